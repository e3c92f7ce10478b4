from __future__ import annotations

import json

import pytest


def test_scenarios_are_created_once(gateway):
    first, second = (gateway.http.post("/reef/scenarios", json={"name": "s"}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert gateway.scenarios() == ["s"]
    assert gateway.http.get("/reef/scenarios/s").json()["scenario"] == "s"


@pytest.mark.parametrize("body", [{}, {"name": 5}, {"name": "a b"}, {"name": "s", "x": 1}])
def test_a_bad_scenario_is_refused(gateway, body):
    assert gateway.http.post("/reef/scenarios", json=body).status_code == 400
    assert gateway.scenarios() == []


@pytest.mark.parametrize("view", ["", "/contract", "/releases", "/commits", "/records"])
def test_views_of_an_unknown_scenario_are_404_and_create_nothing(gateway, view):
    response = gateway.http.get(f"/reef/scenarios/nobody{view}")
    assert response.status_code == 404 and "nobody" in response.json()["error"]["message"]
    assert gateway.scenarios() == []


def test_the_chain_is_shown(gateway):
    gateway.chat()
    shown = gateway.http.get("/reef/scenarios/default/releases").json()
    assert shown["head"] == shown["releases"][0]["release_id"]
    assert (shown["releases"][0]["kind"], shown["releases"][0]["number"]) == ("base", 0)
    assert gateway.http.get("/reef/scenarios/default/commits").json()["commits"] == []
    assert "recipe" in str(gateway.http.get("/reef/scenarios/default/contract").json())


def test_records_page_in_order(gateway):
    receipts = [gateway.chat().headers["x-reef-agent-record-id"] for _ in range(5)]
    seen, after = [], 0
    while after is not None:
        page = gateway.http.get("/reef/scenarios/default/records", params={"limit": 2, "after": after}).json()
        seen += [record["agent_record_id"] for record in page["records"]]
        after = page["next_after"]
    assert seen == receipts


def test_records_are_exported_as_lines(gateway):
    gateway.chat()
    response = gateway.http.get("/reef/scenarios/default/records", params={"format": "jsonl", "kind": "inference"})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["kind"] for line in response.text.splitlines()] == ["inference"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "100000"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"kind": "poem"}, "kind"),
        ({"after": "-1"}, "after"),
        ({"since": "nan"}, "since"),
        ({"until": "inf"}, "until"),
        ({"nonsense": "1"}, "nonsense"),
    ],
)
def test_a_bad_query_is_named(gateway, query, field):
    gateway.chat()
    response = gateway.http.get("/reef/scenarios/default/records", params=query)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_the_chain_moves_by_hand(gateway):
    gateway.chat()
    post = lambda what, body: gateway.http.post(f"/reef/scenarios/default/{what}", json=body)  # noqa: E731
    assert post("rollback", {}).json()["kind"] == "base"
    assert post("rollback", {"release_id": "nope"}).status_code == 404
    assert post("promote", {"job_id": "job_1"}).status_code == 200
    assert post("update", {}).json() == {"started": False}
    assert gateway.http.post("/reef/scenarios/default/update").status_code == 200
    calls = gateway.deployment.scenarios()[0].calls
    assert calls == [("rollback", None), ("rollback", "nope"), ("promote", "job_1"), ("update", None), ("update", None)]


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("rollback", {"release": "x"}),
        ("promote", {}),
        ("promote", {"release_id": "a", "job_id": "b"}),
        ("update", {"x": 1}),
    ],
)
def test_a_bad_order_is_refused(gateway, what, body):
    gateway.chat()
    assert gateway.http.post(f"/reef/scenarios/default/{what}", json=body).status_code == 400
    assert gateway.deployment.scenarios()[0].calls == []


def test_status(gateway):
    gateway.chat()
    status = gateway.http.get("/reef/status").json()
    assert status["default_scenario"] == "default" and status["models"] == ["smollm2"]
    assert status["scenarios"][0]["counts"]["inference"] == 1


def test_health_gives_its_reasons(gateway):
    assert gateway.http.get("/healthz").json() == {"status": "ok", "reasons": []}
    gateway.deployment.reasons = ["engine-0: gone"]
    response = gateway.http.get("/healthz")
    assert response.status_code == 503 and response.json()["reasons"] == ["engine-0: gone"]
