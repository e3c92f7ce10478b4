from __future__ import annotations

import openai
import pytest

from tests.service.conftest import body

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/reef/report"),
    ("POST", "/reef/train"),
    ("GET", "/reef/scenarios"),
    ("POST", "/reef/scenarios/default/rollback"),
    ("GET", "/reef/status"),
    ("GET", "/nowhere"),
]


WRONG = [
    {},
    {"authorization": "Bearer wrong"},
    {"x-api-key": "wrong"},
    {"authorization": "Basic one"},
    {"authorization": "Bearer"},
    {"authorization": b"Bearer \xff\xfe"},
]


@pytest.mark.parametrize("headers", WRONG)
def test_every_route_but_health_wants_a_token(serve, headers):
    with serve(tokens=["one", "two"]) as gateway:
        for method, path in ROUTES:
            response = gateway.http.request(method, path, headers=headers, json=body() if method == "POST" else None)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"
        assert gateway.http.get("/healthz", headers=headers).status_code == 200
        assert gateway.engine.seen == []


def test_any_of_the_tokens_opens_in_either_header(serve):
    with serve(tokens=["one", "two"]) as gateway:
        for headers in ({"authorization": "Bearer two"}, {"authorization": "bearer one"}, {"x-api-key": "one"}):
            assert gateway.chat(headers=headers).status_code == 200
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="two")
        assert client.models.list().data[0].id == "smollm2"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="three").models.list()


def test_tokens_are_not_recorded(serve):
    with serve(tokens=["very-secret"]) as gateway:
        gateway.http.headers["authorization"] = "Bearer very-secret"
        gateway.chat()
        assert "very-secret" not in str(gateway.records())
