"""`make bench` does this for a minute: two gateways on one PostgreSQL database, one of them killed under load."""

from __future__ import annotations

import asyncio
import re
import socket

import httpx

from tests.conftest import needs

needs("psycopg", "alembic")

from benchmarks.load import RECEIPT, Gateway, Outcome, examine, provider, put_under_load  # noqa: E402


def test_a_gateway_that_is_killed_under_load_loses_nothing(postgres, schema, tmp_path):
    with provider() as upstream:
        flags = {
            "inference.upstream-url": upstream,
            "storage.backend": "postgres",
            "storage.url": postgres.url,
            "storage.schema": schema,
        }
        gateways = [Gateway(number, tmp_path, flags) for number in range(2)]
        try:
            for gateway in gateways:
                gateway.start()
            outcome = asyncio.run(put_under_load(gateways, clients=4, seconds=3.0, kill_every=1.0))
        finally:
            for gateway in gateways:
                gateway.stop()
    asyncio.run(examine(f"{postgres.url}&schema={schema}", outcome))
    assert outcome.problems == [] and outcome.counts["kills"] >= 1
    assert outcome.counts["acknowledged and lost"] == 0
    assert outcome.counts["reports stored"] == len(outcome.reports) > 0 < len(outcome.answers)


def test_gateways_may_share_a_port(tmp_path):
    with provider() as upstream, socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))  # never listens, and keeps the number from others
        flags = {
            "inference.upstream-url": upstream,
            "storage.path": tmp_path / "reef.db",
            "reef.port": reserved.getsockname()[1],
            "reef.share-port": "true",
        }
        gateways = [Gateway(number, tmp_path, flags) for number in range(2)]
        try:
            for gateway in gateways:
                gateway.start()
            url = gateways[0].server.url
            assert gateways[1].server.url == url
            answers = {}
            for number in range(40):  # a connection each
                body = {"model": "any", "messages": [{"role": "user", "content": str(number)}]}
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
                answers[answer.raise_for_status().headers[RECEIPT]] = answer.content
            gateways[0].kill()
            by_the_other = re.search(r"reef_requests_total\{.*chat.*\} (\d+)", httpx.get(f"{url}/metrics").text)
            assert by_the_other is not None and 0 < int(by_the_other[1]) < 40
            for receipt in answers:
                report = {"references": [receipt], "score": 1.0}
                httpx.post(f"{url}/reef/report", json=report, timeout=60).raise_for_status()
        finally:
            for gateway in gateways:
                gateway.stop()
    outcome = Outcome(answers=answers)
    asyncio.run(examine(f"sqlite:{tmp_path / 'reef.db'}", outcome))
    assert outcome.problems == [] and outcome.counts["reports stored"] == 40
