"""What a model of each family says, through the official clients: thoughts, text and calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.conftest import needs

needs("transformers", "anthropic")

from tests.inference.chat.families import ARGUMENTS, FAMILIES, end_of, tokenizer_of  # noqa: E402
from tests.service.conftest import running  # noqa: E402
from tests.service.fakes import FakeDeployment  # noqa: E402
from tests.service.test_messages import client  # noqa: E402

HELLO = [{"role": "user", "content": "Hi"}]
F = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
NONE = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("f", F), ("get-time", NONE))
]
CALLS = [("f", json.loads(ARGUMENTS)), ("get-time", {})]


@pytest.fixture(scope="module", params=FAMILIES)
def said(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    name, family = request.param, FAMILIES[request.param]
    deployment = FakeDeployment(tokenizer_of(name), tmp_path_factory.mktemp(name))
    deployment.engine.end = end_of(name)
    with running(deployment) as gateway:
        yield SimpleNamespace(name=name, family=family, gateway=gateway)


def shown(calls) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_chat(said):
    gateway, family = said.gateway, said.family
    gateway.engine.expect(text=family.said)
    message = gateway.openai.chat.completions.create(model="m", messages=HELLO, tools=TOOLS).choices[0].message
    assert shown(message.tool_calls) == CALLS
    assert (message.content or "", (message.model_extra or {}).get("reasoning_content") or "") == (
        family.text,
        family.reasoning,
    )
    for chunk in (1, 3, 1000):
        gateway.engine.expect(text=family.said, chunk=chunk)
        with gateway.openai.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as stream:
            choice = stream.get_final_completion().choices[0]
        assert shown(choice.message.tool_calls) == CALLS and choice.finish_reason == "tool_calls"
        assert (choice.message.content or "") == family.text


def test_messages(said):
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    said.gateway.engine.expect(text=said.family.said, chunk=2)
    whole = client(said.gateway).messages.create(model="m", max_tokens=900, messages=HELLO, tools=tools)
    with client(said.gateway).messages.stream(model="m", max_tokens=900, messages=HELLO, tools=tools) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        found = [getattr(block, block.type, None) or (block.name, block.input) for block in message.content]
        assert found == [*filter(None, (said.family.reasoning, said.family.text)), *CALLS]
        assert message.stop_reason == "tool_use"


def test_responses_go_on_with_the_result(said):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    said.gateway.engine.expect(text=said.family.said, chunk=2)
    with said.gateway.openai.responses.stream(model="m", input="Hi", tools=tools) as stream:
        response = stream.get_final_response()
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    said.gateway.engine.expect(text="<|channel|>final<|message|>Yes." if said.name == "gpt-oss" else "Yes.")
    after = said.gateway.openai.responses.create(
        model="m", input=results, previous_response_id=response.id, tools=tools
    )
    assert after.output_text == ("" if said.name == "deepseek-v3" else "Yes.")  # R1 is still thinking
    assert gone_on(said.gateway.records(limit=1000)[-2:])


def gone_on(records: list[dict]) -> bool:
    """Whether the second prompt begins with the exact tokens of the first exchange."""
    before, after = (record["generations"][0] for record in records)
    whole = before["prompt_ids"] + before["output_ids"]
    return after["prompt_ids"][: len(whole)] == whole and records[1]["parent_id"] == records[0]["agent_record_id"]
