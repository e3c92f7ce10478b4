from __future__ import annotations

import pytest

from reef.errors import ConfigError
from reef.inference.chat.formats import REASONING_FORMATS, TOOL_FORMATS, detect


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


def test_a_template_that_opens_the_reasoning_is_noticed():
    form = detect("<think>")
    assert form.starts_reasoning("assistant\n<think>\n") and not form.starts_reasoning("assistant\n")
    assert form.answer_lead("assistant\n<think>\n") == "\n</think>\n\n" and form.answer_lead("assistant\n") == ""
