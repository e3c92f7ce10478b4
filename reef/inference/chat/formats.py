"""How the common model families write tool calls and reasoning: data for one parser.

Each family's own documents and chat templates define these: Hermes and Qwen (`<tool_call>`), Qwen-Coder (the same with
XML inside), Llama 3 (bare JSON), Mistral (`[TOOL_CALLS]`, with `[ARGS]` from v11 on), DeepSeek (V3, and V3.1 without
fences), GPT-OSS (the harmony channels, which carry reasoning and calls alike).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import msgspec

from reef.errors import ConfigError

Handler = Literal["text", "reasoning", "skip", "name", "arguments", "objects", "functions", "header"]


@dataclass(slots=True, frozen=True)
class Mode:
    """What to do with text, until one of the markers in `exits` leads to another mode."""

    handler: Handler
    exits: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class Table:
    """All modes of one output. What `openings` name is recognized where text would begin, and stays in the text."""

    modes: Mapping[str, Mode]
    openings: Mapping[str, str] = field(default_factory=dict)
    start: str = "text"

    @property
    def markers(self) -> frozenset[str]:
        """Strings that mean something, which the model's tokenizer may have as special tokens."""
        every = {marker for mode in self.modes.values() for marker in mode.exits} | set(self.openings)
        return frozenset(every | ({"<|channel|>", "<|constrain|>"} if self.start == "header" else set()))


