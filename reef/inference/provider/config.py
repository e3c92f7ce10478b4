"""The section "inference" of a deployment in front of an external provider."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from reef.inference.headers import HeaderProvidersKey

_VERSION = re.compile(r"/v\d\w*(/|$)")


class ProviderConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Any endpoint that speaks OpenAI's or Anthropic's API. Bytes are forwarded and recorded; nothing can train."""

    upstream_url: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            description="the provider, http(s)://host[:port][/path]; a path that names no version is followed by /v1",
        ),
    ]
    backend: Annotated[Literal["provider"], msgspec.Meta(description="an external provider")] = "provider"
    upstream_model: Annotated[
        str, msgspec.Meta(description="model name that every request is sent with; empty: the client's own")
    ] = ""
    upstream_api_key: Annotated[
        str,
        msgspec.Meta(
            description="the provider's key, in place of the client's; never recorded, logged or shown. Empty: the "
            "client's own goes along, unless it is a token of Reef's",
            extra={"secret": True},
        ),
    ] = ""
    upstream_api: Annotated[
        Literal["auto", "openai", "anthropic"],
        msgspec.Meta(description="what the provider speaks, and how it wants its key; auto: as the request does"),
    ] = "auto"
    upstream_connections: Annotated[
        int, msgspec.Meta(ge=1, description="most connections to the provider; further requests wait for one")
    ] = 512
    upstream_connect_timeout: Annotated[
        float,
        msgspec.Meta(gt=0, description="seconds to get a connection, waiting and retries included"),
    ] = 10.0
    upstream_connect_retries: Annotated[
        int, msgspec.Meta(ge=0, le=10, description="how often a connection that fails is tried again; nothing else is")
    ] = 2
    upstream_timeout: Annotated[
        float, msgspec.Meta(gt=0, description="seconds without a byte from the provider after which a request fails")
    ] = 600.0
    header_providers: HeaderProvidersKey = []

    def __post_init__(self) -> None:
        if any(not " " < character <= "~" for character in self.upstream_url + self.upstream_api_key):
            raise ValueError("upstream-url and upstream-api-key must be printable ASCII without spaces")
        parts = urlsplit(self.upstream_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"upstream-url must be http(s)://host[:port][/path], got {_shown(self.upstream_url)}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("upstream-url must have no user, query or fragment; a key belongs into upstream-api-key")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError(f"upstream-url: {error}") from error

    @property
    def base_path(self) -> str:
        """What stands in the place of a route's `/v1`."""
        path = urlsplit(self.upstream_url).path.rstrip("/")
        return path if _VERSION.search(path) else f"{path}/v1"


def _shown(url: str) -> str:
    return repr(url.rpartition("@")[2])
