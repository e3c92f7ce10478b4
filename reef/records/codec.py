"""Records as compact bytes, and back.

A payload is one version byte and a raw deflate stream with a preset dictionary (RFC 1950, 1951). Inside, an
inference record is a msgpack array in which token ids and log-probabilities are byte planes: all lowest bytes first,
then the next ones; planes that hold only zeros are left out. Reports and instructions are JSON.
Log-probabilities are rounded to float32; everything else comes back exactly.

What retention emptied has another version byte, then the hash of the rest, which is deflated alike: the SHA-256
of each field that was emptied, behind their number, and JSON that names those fields and holds the others.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

import msgspec

from reef.errors import DamagedRecord
from reef.runtime.interfaces import (
    Ending,
    Generation,
    InferenceRecord,
    InstructionRecord,
    Record,
    RecordKind,
    ReportRecord,
    Span,
)

VERSION = 1
PURGED = 2  # the version byte of what retention emptied
_HASH = 16  # bytes of a digest

# Part of version 1: changing a byte makes stored payloads unreadable. The likeliest text stands last.
_DICTIONARY = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"'
    b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":,"output_tokens":"object":"response"'
    b'data: [DONE]\n\n"parameters":{"type":"object","properties":{"required":["description":"tool_calls":[{"id":"call_'
    b'"type":"function","function":{"name":"","arguments":"{\\""reasoning_content":"top_p":"seed":"tools":"stop":'
    b'{"model":"","messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"assistant","content":'
    b'"},{"role":"user","content":""}],"temperature":1.0,"max_tokens":"stream":true,"logprobs":null,"refusal":null,'
    b'"finish_reason":"length"data: {"id":"chatcmpl-","object":"chat.completion.chunk","created":17'
    b'"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}]}\n\n{"id":"chatcmpl-","object":'
    b'"chat.completion","created":17,"model":"","choices":[{"index":0,"message":{"role":"assistant","content":""},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":,"completion_tokens":,"total_tokens":}}engine:'
    b"/v1/completions/v1/responses/v1/messages/v1/chat/completions"
)

_JSON_KINDS = (ReportRecord, InstructionRecord)
_KIND_OF = {
    InferenceRecord: RecordKind.INFERENCE,
    ReportRecord: RecordKind.REPORT,
    InstructionRecord: RecordKind.INSTRUCTION,
}

_COLUMNS = {"record_id", "scenario", "created_at", "sequence", "purged"}  # not part of the content
_JSON_FIELDS = {kind: [one.name for one in fields(kind) if one.name not in _COLUMNS] for kind in _JSON_KINDS}
_JSON = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True, frozen=True)
class Encoded:
    """A record ready to be stored. `record` is what decoding will return, but for `sequence`."""

    record: Record
    kind: RecordKind
    digest: bytes  # [16]; over everything but the time and the sequence, so that a retry is recognized
    payload: bytes


class _PackedGeneration(msgspec.Struct, array_like=True):
    prompt_ids: bytes
    output_ids: bytes
    logprobs: bytes
    sampled_logprobs: bytes | None  # None: the same as logprobs
    spans: list[tuple[int, int, str]]
    ending: Ending
    cached_tokens: int
    temperature: float


class _PackedExchange(msgspec.Struct, array_like=True):
    route: str
    request: bytes
    response: bytes
    status: int
    release_id: str | None
    tags: dict[str, str]
    generations: list[_PackedGeneration]


class _LinkedExchange(_PackedExchange, array_like=True):
    """One that goes on from another. Without links the array is as long as it was before there were any."""

    parent_id: str | None = None
    fork_of: str | None = None


class _BarredExchange(_LinkedExchange, array_like=True):
    """One that must not train."""

    train: bool = True
    redacted: bool = False


_exchange_decoder = msgspec.msgpack.Decoder(_BarredExchange)


def encode(record: Record) -> Encoded:
    """Raises ValueError for token ids outside [0, 2**32)."""
    canonical = _canonical(record)
    kind = _KIND_OF[type(record)]
    content = _pack_exchange(canonical) if isinstance(canonical, InferenceRecord) else _json_content(canonical)
    digest = _digest(kind, record.scenario, record.record_id, content)
    return Encoded(record=canonical, kind=kind, digest=digest, payload=_deflate(content))


def decode(
    kind: RecordKind,
    *,
    record_id: str,
    scenario: str,
    created_at: float,
    sequence: int,
    digest: bytes,
    payload: bytes,
) -> Record:
    """Raises DamagedRecord when the payload is not what was stored, or was written by a newer Reef."""
    purged = payload[:1] == bytes([PURGED])
    try:
        content = _inflate(payload)
    except (zlib.error, ValueError) as error:
        raise DamagedRecord(f"record {record_id} is damaged: {error}", sequence) from error
    if _digest(kind, scenario, record_id, content) != (payload[1 : 1 + _HASH] if purged else digest):
        raise DamagedRecord(f"record {record_id} is damaged: its bytes are not those that were stored", sequence)
    if kind is RecordKind.INFERENCE and not purged:
        return _unpack_exchange(content, record_id, scenario, created_at, sequence)
    fields = _unpack_emptied(content) if purged else _read_json(content)
    fields |= {"record_id": record_id, "scenario": scenario, "created_at": created_at, "sequence": sequence}
    if kind is RecordKind.INFERENCE:
        return InferenceRecord(**fields, request=b"", response=b"", generations=[])
    return ReportRecord(**fields) if kind is RecordKind.REPORT else InstructionRecord(**fields)


def _read_json(content: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(content.decode("utf-8", "surrogatepass"))
    return fields


def _unpack_emptied(content: bytes) -> dict[str, Any]:
    hashes = content[1 : 1 + 32 * content[0]]
    fields = _read_json(content[1 + len(hashes) :])
    fields["purged"] = {name: hashes[32 * n : 32 * n + 32].hex() for n, name in enumerate(fields["purged"])}
    return fields


def emptied(record: Record) -> bytes | None:
    """The payload of `record` without its bodies, with their hashes instead; None if there is nothing to empty.

    An answer keeps route, status, release and tags; a report keeps references, score and error.
    """
    if isinstance(record, InstructionRecord) or record.purged:
        return None
    if isinstance(record, InferenceRecord):
        generations = msgspec.msgpack.encode([_pack_generation(generation) for generation in record.generations])
        bodies = {"request": record.request, "response": record.response, "generations": generations}
        kept: dict[str, Any] = {
            "route": record.route, "status": record.status, "release_id": record.release_id, "tags": record.tags,
            **({"redacted": True} if record.redacted else {}),
        }  # fmt: skip
    else:
        said = {"feedback": record.feedback, "metadata": record.metadata}
        bodies = {name: _json_bytes(value) for name, value in said.items() if value}
        kept = {"references": record.references, "score": record.score, "error": record.error}
    if not bodies:
        return None
    if not record.train:
        kept["train"] = False
    kept["purged"] = list(bodies)
    hashes = [hashlib.sha256(body).digest() for body in bodies.values()]
    content = bytes([len(hashes)]) + b"".join(hashes) + _json_bytes(kept)
    digest = _digest(_KIND_OF[type(record)], record.scenario, record.record_id, content)
    return bytes([PURGED]) + digest + _deflate(content)[1:]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids [num_tokens] as a width byte (1 to 4) and that many byte planes."""
    try:
        raw = _little_endian(array("I", ids)).tobytes()
    except OverflowError as error:
        raise ValueError(f"token ids must be in [0, 2**32): {error}") from error
    planes = [raw[offset::4] for offset in range(4)]
    while len(planes) > 1 and not planes[-1].strip(b"\0"):
        planes.pop()
    return bytes([len(planes)]) + b"".join(planes)


