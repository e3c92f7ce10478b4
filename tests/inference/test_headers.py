"""Header providers: found by path, merged, and seen by a real HTTP server on the other side of a handler."""

from __future__ import annotations

import asyncio

import pytest

from reef.errors import ConfigError, Unavailable
from reef.inference.headers import HeaderProviders, load_header_provider
from reef.inference.sglang.client import SGLangHandler
from reef.runtime.interfaces import HeaderProvider, OutgoingRequest
from tests.inference.sglang.test_client import DONE, HEAD, LENGTH, FakeServer, a_request, event

REQUEST = OutgoingRequest("r", "support", "/generate", b"{}")


class Affinity(HeaderProvider):
    """Keeps a scenario's requests together."""

    def headers(self, request: OutgoingRequest) -> dict[str, str]:
        return {"X-Routing-Key": request.lane, "x-body-bytes": str(len(request.body)), "x-path": request.path}


class Later(HeaderProvider):
    def headers(self, request: OutgoingRequest) -> dict[str, str]:
        return {"x-routing-key": "later"}


class Returns(HeaderProvider):
    def __init__(self, headers: object) -> None:
        self._headers = headers

    def headers(self, request: OutgoingRequest):
        if isinstance(self._headers, Exception):
            raise self._headers
        return self._headers


class NeedsArguments(HeaderProvider):
    def __init__(self, key: str) -> None: ...

    def headers(self, request: OutgoingRequest) -> dict[str, str]:
        return {}


def generated(*names: str) -> tuple[bytes, dict]:
    """The request that a server saw from SGLang's handler with these providers."""

    async def run() -> tuple[bytes, dict]:
        async with FakeServer(HEAD + event([7], ["engine:3"], finish=LENGTH) + DONE) as server:
            handler = SGLangHandler(lambda: [server.url])
            handler._url, handler._max_context, handler._vocab_size = server.url, 100, 1000
            handler.header_provider = load_header_provider([f"{__name__}:{name}" for name in names])
            chunks = [chunk async for chunk in handler.generate(a_request(lane="support"))]
            assert chunks[-1].token_ids == [7]
            return server.heads[0], server.bodies[0]

    return asyncio.run(asyncio.wait_for(run(), 200))


def test_the_headers_of_every_provider_reach_the_router():
    head, body = generated("Affinity")
    assert b"\r\nx-routing-key: support\r\n" in head and b"\r\nx-path: /generate\r\n" in head
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    assert b"x-body-bytes: " + length.split(b": ")[1] in head and body["lora_path"] == "reef:lane:support"


def test_a_later_provider_wins():
    head, _ = generated("Affinity", "Later")
    assert b"x-routing-key: later" in head and b"x-routing-key: support" not in head


@pytest.mark.parametrize(
    "headers",
    [
        {"x-a": "1\r\nx-b: 2"},
        {"x a": "1"},
        {"content-length": "0"},
        {"Host": "other"},
        {"x-a": "\U0001f41f"},
        {"x-a": 1},
        [("x-a", "1")],
        ValueError("secret"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_sent(headers):
    with pytest.raises(Unavailable, match="header provider Returns failed") as refusal:
        HeaderProviders([Returns(headers)]).headers(REQUEST)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("reef.errors", r"\[1\] must be package.module:Class"),
        ("reef.nowhere:Provider", r"\[1\]: cannot load reef.nowhere:Provider: ModuleNotFoundError"),
        ("reef.errors:Nothing", r"\[1\]: cannot load reef.errors:Nothing: AttributeError"),
        ("reef.errors:ReefError", r"\[1\] must be a subclass of HeaderProvider"),
        (f"{__name__}:NeedsArguments", r"\[1\]: .*NeedsArguments failed: TypeError"),
    ],
)
def test_a_provider_that_cannot_be_loaded_is_named(path, complaint):
    with pytest.raises(ConfigError, match=r"inference\.header-providers" + complaint):
        load_header_provider([f"{__name__}:Affinity", path])


def test_without_providers_there_are_no_headers():
    assert load_header_provider([]) is None
