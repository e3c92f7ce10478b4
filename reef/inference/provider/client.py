"""Requests as a client sent them, on their way to an external provider: other bytes change only where configured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from reef.errors import ConfigError, InvalidRequest, NotFound
from reef.inference.provider.config import ProviderConfig
from reef.inference.provider.connection import Connection, Pool
from reef.inference.provider.stream import read_object
from reef.runtime.interfaces import GenerateRequest, InferenceHandler, OutgoingRequest, TokenChunk

Headers = Iterable[tuple[bytes, bytes]]

# Of one connection only (RFC 9110, section 7.6.1), or about Reef and not about the provider.
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_NOT_SENT = _HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"cookie", b"proxy-authorization"}
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_NOT_RETURNED = _HOP | {b"content-length", b"date", b"server", b"set-cookie"}


class ProviderHandler(InferenceHandler):
    """An external provider. It takes whole requests, and no token ids."""

    def __init__(self, config: ProviderConfig) -> None:
        parts = urlsplit(config.upstream_url)
        self._api = config.upstream_api
        self._base_path = config.base_path
        self._key = config.upstream_api_key.encode()
        self._openai_key = [b"authorization: Bearer " + self._key] if self._key else []
        self._anthropic_key = [b"x-api-key: " + self._key] if self._key else []
        self._model = config.upstream_model
        self._fixed = b" HTTP/1.1\r\nhost: " + parts.netloc.encode() + b"\r\naccept-encoding: identity"
        self._pool = Pool(
            config.upstream_url,
            connections=config.upstream_connections,
            connect_timeout=config.upstream_connect_timeout,
            connect_retries=config.upstream_connect_retries,
            timeout=config.upstream_timeout,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], endpoints: Callable[[], Sequence[str]]) -> ProviderHandler:
        """Keys: those of ProviderConfig. The endpoint is one of them."""
        try:
            return cls(msgspec.convert(dict(config), ProviderConfig))
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"inference: {error}") from error

    async def connect(self) -> None:
        """Connections are made when there is something to send."""
        self._pool.open()

    async def close(self) -> None:
        self._pool.close()

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._refuse_tokens()

    @property
    def max_context(self) -> int:
        self._refuse_tokens()

    def _refuse_tokens(self) -> NoReturn:
        raise InvalidRequest("an external provider takes no token ids")

    async def send(
        self, method: str, route: str, query: bytes, headers: Headers, request: OutgoingRequest, *, credentials: bool
    ) -> Connection:
        """Forward a request; read its answer from the connection, and release that.

        `request.path` is ignored. `credentials`: without a key of its own, send the client's.
        Raises NotFound for a route of an API that the provider does not speak, InvalidRequest for a body that is no
        JSON object, UpstreamError, UpstreamTimeout, Unavailable.
        """
        body = request.body
        if method == "POST":
            content = read_object(body)
            if self._model:  # only this value changes
                body = msgspec.json.encode({**content, "model": self._model})
        path = self._base_path + route.removeprefix("/v1")
        extra = self.prepare(OutgoingRequest(request.request_id, request.lane, path, body))
        refused = _NOT_SENT if credentials and not self._key else _NOT_SENT | _CREDENTIALS
        if extra:
            refused |= {header.encode() for header in extra}
        target = path.encode() + (b"?" + query if query else b"")
        lines = [method.encode() + b" " + target + self._fixed]
        versioned = False
        for name, value in headers:
            if name not in refused and not name.startswith(b"x-reef-"):
                lines.append(name + b": " + value)
                versioned = versioned or name == b"anthropic-version"
        if self._speaks_anthropic(route, versioned):
            lines += self._anthropic_key
        else:
            lines += self._openai_key
        lines += [f"{header}: {text}".encode() for header, text in extra.items()]
        if method == "POST":
            lines.append(b"content-length: %d" % len(body))
        lines += (b"", body if method == "POST" else b"")  # what has no length would be read as the next request
        return await self._pool.send(b"\r\n".join(lines))

    def _speaks_anthropic(self, route: str, versioned: bool) -> bool:
        """Whether the request is Anthropic's; `versioned`: it says so. Raises NotFound if the provider isn't."""
        asked = route.startswith("/v1/messages")
        if self._api == "auto":
            return asked or versioned
        anthropic = self._api == "anthropic"
        if asked != anthropic and not route.startswith("/v1/models"):
            raise NotFound(f"no such route: the provider behind this Reef speaks {self._api} only ({route})")
        return anthropic


def returned_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of the provider's headers that the client gets: among them x-request-id, retry-after and rate limits."""
    return [(name, value) for name, value in headers if name not in _NOT_RETURNED and not name.startswith(b"x-reef-")]
