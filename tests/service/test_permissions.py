"""Serving, recording and training: three permissions, and nothing below loosens what is above."""

from __future__ import annotations

import pytest

from reef.service.config import Permissions, TokenConfig, digest_of
from tests.service.conftest import body, events

RECEIPT = "x-reef-agent-record-id"
ROUTES = {
    "/v1/chat/completions": body(),
    "/v1/completions": {"model": "m", "prompt": "Hi"},
    "/v1/responses": {"model": "m", "input": "Hi"},
    "/v1/messages": {**body(), "max_tokens": 5},
}


def levels(deployment=None, token=None, scenario=None) -> dict:
    """Settings with these permissions at each level."""
    own = {name: value for name, value in (token or {}).items() if name != "serve"}
    return {
        "permissions": Permissions(**(deployment or {})),
        "scenarios": {"default": Permissions(**(scenario or {}))},
        "tokens": [TokenConfig(digest=digest_of("t"), **own)],
    }


def ask(gateway, route="/v1/chat/completions", *, stream=False, **headers):
    sent = {"authorization": "Bearer t", **headers}
    return gateway.http.post(route, json={**ROUTES[route], "stream": stream}, headers=sent)


def stored(gateway):
    answer = gateway.http.get(
        "/reef/scenarios/default/records", params={"detail": "full"}, headers={"authorization": "Bearer t"}
    )
    return answer.json()["records"] if answer.status_code == 200 else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_with_recording_off_nothing_is_stored_and_no_receipt_is_given(serve, route, stream):
    with serve(**levels()) as gateway:
        answer = ask(gateway, route, stream=stream, **{"x-reef-record": "off", "x-reef-record-id": "mine"})
        assert answer.status_code == 200 and RECEIPT not in answer.headers and "agent_record_id" not in answer.text
        assert stored(gateway) == []
        assert gateway.http.get("/reef/scenarios", headers={"authorization": "Bearer t"}).json() == {"scenarios": []}
        kept = ask(gateway, route, stream=stream)
        assert kept.headers[RECEIPT] in kept.text and len(stored(gateway)) == 1
        report = {"references": ["mine"], "score": 1}
        refused = gateway.http.post("/reef/report", json=report, headers={"authorization": "Bearer t"})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "unknown_receipt"


def test_an_answer_that_is_not_recorded_is_no_part_of_a_conversation(serve):
    with serve(**levels()) as gateway:
        answer = ask(gateway, **{"x-reef-record": "off"}).json()["choices"][0]["message"]
        turns = [*body()["messages"], {"role": "assistant", "content": answer["content"]}, *body()["messages"]]
        gateway.chat(messages=turns, headers={"authorization": "Bearer t"})
        assert stored(gateway)[0]["parent_id"] is None
        first = ask(gateway, "/v1/responses", **{"x-reef-record": "off"}).json()["id"]
        later = {"model": "m", "input": "x", "previous_response_id": first}
        refused = gateway.http.post("/v1/responses", json=later, headers={"authorization": "Bearer t"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "previous_response_id"


def test_what_may_not_train_is_stored_as_such(serve):
    with serve(**levels()) as gateway:
        receipt = ask(gateway, **{"x-reef-train": "off"}).headers[RECEIPT]
        ask(gateway, **{"x-reef-train": "on"})
        sent = {"authorization": "Bearer t", "x-reef-train": "off"}
        assert gateway.http.post("/reef/report", json={"references": [receipt], "score": 1}, headers=sent).is_success
        assert [record["train"] for record in stored(gateway)] == [False, True, False]


@pytest.mark.parametrize("permission", ["record", "train"])
def test_no_level_loosens_another(serve, permission):
    names = ("deployment", "token", "scenario")
    for off in [*((name,) for name in names), names]:
        with serve(**levels(**{name: {permission: False} for name in off})) as gateway:
            answer = ask(gateway, **{f"x-reef-{permission}": "on"})
            assert answer.status_code == 200
            if permission == "record":
                assert RECEIPT not in answer.headers
                for route in ("/reef/report", "/reef/train"):
                    sent = {"references": ["x"], "score": 1}
                    answer = gateway.http.post(route, json=sent, headers={"authorization": "Bearer t"})
                    assert answer.status_code == 403 and "recording" in answer.json()["error"]["message"]
                assert stored(gateway) == []
            else:
                assert stored(gateway)[-1]["train"] is False
                answer = gateway.http.post("/reef/train", json={}, headers={"authorization": "Bearer t"})
                assert answer.status_code == 403


@pytest.mark.parametrize("level", ["deployment", "scenario"])
def test_with_serving_off_nothing_is_asked(serve, level):
    with serve(**levels(**{level: {"serve": False}})) as gateway:
        for route in ROUTES:
            assert ask(gateway, route).status_code == 403
        count = gateway.http.post("/v1/messages/count_tokens", json=body(), headers={"authorization": "Bearer t"})
        assert count.status_code == 403 and count.json()["error"]["type"] == "permission_error"
        assert gateway.engine.seen == []
        elsewhere = ask(gateway, **{"x-reef-scenario": "other"})
        assert elsewhere.status_code == (403 if level == "deployment" else 200)


@pytest.mark.parametrize("header", ["x-reef-record", "x-reef-train"])
@pytest.mark.parametrize("word", ["", "no", "0", "false", "offf"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(gateway, header, word):
    answer = gateway.chat(headers={header: word})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == header
    assert gateway.scenarios() == []


def test_of_two_switches_the_stricter_one_counts(gateway):
    sent = [("x-reef-record", "off"), ("x-reef-record", "on")]
    for headers in (sent, sent[::-1]):
        assert RECEIPT not in gateway.http.post("/v1/chat/completions", json=body(), headers=headers).headers


def test_a_stream_that_is_not_recorded_ends_as_ever(gateway):
    answer = gateway.chat(stream=True, headers={"x-reef-record": "off"})
    assert events(answer.text)[-1] == "[DONE]"
