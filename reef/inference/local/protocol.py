"""The data plane between a client and a local engine: length-prefixed msgpack frames on a Unix or TCP socket.

    client ──► Greet, then Add, Abort     engine ──► Hello, then Chunks (one frame per step), Rejected

Over TCP the engine says Hello only to who greets it with its token; a Unix socket is guarded by its directory.

A frame is a big-endian unsigned 32-bit length and that many bytes. When a connection ends, the engine aborts what it
was generating for it, and the client ends its streams with ENGINE_CUT.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from reef.errors import EngineError
from reef.runtime.interfaces import Ending, GenerateRequest, TokenChunk

VERSION = 3
MAX_FRAME_BYTES = 256 * 1024 * 1024

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class Add(msgspec.Struct, array_like=True, tag="add"):
    """Generate this. Choosing a `request.request_id` that is never used again is the client's duty."""

    request: GenerateRequest


class Greet(msgspec.Struct, array_like=True, tag="greet"):
    """A client's first frame over TCP."""

    token: str


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """The client no longer wants the request; nothing more is sent for it."""

    request_id: str


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The engine's first frame."""

    version: int
    engine: str
    max_context: int  # tokens, prompt plus output


class Chunks(msgspec.Struct, array_like=True, tag="chunks"):
    """What one step produced for this connection."""

    chunks: list[TokenChunk]


class Rejected(msgspec.Struct, array_like=True, tag="rejected"):
    """The engine did not take the request: the caller's fault if `invalid`, else the engine's state."""

    request_id: str
    message: str
    invalid: bool
    field: str | None = None


ToEngine = Greet | Add | Abort
FromEngine = Hello | Chunks | Rejected
T = TypeVar("T")


def encode(message: ToEngine | FromEngine) -> bytearray:
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return frame


def cut(request_id: str, reason: str, runtime_load_id: str = "") -> TokenChunk:
    """The last chunk of a request that its engine lost."""
    return TokenChunk(
        request_id=request_id,
        token_ids=[],
        logprobs=[],
        sampled_logprobs=[],
        runtime_load_id=runtime_load_id,
        ending=Ending.ENGINE_CUT,
        error=reason,
    )


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages of one type."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages that `data` completes. Raises EngineError for a stream that is not this protocol."""
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a frame must have at most {MAX_FRAME_BYTES} bytes, got {length}")
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(buffer)[start + _LENGTH_BYTES : end]))
            except msgspec.MsgspecError as error:
                raise EngineError(f"a frame that is not this protocol: {error}") from error
            start = end
        del buffer[:start]
        return messages


def engine_reader() -> FrameReader[ToEngine]:
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def client_reader() -> FrameReader[FromEngine]:
    return FrameReader(msgspec.msgpack.Decoder(FromEngine))
