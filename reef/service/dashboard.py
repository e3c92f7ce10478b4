"""`GET /dashboard`: one page for people, written here, with nothing loaded from elsewhere and no script."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.runtime.interfaces import InferenceRecord, Record, Release, ReportRecord
from reef.service.gateway import Gateway

PATH = "/dashboard"
SHOWN_SCENARIOS, SHOWN_RELEASES, SHOWN_RECORDS = 20, 8, 12
WINDOWS = (10.0, 60.0, 600.0, 86400.0)
"""Seconds to look back for recent records: the first in which there are enough."""
LONGEST = 80  # characters of one cell

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; border-bottom: 1px solid #d5dde5; }
h3 { font-size: .95rem; margin: 1rem 0 .2rem; } p { margin: .2rem 0; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .15rem .8rem .15rem 0; }
th { font-weight: 600; color: #5b6b7b; } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ok { color: #146c43; } .bad { color: #b02a37; font-weight: 600; }
"""
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}


async def dashboard(request: Request) -> Response:
    """`GET /dashboard`: what goes on, as a page for people."""
    gateway = Gateway.of(request)
    status = await gateway.deployment.status()
    parts = [_deployment(status, gateway.in_flight)]
    for scenario in status["scenarios"][:SHOWN_SCENARIOS]:
        name = scenario["scenario"]
        releases = await gateway.deployment.storage.releases(name, SHOWN_RELEASES)
        parts.append(_scenario(scenario, releases, await _recent(gateway, name)))
    if (more := len(status["scenarios"]) - SHOWN_SCENARIOS) > 0:
        parts.append(f"<p>{more} more scenarios are not shown.</p>")
    page = '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="10">'
    page += f"<title>Reef: {escape(status['model'])}</title><style>{_STYLE}</style></head><body>"
    return HTMLResponse(page + "".join(parts) + "</body></html>", headers=_HEADERS)


async def _recent(gateway: Gateway, scenario: str) -> list[Record]:
    """The newest records, newest first; of a rush, some of the last seconds."""
    found: list[Record] = []
    for seconds in WINDOWS:
        found = await gateway.deployment.storage.page(scenario, since=time.time() - seconds, limit=500)
        if len(found) >= SHOWN_RECORDS:
            break
    return found[-1 : -SHOWN_RECORDS - 1 : -1]


def _deployment(status: dict[str, Any], in_flight: int) -> str:
    reasons = "; ".join(status["health"])
    health = f'<span class="bad">{escape(reasons)}</span>' if reasons else '<span class="ok">healthy</span>'
    lines = [
        f"<h1>{escape(status['model'])}</h1><p>{health}, up {status['uptime_seconds']:.0f} s, {in_flight} in flight"
    ]
    lines.append(f"trains: {escape(status['trains'])}")
    if status["training_health"]:
        lines.append(f'<span class="bad">{escape(status["training_health"])}</span>')
    if status["job"] is not None:
        lines.append(escape(f"newest job {status['job']['job_id']}: {status['job']['state']}"))
    if status["last_pause_seconds"] is not None:
        lines.append(f"last publication paused {1000 * status['last_pause_seconds']:.0f} ms")
    engines = [
        [one.engine, one.running, one.waiting, f"{one.free_pages} of {one.total_pages}", "yes" if one.paused else "no"]
        for one in status["engines"]
    ]
    columns = ["engine", "running", "waiting", "free pages", "paused"]
    return "</p><p>".join(lines) + "</p>" + (_table(columns, engines) if engines else "")


def _scenario(scenario: dict[str, Any], releases: Sequence[Release], recent: Sequence[Record]) -> str:
    head = scenario["head"]
    counts = ", ".join(f"{number} {name}" for name, number in scenario["counts"].items() if number)
    waiting = ", ".join(f"{number} {name}" for name, number in scenario["waiting"].items() if number)
    lines = [f"<p>serves release {head['number']} ({head['kind']}, {escape(head['runtime_load_id'])}), recipe "]
    lines.append(
        f"{escape(scenario['recipe'])}; {escape(counts) or 'nothing stored'}; waiting: {escape(waiting) or '-'}"
    )
    lines.append(f"</p><p>{escape(scenario['last_outcome'])}</p>")
    if scenario["error"]:
        lines.append(f'<p class="bad">{escape(scenario["error"])}</p>')
    chain = [[one.number, one.kind, one.content_id[:12], one.runtime_load_id, _at(one.created_at)] for one in releases]
    lines.append("<h3>Releases</h3>" + _table(["number", "kind", "content", "load", "published"], chain))
    rows = [[*_told(record), record.record_id, _at(record.created_at)] for record in recent]
    lines.append("<h3>Recent records</h3>" + _table(["kind", "what", "record", "stored"], rows))
    return f"<h2>{escape(scenario['scenario'])}</h2>" + "".join(lines)


def _told(record: Record) -> tuple[str, str]:
    if isinstance(record, InferenceRecord):
        endings = ", ".join(generation.ending for generation in record.generations)
        return "answer", f"{record.route} {record.status} {endings}"
    if isinstance(record, ReportRecord):
        judged = "feedback" if record.score is None else f"score {record.score:g}"
        return "report", f"{record.error or judged} on {', '.join(record.references)}"
    return "instruction", ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell)[:LONGEST])}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


class BrowserLogin:
    """ASGI layer before authentication: on the page alone, a browser's own login dialog (RFC 7617) gives the token.

    The password is the token; the user's name is nobody's. No other route takes it: browsers send it along with
    requests that other sites make them send.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return

        async def send_asking(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                kept = [(name, value) for name, value in message["headers"] if name != b"www-authenticate"]
                message["headers"] = [*kept, (b"www-authenticate", b'Basic realm="Reef: the password is a token"')]
            await send(message)

        headers = [(name, _as_bearer(value) if name == b"authorization" else value) for name, value in scope["headers"]]
        await self._app({**scope, "headers": headers}, receive, send_asking)


def _as_bearer(authorization: bytes) -> bytes:
    if authorization[:6].lower() != b"basic ":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(authorization[6:], validate=True).partition(b":")[2]
    except binascii.Error:
        return authorization


ROUTES = [Route(PATH, dashboard, methods=["GET"])]
