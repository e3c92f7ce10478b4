"""Requests made from the published description, and bytes that are almost requests: nothing gives a 5xx.

`make fuzz` tries REEF_FUZZ times as many as `make test`, and new ones.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from functools import cache

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation

from reef.errors import InvalidRequest
from reef.service import routes_health, routes_inference, routes_learning, routes_scenarios, scrape
from reef.service.app import create_app
from reef.service.config import ServiceConfig
from reef.service.openapi import ANSWERS, BODIES, describe, openapi_route
from reef.service.redaction import Redaction
from reef.service.routes_inference import _METADATA
from reef.service.routes_learning import _INSTRUCTION, _REPORT
from reef.service.routes_scenarios import _NEW_SCENARIO, _PROMOTE, _ROLLBACK
from reef.service.wire.base import check_nesting, decode_body
from reef.service.wire.messages import parse_count
from reef.service.wire.responses import parse_count as parse_input_tokens
from tests.conftest import FUZZ, examples
from tests.service.conftest import body
from tests.service.test_hostile import APIS, VALID

ROOMS = (routes_inference, routes_learning, routes_health, routes_scenarios, scrape)


fuzzing = settings(
    max_examples=examples(5),
    phases=[Phase.generate, Phase.shrink] if FUZZ > 1 else [Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)

# ------------------------------------------------------------------ from the description


def document(gateway) -> dict:
    return gateway.http.get("/openapi.json").json()


def test_the_description_names_every_route_and_type(gateway):
    described = document(gateway)
    routes = create_app(gateway.deployment, ServiceConfig()).routes
    assert {route.path.replace(":path}", "}") for route in routes} == set(described["paths"])
    found = [operation for path in described["paths"].values() for operation in path.values()]
    assert all(operation["summary"] not in described["paths"] for operation in found)
    assert len({operation["operationId"] for operation in found}) == len(found)
    posted = {path for path, methods in described["paths"].items() if "post" in methods}
    assert posted == set(BODIES) and set(ANSWERS) <= posted
    text = json.dumps(described)
    assert all(ref in described["components"]["schemas"] for ref in _references(described)) and "NODEFAULT" not in text


def _references(value) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _references(inner)


def test_what_tests_send_is_what_the_description_allows():
    described = describe([])
    for api in APIS:
        schema = {
            **described["components"]["schemas"][BODIES[api.route].__name__],
            "components": described["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(VALID[api])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate({**VALID[api], "tempereture": 1})


@cache
def operations() -> dict[str, APIOperation]:
    routes = [route for module in ROOMS for route in module.ROUTES]
    described = schemathesis.openapi.from_dict(describe([*routes, openapi_route(routes)]))
    found = [result.ok() for result in described.get_all_operations()]
    return {f"{operation.method} {operation.path}": operation for operation in found}


@pytest.mark.parametrize("name", operations())
def test_what_the_description_allows_and_forbids_is_answered_below_500(gateway, name):
    gateway.chat()
    allowed, forbidden = (
        operations()[name].as_strategy(generation_mode=mode)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    tried = []

    @given(allowed | forbidden)
    @fuzzing
    def check(case):
        answer = case.call(base_url=gateway.url, timeout=100)
        tried.append(answer.status_code)
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)
        if answer.status_code >= 400 and "html" not in answer.headers["content-type"]:
            assert answer.json()["error"]["message"]

    check()
    assert tried  # there is one way only to ask for what takes nothing


# ------------------------------------------------------------------ bytes

NASTY = [
    b"1e400", b"-1e400", b"9" * 400, b"NaN", b"-Infinity", b"18446744073709551616", b"-0", b"1e-400",
    b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf",
    b"{}", b"[]", b"null", b"true", b'""', b"//", b",", b":", b"'", b"\\", b'"type":', b'"role":',
    b"[" * 70, b'{"a":' * 70, b'"' + b"x" * 5000 + b'"',
]  # fmt: skip
CORPUS = [
    *(json.dumps(content).encode() for content in VALID.values()),
    b'{"references":["a"],"score":1,"feedback":{"a":[1]},"metadata":{"group":"g","group_size":2,"choice":0},"error":null}',
    b'{"metadata":{"a":"b"}}',
    b'{"name":"a","release_id":"b","job_id":"c","agent_record_id":"d"}',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n',
]


def mutated(rng: random.Random, content: bytes) -> bytes:
    """One to six things are deleted, doubled, overwritten, inserted or spliced in."""
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice([0, 1, 1, 2, 8, 60]))
        piece = rng.choice(
            [b"", content[start:end] * 2, rng.randbytes(end - start), rng.choice(NASTY), rng.choice(CORPUS)[start:end]]
        )
        content = content[:start] + piece + content[end:]
    return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.1 else content


def mutations(seed: str, count: int) -> Iterator[bytes]:
    rng = random.Random(seed if FUZZ <= 1 else None)
    for _ in range(examples(count)):
        yield mutated(rng, rng.choice(CORPUS))


PARSERS = {
    **{api.route: api.parse for api in APIS},
    "count": parse_count,
    "input tokens": parse_input_tokens,
    **{
        name: lambda content, decoder=decoder: decode_body(decoder, content)
        for name, decoder in {
            "report": _REPORT, "train": _INSTRUCTION, "scenario": _NEW_SCENARIO, "rollback": _ROLLBACK,
            "promote": _PROMOTE, "metadata": _METADATA,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
def test_no_bytes_make_a_parser_raise_anything_else(name):
    for content in mutations(name, 1000):
        try:
            check_nesting(content, 64)
            PARSERS[name](content)
        except InvalidRequest as error:
            assert str(error)


def test_no_bytes_make_redaction_raise_or_lose_anything():
    hidden, unchanged = Redaction({"hide": lambda text: text.replace("type", "kind")}), Redaction({"same": str})
    for content in mutations("redaction", 500):
        assert unchanged.body(content) is content
        kept = hidden.body(content)
        assert b"type" not in kept


def test_no_bytes_give_a_5xx(gateway):
    paths = [api.route for api in APIS] + [
        "/reef/report",
        "/reef/train",
        "/reef/scenarios",
        "/v1/messages/count_tokens",
    ]
    for number, content in enumerate(mutations("http", 200)):
        answer = gateway.http.post(paths[number % len(paths)], content=content)
        assert answer.status_code < 500, (content, answer.text)


def test_no_bytes_on_the_wire_give_a_5xx(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    content = json.dumps(body(max_tokens=1)).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-reef-scenario: a\r\nx-reef-tag-b: c\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    )
    chunked = b"POST /reef/report HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    rng = random.Random(1 if FUZZ <= 1 else None)
    for _ in range(examples(200)):
        sent = mutated(rng, rng.choice([request, request * 2, chunked, b"GET /openapi.json?a=b HTTP/1.1\r\n\r\n"]))
        with socket.create_connection((host, int(port)), timeout=100) as connection:
            try:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(200)
            except ConnectionError:
                continue
        assert not answer.startswith(b"HTTP/1.1 5"), (sent, answer)
    assert gateway.http.get("/healthz").status_code == 200


def test_the_fuzzers_would_notice(gateway, monkeypatch):
    def fragile(body: bytes, limit: int) -> None:
        if len(body) % 2:
            raise ZeroDivisionError

    monkeypatch.setattr("reef.service.gateway.check_nesting", fragile)
    answers = [gateway.http.post("/reef/train", content=content).status_code for content in mutations("report", 20)]
    assert 500 in answers
