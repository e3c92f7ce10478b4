"""POST /v1/messages and its count_tokens with the official Anthropic client."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest

from reef.errors import Unavailable
from tests.inference.chat.templates import THINKING, with_template
from tests.service.conftest import running
from tests.service.fakes import FakeDeployment
from tests.service.test_tools import SCHEMA, THOUGHT, TWO_CALLS, prompt_of

HELLO = [{"role": "user", "content": "Hi"}]
WEATHER = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
CITED = {"enabled": True}


@pytest.fixture
def thinking(tokenizer, tmp_path):
    with running(FakeDeployment(with_template(tokenizer, THINKING), tmp_path)) as found:
        yield found


def client(gateway) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=100)


def create(gateway, **changes):
    return client(gateway).messages.create(**{"model": "m", "max_tokens": 400, "messages": HELLO, **changes})


def post(gateway, path="/v1/messages", **changes) -> httpx.Response:
    body = {"model": "m", "max_tokens": 400, "messages": HELLO, **changes}
    return gateway.http.post(path, json={name: value for name, value in body.items() if value is not ...})


def events(text: str) -> list[dict]:
    """The data of every event, each under its name."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_with_usage_and_receipt(gateway):
    raw = client(gateway).messages.with_raw_response.create(model="m", max_tokens=100, messages=HELLO)
    message = raw.parse()
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello there, friend.")]
    assert (message.stop_reason, message.stop_sequence, message.role, message.model) == (
        "end_turn",
        None,
        "assistant",
        "smollm2",
    )
    usage = message.usage
    prompt = len(gateway.engine.seen[0].prompt_ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt and usage.cache_read_input_tokens == 3
    assert usage.output_tokens == 6
    receipt = raw.headers["x-reef-agent-record-id"]
    assert receipt == message.model_extra["reef"]["agent_record_id"] and message.id == f"msg_{receipt}"
    assert gateway.records()[0]["route"] == "/v1/messages"


def text(words: str, **fields) -> dict:
    return {"type": "text", "text": words, **fields}


def test_every_kind_of_turn_reaches_the_template(gateway):
    create(
        gateway,
        system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")],
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": [text("One"), text("Two")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Bonn"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ]},
            {"role": "user", "content": "Say."},
        ],
    )  # fmt: skip
    prompt = prompt_of(gateway)
    for part in (
        "system\nBe brief.\n\nBe kind.\n\n# Tools",
        "user\nOne\n\nTwo<",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}',
        "<tool_response>\nsunny\n</tool_response>",
        "user\nAnd?\n\nSay.<",
    ):
        assert part in prompt


