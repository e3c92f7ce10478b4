from __future__ import annotations

import random
import zlib
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.errors import StorageError
from reef.records import codec
from reef.runtime.interfaces import (
    Ending,
    Generation,
    InferenceRecord,
    InstructionRecord,
    Record,
    ReportRecord,
    Span,
)
from tests.conftest import examples
from tests.records.values import exchange, typical

text = st.text(st.characters(codec="utf-8"), max_size=20)
unclean_text = st.text(max_size=20)  # with lone surrogates, as JSON may carry them
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | unclean_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(unclean_text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(unclean_text, json_values, max_size=3)
token_ids = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 50_000) | st.integers(0, 255), max_size=40)
logprobs = st.lists(st.floats(allow_nan=False), max_size=40)
generations = st.builds(
    Generation,
    prompt_ids=token_ids,
    output_ids=token_ids,
    logprobs=logprobs,
    sampled_logprobs=logprobs,
    spans=st.lists(st.builds(Span, st.integers(0, 2**40), st.integers(0, 2**40), text), max_size=3),
    ending=st.sampled_from(Ending),
    cached_tokens=st.integers(0, 2**40),
    temperature=st.floats(allow_nan=False),
)
common = {"record_id": text, "scenario": text, "created_at": st.floats(0, 1e12), "sequence": st.integers(0, 2**62)}
records = st.one_of(
    st.builds(
        InferenceRecord,
        **common,
        route=text,
        request=st.binary(max_size=200),
        response=st.binary(max_size=200),
        status=st.integers(100, 599),
        release_id=st.none() | text,
        generations=st.lists(generations, max_size=3),
        tags=st.dictionaries(text, text, max_size=3),
        parent_id=st.none() | text,
        fork_of=st.none() | text,
    ),
    st.builds(
        ReportRecord,
        **common,
        references=st.lists(unclean_text, max_size=3),
        score=st.none() | st.floats(allow_nan=False),
        feedback=st.none() | unclean_text | objects,
        error=st.none() | unclean_text,
        metadata=objects,
    ),
    st.builds(InstructionRecord, **common, body=objects),
)


def decoded(encoded: codec.Encoded, sequence: int = 0) -> Record:
    record = encoded.record
    return codec.decode(
        encoded.kind,
        record_id=record.record_id,
        scenario=record.scenario,
        created_at=record.created_at,
        sequence=sequence,
        digest=encoded.digest,
        payload=encoded.payload,
    )


def rounded(record: Record) -> Record:
    """What may differ from the original: float32 log-probabilities."""
    if not isinstance(record, InferenceRecord):
        return record
    return replace(
        record,
        generations=[
            replace(
                generation,
                logprobs=array("f", generation.logprobs).tolist(),
                sampled_logprobs=array("f", generation.sampled_logprobs).tolist(),
            )
            for generation in record.generations
        ],
    )


@settings(max_examples=examples(100))
@given(records)
def test_round_trip(record):
    encoded = codec.encode(record)
    assert decoded(encoded, record.sequence) == rounded(record)
    assert encoded.record == replace(rounded(record), sequence=0)
    assert codec.encode(encoded.record).digest == encoded.digest


@given(records, records)
def test_digest_tells_contents_apart(one, other):
    def identity(record):
        return repr(replace(codec.encode(record).record, created_at=0.0))

    same = codec.encode(one).digest == codec.encode(other).digest
    if same:
        assert identity(one) == identity(other)


def test_digest_covers_every_field():
    record = exchange("a")
    changed = {
        "record_id": "b",
        "scenario": "t",
        "route": "/v1/messages",
        "request": b"",
        "response": b"",
        "status": 500,
        "release_id": None,
        "generations": [],
        "tags": {},
    }
    digests = {codec.encode(replace(record, **{name: value})).digest for name, value in changed.items()}
    assert len(digests | {codec.encode(record).digest}) == len(changed) + 1
    ignored = replace(record, created_at=1.0, sequence=9, tags=dict(reversed(record.tags.items())))
    assert codec.encode(ignored).digest == codec.encode(record).digest


@pytest.mark.parametrize("ids", [[-1], [2**32]])
def test_token_ids_out_of_range_are_refused(ids):
    with pytest.raises(ValueError, match="token ids must be in"):
        codec.pack_ids(ids)


def test_small_token_ids_take_few_bytes():
    assert len(codec.pack_ids([200] * 100)) == 101
    assert len(codec.pack_ids([49_151] * 100)) == 201
    assert len(codec.pack_ids([151_000] * 100)) == 301


def test_a_typical_exchange_takes_less_than_700_bytes():
    rng = random.Random(0)
    sizes = [len(codec.encode(typical(f"r{number}", rng)).payload) for number in range(200)]
    assert sum(sizes) / len(sizes) < 700


def test_payloads_of_version_1_stay_readable():
    """Written by the first release of this format; this test fails when someone edits the preset dictionary."""
    payload = bytes.fromhex(
        "019bbe059be811936aa404ab004fb10ad064a580f0a0821230a1e6e403bd537b44a01a11580ad1c01838736265516a0ed0dba9ba064d4b81a6e5952c4c5c02326361d2c41947b89819990a1818041918188fb030b232301de1618080050cfbf733c0780d0718f6ed67983499816905d4c786939998616ca325a0e0643a6dff2c0d0c00"
    )
    encoded = codec.encode(exchange("a"))
    assert decoded(replace(encoded, payload=payload)) == exchange("a")


@settings(max_examples=examples(100))
@given(st.data())
def test_damage_is_noticed(data):
    encoded = codec.encode(exchange("a"))
    damaged = bytearray(encoded.payload)
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = decoded(replace(encoded, payload=bytes(damaged)))
    except StorageError as error:
        assert "record a is damaged" in str(error)
    else:
        assert found == exchange("a")  # only padding after the last deflate block may change unseen


@pytest.mark.parametrize("length", [0, 1, 20])
def test_a_cut_payload_is_refused(length):
    encoded = codec.encode(exchange("a"))
    with pytest.raises(StorageError, match="record a is damaged"):
        decoded(replace(encoded, payload=encoded.payload[:length]))


def test_a_newer_payload_is_refused_by_version():
    encoded = codec.encode(exchange("a"))
    with pytest.raises(StorageError, match="payload version 3, this Reef reads 1 and 2"):
        decoded(replace(encoded, payload=b"\x03" + zlib.compress(b"")))
