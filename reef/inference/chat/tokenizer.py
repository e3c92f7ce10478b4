"""A model's own tokenizer and chat template: conversation to token ids, token id to bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reef.errors import ConfigError
from reef.inference.chat.formats import detect
from reef.inference.chat.messages import Message
from reef.inference.chat.template import ChatTemplate
from reef.inference.source import model_source

INLINE_CHARACTERS = 2000
"""Longer texts are tokenized on a thread: at about 1 us a character they would hold up the event loop."""


class ChatTokenizer:
    """Renders, tokenizes, and knows the bytes of every token. Safe to share between tasks and threads."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto", reasoning_format: str = "auto") -> None:
        """Wrap a loaded `transformers` tokenizer. Raises ConfigError for one without fast backend or template.

        The formats are names of `formats`, or "auto": as the template has it.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{type(tokenizer).__name__} has no tokenizer.json; Reef needs a fast tokenizer")
        if not tokenizer.chat_template:
            raise ConfigError("the model has no chat template (chat_template.jinja or tokenizer_config.json)")
        self._tokenizer = tokenizer
        self._backend = backend
        self.template = ChatTemplate(tokenizer)
        self.format = detect(self.template.text, tool_format, reasoning_format)
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # SGLang's llguidance takes these for special, whatever the tokenizer says of them.
        self.tag_ids = self.special_ids.union(i for i, token in added.items() if re.fullmatch("<.+>", token.content))
        self._added = {token_id: str(token.content).encode() for token_id, token in added.items()}
        kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not {"Metaspace", "ByteFallback"} & set(kinds):
            raise ConfigError(f"the tokenizer's decoder {kinds} is neither byte-level nor SentencePiece-like")
        self.strips_leading_space = not self._byte_level and bool({"Strip", "Metaspace"} & set(kinds))
        self._bytes: dict[int, bytes] = {}
        self._anchor = next((token_id for token_id in sorted(self.special_ids) if self._anchors(token_id)), None)
        self.render([Message(role="user", content="")])  # the first rendering imports and compiles; do it here

    @classmethod
    def load(cls, path: Path | str, tool_format: str = "auto", reasoning_format: str = "auto") -> ChatTokenizer:
        """Load from a model directory or GGUF file. Blocking; reads files. Raises ConfigError."""
        source, options = model_source(Path(path))
        try:
            return cls(_class_of(source).from_pretrained(source, **options), tool_format, reasoning_format)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot read the tokenizer of the model at {path}: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation without tools, up to where the assistant's turn begins. Raises InvalidRequest."""
        return self.template.render(messages)

    async def encode(self, text: str, *, goes_on: bool = False, with_special: bool = False) -> list[int]:
        """Token ids of `text`, special tokens recognized; none are added but with `with_special`: templates write them.

        With `goes_on` the text continues others, so that a SentencePiece vocabulary puts no space before it.
        """
        encode = self._encode_with_special if with_special else partial(self.encode_now, goes_on=goes_on)
        if len(text) <= INLINE_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    def encode_now(self, text: str, *, goes_on: bool = False) -> list[int]:
        if not text:
            return []
        if goes_on and self.strips_leading_space and self._anchor is not None:
            anchored = self._added[self._anchor].decode() + text
            return self._encode(anchored)[1:]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, the batch call lets go of the interpreter lock while it works.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_with_special(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
        return ids

    def _anchors(self, token_id: int) -> bool:
        """Whether the token's name is recognized, alone and before text."""
        name = self._added[token_id].decode()
        return self._encode(name) == [token_id] and self._encode(name + "a")[0] == token_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; those of a special token are its name."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def ids_by_name(self, ids: Iterable[int]) -> dict[str, int]:
        return {self.token_bytes(token_id).decode(): token_id for token_id in ids}

    def text_of(self, ids: Sequence[int]) -> str:
        """All of it, special tokens included; what is no UTF-8 is replaced."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:  # padded rows of the embedding have no token
            return b""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in piece)
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _class_of(source: Path) -> Any:
    """`AutoTokenizer`, which imports torch to read the model's config, or at once what a directory says it would find.

    The service needs torch for nothing else, and importing it takes seconds.
    """
    import transformers

    try:
        said = json.loads((source / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        said = {}
    plain = said.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in said
    return getattr(transformers, "TokenizersBackend" if plain else "AutoTokenizer")


def _decoder_kinds(decoder: dict[str, Any]) -> list[str]:
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [decoder["type"]]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or the next free one from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