def test_sampling_parameters_reach_the_engine(gateway):
    older = {"temperature": 0.5, "top_p": 0.25, "top_k": 3}  # no longer in the client's signature
    create(gateway, max_tokens=7, extra_body=older, stop_sequences=["x"], metadata={"user_id": "u"})
    sampling = gateway.engine.seen[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.25, 3)
    assert sampling.stop == ["x"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": [" friend"]}, "stop_sequence", " friend")],
)
def test_why_it_stopped(gateway, stream, changes, reason, sequence):
    if stream:
        with client(gateway).messages.stream(
            **{"model": "m", "max_tokens": 100, "messages": HELLO, **changes}
        ) as found:
            message = found.get_final_message()
    else:
        message = create(gateway, **changes)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_tool_use(gateway):
    gateway.engine.expect(text=TWO_CALLS)
    message = create(gateway, tools=[WEATHER, TIME])
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    first, second = message.content[1:]
    assert (first.name, first.input) == ("get_weather", {"city": "Paris"}) and second.input == {}
    assert first.id.startswith("toolu_") and first.id != second.id


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_streamed_tool_use_is_the_same_as_whole(gateway, chunk):
    gateway.engine.expect(text=TWO_CALLS, chunk=chunk)
    whole = create(gateway, tools=[WEATHER, TIME])
    with client(gateway).messages.stream(model="m", max_tokens=400, messages=HELLO, tools=[WEATHER, TIME]) as stream:
        assert "".join(stream.text_stream) == "Let me look."
        streamed = stream.get_final_message()
    shown = lambda message: [block.model_dump(exclude={"id"}) for block in message.content]  # noqa: E731
    assert shown(streamed) == shown(whole) and streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_event_sequence(thinking):
    thinking.engine.expect(text=THOUGHT.replace("Yes.", TWO_CALLS), chunk=2)
    response = post(thinking, stream=True, tools=[WEATHER, TIME])
    found = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [event["type"] for event in found]
    assert names.count("message_start") == names.count("message_delta") == names.count("message_stop") == 1
    assert (names[0], names[-2], names[-1]) == ("message_start", "message_delta", "message_stop")
    started = found[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    kinds = []
    open_block = None
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(kinds)
            open_block = event["index"]
            kinds.append(event["content_block"]["type"])
        else:
            assert event["index"] == open_block
        if event["type"] == "content_block_stop":
            open_block = None
    assert open_block is None and kinds == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [
        event["delta"]["type"] for event in found if event["type"] == "content_block_delta" and event["index"] == 0
    ]
    assert set(deltas[:-1]) == {"thinking_delta"} and deltas[-1] == "signature_delta"
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["reef"]["agent_record_id"] == response.headers["x-reef-agent-record-id"]
    assert thinking.records()[0]["response"].encode() == response.content


def test_an_answer_of_nothing_has_no_block(gateway):
    gateway.engine.expect(ids=[2])
    assert create(gateway).content == []
    assert [e["type"] for e in events(post(gateway, stream=True).text)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_blocks(thinking, stream):
    thinking.engine.expect(text=THOUGHT)
    asked = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "model": "m",
        "max_tokens": 2000,
        "messages": HELLO,
    }
    if stream:
        with client(thinking).messages.stream(**asked) as found:
            message = found.get_final_message()
    else:
        message = client(thinking).messages.create(**asked)
    thought, text = message.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm, well.", "Yes.") and thought.signature
    assert prompt_of(thinking).endswith("assistant\n")
    back = [{"role": "assistant", "content": [block.model_dump() for block in message.content]}, *HELLO]
    client(thinking).messages.create(**{**asked, "messages": [*HELLO, *back]})
    assert thinking.records()[1]["parent_id"] == thinking.records()[0]["agent_record_id"]


def test_it_thinks_only_when_asked_to(thinking):
    create(thinking)
    assert prompt_of(thinking).endswith("<think>\n\n</think>\n\n")


def test_the_conversation_keeps_its_tokens(gateway):
    gateway.engine.expect(text='<tool_call>{"name":"get_weather","arguments":{"city":"Rome"}}</tool_call>')
    message = create(gateway, tools=[WEATHER])
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "sunny"}
    create(
        gateway,
        tools=[WEATHER],
        messages=[*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}],
    )
    first, second = gateway.records()
    whole = first["generations"][0]["prompt_ids"] + first["generations"][0]["output_ids"]
    assert second["generations"][0]["prompt_ids"][: len(whole)] == whole
    assert second["parent_id"] == first["agent_record_id"]


