"""The one internal conversation form that every wire format is translated into."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


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
    tool_calls: tuple[ToolCall, ...] = field(default=())
    tool_call_id: str | None = None  # of a tool turn: the call it answers
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the mapping that Hugging Face chat templates expect; absent values are absent keys."""
        turn: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _parsed(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            turn["name"] = self.name
        return turn


def _parsed(arguments: str) -> Any:
    """Templates serialize arguments themselves, so give them the value; what is not JSON stays text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
