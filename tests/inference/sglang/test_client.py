"""The handler against a server that answers what the test says; with real engines it is tested in engines/."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from reef.errors import ConfigError, InvalidRequest, Unavailable
from reef.inference.sglang.client import SGLangHandler
from reef.runtime.interfaces import Ending, GenerateRequest, Grammar, SamplingParams, TokenChunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class FakeServer:
    """Answers every request with `answer`, then closes; `heads` and `bodies` are what it was sent."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[dict] = []

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        for byte in range(0, len(self._answer), 7):  # in pieces that respect nothing
            writer.write(self._answer[byte : byte + 7])
            await writer.drain()
        writer.close()


def event(ids: Sequence[int], weights: Sequence[str], *, load="engine:3", under="engine:3", finish=None) -> bytes:
    meta = {
        "finish_reason": finish,
        "output_token_logprobs": [[-float(token), token, None] for token in ids],
        "reef_drawn": [0.0] * len(ids),
        "reef_weights": list(weights),
        "reef_load": load,
        "reef_under": under,
        "cached_tokens": 5,
    }
    return framed(json.dumps({"output_ids": list(ids), "meta_info": meta}))


def framed(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


DONE = framed("[DONE]") + b"0\r\n\r\n"
STOP, LENGTH = {"type": "stop", "matched": "END"}, {"type": "length"}


def asked(answer: bytes, request: GenerateRequest | None = None) -> tuple[list[TokenChunk], list[dict]]:
    async def run() -> tuple[list[TokenChunk], list[dict]]:
        async with FakeServer(answer) as server:
            handler = SGLangHandler(lambda: [server.url])
            handler._url, handler._max_context, handler._vocab_size = server.url, 100, 1000
            chunks = [chunk async for chunk in handler.generate(request or a_request())]
            return chunks, server.bodies

    return asyncio.run(asyncio.wait_for(run(), 200))


def a_request(**changes) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=8, **changes.pop("sampling", {}))
    return GenerateRequest(request_id="r", prompt_ids=[1, 2], sampling=sampling, **changes)


def test_events_become_chunks() -> None:
    chunks, [body] = asked(HEAD + event([7], ["engine:3"]) + event([8, 9], ["engine:3"] * 2, finish=STOP) + DONE)
    assert [chunk.token_ids for chunk in chunks] == [[7], [8, 9]]
    assert [chunk.logprobs for chunk in chunks] == [[-7.0], [-8.0, -9.0]]
    assert (chunks[0].ending, chunks[1].ending, chunks[1].stopped_by) == (None, Ending.STOP, "END")
    assert {chunk.runtime_load_id for chunk in chunks} == {"engine:3"} and chunks[0].cached_tokens == 5
    assert (body["input_ids"], body["lora_path"]) == ([1, 2], "reef:lane:")


def test_one_event_of_two_loads_is_two_chunks() -> None:
    answer = HEAD + event([7, 8, 9], ["engine:3", "engine:3", "engine:4"], finish=LENGTH) + DONE
    chunks, _ = asked(answer)
    assert [(chunk.token_ids, chunk.runtime_load_id) for chunk in chunks] == [([7, 8], "engine:3"), ([9], "engine:4")]
    assert [chunk.ending for chunk in chunks] == [None, Ending.LENGTH]


def test_tokens_of_an_alias_are_the_aliass_until_the_weights_under_it_change() -> None:
    answer = HEAD + event([7, 8], ["engine:0", "engine:5"], load="engine:4", under="engine:0", finish=LENGTH) + DONE
    chunks, _ = asked(answer)
    assert [chunk.runtime_load_id for chunk in chunks] == ["engine:4", "engine:5"]


def test_lane_load_and_grammar_are_sent() -> None:
    grammar = Grammar("choice", json.dumps(["a.b", "c"]))
    answer = HEAD + event([7], ["engine:3"], finish=LENGTH) + DONE
    _, [body] = asked(answer, a_request(lane="support", sampling={"grammar": grammar}))
    assert (body["lora_path"], body["sampling_params"]["regex"]) == ("reef:lane:support", r"(a\.b)|(c)")
    _, [body] = asked(answer, a_request(sampling={"grammar": Grammar("lark", "start: /a/")}))
    assert body["sampling_params"]["ebnf"] == "start: /a/"
    _, [body] = asked(answer, a_request(lane="support", runtime_load_id="engine:9"))
    assert body["lora_path"] == "reef:load:engine:9"


@pytest.mark.parametrize(
    "rest", [b"", framed('{"error": {"message": "gone", "code": 500}}'), DONE, framed("{broken"), b"x"]
)
def test_an_answer_that_breaks_off_ends_with_a_cut(rest) -> None:
    chunks, _ = asked(HEAD + event([7], ["engine:3"]) + rest)
    assert [chunk.token_ids for chunk in chunks] == [[7], []]
    assert (chunks[1].ending, chunks[1].runtime_load_id) == (Ending.ENGINE_CUT, "engine:3") and chunks[1].error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\ntoo long.", InvalidRequest),
        (b"HTTP/1.1 503 Unavailable\r\ncontent-length: 4\r\n\r\nbusy", Unavailable),
        (HEAD + framed('{"error": {"message": "bad grammar", "code": 400}}') + DONE, InvalidRequest),
        (HEAD + framed('{"error": {"message": "reef: the load x is not resident", "code": 400}}') + DONE, Unavailable),
        (HEAD + event([], [], finish={"type": "abort", "message": "no", "status_code": 400}) + DONE, InvalidRequest),
        (b"", Unavailable),
        (HEAD, Unavailable),
        (b"SSH-2.0-OpenSSH\r\n", Unavailable),
    ],
)
def test_what_fails_before_the_first_token_raises(answer, error) -> None:
    with pytest.raises(error):
        asked(answer)


def test_handler_config_is_checked() -> None:
    assert isinstance(SGLangHandler.from_config({"connect-timeout": 3}, list), SGLangHandler)
    with pytest.raises(ConfigError, match=r"inference\.handler-config: .*`connect-timout`"):
        SGLangHandler.from_config({"connect-timout": 3}, list)