def test_a_tool_is_forced(gateway):
    gateway.engine.expect(text='{"city": "Oslo"}')
    message = create(gateway, tools=[WEATHER, TIME], tool_choice={"type": "tool", "name": "get_weather"})
    assert message.content[0].input == {"city": "Oslo"}
    gateway.engine.expect(text='{"name": "get_time", "arguments": {}}')
    assert create(gateway, tools=[WEATHER, TIME], tool_choice={"type": "any"}).content[0].name == "get_time"
    gateway.engine.expect(text=TWO_CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(create(gateway, tools=[WEATHER, TIME], tool_choice=choice).content) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_json_reach_the_client(gateway, stream):
    gateway.engine.expect(text='<tool_call>{"name": "get_time", "arguments": {"a": oops}}</tool_call>')
    response = post(gateway, tools=[TIME], stream=stream)
    if stream:
        deltas = [event["delta"] for event in events(response.text) if event["type"] == "content_block_delta"]
        assert "".join(delta["partial_json"] for delta in deltas) == '{"a": oops}'
        assert events(response.text)[-1]["type"] == "message_stop"
    else:
        assert response.json()["content"][0]["input"] == '{"a": oops}'
        back = [{"role": "assistant", "content": response.json()["content"]}, *HELLO]
        assert post(gateway, tools=[TIME], messages=[*HELLO, *back]).status_code == 200
        assert gateway.records()[1]["parent_id"] == gateway.records()[0]["agent_record_id"]


def test_a_prefilled_answer(gateway):
    message = create(gateway, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert message.content[0].text == "Hello there, friend." and prompt_of(gateway).endswith("assistant\nIt is")


def test_text_of_documents_and_search_results(gateway):
    document = {
        "type": "document",
        "title": "Log",
        "source": {"type": "text", "media_type": "text/plain", "data": "1 2 3"},
    }
    found = {"type": "search_result", "source": "http://x", "title": "Top", "content": [text("four")]}
    create(gateway, messages=[{"role": "user", "content": [document, found, text("Sum?")]}])
    assert "user\nLog\n\n1 2 3\n\nTop\n\nhttp://x\n\nfour\n\nSum?<" in prompt_of(gateway)


def test_context_management_that_changes_nothing(gateway):
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        assert post(gateway, context_management={"edits": edits}).status_code == 200


def test_structured_output(gateway):
    gateway.engine.expect(text='{"city": "Bern"}')
    create(gateway, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(gateway.engine.seen[0].sampling.grammar.value) == SCHEMA


def test_counting_tokens(gateway):
    counted = client(gateway).messages.count_tokens(model="m", messages=HELLO, tools=[WEATHER], system="Be brief.")
    create(gateway, tools=[WEATHER], system="Be brief.")
    assert counted.input_tokens == len(gateway.engine.seen[0].prompt_ids)
    assert len(gateway.records()) == 1


def test_models_in_this_shape(gateway):
    (model,) = client(gateway).models.list().data
    assert (model.id, model.type, model.display_name) == ("smollm2", "model", "smollm2")
    assert client(gateway).models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(anthropic.NotFoundError):
        client(gateway).models.retrieve("gpt-9")


# ------------------------------------------------------------------ errors


def block(kind: str, **fields) -> list[dict]:
    return [{"role": "user", "content": [{"type": kind, **fields}]}]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": block("image", source={"type": "base64", "data": ""})}, "messages[0].content[0]"),
        ({"messages": block("document", source={"type": "base64", "data": ""})}, "messages[0].content[0].source.type"),
        ({"messages": block("document", source={"type": "text", "data": "x"}, citations=CITED)}, "citations"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"messages": block("server_tool_use", id="x")}, "messages[0].content[0]"),
        ({"messages": block("text", text=5)}, "messages[0].content[0].text"),
        ({"messages": block("text", text="x", colour="red")}, "messages[0].content[0].colour"),
        ({"messages": block("tool_result", content="x")}, "messages[0].content[0].tool_use_id"),
        ({"messages": block("tool_result", tool_use_id="t", content=[{"type": "image"}])}, "content[0].content[0]"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TIME, TIME]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TIME]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [TIME]}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named_in_this_api_s_shape(gateway, changes, field):
    response = post(gateway, **changes)
    body = response.json()
    assert response.status_code == 400 and set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and field in body["error"]["message"], response.text
    assert gateway.engine.seen == [] and gateway.scenarios() == []


def test_the_client_library_sees_errors(gateway, serve):
    with pytest.raises(anthropic.BadRequestError):
        create(gateway, messages=[])
    gateway.engine.expect(refuse=Unavailable("no engine"))
    with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
        create(gateway)


def test_other_errors_have_this_shape_too(serve):
    with serve(tokens=["secret"], max_body_bytes=2000) as gateway:
        unknown = post(gateway, "/v1/messages")
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
        gateway.http.headers["x-api-key"] = "secret"
        large = post(gateway, system="x" * 3000)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert gateway.http.get("/v1/messages").json()["type"] == "error"


def test_an_engine_that_fails_in_a_stream_ends_it_in_an_error_event(gateway):
    gateway.engine.expect(cut_after=3)
    found = events(post(gateway, stream=True).text)
    assert found[-1]["type"] == "error" and "scripted failure" in found[-1]["error"]["message"]
    assert gateway.records()[0]["generations"][0]["ending"] == "engine_cut"
    with pytest.raises(anthropic.APIStatusError, match="scripted failure"):
        list(client(gateway).messages.create(model="m", max_tokens=100, messages=HELLO, stream=True))
