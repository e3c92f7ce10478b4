"""Log lines on standard error: for people, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import msgspec

from reef.service.config import ObservabilityConfig
from reef.service.redaction import Redaction

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """`time` in Unix seconds, `level`, `logger`, `message`, and `error` with the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class RedactedFormatter(logging.Formatter):
    """Another formatter's lines, redacted. Where a hook fails, only that is said."""

    def __init__(self, formatter: logging.Formatter, redaction: Redaction) -> None:
        super().__init__()
        self._formatter = formatter
        self._redaction = redaction

    def format(self, record: logging.LogRecord) -> str:
        try:
            return self._redaction.body(self._formatter.format(record).encode(errors="replace")).decode()
        except Exception as error:  # what failed may hold the text, so only its kind is said
            return f"{record.levelname} {record.name}: withheld: {type(error).__name__} while it was redacted"


class RedactedHandler(logging.StreamHandler[TextIO]):
    """Where a line cannot be written, the standard library would print what was to be logged as it was."""

    def handleError(self, record: logging.LogRecord) -> None:
        """There is nobody to tell."""


def configure(config: ObservabilityConfig, redaction: Redaction | None = None) -> None:
    """Send Reef's log to standard error, redacted; other packages are heard from warnings on."""
    handler = RedactedHandler(sys.stderr) if redaction else logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter() if config.log_format == "json" else logging.Formatter(TEXT_FORMAT)
    handler.setFormatter(RedactedFormatter(formatter, redaction) if redaction else formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("reef").setLevel(config.log_level.upper())
