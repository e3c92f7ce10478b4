"""Log lines on standard error: for people, or one JSON object a line.

A line that is written for a request names it: its request id, scenario and receipt. Headers, query strings and bodies
are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from reef.service.config import ObservabilityConfig
from reef.service.observe import access, current

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
"""What a client could begin a line of its own with, or a terminal's escape sequence."""


class JsonFormatter(logging.Formatter):
    """`time` in Unix seconds, `level`, `logger`, `message`; `error` with the traceback if there is one.

    For a request also `request_id`, `scenario`, `receipt`; the access log adds `method`, `path`, `status`, `seconds`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_of_request(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """One line, whatever the message holds, and a traceback if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_CONTROL)
        named = " ".join(f"{name}={value}" for name, value in _of_request().items())
        return super().formatMessage(record) + (f" [{named}]" if named else "")


def _of_request() -> dict[str, str]:
    request = current()
    if request is None:
        return {}
    named = {"request_id": request.request_id, "scenario": request.scenario, "receipt": request.receipt}
    return {name: value for name, value in named.items() if value}


def configure(config: ObservabilityConfig) -> None:
    """Send Reef's log to standard error; other packages are heard from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter(TEXT_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("reef").setLevel(config.log_level.upper())
    access.setLevel(logging.INFO if config.access_log else logging.CRITICAL)
