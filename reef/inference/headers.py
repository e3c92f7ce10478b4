"""Header providers by name: loaded when a deployment is built, merged and checked for each request."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from reef.errors import Unavailable
from reef.named import call, load_subclass
from reef.runtime.interfaces import HeaderProvider, OutgoingRequest

log = logging.getLogger("reef.inference")

HeaderProvidersKey = Annotated[
    list[str],
    msgspec.Meta(
        description="package.module:Class of HeaderProviders, whose headers go with every request to the engines' "
        "router or the upstream; later ones win"
    ),
]

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)  # RFC 9110, section 5.6.2
_VALUE = re.compile(r"[\t\x20-\x7e]*", re.ASCII)
_FRAMING = frozenset({"host", "connection", "content-length", "content-type", "transfer-encoding", "accept-encoding"})


class HeaderProviders(HeaderProvider):
    """Several as one. What they return is checked, so that none can break the framing of a request."""

    def __init__(self, providers: Sequence[HeaderProvider]) -> None:
        self._providers = providers

    def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        """Lower-case names. Raises Unavailable, naming the provider, if one fails or returns what cannot be sent."""
        found: dict[str, str] = {}
        for provider in self._providers:
            name = type(provider).__name__
            try:
                for header, value in provider.headers(request).items():
                    found[_checked(header, value)] = value
            except Exception as error:  # the user's code; its text may hold a secret
                log.warning("header provider %s failed: %s", name, type(error).__name__)
                raise Unavailable(f"header provider {name} failed: {type(error).__name__}") from None
        return found


def _checked(header: str, value: str) -> str:
    name = header.lower()
    if not _NAME.fullmatch(name) or name in _FRAMING or not _VALUE.fullmatch(value):
        raise ValueError(f"{header!r} cannot be sent")
    return name


def load_header_provider(paths: Sequence[str]) -> HeaderProvider | None:
    """All of `inference.header-providers` as one, or None. Raises ConfigError naming the one that is wrong."""
    keys = [f"inference.header-providers[{index}]" for index in range(len(paths))]
    found = [load_subclass(key, path, HeaderProvider) for key, path in zip(keys, paths, strict=True)]
    made = [call(key, path, kind) for key, path, kind in zip(keys, paths, found, strict=True)]
    return HeaderProviders(made) if made else None
