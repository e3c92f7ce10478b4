"""`GET /metrics` after known traffic. Counters belong to the process, so tests look at differences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reef import metrics
from reef.errors import EngineError
from tests.service.conftest import Running
from tests.service.test_endings import leave_after

CHAT = "/v1/chat/completions"


class Samples(dict):
    """Values by name and labels: `found["reef_tokens_total", "scenario=a", "kind=prompt"]`; 0 without a series."""

    def __missing__(self, key: tuple[str, ...]) -> float:
        return 0.0

    def of(self, name: str, *labels: str) -> float:
        return self[(name, *sorted(labels))]


def scrape(gateway: Running) -> Samples:
    response = gateway.http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    found = Samples()
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[(sample.name, *sorted(f"{label}={value}" for label, value in sample.labels.items()))] = sample.value
    return found


@contextmanager
def counted(gateway: Running) -> Iterator[Samples]:
    """What the block adds to each series, once it is over."""
    before, difference = scrape(gateway), Samples()
    yield difference
    difference.update({key: value - before[key] for key, value in scrape(gateway).items()})


def test_requests_tokens_latency_and_storage_after_known_traffic(gateway):
    headers = {"x-reef-scenario": "counted"}
    with counted(gateway) as found:
        receipts = [gateway.chat(headers=headers).headers["x-reef-agent-record-id"] for _ in range(3)]
        assert "[DONE]" in gateway.chat(headers=headers, stream=True).text
        assert gateway.chat(headers=headers, temperature="hot").status_code == 400
        report = {"references": receipts[:1], "score": 1}
        assert gateway.http.post("/reef/report", json=report, headers=headers).status_code == 200
        assert gateway.http.get("/nowhere/at/all").status_code == 404
        assert gateway.http.put(CHAT).status_code == 405
    records = gateway.records("counted", kind="inference")
    [generation] = {str(record["generations"]): record["generations"][0] for record in records}.values()
    prompt, output = len(generation["prompt_ids"]), len(generation["output_ids"])

    assert found.of("reef_requests_total", f"route={CHAT}", "status=200") == 4
    assert found.of("reef_requests_total", f"route={CHAT}", "status=400") == 1
    assert found.of("reef_requests_total", f"route={CHAT}", "status=405") == 1
    assert found.of("reef_requests_total", "route=/reef/report", "status=200") == 1
    assert found.of("reef_requests_total", "route=other", "status=404") == 1
    assert found.of("reef_request_seconds_count", f"route={CHAT}") == 6
    assert found.of("reef_first_token_seconds_count", f"route={CHAT}") == 4
    assert (
        0
        < found.of("reef_first_token_seconds_sum", f"route={CHAT}")
        < found.of("reef_request_seconds_sum", f"route={CHAT}")
    )
    for kind, number in {"prompt": prompt, "completion": output, "cached": generation["cached_tokens"]}.items():
        assert found.of("reef_tokens_total", "scenario=counted", f"kind={kind}") == 4 * number > 0
    assert found.of("reef_answers_total", "ending=stop") == 4
    assert found.of("reef_errors_total", "error=InvalidRequest") == 1
    assert found.of("reef_errors_total", "error=NotFound") == 2
    assert found.of("reef_append_seconds_count") == 5
    assert found.of("reef_appended_bytes_total") == sum(
        gateway.server.gateway.deployment.storage.database.read(
            lambda connection: [row[0] for row in connection.execute("SELECT length(payload) FROM records").fetchall()]
        )
    )
    assert found.of("reef_commit_group_size_sum") == 6, "five appends and a new scenario"
    now = scrape(gateway)
    assert now.of("reef_waiting_writes") == now.of("reef_generations_in_flight") == 0
    assert now.of("reef_requests_in_flight") == 1, "the scrape itself"
    assert now.of("reef_head_number", "scenario=counted") == 0 and now.of("reef_scenarios") == 1


def test_what_failed_and_who_left(gateway):
    with counted(gateway) as found:
        gateway.engine.expect(cut_after=2)
        assert gateway.chat().status_code == 503
        gateway.engine.expect(refuse=EngineError("no"))
        assert gateway.chat().status_code == 503
        gateway.engine.expect(text="word " * 50, gate=threading.Event())
        left = scrape(gateway).of("reef_answers_total", "ending=client_left")
        leave_after(gateway, b"word", stream=True)
        while scrape(gateway).of("reef_answers_total", "ending=client_left") == left:
            threading.Event().wait(0.005)
    assert (
        found.of("reef_answers_total", "ending=engine_cut") == found.of("reef_answers_total", "ending=client_left") == 1
    )
    assert found.of("reef_errors_total", "error=EngineError") == found.of("reef_errors_total", "error=Unavailable") == 1


def test_a_full_disk_is_counted_and_the_answer_is_not(gateway):
    with counted(gateway) as found:
        assert gateway.chat().status_code == 200
        gateway.deployment.storage.full = True
        assert gateway.chat().status_code == 503
        gateway.deployment.storage.full = False
    assert found.of("reef_errors_total", "error=StorageError") == found.of("reef_answers_total", "ending=stop") == 1


def test_in_flight_while_it_is(gateway):
    gate = threading.Event()
    gateway.engine.expect(gate=gate)
    thread = threading.Thread(target=gateway.chat)
    thread.start()
    while not gateway.engine.at_gate:
        threading.Event().wait(0.005)
    now = scrape(gateway)
    gate.set()
    thread.join()
    assert now.of("reef_generations_in_flight") == 1 and now.of("reef_requests_in_flight") == 2


def test_it_obeys_authentication(serve):
    with serve(tokens=["secret-token"]) as gateway:
        assert gateway.http.get("/metrics").status_code == 401
        response = gateway.http.get("/metrics", headers={"authorization": "Bearer secret-token"})
        assert response.status_code == 200 and "secret-token" not in response.text
        assert 'reef_requests_total{route="/metrics",status="401"}' in response.text


def test_many_scenarios_and_paths_do_not_make_many_series(gateway, monkeypatch):
    monkeypatch.setattr(metrics, "NAMED_SCENARIOS", len(metrics._scenarios) + 2)
    with counted(gateway) as found:
        for number in range(5):
            assert gateway.chat(headers={"x-reef-scenario": f"many-{number}"}).status_code == 200
            gateway.http.get(f"/reef/scenarios/many-{number}")
            gateway.http.get(f"/no/such/path/{number}")
    assert [found.of("reef_answers_total", "ending=stop")] == [5]
    named = {label for key in found for label in key if label.startswith("scenario=many-")}
    assert named == {"scenario=many-0", "scenario=many-1"}
    one = found.of("reef_tokens_total", "scenario=many-0", "kind=prompt")
    assert found.of("reef_tokens_total", "scenario=other", "kind=prompt") == 3 * one > 0
    assert found.of("reef_requests_total", "route=/reef/scenarios/{scenario}", "status=200") == 5
    assert not any("many-" in label or "/no/such" in label for key in found for label in key if "route=" in label)


@pytest.mark.parametrize("route", ["/reef/scenarios/no-such-one", "/v1/models/none"])
def test_a_route_is_named_by_its_template(gateway, route):
    with counted(gateway) as found:
        assert gateway.http.get(route).status_code == 404
    template = "/reef/scenarios/{scenario}" if "scenarios" in route else "/v1/models/{model:path}"
    assert found.of("reef_requests_total", f"route={template}", "status=404") == 1


def test_a_provider_counts_its_own_tokens(tmp_path):
    from tests.service.providers import DONE, END, STREAM_HEAD, USAGE, FakeProvider, ask, chunk, in_front, piece, reply

    provider = FakeProvider()
    spoken = {"content": 'he said "prompt_tokens": 999', "usage": {"input_tokens": 11, "output_tokens": 7}}
    spoken["usage"]["cache_read_input_tokens"] = 4
    try:
        with in_front(provider.url, tmp_path) as reef, counted(reef) as found:
            provider.answer = reply(spoken)
            assert ask(reef, "/v1/messages").status_code == 200
            provider.answer = STREAM_HEAD + b"".join(map(chunk, [piece("a"), piece("b", "stop"), USAGE, DONE])) + END
            assert ask(reef).status_code == 200
            provider.answer = reply({"error": {"message": "no"}}, 429)
            assert ask(reef).status_code == 429
    finally:
        provider.close()
    for kind, number in {"prompt": 11 + 3, "completion": 7 + 2, "cached": 4}.items():
        assert found.of("reef_tokens_total", "scenario=s", f"kind={kind}") == number
    assert found.of("reef_answers_total", "ending=complete") == 2
    for route in ("/v1/messages", CHAT):
        assert found.of("reef_first_token_seconds_count", f"route={route}") == 1
    assert found.of("reef_requests_total", f"route={CHAT}", "status=429") == 1
