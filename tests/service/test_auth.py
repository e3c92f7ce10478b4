from __future__ import annotations

import json
import threading

import openai
import pytest
from click.testing import CliRunner

from reef.cli import root
from reef.config import resolve
from reef.errors import ConfigError
from reef.service.config import TokenConfig, digest_of
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


# ------------------------------------------------------------------ roles and scenarios

ROLE_OF = {
    ("POST", "/v1/chat/completions"): "infer",
    ("GET", "/v1/models"): "infer",
    ("GET", "/v1/responses/resp_x"): "infer",
    ("DELETE", "/v1/responses/resp_x"): "infer",
    ("POST", "/reef/report"): "report",
    ("POST", "/reef/train"): "admin",
    ("GET", "/reef/scenarios"): "admin",
    ("GET", "/reef/scenarios/default/records"): "admin",
    ("POST", "/reef/scenarios/default/rollback"): "admin",
    ("GET", "/reef/status"): "admin",
    ("GET", "/metrics"): "admin",
    ("GET", "/dashboard"): "admin",
}


def token(secret: str, **limits) -> TokenConfig:
    return TokenConfig(digest=digest_of(secret), **limits)


def bearer(secret: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}", **headers}


@pytest.mark.parametrize("role", ["infer", "report", "admin"])
def test_a_role_opens_its_own_routes_only(serve, role):
    with serve(tokens=[token("one", roles=[role])]) as gateway:
        for (method, path), wanted in ROLE_OF.items():
            content = body() if method == "POST" else None
            answer = gateway.http.request(method, path, headers=bearer("one"), json=content)
            assert (answer.status_code == 403) == (role != wanted), path
            if role != wanted:
                assert wanted in answer.json()["error"]["message"]


def test_a_contract_is_for_whoever_reports(serve):
    with serve(tokens=[token("r", roles=["report"]), token("i", roles=["infer"])]) as gateway:
        gateway.chat(headers=bearer("i"))
        assert gateway.http.get("/reef/scenarios/default/contract", headers=bearer("r")).status_code == 200
        assert gateway.http.get("/reef/scenarios/default/contract", headers=bearer("i")).status_code == 403


def test_a_token_of_some_scenarios_sees_no_others(serve):
    with serve(tokens=[token("all"), token("one", scenarios=["a"])]) as gateway:
        for scenario in "ab":
            assert gateway.chat(headers=bearer("all", **{"x-reef-scenario": scenario})).status_code == 200
        assert gateway.chat(headers=bearer("one", **{"x-reef-scenario": "a"})).status_code == 200
        listed = gateway.http.get("/reef/scenarios", headers=bearer("one")).json()["scenarios"]
        assert [scenario["scenario"] for scenario in listed] == ["a"]
        other = bearer("one", **{"x-reef-scenario": "b"})
        for method, path, content in [
            ("POST", "/v1/chat/completions", body()),
            ("POST", "/v1/messages", {**body(), "max_tokens": 1}),
            ("GET", "/v1/responses/resp_x", None),
            ("DELETE", "/v1/responses/resp_x", None),
            ("POST", "/reef/report", {"references": ["x"], "score": 1}),
            ("POST", "/reef/train", {}),
            ("POST", "/reef/scenarios", {"name": "b"}),
            ("POST", "/reef/scenarios", {"name": "c"}),
            *(("GET", f"/reef/scenarios/b{rest}", None) for rest in ("", "/records", "/releases", "/contract")),
            ("POST", "/reef/scenarios/b/rollback", {}),
            ("GET", "/reef/status", None),
            ("GET", "/metrics", None),
        ]:
            assert gateway.http.request(method, path, headers=other, json=content).status_code == 403, path
        default = gateway.chat(headers=bearer("one"))
        assert default.status_code == 403 and "'default'" in default.json()["error"]["message"]


def test_requests_of_one_token_at_a_time_are_limited(serve):
    with serve(tokens=["one", "two"], max_concurrent_requests=1) as gateway:
        gateway.engine.expect(gate=threading.Event())
        talk = gateway.http.stream("POST", "/v1/chat/completions", json=body(stream=True), headers=bearer("one"))
        with talk as first:
            next(first.iter_raw())
            busy = gateway.http.post("/v1/messages", headers=bearer("one"), json=body())
            assert busy.status_code == 429 and int(busy.headers["retry-after"]) >= 1
            assert busy.json() == {
                "type": "error",
                "error": {"type": "rate_limit_error", "message": "at most 1 requests of one token at a time"},
                "request_id": None,
            }
            assert gateway.http.get("/healthz").status_code == 200
            assert gateway.http.get("/v1/models", headers=bearer("two")).status_code == 200
        for _ in range(5000):  # until the gateway has noticed that the client left
            if gateway.http.get("/v1/models", headers=bearer("one")).status_code == 200:
                return
            threading.Event().wait(0.02)
        raise AssertionError("a request that ended still counts")


def test_no_other_origin_is_invited(gateway):
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    answers = [gateway.http.options("/v1/chat/completions", headers=asked), gateway.chat(headers=asked)]
    assert answers[0].status_code == 405 and answers[1].status_code == 200
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)


# ------------------------------------------------------------------ tokens at rest

SECRET = "reef_very-secret"


def test_what_reef_token_prints_opens(serve):
    printed = json.loads(CliRunner().invoke(root, ["token", "--role", "infer", "--scenario", "s", "--json"]).output)
    secret = printed.pop("secret")
    assert printed["roles"] == ["infer"] and secret not in str(printed)
    flags = {"inference.model-path": "m", "reef.tokens": json.dumps([printed, digest_of("other")])}
    with serve(tokens=resolve(flags=flags).config.reef.tokens) as gateway:
        assert gateway.chat(headers=bearer(secret, **{"x-reef-scenario": "s"})).status_code == 200
        assert gateway.chat(headers=bearer("other")).status_code == 200
        assert gateway.http.get("/reef/status", headers=bearer(secret)).status_code == 403


def test_no_configuration_keeps_or_shows_a_secret(tmp_path):
    flags = {"inference.model-path": "m", "reef.tokens": SECRET}
    resolved = resolve(flags=flags)
    assert SECRET not in resolved.to_yaml() and SECRET not in repr(resolved.config)
    with pytest.raises(ConfigError) as caught:
        resolve(flags={**flags, "reef.tokens": json.dumps([{"digest": SECRET}])})
    assert SECRET not in str(caught.value)
    file = tmp_path / "reef.yaml"
    file.write_text(f"inference: {{model-path: m}}\nreef: {{tokens: [{SECRET}]}}\n")
    with pytest.raises(ConfigError, match=r"digests .*reef token") as caught:
        resolve(file=file)
    assert SECRET not in str(caught.value)
    file.write_text(f"inference: {{model-path: m}}\nreef: {{tokens: ['{digest_of(SECRET)}']}}\n")
    assert resolve(file=file).config.reef.tokens == resolved.config.reef.tokens


@pytest.mark.parametrize("digest", ["sha256:abc", "sha256:" + "g" * 64, "sha256:" + "A" * 64])
def test_a_digest_that_is_none_is_refused(digest):
    with pytest.raises(ConfigError, match=r"reef\.tokens"):
        resolve(flags={"inference.model-path": "m", "reef.tokens": digest})
