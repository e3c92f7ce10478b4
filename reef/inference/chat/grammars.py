"""What may follow a prompt: a call of one tool, a call of any of them, or an answer of a given form or calls.

Where one JSON schema says it, it is a JSON schema, which every engine knows. The rest is written in llguidance's Lark
(docs/syntax.md of that project), where a special token is no text but `<[its id]>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reef.inference.chat.formats import ToolFormat
from reef.inference.chat.messages import Tool
from reef.runtime.interfaces import Grammar

# One space, or a new line with its indentation: a weak model would else write white space until its tokens are spent.
WHITESPACE = r" |\r?\n[ \t]{0,40}"


class CallGrammars:
    """Grammars of calls in one format. `special` has the ids of tokens that are never spelled, by their names."""

    def __init__(self, form: ToolFormat, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self._split = re.compile(f"({any_name(special)})")

    def forced(self, tools: Sequence[Tool], *, parallel: bool) -> tuple[str, Grammar]:
        """What to put behind the prompt so that a call of one of `tools` follows, and what the rest must match."""
        form = self._form
        if len(tools) == 1 and form.json_arguments:
            return form.begin + self._opening(tools[0]), Grammar("json_schema", json.dumps(_object(tools[0])))
        lead = self._opening(tools[0]) if len(tools) == 1 else form.any_call
        if form.objects_key is not None:
            return form.begin + lead, _any_of(_call(tool, form.objects_key) for tool in tools)
        first, rules = ["first", *self._calls(tools, lead)], self._rules(tools)
        return form.begin + lead, _lark(["start", *self._row("first", parallel)], first, *rules)

    def answer_or_calls(self, answer: Grammar, tools: Sequence[Tool], begin: str, *, parallel: bool) -> Grammar:
        """JSON as in `answer` after `begin`, or one or more calls."""
        schema = json.loads(answer.value) if answer.kind == "json_schema" else {"type": "object"}
        if self._form.objects_key is not None and not self._form.begin + self._form.any_call:
            return _any_of([schema, *(_call(tool, self._form.objects_key) for tool in tools)])
        start = ["start", "answer", "|", *self._text(self._form.begin), *self._row("call", parallel)]
        return _lark(start, ["answer", *self._text(begin), _json(schema)], *self._rules(tools))

    def _row(self, first: str, parallel: bool) -> list[str]:
        between, end = self._form.between, self._text(self._form.end)
        more = [] if between is None or not parallel else ["(", *self._text(between), "call", ")*"]
        return [first, *more, *end]

    def _rules(self, tools: Sequence[Tool]) -> list[list[str]]:
        return [
            ["call", *self._calls(tools)],
            *([f"arguments{number}", *self._arguments(tool)] for number, tool in enumerate(tools)),
        ]

    def _calls(self, tools: Sequence[Tool], lead: str = "") -> list[str]:
        """Any call, without `lead`, which they all begin with."""
        found: list[str] = []
        for number, tool in enumerate(tools):
            opening = self._text(self._opening(tool)[len(lead) :])
            found += ["|", *opening, f"arguments{number}", *self._text(self._form.close)]
        return found[1:]

    def _opening(self, tool: Tool) -> str:
        return self._form.call.format(name=tool.name, quoted=json.dumps(tool.name))

    def _text(self, text: str) -> list[str]:
        parts = filter(None, self._split.split(text))
        return [f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts]

    def _arguments(self, tool: Tool) -> list[str]:
        schema = _object(tool)
        if self._form.json_arguments:
            return [_json(schema)]
        properties, required = schema.get("properties"), schema.get("required")
        shared: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        found = ['""']
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            parameter = _parameter(name, {**shared, **(inner if isinstance(inner, dict) else {})})
            found.append(f"({parameter}){'' if isinstance(required, list) and name in required else '?'}")
        return found


def any_name(special: Iterable[str]) -> str:
    """A regular expression of these names of tokens, the longest first; without any it matches nothing."""
    return "|".join(map(re.escape, sorted(filter(None, special), key=len, reverse=True))) or "(?!)"


def _object(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **tool.parameters}


def _parameter(name: str, schema: dict[str, Any]) -> str:
    """A parameter in XML; text where `calls.FunctionScanner` reads text."""
    opening, closing = json.dumps(f"<parameter={name}>\n"), "\n</parameter>\n"
    if schema.get("type", "string") != "string":
        return f"{opening} {_json(schema)} {json.dumps(closing)}"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) and choice for choice in choices):
        return f"{opening} ({' | '.join(map(json.dumps, choices))}) {json.dumps(closing)}"
    return f"{opening} text"


_TEXT = r'text[suffix="\n</parameter>\n"]: /(?s:.*)/'


def _lark(*rules: Sequence[str]) -> Grammar:
    return Grammar("lark", "\n".join([*(f"{name}: {' '.join(body)}" for name, *body in rules), _TEXT]))


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _call(tool: Tool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: _moved(_object(tool), f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _any_of(schemas: Iterable[dict[str, Any]]) -> Grammar:
    moved = [_moved(schema, f"#/anyOf/{number}") for number, schema in enumerate(schemas)]
    return Grammar("json_schema", json.dumps({"anyOf": moved}))


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references as they have to be once it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(inner, place) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(inner, place) for name, inner in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
