"""What a Reef in front of a provider keeps of what passes: permissions, limits and redaction hold there, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reef.config import resolve
from reef.service.app import build
from tests.service.conftest import running
from tests.service.providers import (
    DONE,
    END,
    STREAM_HEAD,
    USAGE,
    FakeProvider,
    ask,
    chunk,
    in_front,
    message,
    piece,
    reply,
)


def stream(*events: bytes) -> bytes:
    return STREAM_HEAD + b"".join(map(chunk, events)) + END


WHOLE = reply({"id": "x", "usage": {"total_tokens": 5}})
STREAM = stream(piece("a"), piece(finish="stop"), USAGE, DONE)


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    found = FakeProvider()
    yield found
    found.close()


@pytest.mark.parametrize("answer", [WHOLE, STREAM], ids=["whole", "stream"])
def test_with_recording_off_every_byte_passes_and_none_is_kept(provider, tmp_path, answer):
    provider.answer = answer
    with in_front(provider.url, tmp_path) as reef:
        said = ask(reef, x_reef_record="off")
        assert said.status_code == 200 and "agent_record_id" not in said.text + str(said.headers)
        assert reef.scenarios() == ["default"] and reef.records("s") == []
        kept = ask(reef, x_reef_train="off")
        assert kept.headers["x-reef-agent-record-id"] and reef.records("s")[0]["train"] is False


def test_limits_hold_in_front_of_a_provider(provider, tmp_path):
    provider.answer = WHOLE
    with in_front(provider.url, tmp_path) as reef:
        deep = ask(reef, content=b'{"model":"m","messages":' + b"[" * 100 + b"]" * 100 + b"}")
        assert deep.status_code == 413 and message(deep).startswith("messages")
        described = reef.http.get("/openapi.json").json()["paths"]["/v1/messages"]["post"]["requestBody"]["content"]
        assert described["application/json"]["schema"] == {"type": "object"}  # what the provider takes, it knows
        assert reef.scenarios() == ["default"]


def test_a_secret_that_a_provider_streams_in_pieces_is_not_kept(provider, tmp_path):
    provider.answer = stream(piece("it is hunter2"), piece("-4711."), piece(finish="stop"), USAGE, DONE)
    flags = {"inference.upstream-url": provider.url, "reef.data-dir": str(tmp_path)}
    flags["reef.redact"] = "tests.service.test_redaction:hide"
    config = resolve(environ={}, flags=flags).config
    with running(build(config), redact=config.reef.redact) as reef:
        assert "-4711" in ask(reef).text
        (record,) = reef.records("s")
        assert record["redacted"] and "it is [gone]." in record["response"] and "4711" not in record["response"]
