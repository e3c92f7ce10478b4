"""The exception tree and the one table from error to HTTP status.

ReefError
├── InvalidRequest        the caller's fault; names the field
│   ├── UnknownReceipt
│   ├── RequestTooLarge   over a limit on what one request may hold
│   └── TooSlow           its body did not arrive in time
├── Unauthorized
├── Forbidden
├── NotFound
├── Conflict              same id, other content; or a lost compare-and-swap
│   └── LeaseLost         another process trains this deployment now
├── TooManyRequests       over a limit on how many; try again later
├── Unavailable           try again later: starting, recovering, closed admission
├── StorageError          the database or the disk refused a write
│   └── DamagedRecord     a stored record is not what was stored
├── EngineError           an engine failed; the request was not completed
│   ├── EngineUncertain   the engine's weights or memory are in an unknown state: replace it
│   └── UpstreamError     an external provider could not be reached, or its answer is of no use
│       └── UpstreamTimeout
├── BarrierError          a pause barrier did not hold on every engine
├── VerificationError     what an engine serves is not what was published
├── TrainingError         the trainer could not produce a candidate
├── WorkerDied            a process that Reef started is gone
└── ConfigError           the deployment file, environment or flags are wrong
"""

from __future__ import annotations


class ReefError(Exception):
    """Root of everything that Reef raises on purpose."""


class InvalidRequest(ReefError):
    """The caller's fault. `field` is the dotted path of the offending field, or None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownReceipt(InvalidRequest):
    """A report quotes a receipt that this scenario does not hold."""


class RequestTooLarge(InvalidRequest):
    """The body is over a configured limit: bytes, depth, messages."""

    retry_after = 60.0  # seconds: only an operator can raise the limit


class TooSlow(InvalidRequest):
    """The body did not arrive in the configured time."""


class Unauthorized(ReefError):
    """No token, or an unknown one."""


class Forbidden(ReefError):
    """The token does not allow this."""


class NotFound(ReefError):
    """No such scenario, release, record or route."""


class Conflict(ReefError):
    """The same id with other content, or a compare-and-swap that lost."""


class LeaseLost(Conflict):
    """Another process holds the deployment's training lease; only that one may commit."""


class TooManyRequests(ReefError):
    """Over a configured limit on how many there may be at once. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(ReefError):
    """Reef cannot serve this now. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageError(ReefError):
    """The database or the disk refused a write; nothing was stored."""


class DamagedRecord(StorageError):
    """A stored record is not what was stored. `sequence` is its place in the store."""

    def __init__(self, message: str, sequence: int) -> None:
        super().__init__(message)
        self.sequence = sequence


class EngineError(ReefError):
    """An engine failed while it held the request."""


class EngineUncertain(EngineError):
    """The engine's weights or memory are in an unknown state; it must be replaced."""


class UpstreamError(EngineError):
    """An external provider could not be reached, broke off, or answered with what is not an answer."""


class UpstreamTimeout(UpstreamError):
    """An external provider took too long."""


class BarrierError(ReefError):
    """A pause barrier did not hold on every engine."""


class VerificationError(ReefError):
    """What an engine serves is not what was published to it."""


class TrainingError(ReefError):
    """The trainer could not produce a candidate from this batch."""


class WorkerDied(ReefError):
    """A process that Reef started is gone."""


class ConfigError(ReefError):
    """The deployment file, the environment or the flags are wrong."""


# Most specific first: the first class that matches decides.
HTTP_STATUS: tuple[tuple[type[ReefError], int], ...] = (
    (RequestTooLarge, 413),
    (TooSlow, 408),
    (InvalidRequest, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (TooManyRequests, 429),
    (Unavailable, 503),
    (StorageError, 503),
    (WorkerDied, 503),
    (BarrierError, 503),
    (UpstreamTimeout, 504),
    (UpstreamError, 502),
    (EngineError, 503),
    (ReefError, 500),
)


def http_status(error: ReefError) -> int:
    return next(status for kind, status in HTTP_STATUS if isinstance(error, kind))
