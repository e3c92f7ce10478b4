"""Log lines: which request they are for, and what is never in them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reef.service import logs
from reef.service.config import ObservabilityConfig
from tests.service.conftest import Running, body


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """Configures logging; afterwards it is as it was."""
    loggers = [logging.getLogger(name) for name in (None, "reef", "reef.access")]
    before = loggers[0].handlers[:], [logger.level for logger in loggers]
    yield lambda **settings: logs.configure(ObservabilityConfig(**settings))
    loggers[0].handlers[:] = before[0]
    for logger, level in zip(loggers, before[1], strict=True):
        logger.setLevel(level)


@pytest.fixture
def lines(capsys) -> Callable[[int], list[dict[str, Any]]]:
    """Waits for so many lines: the last ones of a request are written when its client has the answer already."""
    found: list[dict[str, Any]] = []

    def read(count: int) -> list[dict[str, Any]]:
        for _ in range(5000):
            found.extend(json.loads(line) for line in capsys.readouterr().err.splitlines())
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{len(found)} lines after 100 s, not {count}: {found}")

    return read


def test_log_lines_as_json(configured, lines):
    configured(log_level="info", log_format="json")
    logging.getLogger("reef.test").info("hello %s", "there")
    logging.getLogger("reef.test").debug("unheard")
    try:
        raise ValueError("é\n")
    except ValueError:
        logging.getLogger("other").exception("broken")
    found = lines(2)
    assert [(line["level"], line["logger"], line["message"]) for line in found] == [
        ("info", "reef.test", "hello there"),
        ("error", "other", "broken"),
    ]
    assert "ValueError" in found[1]["error"] and "request_id" not in found[0]


def test_a_message_for_people_is_one_line_whatever_it_holds(configured, capsys):
    configured()
    logging.getLogger("reef.test").info("scenario %s", "x\n2026 ERROR forged \x1b[2J\x85")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(r"scenario x\x0a2026 ERROR forged \x1b[2J\x85")


def test_the_request_id_of_the_client_is_answered_and_another_one_made_where_there_is_none(gateway: Running):
    own = {"x-request-id": "trace-7/b:1"}
    assert gateway.chat(headers=own).headers["x-request-id"] == "trace-7/b:1"
    assert gateway.chat(headers=own, stream=True).headers["x-request-id"] == "trace-7/b:1"
    assert gateway.http.get("/nowhere", headers=own).headers["x-request-id"] == "trace-7/b:1"
    made = {gateway.http.get("/healthz").headers["x-request-id"] for _ in range(3)}
    for hostile in ("a b", "x" * 129, 'quote"', "é".encode(), ""):
        made.add(gateway.http.get("/healthz", headers={"x-request-id": hostile}).headers["x-request-id"])
    assert len(made) == 8 and all(name.startswith("req_") and len(name) == 20 for name in made)


def test_a_bug_has_the_id_that_its_client_was_told(gateway: Running, monkeypatch, configured, lines):
    configured(log_format="json")
    monkeypatch.setattr(gateway.deployment, "models", lambda: 1 / 0)
    response = gateway.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "mine"
    [line] = [line for line in lines(1) if line["level"] == "error"]
    assert line["request_id"] == "mine" and "ZeroDivisionError" in line["error"]


def test_every_line_of_a_request_names_it_and_the_access_log_says_how_it_went(gateway, configured, lines):
    configured(log_format="json", log_level="debug", access_log=True)
    headers = {"x-request-id": "one", "x-reef-scenario": "lines"}
    receipt = gateway.chat(headers=headers).headers["x-reef-agent-record-id"]
    gateway.deployment.storage.full = True
    assert gateway.chat(headers={**headers, "x-request-id": "two"}).status_code == 503
    gateway.deployment.storage.full = False
    judged = {"references": [receipt], "score": 1, "agent_record_id": "verdict"}
    gateway.http.post("/reef/report?why=not", json=judged, headers={**headers, "x-request-id": "three"})
    gateway.http.get("/reef/scenarios/a%0Ab", headers={"x-request-id": "four"})
    found = lines(5)
    one, two, three, four = ([line for line in found if line.get("request_id") == name] for name in
                             ("one", "two", "three", "four"))  # fmt: skip
    assert [line["logger"] for line in one] == ["reef.access"] and one[0]["receipt"] == receipt
    assert [line["logger"] for line in two] == ["reef.service", "reef.access"] and "disk is full" in two[0]["message"]
    assert {line["scenario"] for line in one + two + three} == {"lines"} and len({two[0]["receipt"], receipt, ""}) == 3
    assert [line["receipt"] for line in three] == ["verdict"] and three[0]["path"] == "/reef/report"
    assert {name: four[0][name] for name in ("method", "path", "status")} == {
        "method": "GET", "path": "/reef/scenarios/a%0Ab", "status": 400,
    }  # fmt: skip
    assert two[1]["status"] == 503 and 0 < one[0]["seconds"] < 60


def test_without_the_access_log_a_request_that_went_well_is_silent(gateway, configured, capsys):
    configured(log_level="debug")
    gateway.chat()
    assert "/v1/chat" not in capsys.readouterr().err


def test_a_task_that_outlives_its_request_does_not_log_for_it(gateway: Running, configured, lines):
    configured(log_format="json")

    async def later() -> None:
        await asyncio.sleep(0.2)
        logging.getLogger("reef.test").info("later")

    kept: list[Any] = []
    gateway.engine.on_request = lambda: kept.append(asyncio.create_task(later()))
    gateway.chat()
    [line] = [line for line in lines(1) if line["message"] == "later"]
    assert "request_id" not in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_secret_is_logged(serve, configured, capsys, log_format):
    configured(log_format=log_format, log_level="debug", access_log=True)
    secrets = {"authorization": "Bearer planted-1", "x-api-key": "planted-2", "cookie": "planted-3"}
    asked = body(messages=[{"role": "user", "content": "planted-4"}])
    with serve(tokens=["planted-1"]) as gateway:
        send = gateway.http.post
        assert send("/v1/chat/completions?key=planted-5", json=asked, headers=secrets).status_code == 200
        assert send("/v1/chat/completions?key=planted-5", json={**asked, "n": "planted-6"}, headers=secrets).is_error
        gateway.engine.expect(die_after=1)
        assert send("/v1/chat/completions", json=asked, headers=secrets).status_code == 503
        gateway.deployment.storage.full = True
        gateway.engine.expect()
        assert send("/v1/chat/completions", json=asked, headers=secrets).status_code == 503
        assert send("/v1/chat/completions", json=asked, headers={"x-api-key": "planted-7"}).status_code == 401
    written = capsys.readouterr().err  # the server has stopped
    assert written.count("/v1/chat/completions") >= 5 and "planted" not in written
