"""Outputs of the model families, whole and in any chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.inference.chat.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from reef.inference.chat.parser import OutputParser
from reef.inference.chat.pieces import Answer, Kind, Piece, joined
from tests.conftest import examples

TOOLS = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "get-time": {"type": "object", "properties": {}},
}
CALLS, CALL, SEP, END, ENDS = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)

# One answer in each family's own writing: some text, a call of f and one of get-time.
WRITTEN = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x} </b>", "n": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
    ),
    "qwen-coder": (
        "Let me see.\n<tool_call>\n<function=f>\n<parameter=a>\nx} </b>\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get-time>\n</function>\n</tool_call>"
    ),
    "llama": '{"name": "f", "parameters": {"a": "x} </b>", "n": 3}}; {"name": "get-time", "parameters": {}}',
    "mistral": (
        'Let me see.[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x} </b>", "n": 3}}, '
        '{"name": "get-time", "arguments": {}}]'
    ),
    "mistral-args": (
        'Let me see.[TOOL_CALLS]f[ARGS]{"a": "x} </b>", "n": 3}[TOOL_CALLS]get-time[CALL_ID]a1b2c3d4e[ARGS]{}'
    ),
    "deepseek-v3": (
        f'Let me see.{CALLS}{CALL}function{SEP}f\n```json\n{{"a": "x}} </b>", "n": 3}}\n```{END}\n'
        f"{CALL}function{SEP}get-time\n```json\n{{}}\n```{END}{ENDS}"
    ),
    "deepseek": f'Let me see.{CALLS}{CALL}f{SEP}{{"a": "x}} </b>", "n": 3}}{END}{CALL}get-time{SEP}{{}}{END}{ENDS}',
    "gpt-oss": (
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": "x} </b>", "n": 3}<|call|><|start|>assistant<|channel|>commentary '
        "to=functions.get-time<|message|>{}<|call|>"
    ),
}


def parse(name: str, chunks: list[str], *, with_tools: bool = True, reasoning: bool = False) -> tuple[list[Piece], int]:
    thinks = "gpt-oss" if name == "gpt-oss" else "mistral" if name.startswith("mistral") else "think"
    form = OutputFormat(TOOL_FORMATS[name], REASONING_FORMATS[thinks])
    parser = OutputParser(
        form.table(with_tools=with_tools), TOOLS if with_tools else {}, start="reasoning" if reasoning else ""
    )
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return joined(pieces + parser.finish()), parser.calls_ended


def read(name: str, text: str, **options) -> Answer:
    answer = Answer()
    answer.add(parse(name, [text], **options)[0])
    return answer


def calls_of(answer: Answer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize("name", WRITTEN)
def test_each_family_s_calls_are_found(name):
    answer = read(name, WRITTEN[name])
    assert answer.text == ("" if name == "llama" else "Let me see.")
    assert calls_of(answer) == [("f", '{"a": "x} </b>", "n": 3}'), ("get-time", "{}")]
    assert parse(name, [WRITTEN[name]])[1] == 2


THOUGHTS = {"gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "mistral": "[THINK]Hm.[/THINK]"}


@pytest.mark.parametrize("name", WRITTEN)
def test_reasoning_comes_before_calls(name):
    thought = THOUGHTS.get(name.removesuffix("-args"), "<think>\nHm.\n</think>\n\n")
    answer = read(name, thought + WRITTEN[name])
    assert answer.reasoning == "Hm." and len(answer.tool_calls) == 2
    assert answer.text == ("" if name == "llama" else "Let me see.")


# ------------------------------------------------------------------ any chunking


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks = []
    for size in sizes:
        chunks.append(text[:size])
        text = text[size:]
    return [*chunks, text]


fragments = st.sampled_from(
    [
        '{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"a": "}"}, "name": "f"}', '{"name": "f"}', '{"a": 1}',
        '"name"', "[", "]", "{", "}", ",", ";", '"', "\\", " ", "\n", "x", "f", "```json\n", "\n```", "hello",
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>",
        "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", CALLS, CALL, SEP,
        END, ENDS, "<|channel|>", "analysis", "final", "commentary to=functions.f", "<|message|>", "<|end|>",
        "<|start|>", "assistant", "<|call|>", "<|return|>", "<", "<tool_", "[TOOL", "<|",
    ]
)  # fmt: skip


@given(
    st.sampled_from(sorted(WRITTEN)),
    st.lists(fragments, max_size=14).map("".join),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=40),
)
@settings(max_examples=examples(500))
def test_any_chunking_gives_the_same_pieces(name, text, reasoning, sizes):
    whole = parse(name, [text], reasoning=reasoning and name != "gpt-oss")
    assert parse(name, cut(text, sizes), reasoning=reasoning and name != "gpt-oss") == whole
    assert parse(name, list(text), reasoning=reasoning and name != "gpt-oss") == whole


@given(
    st.sampled_from(sorted(WRITTEN)),
    st.integers(0, 200),
    st.integers(0, 200),
    st.text(alphabet='<>{}[]"\\|/ \nabf', max_size=3),
    st.lists(st.integers(0, 9), max_size=60),
)
@settings(max_examples=examples(300))
def test_damaged_outputs_too(name, start, length, instead, sizes):
    text = WRITTEN[name]
    text = text[:start] + instead + text[start + length :]
    assert parse(name, cut(text, sizes)) == parse(name, [text]) == parse(name, list(text))


@given(st.sampled_from(sorted(set(WRITTEN) - {"gpt-oss"})), st.lists(fragments, max_size=12).map("".join))
@settings(max_examples=examples(200))
def test_nothing_that_is_not_white_space_or_a_marker_is_lost(name, text):
    """Every letter of the output is somewhere in what the client gets, but for those of markers and keys."""
    pieces, _ = parse(name, [text])
    shown = "".join(piece.text for piece in pieces)
    text = text.replace("<|python_tag|>", "") if name == "llama" else text
    if not any(piece.kind in (Kind.CALL, Kind.REASONING) for piece in pieces) and "think" not in text.lower():
        text = text.replace("<|python_tag|>", "") if name == "llama" else text
        assert "".join(shown.split()) == "".join(text.split())


@given(st.text(max_size=40), st.lists(st.integers(0, 5), max_size=20))
def test_without_tools_and_reasoning_all_is_text(text, sizes):
    table = OutputFormat(TOOL_FORMATS["hermes"], None).table(with_tools=False)
    parser = OutputParser(table)
    pieces = [piece for chunk in cut(text, sizes) for piece in parser.push(chunk)] + parser.finish()
    assert joined(pieces) == ([Piece(Kind.TEXT, text)] if text else [])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_any_json_passes_through_as_arguments(value, ascii_only):
    arguments = json.dumps({"v": value}, ensure_ascii=ascii_only)
    if "</tool_call>" in arguments:
        return
    written = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert calls_of(read("hermes", written)) == [("f", arguments)]


# ------------------------------------------------------------------ what is not as it should be


def test_arguments_that_are_no_json_are_passed_on_as_written():
    answer = read("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops, [}}</tool_call> done')
    assert calls_of(answer) == [("f", '{"a": oops, [}}')] and answer.text == "done"
    assert calls_of(read("deepseek", f"{CALLS}{CALL}f{SEP}not json{END}{ENDS}")) == [("f", "not json")]


def test_arguments_may_stand_before_the_name_and_may_be_missing():
    answer = read(
        "hermes", '<tool_call>{"arguments": {"a": 1} , "name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    )
    assert calls_of(answer) == [("f", '{"a": 1}'), ("g", "{}")]


def test_white_space_around_arguments_is_left_out():
    answer = read("hermes", '<tool_call>{"name": "f", "arguments":  {"a": " x "} \n}</tool_call>')
    assert calls_of(answer) == [("f", '{"a": " x "}')]


def test_what_turns_out_to_be_no_call_is_text():
    text = 'See <tool_call> {"nome": 1} </tool_call> ok'
    assert read("hermes", text).text == text
    assert read("mistral", "[TOOL_CALLS] none").text == "[TOOL_CALLS] none"
    assert read("llama", '{"name": "Bob", "age": 5}').text == '{"name": "Bob", "age": 5}'
    assert read("llama", '{"name": "f"} is JSON').text == '{"name": "f"} is JSON'


def test_an_output_that_ends_in_a_call_shows_what_there_is():
    assert calls_of(read("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x')) == [("f", '{"a": "x')]
    assert read("hermes", '<tool_call>\n{"name": "f').text == '<tool_call>\n{"name": "f'
    assert read("deepseek", f"{CALLS}{CALL}get-ti").text == f"{CALLS}{CALL}get-ti"
    assert calls_of(read("qwen-coder", "<tool_call><function=f><parameter=a>x</parameter>")) == [("f", '{"a": "x"')]


def test_white_space_of_an_answer_without_calls_is_kept():
    assert read("hermes", " Hello \n").text == " Hello \n"


def test_reasoning_that_the_prompt_opened_and_that_never_ends():
    assert read("hermes", "so\n</think>\n\nYes", reasoning=True).text == "Yes"
    cut_short = read("hermes", "so on", reasoning=True)
    assert (cut_short.reasoning, cut_short.text) == ("so on", "")


def test_a_tag_in_the_middle_of_the_text_is_text():
    assert read("hermes", "The tag <think> opens it").text == "The tag <think> opens it"


def test_values_have_the_types_of_the_schema():
    written = "<function=f><parameter=a>3</parameter><parameter=n>three</parameter></function>"
    assert calls_of(read("qwen-coder", f"<tool_call>{written}</tool_call>")) == [("f", '{"a": "3", "n": "three"}')]


def test_a_gpt_oss_answer_without_tools():
    answer = read(
        "gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    )
    assert (answer.reasoning, answer.text) == ("Hm.", "Yes")
    assert read("gpt-oss", "just text").text == "just text"


def test_calls_are_not_looked_for_without_tools():
    assert read("hermes", WRITTEN["hermes"], with_tools=False).text == WRITTEN["hermes"]
