"""POST /v1/completions with the official client."""

from __future__ import annotations

import openai
import pytest

from tests.service.conftest import events


def create(gateway, **changes):
    return gateway.openai.completions.create(**{"model": "m", "prompt": "Once", **changes})


def post(gateway, **changes):
    return gateway.http.post("/v1/completions", json={"model": "m", "prompt": "Once", **changes})


def test_a_prompt_is_gone_on_with_as_it_is(gateway):
    answer = create(gateway)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello there, friend.", "stop")
    assert gateway.engine.seen[0].prompt_ids == gateway.deployment.chat.tokenizer.encode_now("Once")
    assert (answer.object, answer.usage.prompt_tokens, answer.usage.completion_tokens) == ("text_completion", 1, 6)
    record = gateway.records()[0]
    assert (
        record["route"] == "/v1/completions"
        and record["agent_record_id"] == answer.model_extra["reef"]["agent_record_id"]
    )


def test_the_default_limit_is_the_documented_one(gateway):
    gateway.engine.expect(text="word " * 100)
    answer = create(gateway)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_several_prompts_with_several_choices(gateway, prompt):
    answer = create(gateway, prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(seen.prompt_ids) for seen in gateway.engine.seen}) == 2
    assert answer.usage.prompt_tokens == sum(len(ids) for ids in {tuple(s.prompt_ids) for s in gateway.engine.seen})


def test_token_ids_are_a_prompt(gateway):
    create(gateway, prompt=[5, 6, 7])
    assert gateway.engine.seen[0].prompt_ids == [5, 6, 7]


def test_logprobs_with_offsets(gateway):
    shown = create(gateway, logprobs=2).choices[0].logprobs
    assert "".join(shown.tokens) == "Hello there, friend." and shown.text_offset[:2] == [0, 5]
    assert shown.token_logprobs[0] == -0.5 and len(shown.top_logprobs[0]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo(gateway, stream):
    answer = create(gateway, prompt=["One", "Two"], echo=True, stream=stream)
    texts = ["", ""]
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["OneHello there, friend.", "TwoHello there, friend."]


def test_the_shape_of_a_stream(gateway):
    response = post(gateway, stream=True, stream_options={"include_usage": True})
    *chunks, last, usage, done = events(response.text)
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there, friend."
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in [*chunks, last])
    assert last["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert last["reef"]["agent_record_id"] == response.headers["x-reef-agent-record-id"]
    assert all("usage" not in chunk for chunk in events(post(gateway, stream=True).text)[:-1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 100, "prompt": ["a", "b"]}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_field_is_named(gateway, changes, field):
    response = post(gateway, **changes)
    assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text
    assert gateway.engine.seen == [] and gateway.scenarios() == []


def test_the_client_library_raises(gateway):
    with pytest.raises(openai.BadRequestError):
        create(gateway, suffix="x")
