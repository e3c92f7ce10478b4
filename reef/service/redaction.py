"""Redaction: hooks of the operator's see every text before it is stored or logged, and say what is kept of it.

A body is looked at value by value, names and numbers included, so that no escape or duplicate key hides anything; and
once more with the pieces of each text put together, for a stream or a list of tokens tears it apart. Where only the
whole gives a secret away, only the redacted whole is kept, as {"redacted": {path: text}}.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reef.errors import InvalidRequest, StorageError
from reef.named import load_callable
from reef.runtime.interfaces import Generation, InferenceRecord, InstructionRecord, Record

Hook = Callable[[str], str]
Decode = Callable[[Sequence[int]], str]


class Redaction:
    """What all hooks together make of a text. Without hooks everything stays as it is."""

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    @classmethod
    def load(cls, paths: Sequence[str]) -> Redaction:
        """Raises ConfigError for a path that leads to nothing callable."""
        return cls({path: load_callable("reef.redact", path, "a list of functions") for path in paths})

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def text(self, text: str) -> str:
        """Raises StorageError, without the text, if a hook fails: then nothing may be kept of it."""
        for path, hook in self._hooks.items():
            try:
                found: object = hook(text)
            except Exception as error:  # the operator's code may raise anything, and its message may hold the text
                raise StorageError(f"reef.redact: {path} failed with {type(error).__name__}") from None
            if not isinstance(found, str):
                raise StorageError(f"reef.redact: {path} must return a string, got {type(found).__name__}")
            text = found
        return text

    def keeps(self, text: str) -> bool:
        """Whether it may be stored as it is; not where a hook fails."""
        try:
            return not self._hooks or self.text(text) == text
        except StorageError:
            return False

    def check_name(self, name: str | None, field: str) -> None:
        """A name cannot be stored under another one. Raises InvalidRequest naming the field, and not the name."""
        if name is not None and self._hooks and self.text(name) != name:
            raise InvalidRequest(f"{field} holds what must not be stored", field)

    def value(self, value: Any) -> Any:
        """A JSON value, redacted; the same object if that changes nothing."""
        found = _Pass(self)
        return found.result(found.walk(value, ()), value)

    def body(self, body: bytes) -> bytes:
        """A JSON document, or a stream of server-sent events, or text. Raises StorageError, as `text` does."""
        try:
            return self._body(body, body.decode("utf-8", "surrogateescape"))
        except RecursionError:  # of an upstream: what clients send is bounded
            raise StorageError("reef.redact: a body is nested too deeply to be looked at") from None

    def _body(self, body: bytes, text: str) -> bytes:
        found = _Pass(self)
        parsed = found.parse(text)
        if parsed is not _NO_JSON:
            kept = found.result(parsed, None)
            return body if kept is None else _encoded(kept)
        lines = [found.line(line) for line in text.split("\n")]
        kept = found.result("\n".join(lines), None)
        if kept is None:
            return body
        return kept.encode("utf-8", "surrogateescape") if isinstance(kept, str) else _encoded(kept)

    # ------------------------------------------------------------------ records

    def record(self, record: Record, decode: Decode | None = None) -> Record:
        """What may be stored of it. `decode` reads token ids. Raises InvalidRequest for a score that may not be."""
        if not self._hooks:
            return record
        if isinstance(record, InferenceRecord):
            return self._exchange(record, decode)
        if isinstance(record, InstructionRecord):
            return replace(record, body=self.value(record.body))
        if record.score is not None and self.text(json.dumps(record.score)) != json.dumps(record.score):
            raise InvalidRequest("score holds what must not be stored", "score")
        metadata = self.value(record.metadata)
        return replace(
            record,
            feedback=self.value(record.feedback),
            error=None if record.error is None else self.text(record.error),
            metadata=metadata,
            train=record.train and metadata is record.metadata,  # two groups may have become one
        )

    def _exchange(self, record: InferenceRecord, decode: Decode | None) -> InferenceRecord:
        tags = {self.text(name): self.text(value) for name, value in record.tags.items()}
        request = self._with_tokens(
            record.request, [generation.prompt_ids for generation in record.generations], decode
        )
        response = self._with_tokens(
            record.response, [generation.output_ids for generation in record.generations], decode
        )
        if request == record.request and response == record.response:
            return replace(record, tags=tags)
        return replace(
            record,
            request=request,
            response=response,
            tags=tags,
            generations=[_without_tokens(generation) for generation in record.generations],
            train=False,
            redacted=True,
        )

    def _with_tokens(self, body: bytes, ids: Sequence[Sequence[int]], decode: Decode | None) -> bytes:
        """The redacted body; if only its token ids give something away, what they say, redacted."""
        kept = self.body(body)
        if kept != body or decode is None:
            return kept
        told = [decode(some) for some in ids]
        redacted = [self.text(text) for text in told]
        return body if redacted == told else _encoded({"redacted": {"tokens": redacted}})


def _without_tokens(generation: Generation) -> Generation:
    return replace(generation, prompt_ids=[], output_ids=[], logprobs=[], sampled_logprobs=[], spans=[])


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


_NO_JSON = object()
_PLACES = ("index", "output_index", "content_index", "summary_index")
"""Which of several texts a piece belongs to, in the events of the provider-shaped APIs."""


class _Pairs(list[tuple[str, Any]]):
    """An object with every pair that was written, of which a dict would keep one per name."""


class _Number(str):
    """A number as it was written."""


class _Pass:
    """One look at one document."""

    def __init__(self, redaction: Redaction) -> None:
        self._text = redaction.text
        self._changed = False
        self._pieces: dict[tuple[object, ...], list[str]] = defaultdict(list)

    def parse(self, text: str) -> Any:
        """The redacted document, or _NO_JSON."""
        try:
            document = json.loads(text, object_pairs_hook=_Pairs, parse_int=_Number, parse_float=_Number)
        except ValueError:
            return _NO_JSON
        return self.walk(document, ())

    def line(self, line: str) -> str:
        """A line of text, or of an event stream."""
        prefix, data = ("data: ", line[6:]) if line.startswith("data: ") else ("", line)
        before, self._changed = self._changed, False
        parsed = self.parse(data) if prefix else _NO_JSON
        if parsed is not _NO_JSON:
            kept = json.dumps(parsed, separators=(",", ":")) if self._changed else data
        else:
            kept = self._text(data)
        self._changed = before or kept != data
        return prefix + kept

    def result(self, redacted: Any, unchanged: Any) -> Any:
        """`redacted`, or `unchanged`, or the texts put together where they were torn apart."""
        whole: dict[str, str] = {}
        torn = False
        for path, pieces in self._pieces.items():
            text = self._text("".join(pieces))
            whole[".".join(map(str, path))] = text
            torn = torn or (len(pieces) > 1 and text != "".join(map(self._text, pieces)))
        if torn:
            return {"redacted": {self._text(path): text for path, text in whole.items()}}
        return redacted if self._changed else unchanged

    def walk(self, value: Any, path: tuple[object, ...]) -> Any:
        if isinstance(value, _Number) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return self._number(value)
        if isinstance(value, str):
            self._pieces[path].append(value)
            return self._kept(value)
        if isinstance(value, dict | _Pairs):
            return self._object(list(value.items()) if isinstance(value, dict) else value, path)
        if isinstance(value, list):
            if value and all(isinstance(item, _Number) and item.isdecimal() and len(item) <= 3 for item in value):
                self._pieces[path].append(bytes(min(int(item), 255) for item in value).decode(errors="replace"))
            return [self.walk(item, path) for item in value]
        return value

    def _object(self, pairs: list[tuple[str, Any]], path: tuple[object, ...]) -> dict[str, Any]:
        place = tuple(str(value) for name, value in pairs if name in _PLACES)
        return {self._kept(name): self.walk(value, (*path, *place, name)) for name, value in pairs}

    def _number(self, value: Any) -> Any:
        text = str(value) if isinstance(value, _Number) else json.dumps(value)
        if (kept := self._text(text)) != text:
            self._changed = True
            return kept
        return json.loads(text) if isinstance(value, _Number) else value

    def _kept(self, text: str) -> str:
        kept = self._text(text)
        self._changed = self._changed or kept != text
        return kept
