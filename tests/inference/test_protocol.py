from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import EngineError
from reef.inference.local.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Add,
    Chunks,
    Hello,
    Rejected,
    client_reader,
    encode,
    engine_reader,
)
from reef.runtime.interfaces import Ending, GenerateRequest, Grammar, SamplingParams, TokenChunk

CHUNK = TokenChunk(
    request_id="r",
    token_ids=[5, 6],
    logprobs=[-0.1, -2.0],
    sampled_logprobs=[0.0, -1.5],
    runtime_load_id="engine:3",
    top_logprobs=[[(5, -0.1), (9, -3.0)], [(6, -2.0), (1, -2.5)]],
    ending=Ending.STOP,
    stopped_by="\n\n",
    cached_tokens=7,
)
SAMPLING = SamplingParams(
    max_tokens=3,
    logit_bias={3: -1.5},
    stop=["é"],
    stop_token_ids=[2],
    seed=2**63,
    top_logprobs=2,
    grammar=Grammar("json_schema", '{"type": "object"}'),
)
REQUEST = GenerateRequest(request_id="r", prompt_ids=[1, 2], sampling=SAMPLING, lane="s", runtime_load_id="engine:3")
FROM_ENGINE = [Hello(1, "engine-0", 2048), Chunks([CHUNK, CHUNK]), Rejected("r", "no", True, "prompt_ids"), Chunks([])]


@given(cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_frames_survive_any_cutting(cuts):
    stream = b"".join(encode(message) for message in FROM_ENGINE)
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    reader, received = client_reader(), []
    for start, end in itertools.pairwise(edges):
        received += reader.feed(stream[start:end])
    assert received == FROM_ENGINE


def test_requests_keep_every_field():
    assert engine_reader().feed(bytes(encode(Add(REQUEST)) + encode(Abort("r")))) == [Add(REQUEST), Abort("r")]


def test_the_wrong_kind_of_message_is_refused():
    with pytest.raises(EngineError, match="not this protocol"):
        engine_reader().feed(bytes(encode(Hello(1, "engine-0", 10))))
    with pytest.raises(EngineError, match="not this protocol"):
        client_reader().feed(bytes([0, 0, 0, 3]) + b"abc")
    body = msgspec.msgpack.encode(["rejected", 7, "no", True, None])
    with pytest.raises(EngineError, match=r"Expected `str`, got `int`"):
        client_reader().feed(len(body).to_bytes(4, "big") + body)


def test_a_mad_length_is_refused_before_it_is_buffered():
    with pytest.raises(EngineError, match=f"at most {MAX_FRAME_BYTES} bytes, got 4294967295"):
        client_reader().feed(b"\xff\xff\xff\xff")
