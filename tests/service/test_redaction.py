"""A hook of the operator's decides what is kept: a secret planted anywhere is found nowhere."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import json
import logging
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import ConfigError, InvalidRequest, StorageError
from reef.records.sqlite import SqliteStorage
from reef.runtime.interfaces import InferenceRecord, ReportRecord
from reef.service import logs
from reef.service.config import ObservabilityConfig
from reef.service.redaction import Redaction
from tests.inference.chat.engines import Script
from tests.records.values import exchange
from tests.service.conftest import serving
from tests.service.test_hostile import APIS, VALID, places

SECRET = "hunter2-4711"
NUMBER = 471147114711
HOOK = f"{__name__}:hide"


def hide(text: str) -> str:
    return re.sub(rf"{SECRET}|{NUMBER}", "[gone]", text)


def redaction() -> Redaction:
    return Redaction({"hide": hide})


def planted(value, path):
    """`value` with the secret at `path`: in its text or in its place, and as the name of a field."""
    changed = copy.deepcopy(value)
    target = changed
    for key in path[:-1]:
        target = target[key]
    old = target[path[-1]]
    target[path[-1]] = f"{old} {SECRET}" if isinstance(old, str) else NUMBER if isinstance(old, int) else SECRET
    yield copy.deepcopy(changed)
    if isinstance(path[-1], str):
        del target[path[-1]]
        target[SECRET] = old
        yield changed


def everything_kept(directory: Path, tokenizer) -> str:
    """Whatever lies in the data directory, decoded: records, their token ids, and the raw bytes of every file."""
    kept = [str(path) + path.read_bytes().decode("latin-1") for path in directory.rglob("*") if path.is_file()]

    async def read() -> None:
        storage = SqliteStorage(directory / "reef.db", read_only=True)
        await storage.open()
        for state in await storage.scenarios():
            for record in await storage.page(state.scenario, limit=100_000):
                kept.append(repr(asdict(record)))
                if isinstance(record, InferenceRecord):
                    kept.append(record.request.decode() + record.response.decode())
                    for generation in record.generations:
                        kept.append(tokenizer.text_of([*generation.prompt_ids, *generation.output_ids]))
            kept.append(repr(await storage.commits(state.scenario)) + repr(state))
        await storage.close()

    asyncio.run(read())
    return "\n".join(kept)


@pytest.fixture
def caught():
    """The log as it is written, redacted."""
    root = logging.getLogger()
    before, levels = root.handlers[:], (root.level, logging.getLogger("reef").level)
    logs.configure(ObservabilityConfig(log_level="debug", access_log=True), redaction())
    written = io.StringIO()
    root.handlers[0].setStream(written)
    yield written.getvalue
    root.handlers[:] = before
    root.setLevel(levels[0])
    logging.getLogger("reef").setLevel(levels[1])


@pytest.fixture
def gateway(deployment, serve):
    deployment.storage.prepare = lambda record: redaction().record(record, deployment.chat.tokenizer.text_of)
    with serve(redact=[HOOK]) as found:
        yield found


def plant(gateway) -> int:
    """The secret in every field of every route; returns how many requests were answered."""
    answered = 0
    for api in APIS:
        for path in [path for path in places(VALID[api]) if path]:
            for number, content in enumerate(planted(VALID[api], path)):
                sent = {**content, "stream": True} if number % 2 else content
                answered += gateway.http.post(api.route, json=sent).status_code == 200
    receipt = gateway.chat().headers["x-reef-agent-record-id"]
    report = {
        "references": [receipt], "score": 0.5, "feedback": {"why": "x", "list": ["a", 1]},
        "metadata": {"group": "g", "group_size": 2, "deep": [{"a": 1}]}, "agent_record_id": "r",
    }  # fmt: skip
    instruction = {"goal": "x", "list": [1, {"a": "b"}], "agent_record_id": "i"}
    for route, valid in (("/reef/report", report), ("/reef/train", instruction), ("/reef/scenarios", {"name": "n"})):
        for path in [path for path in places(valid) if path]:
            for number, content in enumerate(planted(valid, path)):
                if "agent_record_id" in content and path != ("agent_record_id",):
                    content["agent_record_id"] = f"{route[6:]}-{number}-{'-'.join(map(str, path))}"
                answered += gateway.http.post(route, json=content).status_code < 300
    text = {"references": [receipt], "feedback": f"f {SECRET}", "error": f"e {SECRET}"}
    answered += gateway.http.post("/reef/report", json=text).status_code == 200
    for header in ("x-reef-scenario", "x-reef-record-id", "x-reef-tag-a", f"x-reef-tag-{SECRET}", "x-request-id"):
        answered += gateway.chat(headers={header: SECRET}).status_code == 200
    hidden = "".join(f"%{ord(letter):02x}" for letter in SECRET)
    for route in (
        f"/v1/models/{SECRET}",
        f"/v1/models/{hidden}",
        f"/reef/scenarios/{SECRET}/records",
        f"/v1/responses/{SECRET}",
        f"/{SECRET}",
    ):
        assert gateway.http.get(route).status_code == 404
    return answered


def test_a_secret_in_any_field_of_any_route_is_found_nowhere(gateway, deployment, tmp_path, caught):
    words = itertools.cycle([f"It is {SECRET}, friend.", "Nothing of that kind."])
    deployment.engine.script_of = lambda request: Script(text=next(words))
    assert plant(gateway) > 100
    deployment.storage.full = True  # failures are logged, with what they are about
    assert gateway.chat(headers={"x-reef-tag-a": SECRET}).status_code == 503
    logging.getLogger("reef.test").error("said %s", SECRET, exc_info=ValueError(SECRET))
    deployment.storage.full = False
    stored = gateway.records(limit=1000)
    assert any(record.get("redacted") for record in stored) and any(
        record.get("redacted") is False for record in stored
    )
    gateway.stop()
    log = caught()
    assert "GET /v1/models/[gone]" in log and "said [gone]" in log and "ValueError: [gone]" in log
    kept = everything_kept(tmp_path, deployment.chat.tokenizer)
    assert "[gone]" in kept
    for secret in (SECRET, str(NUMBER)):
        assert secret not in kept and secret not in log


def test_a_stored_completion_that_was_redacted_is_not_found_and_metadata_that_would_be_is_refused(gateway):
    receipts = [gateway.chat(store=True, user=user).headers["x-reef-agent-record-id"] for user in ("u", SECRET)]
    kept, redacted = (f"/v1/chat/completions/chatcmpl-{receipt}" for receipt in receipts)
    assert gateway.http.get(redacted).status_code == 404
    assert [found["id"] for found in gateway.http.get("/v1/chat/completions").json()["data"]] == [kept[21:]]
    answer = gateway.http.post(kept, json={"metadata": {"a": SECRET}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata" and SECRET not in answer.text
    assert gateway.http.post(kept, json={"metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}


def test_a_real_deployment_redacts_what_it_stores_and_trains_none_of_it(tiny_model, tmp_path):
    with serving(tmp_path, tiny_model, **{"reef.redact": HOOK}) as gateway:
        asked = {"model": "m", "prompt": f"I say {SECRET} now", "echo": True, "max_tokens": 3}
        said = gateway.http.post("/v1/completions", json=asked)
        ids = gateway.server.gateway.deployment.chat.tokenizer.encode_now(asked["prompt"])
        gateway.http.post("/v1/completions", json={"model": "m", "prompt": ids, "max_tokens": 3})
        gateway.http.post("/v1/completions", json={"model": "m", "prompt": "plain", "max_tokens": 3})
        assert SECRET in said.text  # the client sees what the model said
        first, second, third = gateway.records()
        tokenizer = gateway.server.gateway.deployment.chat.tokenizer
        receipt = said.headers["x-reef-agent-record-id"]
        again = gateway.http.post("/v1/completions", json=asked, headers={"x-reef-record-id": receipt})
        assert again.status_code == 409 and "redacted" in again.text
    assert json.loads(first["request"])["prompt"] == "I say [gone] now" and "[gone]" in first["response"]
    assert "[gone]" in second["request"] and str(ids[0]) not in second["request"]
    for record in (first, second):
        assert record["train"] is False and record["redacted"] is True
        assert record["generations"][0]["prompt_ids"] == record["generations"][0]["output_ids"] == []
    assert third["train"] is True and third["generations"][0]["output_ids"]
    assert SECRET not in everything_kept(tmp_path, tokenizer)


# ------------------------------------------------------------------ what is looked at


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":"x {SECRET}"}}',
        f'{{"a":"{SECRET}","a":"x"}}',
        '{"a":"\\u0068unter2-4711"}',
        f'{{"{SECRET}":1}}',
        f'{{"a":{NUMBER}}}',
        f'{{"a":{NUMBER}.5}}',
        f'["{SECRET}"]',
        f'"{SECRET}"',
        f"no json {SECRET}",
        '{"a":["hunter","2-47","11"]}',
        '{"a":[{"token":"hunter","bytes":[1]},{"token":"2-4711","bytes":[2]}]}',
        json.dumps({"a": [{"b": list(SECRET[:5].encode())}, {"b": list(SECRET[5:].encode())}]}),
        'data: {"d":{"c":"hunter2"}}\n\ndata: {"d":{"c":"-4711"}}\n\ndata: [DONE]\n\n',
        f"event: x\ndata: {SECRET}\n\n",
        f": {SECRET}\n\n",
        'data: {"choices":[{"index":0,"t":"hunter2"},{"index":1,"t":"no"}]}\n\n'
        'data: {"choices":[{"index":1,"t":"no"}]}\n\ndata: {"choices":[{"index":0,"t":"-4711"}]}\n\n',
    ],
)
def test_no_disguise_hides_it(text):
    kept = redaction().body(text.encode())
    assert kept != text.encode() and SECRET.encode() not in kept and str(NUMBER).encode() not in kept


def test_a_stream_whose_events_can_be_redacted_one_by_one_stays_a_stream():
    text = f'event: e\ndata: {{"a": "{SECRET}"}}\n\ndata: {{"a":  "as it was"}}\n\ndata: [DONE]\n\n'
    assert redaction().body(text.encode()).decode() == (
        'event: e\ndata: {"a":"[gone]"}\n\ndata: {"a":  "as it was"}\n\ndata: [DONE]\n\n'
    )


@given(
    st.binary() | st.recursive(st.integers() | st.text() | st.none(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_what_holds_no_secret_keeps_its_bytes(content):
    assert redaction().body(content) is content


@given(st.lists(st.integers(1, len(SECRET) - 1), max_size=5))
def test_a_secret_torn_apart_anywhere_is_noticed(cuts):
    edges = [0, *sorted(set(cuts)), len(SECRET)]
    pieces = [SECRET[start:end] for start, end in itertools.pairwise(edges)]
    events = "".join(f"data: {json.dumps({'c': [{'delta': piece}]})}\n\n" for piece in ["so ", *pieces, "!"])
    assert b"so [gone]!" in redaction().body(events.encode()) or len(pieces) == 1


def test_tokens_alone_can_give_it_away():
    record = exchange("a")
    kept = redaction().record(record, lambda ids: SECRET if 70_000 in ids else "")
    assert kept.redacted and not kept.train and json.loads(kept.request) == {"redacted": {"tokens": ["[gone]"]}}
    assert kept.response == record.response and kept.generations[0].prompt_ids == []
    assert kept.generations[0].ending is record.generations[0].ending


def test_tags_alone_cost_no_training():
    record = exchange("a")
    record.tags = {"user": SECRET}
    kept = redaction().record(record, lambda ids: "")
    assert kept.tags == {"user": "[gone]"} and kept.train and kept.generations == record.generations


def test_a_report_whose_group_was_redacted_never_trains():
    def report(**fields) -> ReportRecord:
        return ReportRecord(record_id="r", scenario="s", created_at=1.0, references=["a"], **fields)

    assert not redaction().record(report(score=1.0, metadata={"group": SECRET})).train
    kept = redaction().record(report(score=1.0, feedback=SECRET, error=SECRET, metadata={"group": "g"}))
    assert kept.train and (kept.feedback, kept.error) == ("[gone]", "[gone]")
    with pytest.raises(InvalidRequest, match="score"):
        redaction().record(report(score=float(NUMBER)))


# ------------------------------------------------------------------ hooks


def fails(text: str) -> str:
    raise ValueError(text)


def forgets(text: str) -> None:
    return None


@pytest.mark.parametrize("hook", ["fails", "forgets"])
def test_nothing_is_stored_where_a_hook_fails(deployment, serve, hook, caught):
    own = Redaction.load([f"{__name__}:{hook}"])
    deployment.storage.prepare = own.record
    with serve() as gateway:
        answer = gateway.chat(user=SECRET)
        assert answer.status_code == 503 and hook in answer.text and SECRET not in answer.text
        assert gateway.records() == []
    formatter = logs.RedactedFormatter(logging.Formatter(), own)
    line = formatter.format(logging.makeLogRecord({"msg": SECRET, "levelname": "INFO", "name": "reef"}))
    assert SECRET not in line and "withheld" in line
    with pytest.raises(StorageError) as raised:
        own.text(SECRET)
    assert SECRET not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_hooks_are_applied_in_order_and_named_when_they_are_none():
    both = Redaction.load([HOOK, "builtins:ascii"])
    assert both.text(SECRET) == "'[gone]'"
    with pytest.raises(ConfigError, match=r"reef\.redact"):
        Redaction.load(["tests.nowhere:hide"])