def unpack_ids(packed: bytes) -> list[int]:
    values = array("I")
    values.frombytes(_interleave(packed[1:], packed[0]))
    return _little_endian(values).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Floats [num_tokens] as four byte planes of float32."""
    raw = _little_endian(array("f", values)).tobytes()
    return b"".join(raw[offset::4] for offset in range(4))


def unpack_floats(packed: bytes) -> list[float]:
    values = array("f")
    values.frombytes(_interleave(packed, 4))
    return _little_endian(values).tolist()


def _interleave(planes: bytes, width: int) -> bytearray:
    """Undo byte planes: [width][count] to [count][4]."""
    count = len(planes) // width
    raw = bytearray(4 * count)
    for offset in range(width):
        raw[offset::4] = planes[offset * count : (offset + 1) * count]
    return raw


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _canonical(record: Record) -> Record:
    """A copy that equals what will be read back, so that a retry and the first answer agree."""
    if isinstance(record, ReportRecord):
        return replace(record, score=None if record.score is None else float(record.score), sequence=0)
    if isinstance(record, InstructionRecord):
        return replace(record, sequence=0)
    if not record.generations and not record.sequence:
        return record
    rounded = [
        replace(
            generation,
            logprobs=array("f", generation.logprobs).tolist(),
            sampled_logprobs=array("f", generation.sampled_logprobs).tolist(),
        )
        for generation in record.generations
    ]
    return replace(record, generations=rounded, sequence=0)


def _json_content(record: ReportRecord | InstructionRecord) -> bytes:
    fields = {name: getattr(record, name) for name in _JSON_FIELDS[type(record)]}
    if fields.get("train") is True:  # as it was written before there was a choice
        del fields["train"]
    return _json_bytes(fields)


def _json_bytes(value: Any) -> bytes:
    text = _JSON.encode(value)
    return text.encode("utf-8", "surrogatepass")  # clients may send lone surrogates, as "\ud800"


def _pack_exchange(record: InferenceRecord) -> bytes:
    fields = (
        record.route,
        record.request,
        record.response,
        record.status,
        record.release_id,
        dict(sorted(record.tags.items())),
        [_pack_generation(generation) for generation in record.generations],
    )
    if not record.train:
        return msgspec.msgpack.encode(
            _BarredExchange(*fields, record.parent_id, record.fork_of, False, record.redacted)
        )
    if record.parent_id is None and record.fork_of is None:
        return msgspec.msgpack.encode(_PackedExchange(*fields))
    return msgspec.msgpack.encode(_LinkedExchange(*fields, record.parent_id, record.fork_of))


def _pack_generation(generation: Generation) -> _PackedGeneration:
    logprobs = pack_floats(generation.logprobs)
    sampled = pack_floats(generation.sampled_logprobs)
    return _PackedGeneration(
        prompt_ids=pack_ids(generation.prompt_ids),
        output_ids=pack_ids(generation.output_ids),
        logprobs=logprobs,
        sampled_logprobs=None if sampled == logprobs else sampled,
        spans=[(span.start, span.end, span.runtime_load_id) for span in generation.spans],
        ending=generation.ending,
        cached_tokens=generation.cached_tokens,
        temperature=generation.temperature,
    )


def _unpack_exchange(
    content: bytes, record_id: str, scenario: str, created_at: float, sequence: int
) -> InferenceRecord:
    exchange = _exchange_decoder.decode(content)
    return InferenceRecord(
        record_id=record_id,
        scenario=scenario,
        created_at=created_at,
        route=exchange.route,
        request=exchange.request,
        response=exchange.response,
        status=exchange.status,
        release_id=exchange.release_id,
        generations=[_unpack_generation(packed) for packed in exchange.generations],
        tags=exchange.tags,
        parent_id=exchange.parent_id,
        fork_of=exchange.fork_of,
        train=exchange.train,
        redacted=exchange.redacted,
        sequence=sequence,
    )


def _unpack_generation(packed: _PackedGeneration) -> Generation:
    sampled = packed.logprobs if packed.sampled_logprobs is None else packed.sampled_logprobs
    return Generation(
        prompt_ids=unpack_ids(packed.prompt_ids),
        output_ids=unpack_ids(packed.output_ids),
        logprobs=unpack_floats(packed.logprobs),
        sampled_logprobs=unpack_floats(sampled),
        spans=[Span(start, end, load) for start, end, load in packed.spans],
        ending=packed.ending,
        cached_tokens=packed.cached_tokens,
        temperature=packed.temperature,
    )


def _digest(kind: RecordKind, scenario: str, record_id: str, content: bytes) -> bytes:
    identity = f'["{kind}", {_quoted(scenario)}, {_quoted(record_id)}]'.encode()  # as json.dumps writes the three
    return hashlib.blake2b(identity + b"\0" + content, digest_size=_HASH).digest()


def _deflate(content: bytes) -> bytes:
    # A window that just holds everything: deflate's memory, and the time to clear it, go by the window.
    bits = min(max((len(_DICTIONARY) + len(content)).bit_length(), 9), 15)
    compressor = zlib.compressobj(6, zlib.DEFLATED, -bits, bits - 7, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY)
    return bytes([VERSION]) + compressor.compress(content) + compressor.flush()


def _inflate(payload: bytes) -> bytes:
    """The first byte of `payload` says its version."""
    if not payload:
        raise ValueError("the payload is empty")
    if payload[0] not in (VERSION, PURGED):
        raise ValueError(f"payload version {payload[0]}, this Reef reads {VERSION} and {PURGED}: upgrade Reef")
    deflated = payload[1 + _HASH :] if payload[0] == PURGED else payload[1:]
    decompressor = zlib.decompressobj(-15, zdict=_DICTIONARY)
    content = decompressor.decompress(deflated) + decompressor.flush()
    if not decompressor.eof:
        raise ValueError("the payload is cut short")
    return content
