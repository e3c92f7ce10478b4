"""What the real engine can be made to say in the format of each family, and conversations that go on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import jsonschema
import pytest

from tests.conftest import needs

needs("torch", "llguidance")

from tests.inference.chat.families import FAMILIES, save_model, tokenizer_of  # noqa: E402
from tests.service.conftest import Running, serving  # noqa: E402
from tests.service.test_families import HELLO, gone_on  # noqa: E402

PAINT = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["red", "green"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
PAINTS = [{"type": "function", "function": {"name": name, "parameters": PAINT}} for name in ("paint", "erase")]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": PAINT}}


@pytest.fixture(scope="module", params=FAMILIES)
def real(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    root = tmp_path_factory.mktemp(request.param)
    with serving(root / "data", save_model(request.param, root / "model"), **{"inference.dtype": "float32"}) as gateway:
        yield SimpleNamespace(name=request.param, gateway=gateway, tokenizer=tokenizer_of(request.param))


def create(gateway: Running, **changes):
    asked = {"model": "m", "messages": HELLO, "tools": PAINTS, "max_tokens": 400, "seed": 1, **changes}
    return gateway.openai.chat.completions.create(**asked)


def assert_calls(calls, names=("paint", "erase")) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), PAINT)


def test_any_tool_is_forced_and_the_conversation_goes_on(real):
    gateway = real.gateway
    message = create(gateway, tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert_calls(message.tool_calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
    create(gateway, messages=[*HELLO, message.model_dump(exclude_none=True), *results], max_tokens=2)
    assert gone_on(gateway.records(limit=1000)[-2:])


def test_a_named_tool_is_forced_whole_or_streamed(real):
    named = {"tool_choice": {"type": "function", "function": {"name": "erase"}}, "parallel_tool_calls": False}
    (whole,) = create(real.gateway, **named).choices[0].message.tool_calls
    assert_calls([whole], ["erase"])
    pieces = [
        call for chunk in create(real.gateway, **named, stream=True) for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert pieces[0].function.name == "erase"
    assert "".join(piece.function.arguments for piece in pieces) == whole.function.arguments


def test_a_call_or_the_answer_in_its_form(real):
    """Which of them is up to the model; the bias of a token that begins one of them decides here."""
    tokenizer = real.tokenizer
    form = tokenizer.format.tools
    starts = {"call": form.begin + form.call.format(name="paint", quoted='"paint"'), "answer": '{"kind'}
    if real.name == "gpt-oss":
        starts = {"call": "commentary", "answer": "final"}
    for wanted, text in starts.items():
        others = starts["answer" if wanted == "call" else "call"]
        ids, other = tokenizer.encode_now(text, goes_on=True), tokenizer.encode_now(others, goes_on=True)
        at = next(index for index, pair in enumerate(zip(ids, other, strict=False)) if pair[0] != pair[1])
        bias = {str(ids[at]): 100, str(other[at]): -100}
        asked = {"response_format": FORMAT, "logit_bias": bias, "parallel_tool_calls": False}
        message = create(real.gateway, **asked).choices[0].message
        if wanted == "call":
            assert_calls(message.tool_calls)
        else:
            assert message.tool_calls is None
            jsonschema.validate(json.loads(message.content), PAINT)
