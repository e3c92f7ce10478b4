"""Sections `reef` (what listens, who may call) and `observability` (what is logged), and the whole: ReefConfig."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from reef.inference.local.config import LocalConfig
from reef.inference.provider.config import ProviderConfig
from reef.inference.sglang.config import SGLangConfig
from reef.recipe.config import EvaluationConfig, RecipeConfig
from reef.records.config import PostgresConfig, SqliteConfig
from reef.runtime.config import ExecutionConfig
from reef.train.torch_backend.config import TorchConfig


class ServiceConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `reef`. Raises ValueError where Reef would be open to a network without a token."""

    host: Annotated[str, Meta(description="address to listen on; other than loopback needs tokens")] = "127.0.0.1"
    port: Annotated[int, Meta(description="TCP port; 0 lets the system choose", ge=0, le=65535)] = 8900
    data_dir: Annotated[str, Meta(description="directory for records, releases and markers", min_length=1)] = (
        ".reef/data"
    )
    default_scenario: Annotated[
        str, Meta(description="scenario of requests that name none", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    ] = "default"
    tokens: Annotated[
        list[Annotated[str, Meta(min_length=1)]],
        Meta(description="bearer tokens that may call; none: loopback only", extra={"secret": True}),
    ] = msgspec.field(default_factory=list)
    max_body_bytes: Annotated[int, Meta(description="largest request body, in bytes", ge=1024)] = 10 * 1024 * 1024
    shutdown_grace: Annotated[
        float, Meta(description="seconds that running requests get to finish at shutdown", ge=0.0, le=3600.0)
    ] = 10.0

    def __post_init__(self) -> None:
        for token in self.tokens:
            if not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError("reef.tokens must be printable ASCII without spaces")
        if not self.tokens and not is_loopback(self.host):
            raise ValueError(
                f"reef.host must be a loopback address while reef.tokens is empty, got {self.host!r}: "
                "set reef.tokens, or reef.host to 127.0.0.1"
            )


class ObservabilityConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `observability`."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe message that is logged")
    ] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="lines for people, or one JSON object a line")] = (
        "text"
    )
    access_log: Annotated[bool, Meta(description="log a line for each request that was answered")] = False
    trace_endpoint: Annotated[
        str | None,
        Meta(description="URL that takes OpenTelemetry traces by OTLP over HTTP, such as http://HOST:4318/v1/traces"),
    ] = None

    def __post_init__(self) -> None:
        if self.trace_endpoint is not None and not self.trace_endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"observability.trace-endpoint must begin with http:// or https://, got {self.trace_endpoint!r}"
            )


class NoTraining(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `training` with backend `none`: serve and record, train nothing."""


class ReefConfig(msgspec.Struct, kw_only=True, frozen=True):
    """One deployment, validated. `training` is NoTraining when nothing trains."""

    reef: ServiceConfig
    inference: LocalConfig | SGLangConfig | ProviderConfig
    training: NoTraining | TorchConfig
    recipe: RecipeConfig
    storage: SqliteConfig | PostgresConfig
    execution: ExecutionConfig
    evaluation: EvaluationConfig
    observability: ObservabilityConfig


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
