from __future__ import annotations

import json

import pytest

from reef.errors import ConfigError
from reef.inference.chat.formats import HERMES, REASONING_FORMATS, TOOL_FORMATS, detect, forced_call
from reef.inference.chat.messages import Tool
from reef.inference.chat.parser import OutputParser
from reef.inference.chat.pieces import Answer

ADD = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
NOW = Tool(name="now")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("<tool_call> {{ reasoning_content }} <think>", "hermes", "think"),
        ("<tool_call><function=x><parameter=y>", "qwen-coder", None),
        ("ipython <|python_tag|> {{ tools }}", "llama", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral-args", "mistral"),
        ("<｜tool▁call▁begin｜>function ```json", "deepseek-v3", None),
        ("<｜tool▁call▁begin｜> <think>", "deepseek", "think"),
        ("<|channel|>analysis<|message|>", "gpt-oss", "gpt-oss"),
        ("{{ messages }}", "hermes", None),
    ],
)
def test_the_template_tells_the_format(template, tools, reasoning):
    found = detect(template)
    assert found.tools is TOOL_FORMATS[tools]
    assert found.reasoning is (None if reasoning is None else REASONING_FORMATS[reasoning])


def test_a_format_may_be_named():
    found = detect("<tool_call><think>", "none", "mistral")
    assert found.tools is None and found.reasoning is REASONING_FORMATS["mistral"]
    with pytest.raises(ConfigError, match="deepseek-v3"):
        detect("", "deepsick")


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("tool", ["add", None])
def test_what_is_forced_reads_as_a_call(name, tool):
    """The lead, and an output that matches the grammar, are one call for the parser."""
    form = TOOL_FORMATS[name]
    lead, grammar = forced_call([ADD, NOW], tool, form)
    rest = '{"a": 1}' if tool else json.dumps({"name": "add", form.objects_key or "": {"a": 1}})
    if not form.json_arguments:
        rest = ("" if tool else "add>") + "<parameter=a>1</parameter></function></tool_call>"
    elif tool is None and form.objects_key is None:
        rest = {
            "mistral-args": "add[ARGS]",
            "gpt-oss": "add<|message|>",
            "deepseek": "add<｜tool▁sep｜>",
            "deepseek-v3": "add\n```json\n",
        }[name] + '{"a": 1}'
    assert (grammar is None) == (not form.json_arguments or (tool is None and form.objects_key is None))
    parser = OutputParser(detect("", name, "none").table(with_tools=True), {"add": ADD.parameters, "now": {}})
    answer = Answer()
    answer.add([*parser.push(lead), *parser.push(rest), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("add", {"a": 1})]


def test_the_grammar_of_a_named_tool_is_its_parameters():
    _, grammar = forced_call([ADD, NOW], "add", HERMES)
    assert (grammar.kind, json.loads(grammar.value)) == ("json_schema", ADD.parameters)


def test_the_grammar_of_any_tool_names_one_of_them():
    import jsonschema

    _, grammar = forced_call([ADD, NOW], None, HERMES)
    schema = json.loads(grammar.value)
    jsonschema.validate({"name": "now", "arguments": {}}, schema)
    for wrong in ({"name": "other", "arguments": {}}, {"name": "add", "arguments": {"a": "x"}}, {"name": "add"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_a_template_that_opens_the_reasoning_is_noticed():
    form = detect("<think>")
    assert form.starts_reasoning("assistant\n<think>\n") and not form.starts_reasoning("assistant\n")
    assert form.answer_lead("assistant\n<think>\n") == "\n</think>\n\n" and form.answer_lead("assistant\n") == ""
