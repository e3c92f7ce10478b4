"""Sections `reef` (what listens, who may call) and `observability` (what is logged), and the whole: ReefConfig."""

from __future__ import annotations

import enum
import hashlib
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

Digest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$", description="what `reef token` prints")]
ScenarioName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class Permissions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """What may be done with an exchange. No level gives back what another one takes away."""

    serve: Annotated[bool, Meta(description="whether requests for answers are let in")] = True
    record: Annotated[bool, Meta(description="whether exchanges are stored; where not, there is no receipt")] = True
    train: Annotated[bool, Meta(description="whether what is stored from now on may ever train")] = True

    def __and__(self, other: Permissions) -> Permissions:
        return Permissions(
            serve=self.serve and other.serve, record=self.record and other.record, train=self.train and other.train
        )


class Role(enum.StrEnum):
    """What a token may do."""

    INFER = "infer"  # the provider-shaped routes
    REPORT = "report"  # POST /reef/report, and the contract that says how
    ADMIN = "admin"  # everything else


class TokenConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """One bearer token, known by its digest."""

    digest: Digest
    roles: list[Role] = msgspec.field(default_factory=lambda: list(Role))
    scenarios: list[ScenarioName] | None = None  # None: all
    record: bool = True
    train: bool = True


class ServiceConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Section `reef`. Raises ValueError where Reef would be open to a network without a token."""

    host: Annotated[str, Meta(description="address to listen on; other than loopback needs tokens")] = "127.0.0.1"
    port: Annotated[int, Meta(description="TCP port; 0 lets the system choose", ge=0, le=65535)] = 8900
    share_port: Annotated[
        bool,
        Meta(description="other gateways on this database may listen on the same port; the system spreads connections"),
    ] = False
    data_dir: Annotated[str, Meta(description="directory for records, releases and markers", min_length=1)] = (
        ".reef/data"
    )
    default_scenario: Annotated[ScenarioName, Meta(description="scenario of requests that name none")] = "default"
    tokens: Annotated[
        list[Annotated[str, Meta(min_length=1)] | TokenConfig],
        Meta(
            description="who may call: digests that `reef token` printed, alone or with roles and scenarios; "
            "a token itself only in the environment or a flag; none: loopback only",
            extra={"secret": True},
        ),
    ] = msgspec.field(default_factory=list)
    permissions: Permissions = msgspec.field(default_factory=Permissions)
    scenarios: Annotated[
        dict[ScenarioName, Permissions],
        Meta(description="by name, scenarios with stricter permissions: {support: {train: false}}"),
    ] = msgspec.field(default_factory=dict)
    redact: Annotated[
        list[str],
        Meta(
            description="functions, package.module:name or file.py:name, from text to what may be stored and logged "
            "of it, applied in this order"
        ),
    ] = msgspec.field(default_factory=list)
    max_body_bytes: Annotated[int, Meta(description="largest request body, in bytes", ge=1024)] = 10 * 1024 * 1024
    body_timeout: Annotated[
        float, Meta(description="seconds that a request body may take to arrive", gt=0.0, le=3600.0)
    ] = 60.0
    max_json_depth: Annotated[int, Meta(description="deepest nesting of a request's JSON", ge=8, le=200)] = 64
    max_messages: Annotated[
        int,
        Meta(description="most messages, or prompts, of one request, with what it goes on from", ge=1, le=1_000_000),
    ] = 10_000
    max_concurrent_requests: Annotated[int, Meta(description="most requests of one token at a time", ge=1)] = 1024
    max_scenarios: Annotated[int, Meta(description="most scenarios; a request for one more gets 429", ge=1)] = 10_000
    shutdown_grace: Annotated[
        float, Meta(description="seconds that running requests get to finish at shutdown", ge=0.0, le=3600.0)
    ] = 10.0

    @property
    def callers(self) -> list[TokenConfig]:
        return [token for token in self.tokens if isinstance(token, TokenConfig)]

    def permissions_of(self, scenario: str) -> Permissions:
        """Those of the deployment and the scenario together."""
        own = self.scenarios.get(scenario)
        return self.permissions if own is None else self.permissions & own

    def __post_init__(self) -> None:
        hashed = [token if isinstance(token, TokenConfig) else _hashed(token) for token in self.tokens]
        msgspec.structs.force_setattr(self, "tokens", hashed)
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


def _hashed(token: str) -> TokenConfig:
    """Raises ValueError, without the token."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("reef.tokens must be printable ASCII without spaces")
    if token.startswith("sha256:"):
        try:
            return msgspec.convert({"digest": token}, TokenConfig)
        except msgspec.ValidationError:
            raise ValueError("reef.tokens: a digest is sha256: and 64 hexadecimal digits") from None
    return TokenConfig(digest=digest_of(token))


def digest_of(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
