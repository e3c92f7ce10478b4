"""Tool calls inside their markers, read character by character: JSON objects, or functions with parameters in XML."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any

from reef.inference.chat.pieces import Kind, Piece

_SPACE = " \t\r\n"
BETWEEN = _SPACE + ",;[]}"


class CallScanner(ABC):
    """Reads what may be a row of calls."""

    broken = False  # this is no row of calls, or no longer
    between = True  # outside of any call
    ended = 0  # calls that are complete

    @abstractmethod
    def feed(self, character: str) -> list[Piece]: ...


class ObjectScanner(CallScanner):
    """`{"name": ..., "arguments": ...}`, one or many, in an array or not; Llama's key is "parameters".

    The arguments are passed on as they are written, valid or not; only white space around them is left out.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        """With `known`, an object is a call only if it names one of these and has arguments."""
        self._known = known
        self._begin()

    def _begin(self) -> None:
        self._state = "object"
        self._key = self._text = ""
        self._name: str | None = None
        self._announced = self._has_arguments = False
        self._held = ""  # arguments of a function not known yet, or white space that may be their end
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, character: str) -> list[Piece]:
        if self.between:
            if character == "{":
                self._begin()
                self.between = False
            else:
                self.broken = character not in BETWEEN
            return []
        return self._value(character) if self._state == "value" else self._outside_of_values(character)

    def _outside_of_values(self, character: str) -> list[Piece]:
        if self._state in ("key", "name"):
            self._string(character)
        elif character in _SPACE:
            pass
        elif self._state == "object" and character == "}":
            return self._end()
        elif self._state == "object" and character == '"':
            self._state, self._text = "key", ""
        elif self._state == "colon" and character == ":":
            self._state = "before"
        elif self._state == "before":
            return self._begin_value(character)
        else:
            self.broken = self._state != "object" or character != ","
        return []

    def _string(self, character: str) -> None:
        if character != '"' or self._escaped:
            self._escaped = character == "\\" and not self._escaped
            self._text += character
        elif self._state == "key":
            self._key, self._state = _unquoted(self._text), "colon"
        else:
            self._name, self._state = _unquoted(self._text), "object"
            self.broken = self._known is not None and self._name not in self._known

    def _begin_value(self, character: str) -> list[Piece]:
        if self._key == "name" and self._name is None and character == '"':
            self._state, self._text = "name", ""
            return []
        self._state, self._depth, self._in_string, self._escaped = "value", 0, False, False
        first = self._key in ("arguments", "parameters") and not self._has_arguments
        self._has_arguments |= first
        self._key = "arguments" if first else ""
        return self._value(character)

    def _value(self, character: str) -> list[Piece]:
        if not self._in_string and self._depth == 0 and character in ",}":
            self._state = "object"
            return self._end() if character == "}" else []
        self._nest(character)
        if self._key == "arguments":
            self._held += character
        return self._announce() if self._key == "arguments" and self._name is not None else []

    def _nest(self, character: str) -> None:
        if self._in_string:
            if character == '"' and not self._escaped:
                self._in_string = False
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _announce(self) -> list[Piece]:
        ready = self._held if self._in_string else self._held.rstrip(_SPACE)
        self._held = self._held[len(ready) :]
        pieces = [] if self._announced or self._name is None else [Piece(Kind.CALL, self._name)]
        self._announced = True
        return [*pieces, Piece(Kind.ARGUMENTS, ready)] if ready else pieces

    def _end(self) -> list[Piece]:
        self.between = True
        if self._name is None or (self._known is not None and not self._has_arguments):
            self.broken = True
            return []
        self.ended += 1
        if self._announced:
            return []
        self._announced = True
        return [Piece(Kind.CALL, self._name), Piece(Kind.ARGUMENTS, self._held.rstrip(_SPACE) or "{}")]


class FunctionScanner(CallScanner):
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; the arguments become a JSON object.

    A value is text unless the parameter's schema says otherwise and the value is JSON.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._tools = tools
        self._until: tuple[str, ...] = ("<function=",)
        self._text = ""
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._keys = 0

    def feed(self, character: str) -> list[Piece]:
        self._text += character
        found = next((end for end in self._until if self._text.endswith(end)), None)
        if found is None:
            return []
        text, self._text, state = self._text.removesuffix(found), "", self._until
        if state == ("<function=",):
            self.between, self._until = False, (">",)
            self._key, self._keys = "", -1
            return []
        if found == ">" and self._keys < 0:
            return self._begin(text.strip())
        if found == ">":
            self._key, self._until = text.strip(), ("</parameter>",)
            return []
        return self._continue(found, text)

    def _begin(self, name: str) -> list[Piece]:
        self._keys, self._until = 0, ("<parameter=", "</function>")
        properties = self._tools.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        return [Piece(Kind.CALL, name)]

    def _continue(self, found: str, text: str) -> list[Piece]:
        if found == "<parameter=":
            self._until = (">",)
            return []
        if found == "</parameter>":
            self._until = ("<parameter=", "</function>")
            self._keys += 1
            opening = "{" if self._keys == 1 else ", "
            value = _typed(text.removeprefix("\n").removesuffix("\n"), self._properties.get(self._key))
            return [Piece(Kind.ARGUMENTS, f"{opening}{json.dumps(self._key)}: {value}")]
        self._until, self.between = ("<function=",), True
        self.ended += 1
        return [Piece(Kind.ARGUMENTS, "}" if self._keys else "{}")]


def _typed(value: str, schema: Any) -> str:
    """`value` as JSON text."""
    kind = schema.get("type", "string") if isinstance(schema, dict) else "string"
    if kind != "string":
        try:
            json.loads(value)
            return value.strip()
        except (ValueError, RecursionError):
            pass
    return json.dumps(value)


def _unquoted(text: str) -> str:
    try:
        value: str = json.loads(f'"{text}"')
    except ValueError:
        return text
    return value
