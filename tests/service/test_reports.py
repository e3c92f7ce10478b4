from __future__ import annotations

import pytest


@pytest.fixture
def receipt(gateway) -> str:
    return gateway.chat().headers["x-reef-agent-record-id"]


def report(gateway, scenario: str | None = None, **body):
    headers = {"x-reef-scenario": scenario} if scenario else None
    return gateway.http.post("/reef/report", json=body, headers=headers)


def refused(gateway, response, field: str | None) -> None:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert gateway.records(kind="report") == []
    assert gateway.scenarios() == ["default"]


def test_a_report_is_stored_and_named(gateway, receipt):
    response = report(gateway, references=[receipt], score=0.5, feedback={"why": "ok"}, metadata={"group": "g"})
    assert response.status_code == 200
    stored = gateway.records(kind="report")[0]
    assert stored["agent_record_id"] == response.json()["agent_record_id"]
    assert (stored["score"], stored["references"]) == (0.5, [receipt])
    assert (stored["feedback"], stored["metadata"]) == ({"why": "ok"}, {"group": "g"})


def test_a_grader_may_say_that_it_failed(gateway, receipt):
    assert report(gateway, references=[receipt], error="timeout").status_code == 200
    assert gateway.records(kind="report")[0]["error"] == "timeout"


def test_repeating_a_report_with_its_id_stores_it_once(gateway, receipt):
    answers = [report(gateway, references=[receipt], score=1, agent_record_id="r1") for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert len(gateway.records(kind="report")) == 1
    assert report(gateway, references=[receipt], score=0, agent_record_id="r1").status_code == 409


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"score": "high"}, "score"),
        ({"score": True}, "score"),
        ({"score": 1, "error": "x"}, "error"),
        ({"feedback": 5}, "feedback"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"group": 5}, "score": 1}, "metadata.group"),
        ({"references": []}, "references"),
        ({"references": "r"}, "references"),
        ({"references": [5]}, "references[0]"),
        ({"references": ["nobody"]}, "references[0]"),
        ({"agent_record_id": "a b"}, "agent_record_id"),
        ({"agent_record_id": ""}, "agent_record_id"),
        ({"scores": 1}, "scores"),
    ],
)
def test_a_bad_field_is_named_and_nothing_is_stored(gateway, receipt, changes, field):
    refused(gateway, report(gateway, **{"references": [receipt], **changes}), field)


def test_references_are_required_and_distinct(gateway, receipt):
    refused(gateway, report(gateway, score=1), "references")
    refused(gateway, report(gateway, score=1, references=[receipt, receipt]), "references")
    refused(gateway, report(gateway, score=1, references=[receipt, "nobody"]), "references[1]")


@pytest.mark.parametrize("score", [b"1e999", b"-1e999"])
def test_a_score_that_overflows_is_refused(gateway, receipt, score):
    content = b'{"references":["' + receipt.encode() + b'"],"score":' + score + b"}"
    refused(gateway, gateway.http.post("/reef/report", content=content), "score")


@pytest.mark.parametrize("content", [b'{"references":["x"],"score":NaN}', b'{"references":["x"],"score":Infinity}'])
def test_a_score_that_is_no_json_is_refused(gateway, receipt, content):
    refused(gateway, gateway.http.post("/reef/report", content=content), None)


def test_a_receipt_of_another_scenario_is_unknown_here(gateway, receipt):
    response = report(gateway, scenario="other", references=[receipt], score=1)
    refused(gateway, response, "references[0]")
    assert response.json()["error"]["code"] == "unknown_receipt"


def test_a_report_is_no_receipt(gateway, receipt):
    own = report(gateway, references=[receipt], score=1).json()["agent_record_id"]
    response = report(gateway, references=[own], score=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "references[0]"


def test_a_report_never_creates_a_scenario(gateway):
    assert report(gateway, references=["x"], score=1).status_code == 400
    assert gateway.scenarios() == []


def test_a_training_instruction_is_stored(gateway):
    response = gateway.http.post("/reef/train", json={"steps": 3, "agent_record_id": "t1"})
    assert response.json() == {"agent_record_id": "t1", "scenario": "default"}
    assert gateway.records(kind="instruction")[0]["body"] == {"steps": 3}
    assert gateway.http.post("/reef/train", json=[1]).status_code == 400
    assert gateway.http.post("/reef/train", json={"agent_record_id": 5}).json()["error"]["param"] == "agent_record_id"


def test_a_report_that_says_nothing_is_refused(gateway, receipt):
    refused(gateway, report(gateway, references=[receipt]), "score")