PLAIN = Table(modes={"text": Mode("text")})
"""Nothing means anything: all is text."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolFormat:
    """`exits` lead from text into `modes`. A row of calls is `begin`, each call up to its arguments (`call`, with
    {name} or {quoted} filled in), the arguments and `close`, with `between` in between, and `end`.

    `objects_key` says that a call is a JSON object, and under which key it has the arguments. Without `between` an
    answer has one call. Arguments that are not `json_arguments` are parameters in XML.
    """

    exits: Mapping[str, str]
    modes: Mapping[str, Mode]
    openings: Mapping[str, str] = field(default_factory=dict)
    begin: str = ""
    call: str
    close: str = ""
    between: str | None = None
    end: str = ""
    objects_key: str | None = None
    json_arguments: bool = True
    start: str = "text"

    @property
    def any_call(self) -> str:
        """What a call of any tool begins with: all that stands before the object, or before the name."""
        return self.call.partition("{{" if self.objects_key else "{name}")[0]


@dataclass(slots=True, frozen=True)
class ReasoningFormat:
    begin: str
    end: str


_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEP = "<｜tool▁sep｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_ENDS = "<｜tool▁calls▁end｜>"
_HARMONY_ENDS = {"<|end|>": "header", "<|return|>": "header", "<|call|>": "header", "<|start|>": "header"}

HERMES = ToolFormat(
    exits={"<tool_call>": "call"},
    modes={"call": Mode("objects", {"</tool_call>": "text"})},
    call='<tool_call>\n{{"name": {quoted}, "arguments": ',
    close="}\n</tool_call>",
    between="\n",
    objects_key="arguments",
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen-coder": ToolFormat(
        exits={"<tool_call>": "call"},
        modes={"call": Mode("functions", {"</tool_call>": "text"})},
        call="<tool_call>\n<function={name}>\n",
        close="</function>\n</tool_call>",
        between="\n",
        json_arguments=False,
    ),
    "llama": ToolFormat(
        exits={"<|python_tag|>": "text"},
        openings={"{": "bare"},
        modes={"bare": Mode("objects")},
        call='{{"name": {quoted}, "parameters": ',
        close="}",
        objects_key="parameters",
    ),
    "mistral": ToolFormat(
        exits={"[TOOL_CALLS]": "call"},
        modes={"call": Mode("objects")},
        begin="[TOOL_CALLS][",
        call='{{"name": {quoted}, "arguments": ',
        close="}",
        between=", ",
        end="]",
        objects_key="arguments",
    ),
    "mistral-args": ToolFormat(
        exits={"[TOOL_CALLS]": "name"},
        modes={
            "name": Mode("name", {"[ARGS]": "arguments", "[CALL_ID]": "id"}),
            "id": Mode("skip", {"[ARGS]": "arguments"}),
            "arguments": Mode("arguments", {"[TOOL_CALLS]": "name"}),
        },
        call="[TOOL_CALLS]{name}[ARGS]",
        between="",
    ),
    "deepseek-v3": ToolFormat(
        exits={_DEEPSEEK_CALLS: "between"},
        modes={
            "between": Mode("skip", {_DEEPSEEK_CALL: "type", _DEEPSEEK_ENDS: "text"}),
            "type": Mode("skip", {_DEEPSEEK_SEP: "name"}),
            "name": Mode("name", {"```json": "arguments", "\n": "fence"}),
            "fence": Mode("skip", {"```json": "arguments"}),
            "arguments": Mode("arguments", {"```" + _DEEPSEEK_END: "between", _DEEPSEEK_END: "between"}),
        },
        begin=_DEEPSEEK_CALLS,
        call=_DEEPSEEK_CALL + "function" + _DEEPSEEK_SEP + "{name}\n```json\n",
        close="\n```" + _DEEPSEEK_END,
        between="\n",
        end=_DEEPSEEK_ENDS,
    ),
    "deepseek": ToolFormat(
        exits={_DEEPSEEK_CALLS: "between"},
        modes={
            "between": Mode("skip", {_DEEPSEEK_CALL: "name", _DEEPSEEK_ENDS: "text"}),
            "name": Mode("name", {_DEEPSEEK_SEP: "arguments"}),
            "arguments": Mode("arguments", {_DEEPSEEK_END: "between"}),
        },
        begin=_DEEPSEEK_CALLS,
        call=_DEEPSEEK_CALL + "{name}" + _DEEPSEEK_SEP,
        close=_DEEPSEEK_END,
        between="",
        end=_DEEPSEEK_ENDS,
    ),
    "gpt-oss": ToolFormat(
        exits=_HARMONY_ENDS,
        modes={
            "header": Mode("header", {"<|message|>": "text"}),
            "reasoning": Mode("reasoning", _HARMONY_ENDS),
            "arguments": Mode("arguments", _HARMONY_ENDS),
        },
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        start="header",
    ),
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gpt-oss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
}

ToolFormatName = Literal[
    "auto", "none", "hermes", "qwen-coder", "llama", "mistral", "mistral-args", "deepseek-v3", "deepseek", "gpt-oss"
]
ReasoningFormatName = Literal["auto", "none", "think", "mistral", "gpt-oss"]

ToolFormatKey = Annotated[
    ToolFormatName, msgspec.Meta(description="how the model writes tool calls; auto: as its chat template says")
]
"""As a configuration key of every engine whose model Reef renders and parses for; so is the next."""
ReasoningFormatKey = Annotated[
    ReasoningFormatName,
    msgspec.Meta(description="how the model marks its reasoning; auto: as its chat template says"),
]

# The first whose every sign stands in the template decides.
_TOOL_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("deepseek-v3", (_DEEPSEEK_CALL, "```json")),
    ("deepseek", (_DEEPSEEK_CALL,)),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen-coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("llama", ("<|python_tag|>",)),
    ("llama", ('"parameters"', "tools")),
)
_REASONING_SIGNS: Sequence[tuple[str, str]] = (("gpt-oss", "<|channel|>"), ("mistral", "[THINK]"), ("think", "<think>"))


@dataclass(slots=True, frozen=True)
class OutputFormat:
    """How one model writes. `tools` is None where its calls are not to be looked for."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    def table(self, *, with_tools: bool) -> Table:
        """The parser's table for a request with or without tools."""
        tools = self.tools
        if tools is not None and tools.start == "header":  # one format for everything, tools or none
            return Table(modes={"text": Mode("text", tools.exits), **tools.modes}, start=tools.start)
        if not with_tools or tools is None:
            tools = ToolFormat(exits={}, modes={}, call="")
        modes = {"text": Mode("text", tools.exits), **tools.modes}
        openings = dict(tools.openings)
        if self.reasoning is not None:
            modes["reasoning"] = Mode("reasoning", {self.reasoning.end: "text"})
            openings[self.reasoning.begin] = "reasoning"
        return Table(modes=modes, openings=openings)

    def starts_reasoning(self, prompt: str) -> bool:
        """Whether the template has opened the reasoning already."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.begin)

    def answer_lead(self, prompt: str) -> str:
        """What to put behind the prompt so that the answer's text begins at once, without reasoning."""
        if self.tools is not None and self.tools.start == "header":
            return "<|channel|>final<|message|>"
        return f"\n{self.reasoning.end}\n\n" if self.reasoning and self.starts_reasoning(prompt) else ""


def detect(template: str, tool_format: str = "auto", reasoning_format: str = "auto") -> OutputFormat:
    """Choose by the chat template what is not chosen by name. Raises ConfigError for a name nobody knows."""
    for given, known in ((tool_format, ToolFormatName), (reasoning_format, ReasoningFormatName)):
        if given not in get_args(known):
            raise ConfigError(f"no such output format: {given!r}; there are {', '.join(get_args(known))}")
    if tool_format == "auto":
        tool_format = next(
            (name for name, signs in _TOOL_SIGNS if all(sign in template for sign in signs)), "hermes"
        )  # a model without a format of its own is told about tools in the commonest one
    if reasoning_format == "auto":
        reasoning_format = next((name for name, sign in _REASONING_SIGNS if sign in template), "none")
    return OutputFormat(TOOL_FORMATS.get(tool_format), REASONING_FORMATS.get(reasoning_format))
