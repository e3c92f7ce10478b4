"""A small tokenizer and a chat template of each model family, with its own way of writing turns, calls and thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from reef.inference.chat.tokenizer import ChatTokenizer
from tests.models import save_random_llama

CALLS, CALL, SEP, END, ENDS = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


@dataclass(frozen=True)
class Family:
    """`said` is an answer with a thought, some text, and a call of f and of get-time in the family's own writing.

    `special` are special tokens, the first of which ends an answer; `added` are tokens that are not special.
    The rest are pieces of the template; `f` is the function of a call.
    """

    special: str
    said: str
    turn: str
    end: str
    call: str
    result: str
    ask: str
    tools: str = "{{ tools | tojson }}"
    calls: tuple[str, str] = ("", "")
    thought: str = "<think>\n{{ message.reasoning_content }}\n</think>\n\n"
    added: str = ""
    reasoning: str = "Hm."
    text: str = "Let me see."
    sentencepiece: bool = field(default=False)

    @property
    def template(self) -> str:
        begin, end = self.calls
        return (
            f"{{% if tools %}}{self.tools}{{% endif %}}{{% for message in messages %}}"
            f"{{% if message.role == 'tool' %}}{self.result}{{% else %}}{self.turn}"
            f"{{% if message.reasoning_content %}}{self.thought}{{% endif %}}{{{{ message.content }}}}"
            f"{{% if message.tool_calls %}}{begin}{{% for call in message.tool_calls %}}{{% set f = call.function %}}"
            f"{self.call}{{% endfor %}}{end}{{% endif %}}{self.end}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{self.ask}{{% endif %}}"
        )


ARGUMENTS = '{"a": "x} </b> é", "n": 3}'
_HERMES_CALL = '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
_CODER_CALL = (
    "\n<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_CHATML = {
    "special": "<|im_end|> <|im_start|>",
    "added": "<tool_call> </tool_call> <think> </think>",
    "turn": "<|im_start|>{{ message.role }}\n",
    "end": "<|im_end|>\n",
    "result": "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n",
    "ask": "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}",
}
_MISTRAL = {
    "turn": "{% if message.role == 'assistant' %}{% else %}[INST]{% endif %}",
    "end": "{% if message.role == 'assistant' %}</s>{% else %}[/INST]{% endif %}",
    "ask": "",
    "tools": "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
    "thought": "[THINK]{{ message.reasoning_content }}[/THINK]",
}
_DEEPSEEK = {
    "special": f"<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> {CALLS} {CALL} {SEP} {END} {ENDS}",
    "added": "<think> </think>",
    "turn": "<｜{{ 'Assistant' if message.role == 'assistant' else 'User' }}｜>",
    "end": "{% if message.role == 'assistant' %}<｜end▁of▁sentence｜>{% endif %}",
    "result": "<｜User｜>{{ message.content }}",
    "calls": (CALLS, ENDS),
}

FAMILIES = {
    "hermes": Family(
        **_CHATML,
        call=_HERMES_CALL,
        said="<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n"
        f'{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>',
    ),
    "qwen-coder": Family(
        **_CHATML,
        call=_CODER_CALL,
        said="<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n<function=f>\n<parameter=a>\nx} </b> é\n"
        "</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get-time>\n</function>\n"
        "</tool_call>",
    ),
    "llama": Family(
        special="<|eot_id|> <|start_header_id|> <|end_header_id|> <|python_tag|>",
        turn="<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n",
        end="<|eot_id|>",
        call='{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        result="<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
        ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
        thought="",
        said=f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "get-time", "parameters": {{}}}}',
        reasoning="",
        text="",
    ),
    "mistral": Family(
        **_MISTRAL,
        special="</s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        calls=("[TOOL_CALLS] [", "]"),
        call="{% if call.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}'
        "{% if not loop.last %}, {% endif %}",
        result='[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}'
        "[/TOOL_RESULTS]",
        said=f'Let me see.[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "a1b2c3d4e"}}, '
        '{"name": "get-time", "arguments": {}, "id": "f1b2c3d4e"}]',
        reasoning="",
        sentencepiece=True,
    ),
    "mistral-args": Family(
        **_MISTRAL,
        special="</s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] "
        "[/TOOL_RESULTS] [THINK] [/THINK]",
        call="[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        result="[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]",
        said=f"[THINK]Hm.[/THINK]Let me see.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get-time[ARGS]{{}}",
    ),
    "deepseek-v3": Family(  # R1: the template opens the reasoning
        **_DEEPSEEK,
        call=f"{CALL}function{SEP}{{{{ f.name }}}}\n```json\n{{{{ f.arguments | tojson }}}}\n```{END}"
        "{% if not loop.last %}\n{% endif %}",
        ask="<｜Assistant｜><think>\n",
        thought="",
        said=f"Hm.\n</think>\n\nLet me see.{CALLS}{CALL}function{SEP}f\n```json\n{ARGUMENTS}\n```{END}\n"
        f"{CALL}function{SEP}get-time\n```json\n{{}}\n```{END}{ENDS}",
    ),
    "deepseek": Family(
        **_DEEPSEEK,
        call=f"{CALL}{{{{ f.name }}}}{SEP}{{{{ f.arguments | tojson }}}}{END}",
        ask="<｜Assistant｜>{{ '<think>' if thinking is defined and thinking else '</think>' }}",
        thought="",
        said=f"Let me see.{CALLS}{CALL}f{SEP}{ARGUMENTS}{END}{CALL}get-time{SEP}{{}}{END}{ENDS}",
        reasoning="",
    ),
    "gpt-oss": Family(
        special="<|call|> <|return|> <|start|> <|end|> <|channel|> <|message|> <|constrain|>",
        turn="<|start|>{{ message.role }}"
        "{% if message.role == 'assistant' and not message.tool_calls %}<|channel|>final{% endif %}"
        "{% if not message.tool_calls %}<|message|>{% endif %}",
        end="{{ '<|call|>' if message.tool_calls else '<|end|>' }}",
        call="<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}",
        result="<|start|>functions to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>",
        ask="<|start|>assistant",
        thought="",
        said="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.get-time <|constrain|>json<|message|>{}",
        tools="Effort: {{ reasoning_effort | default('medium') }}{{ tools | tojson }}",
    ),
}
VOCABULARY = 640
"""Rows of a model that any of these tokenizers fits."""


def _inner(family: Family, also: Sequence[Family] = ()):
    """With `also` it has the tokens of those as well, and the same ids as each of them would have."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if family.sentencepiece:
        pieces = ["▁", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(strip)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {character: number for number, character in enumerate(alphabet)}
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    for other in also:
        inner.add_special_tokens(other.special.split())
    special = family.special.split()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=special[0], additional_special_tokens=special[1:])
    added = [name for one in (*also, family) for name in one.added.split()]
    found.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    found.chat_template = family.template
    return found


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    return ChatTokenizer(_inner(FAMILIES[name]))


def end_of(name: str) -> int:
    """The token that ends an answer."""
    (end,) = tokenizer_of(name).encode_now(FAMILIES[name].special.split()[0])
    return end


def save_model(name: str, directory: Path, also: Sequence[str] = ()) -> Path:
    """A random Llama of two layers with the family's tokenizer and template.

    With `also`, itself among them, the tokenizer has all their tokens and the model ends where any of them does.
    """
    inner = _inner(FAMILIES[name], [FAMILIES[other] for other in also])
    ends = inner.convert_tokens_to_ids([FAMILIES[other].special.split()[0] for other in also or [name]])
    save_random_llama(
        directory,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=ends if also else ends[0],
    )
    inner.save_pretrained(directory)
    return directory
