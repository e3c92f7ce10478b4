"""SmolLM2's tokenizer with templates of other families, and what their vocabularies have."""

from __future__ import annotations

import copy

from reef.inference.chat.tokenizer import ChatTokenizer

THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- set written = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '\\n<tool_call>\\n' + written | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Like Qwen 3's: reasoning before the last user's turn is left out, calls are written as compact as `tojson` has it."""

EFFORT = "Effort: {{ reasoning_effort }}\n" + THINKING

MARKERS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]
HARMONY = """{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %}<|channel|>commentary to=functions.{{ message.tool_calls[0].function.name }}<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>
{%- endif %}{% endfor %}
{%- if tools %}{% endif %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def with_template(
    tokenizer: ChatTokenizer, template: str, markers: list[str] | None = None, **formats
) -> ChatTokenizer:
    """`markers` become special tokens."""
    inner = copy.deepcopy(tokenizer._tokenizer)
    inner.chat_template = template
    if markers:
        inner.add_special_tokens({"additional_special_tokens": markers})
    return ChatTokenizer(inner, **formats)
