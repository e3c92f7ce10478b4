"""`make bench` does this for a minute: two gateways on one PostgreSQL database, one of them killed under load."""

from __future__ import annotations

import asyncio

from tests.conftest import needs

needs("psycopg", "alembic")

from benchmarks.load import Gateway, examine, provider, put_under_load  # noqa: E402


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
