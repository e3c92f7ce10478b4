"""Log lines on standard error: for people, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from reef.service.config import ObservabilityConfig

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


def configure(config: ObservabilityConfig) -> None:
    """Send Reef's log to standard error; other packages are heard from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("reef").setLevel(config.log_level.upper())
