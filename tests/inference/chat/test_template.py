from __future__ import annotations

import pytest

from reef.errors import InvalidRequest
from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall
from reef.runtime.interfaces import Grammar
from tests.inference.chat.templates import EFFORT, THINKING, with_template

HELLO = Message(role="user", content="Hello")
ADD = Tool(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


def conversation(*messages: Message, **fields) -> Conversation:
    return Conversation(messages=messages or (HELLO,), **fields)


def test_a_template_gets_tools_and_arguments_as_values(tokenizer):
    template = with_template(tokenizer, THINKING).template
    call = Message(role="assistant", content="", tool_calls=(ToolCall("c", "add", '{"a":1}'),))
    text = template.render([HELLO, call, Message(role="tool", content="2", tool_call_id="c")], [ADD])
    assert template.knows_tools
    assert '<tools>{"type": "function", "function": {"name": "add"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_without_tools_gets_them_as_text(tokenizer):
    template = tokenizer.template
    call = Message(
        role="assistant", content="So:", tool_calls=(ToolCall("c", "add", '{"a":1}'), ToolCall("d", "x", "oops"))
    )
    results = [Message(role="tool", content=content, tool_call_id="c") for content in "23"]
    text = template.render([Message(role="system", content="Be brief."), HELLO, call, *results], [ADD])
    assert not template.knows_tools
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and '"name": "add"' in text
    assert 'assistant\nSo:\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>\n<tool_call>\n' in text
    assert "user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>" in text
    assert template.render([HELLO], [ADD]).startswith("<|im_start|>system\n# Tools")


def test_thinking_is_switched_where_the_template_has_a_switch(tokenizer):
    thinking, plain = with_template(tokenizer, THINKING).template, tokenizer.template
    assert thinking.options(conversation()) == {} == plain.options(conversation(thinking=False))
    assert thinking.options(conversation(thinking=False)) == {"enable_thinking": False}
    assert thinking.options(conversation(effort="none")) == {"enable_thinking": False}
    assert thinking.options(conversation(effort="high")) == {"enable_thinking": True}
    assert thinking.options(conversation(grammar=Grammar("json_object", ""))) == {"enable_thinking": False}
    assert "<think>\n\n</think>" in thinking.render([HELLO], options={"enable_thinking": False})


def test_effort_reaches_a_template_that_knows_it(tokenizer):
    template = with_template(tokenizer, EFFORT).template
    options = template.options(conversation(effort="low"))
    assert options == {"reasoning_effort": "low"}
    assert template.render([HELLO], options=options).startswith("Effort: low")


def test_effort_is_refused_where_nothing_knows_it(tokenizer):
    assert tokenizer.template.options(conversation(effort="none")) == {}
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.template.options(conversation(effort="high"))
    assert caught.value.field == "reasoning_effort"


def test_a_prefilled_turn_stays_open(tokenizer):
    text = tokenizer.template.render([HELLO, Message(role="assistant", content="It is ")], prefill=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")


def test_a_template_cannot_reach_the_interpreter(tokenizer):
    hostile = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match="unsafe"):
        with_template(tokenizer, hostile)


def test_mistral_s_ids_have_nine_characters(tokenizer):
    template = with_template(
        tokenizer,
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9!') }}"
        "{% endif %}{{ c.id }};{% endfor %}{{ m.tool_call_id }}{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}",
    ).template
    call = Message(role="assistant", content="", tool_calls=(ToolCall("call_of_any_length", "f", "{}"),))
    answer = Message(role="tool", content="", tool_call_id="call_of_any_length")
    called, answered = template.render([call, answer]).split(";")
    assert called == answered and len(called) == 9


def test_half_a_character_inside_of_arguments_is_refused(tokenizer):
    template = with_template(tokenizer, THINKING).template
    call = Message(role="assistant", content="", tool_calls=(ToolCall("c", "f", '{"a": "\\ud800"}'),))
    with pytest.raises(InvalidRequest) as caught:
        template.render([HELLO, call])
    assert caught.value.field == "messages"
