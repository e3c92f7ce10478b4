"""A coordinator behind HTTP: the same scenario learns through it, and follows it when another takes its place."""

from __future__ import annotations

import asyncio
import http.client

import msgspec
import pytest

from reef.errors import Conflict, InvalidRequest, NotFound, Unauthorized, WorkerDied
from reef.runtime.coordinator import Coordinator
from reef.runtime.interfaces import BASE_LOAD_ID, MarkerState, ReleaseKind
from reef.runtime.remote import MSGPACK, CoordinatorServer, RemoteChannel, publish_discovery, read_discovery
from tests.runtime.fakes import FakeEngines, FakeTrainer, plan_of
from tests.scenario.harness import Harness, teach


class RemoteHarness(Harness):
    """Its coordinator is found by a file, and can be killed and replaced."""

    servers: list[CoordinatorServer]

    def channel(self) -> RemoteChannel:
        self.launch()

        async def find():
            return await asyncio.to_thread(read_discovery, self.path / "coordinator.json")

        return RemoteChannel(find)

    def launch(self) -> None:
        """Another coordinator with engines of its own, on the same directory."""
        self.engines, self.trainer = FakeEngines(self.faults), FakeTrainer(self.faults)
        coordinator = Coordinator(plan_of(self.path, self.engines, self.trainer))
        self.marker = coordinator._training._marker
        coordinator.start()
        self.server = CoordinatorServer(coordinator, "127.0.0.1")
        self.server.start()
        self.servers.append(self.server)
        publish_discovery(self.path / "coordinator.json", self.server.discovery)

    async def stop(self) -> None:
        await super().stop()
        for server in self.servers:
            await asyncio.to_thread(server.close)
            server._coordinator.close()


def run(body, path, **recipe) -> None:
    async def go() -> None:
        harness = RemoteHarness(path, **recipe)
        harness.servers = []
        await harness.boot()
        try:
            await asyncio.wait_for(body(harness), 250)
        finally:
            await harness.stop()

    asyncio.run(go())


def test_learns_and_rolls_back_through_it(tmp_path):
    async def body(reef: RemoteHarness) -> None:
        await teach(reef, "a", "b")
        await reef.released(1)
        assert reef.engines.lanes["s"] == reef.scenario.head.runtime_load_id != BASE_LOAD_ID
        assert (await reef.scenario.rollback()).kind is ReleaseKind.ROLLBACK
        assert [report.engine for report in await reef.inference.reports()] == ["engine-0", "engine-1"]

    run(body, tmp_path)


def test_its_replacement_gets_the_committed_heads_and_goes_on(tmp_path):
    async def body(reef: RemoteHarness) -> None:
        await teach(reef, "a", "b")
        await reef.released(1)
        before = reef.inference.handler.connected[-1]
        await asyncio.to_thread(reef.server.close)
        await reef.until(lambda: reef.inference.health() is not None)
        assert "did not answer" in reef.inference.health()
        reef.launch()
        await reef.until(lambda: reef.engines.lanes.get("s") == reef.scenario.head.runtime_load_id)
        await reef.until(lambda: reef.inference.health() is None)
        assert reef.inference.handler.connected[-1] == before and len(reef.inference.handler.connected) >= 2
        await teach(reef, "c", "d")
        await reef.released(2)

    run(body, tmp_path)


def test_a_step_whose_coordinator_dies_is_trained_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("reef.runtime.deployment.STEP_POLL_SECONDS", 0.2)  # a server that closes answers first

    async def body(reef: RemoteHarness) -> None:
        inside, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def never(job):
            loop.call_soon_threadsafe(inside.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(200)
            raise WorkerDied("it died with its coordinator")

        reef.trainer.train = never  # type: ignore[method-assign]
        await teach(reef, "a", "b")
        await asyncio.wait_for(inside.wait(), 100)
        closing = asyncio.create_task(asyncio.to_thread(reef.server.close))
        reef.launch()
        await reef.released(1)
        go_on.set()
        await closing
        await reef.until(lambda: reef.state() is MarkerState.COMPLETE)
        assert len(reef.trainer.trained) == 1

    run(body, tmp_path)


def test_a_service_that_was_replaced_can_only_look(tmp_path):
    async def body(reef: RemoteHarness) -> None:
        old = reef.runtime._channel
        usurper = RemoteChannel(old._find)
        assert await usurper.call("recover", [reef.scenario.head], False) is None
        with pytest.raises(Conflict, match="another service"):
            await old.call("reject", "job_1", "no")
        assert await old.call("marker") is None
        await usurper.close()

    run(body, tmp_path)


def test_who_does_not_know_the_token_learns_nothing(tmp_path):
    async def body(reef: RemoteHarness) -> None:
        wrong = msgspec.structs.replace(reef.server.discovery, token="guess")
        with pytest.raises(Unauthorized, match="token is wrong"):
            await asyncio.to_thread(reef.runtime._channel._post, wrong, "status", ())

    run(body, tmp_path)


def test_what_is_no_call_is_refused(tmp_path):
    def post(server: CoordinatorServer, method: str, body: bytes) -> tuple[int, dict]:
        connection = http.client.HTTPConnection(server.discovery.host, server.discovery.port, timeout=60)
        connection.request("POST", f"/{method}", body, {"authorization": f"Bearer {server.discovery.token}"})
        answer = connection.getresponse()
        assert answer.headers["content-type"] == MSGPACK
        content = msgspec.msgpack.decode(answer.read())
        connection.close()
        return answer.status, content

    async def body(reef: RemoteHarness) -> None:
        for method, sent, status, kind in (
            ("close", msgspec.msgpack.encode([]), 404, NotFound),
            ("reject", b"\xc1", 400, InvalidRequest),
            ("reject", msgspec.msgpack.encode(["job"]), 400, InvalidRequest),
            ("publish", msgspec.msgpack.encode([{"job_id": 7}]), 400, InvalidRequest),
        ):
            found, told = await asyncio.to_thread(post, reef.server, method, sent)
            assert (found, told["kind"]) == (status, kind.__name__), told

    run(body, tmp_path)


def test_an_answer_of_another_coordinator_is_not_taken(tmp_path):
    async def body(reef: RemoteHarness) -> None:
        stale = msgspec.structs.replace(reef.server.discovery, incarnation="before")
        with pytest.raises(WorkerDied, match="another one than was found"):
            await asyncio.to_thread(reef.runtime._channel._post, stale, "status", ())

    run(body, tmp_path)


def test_a_discovery_that_is_not_there_or_damaged_says_what_to_do(tmp_path):
    path = tmp_path / "coordinator.json"
    with pytest.raises(WorkerDied, match="start one with reef coordinator"):
        read_discovery(path)
    path.write_bytes(b"{")
    with pytest.raises(WorkerDied, match="does not say where"):
        read_discovery(path)
