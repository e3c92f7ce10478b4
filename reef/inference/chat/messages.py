"""The one internal conversation form that every wire format is translated into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reef.runtime.interfaces import Grammar


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call that the assistant asked for. `arguments` is the model's own text, normally JSON."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Message:
    """One turn. `role` is system, user, assistant or tool."""

    role: str
    content: str
    reasoning: str = ""  # what the assistant thought before it said `content`
    tool_calls: tuple[ToolCall, ...] = field(default=())
    tool_call_id: str | None = None  # of a tool turn: the call it answers
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the mapping that Hugging Face chat templates expect; absent values are absent keys."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            turn["name"] = self.name
        return turn


@dataclass(slots=True, frozen=True, kw_only=True)
class Tool:
    """A function that the assistant may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(slots=True, frozen=True, kw_only=True)
class Conversation:
    """What is asked of the model, whatever API it came through."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"  # "auto", "none" or "required"
    tool_name: str | None = None  # with "required": this one
    parallel_calls: bool = True
    grammar: Grammar | None = None  # of the answer's text
    effort: str | None = None  # how long to think: "none", "minimal", "low", "medium", "high", ...
    thinking: bool | None = None  # None: as the model's template would have it
    prefill: bool = False  # the last message is the beginning of the answer
    receipts: frozenset[str] = frozenset()  # of answers of ours that it is known to hold


def parsed_arguments(arguments: str) -> Any:
    """Templates serialize arguments themselves, so give them the value; what is not JSON stays text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
