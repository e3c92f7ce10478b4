"""Publications into real engines behind their sockets: under structured traffic, and when the barrier fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "llguidance")

from reef.artifact import chain  # noqa: E402
from reef.artifact.content import DirectoryContentStore  # noqa: E402
from reef.errors import BarrierError, EngineError, InvalidRequest, ReefError  # noqa: E402
from reef.inference.chat.tokenizer import ChatTokenizer  # noqa: E402
from reef.inference.local.backend import LocalBackend  # noqa: E402
from reef.inference.local.client import LocalHandler  # noqa: E402
from reef.inference.local.engine import LocalEngine  # noqa: E402
from reef.inference.local.grammar import GrammarQueue  # noqa: E402
from reef.runtime.executor import make_executor  # noqa: E402
from reef.runtime.interfaces import (  # noqa: E402
    Candidate,
    Ending,
    Evaluation,
    GenerateRequest,
    Grammar,
    MarkerState,
    PauseMode,
    SamplingParams,
    WeightKind,
    WeightLoad,
)
from reef.runtime.publication import Publication, probe_ids  # noqa: E402
from reef.runtime.recovery import MarkerFile  # noqa: E402
from reef.runtime.scheduler import TrainingCoordinator  # noqa: E402
from tests.inference.engines import Brake, Reader, control, run, tiny_config  # noqa: E402
from tests.inference.references import make_adapter  # noqa: E402

PROMPT = list(range(300, 340))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["coral", "fish"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_model, tmp_path_factory.mktemp("publication") / "lora", seed=1)


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Iterator[LocalBackend]:
    made = in_process(tiny_model)
    yield made
    made.close()


def in_process(model: Path) -> LocalBackend:
    """A started backend whose engine is a thread of this process, where a test can reach it."""
    made = LocalBackend(
        tiny_config(model), lambda worker, arguments: make_executor("uni", worker, arguments, name="engine")
    )
    made.start()
    return made


@contextlib.asynccontextmanager
async def client(backend: LocalBackend) -> Any:
    handler = LocalHandler(backend.endpoints)
    await handler.connect()
    yield handler
    await handler.close()


def asked(name: str, *, lane: str = "s", grammar: Grammar | None = None, max_tokens: int = 200) -> GenerateRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=grammar is None, grammar=grammar, seed=sum(name.encode())
    )
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=sampling, lane=lane)


def text_of(tokenizer: ChatTokenizer, reader: Reader) -> str:
    return b"".join(tokenizer.token_bytes(one) for one in reader.tokens if one not in (0, 2)).decode()


# ---------------------------------------------------------------------------------------------- structured traffic


@pytest.mark.parametrize("mode", list(PauseMode))
def test_eight_long_and_sixteen_structured_requests_cross_a_publication(
    backend, tiny_model, adapter, mode, monkeypatch
):
    """Every one completes, the JSON is valid, and each token is of the old load before and of the new one after."""
    tokenizer, load_id, lane = ChatTokenizer.load(tiny_model), f"{mode}:1", f"lane {mode}"
    load = WeightLoad(runtime_load_id=load_id, content_id=f"lora {mode}", kind=WeightKind.LORA, path=str(adapter))

    brake = Brake(monkeypatch, lambda: backend.reports()[0])

    async def publish(first: list[Reader]) -> None:
        """All begin together, so that none is far ahead, and none goes beyond its beginning before the barrier."""
        while True:
            [report] = await control(backend.reports)
            if report.waiting == len(first) and not report.stats["compiling"]:
                break
            await asyncio.sleep(0.01)
        await control(brake.hold, 8 * len(first))
        for reader in first:
            await reader.has(3)
        await control(backend.pause, mode)
        try:
            [paused] = await control(backend.reports)
            await control(brake.lift)
            if mode is PauseMode.RETRACT:
                assert paused.free_pages == paused.total_pages and paused.running == 0
            await control(backend.activate, lane, load_id)
            await asyncio.sleep(0.05)
            [later] = await control(backend.reports)
            assert later.stats["output_tokens"] == paused.stats["output_tokens"], "a token came through the barrier"
        finally:
            await control(backend.resume)

    async def scenario() -> tuple[list[Reader], list[Reader]]:
        async with client(backend) as handler:
            await control(backend.stage, load)
            await control(brake.hold, 0)
            long, structured = [Reader() for _ in range(8)], [Reader() for _ in range(16)]
            tasks = [one.read(handler, asked(f"long {n}", lane=lane, max_tokens=60)) for n, one in enumerate(long)]
            tasks += [
                one.read(handler, asked(f"json {n}", lane=lane, grammar=OBJECT)) for n, one in enumerate(structured)
            ]
            await asyncio.gather(*tasks, publish([*long, *structured]))
            return long, structured

    long, structured = run(scenario())
    for reader in (*long, *structured):
        assert reader.loads == ["engine:0", load_id]
    assert [len(reader.tokens) for reader in long] == [60] * 8
    for reader in structured:
        assert reader.chunks[-1].ending is Ending.STOP
        jsonschema.validate(json.loads(text_of(tokenizer, reader)), SCHEMA)


def test_a_barrier_holds_while_a_grammar_compiles(backend, tiny_model, monkeypatch):
    """The flush succeeds, the queued requests survive it, and the one whose client leaves is forgotten."""
    tokenizer, gate, compiling = ChatTokenizer.load(tiny_model), threading.Event(), threading.Event()
    real = GrammarQueue._attempt

    def slow(self: GrammarQueue, grammar: Grammar) -> Any:
        compiling.set()
        assert gate.wait(200)
        return real(self, grammar)

    monkeypatch.setattr(GrammarQueue, "_attempt", slow)
    grammar = Grammar("regex", r"[a-f]{4}")  # one that no other test has compiled

    async def scenario() -> None:
        async with client(backend) as handler:
            readers = [Reader() for _ in range(3)]
            tasks = [
                asyncio.create_task(reader.read(handler, asked(f"r{number}", grammar=grammar)))
                for number, reader in enumerate(readers)
            ]
            assert await control(compiling.wait, 200)
            free = await Reader().read(handler, asked("free", max_tokens=5))
            assert len(free.tokens) == 5, "who waits for a grammar holds up nobody"
            tasks[2].cancel()
            await control(backend.pause, PauseMode.RETRACT)
            await control(backend.flush)
            while (report := (await control(backend.reports))[0]).waiting > 2:  # it hears soon who left
                await asyncio.sleep(0.01)
            assert report.free_pages == report.total_pages
            gate.set()
            await control(backend.resume)
            for reader in await asyncio.gather(*tasks[:2]):
                assert len(text_of(tokenizer, reader)) == 4 and reader.chunks[-1].ending is Ending.STOP
            assert readers[2].tokens == []

    try:
        run(scenario())
    finally:
        gate.set()


def test_a_bad_schema_is_an_invalid_request_before_the_first_chunk(backend):
    async def scenario() -> None:
        async with client(backend) as handler:
            for schema in ("{", '{"type": "wat"}'):
                with pytest.raises(InvalidRequest) as caught:
                    await Reader().read(handler, asked("bad", grammar=Grammar("json_schema", schema)))
                assert caught.value.field == "sampling.grammar"
            assert len((await Reader().read(handler, asked("good", max_tokens=3))).tokens) == 3

    run(scenario())


# ---------------------------------------------------------------------------------------------- failed barriers


class FakeRefusal:
    """Makes one engine method fail, as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.times = 0
        real = getattr(LocalEngine, method)

        def maybe(engine: LocalEngine, *arguments: Any) -> Any:
            if self.times > 0:
                self.times -= 1
                raise EngineError(f"{method} refused")
            return real(engine, *arguments)

        monkeypatch.setattr(LocalEngine, method, maybe)


class Deployed:
    """The parts of a deployment that publish, around one real engine."""

    def __init__(self, model: Path, data: Path, adapter: Path) -> None:
        self.engines = in_process(model)
        contents = DirectoryContentStore(data / "artifacts")
        self.publication = Publication(self.engines, contents, PauseMode.RETRACT, "", probe_ids(49152))
        self.marker = MarkerFile(data / "marker.json")
        self.coordinator = TrainingCoordinator(None, self.publication, contents, self.marker)
        self.base = chain.base_release("s", "", 0.0)
        self.candidate = Candidate(
            job_id="job",
            scenario="s",
            content_id=contents.put(adapter),
            state_id=None,
            kind=WeightKind.LORA,
            runtime_load_id="engine:1",
            probe_logprobs=[],
            incumbent_probe_logprobs=[],
        )

    def state(self) -> MarkerState:
        marker = self.marker.read()
        assert marker is not None
        return marker.state

    def publish_and_commit(self) -> None:
        self.coordinator.publish(self.candidate)
        self.coordinator.acknowledge("job", chain.next_release(self.base, self.candidate, Evaluation(), time.time()))

    def serves(self) -> list[str]:
        async def scenario() -> list[str]:
            async with client(self.engines) as handler:
                return (await Reader().read(handler, asked("a", max_tokens=4))).loads

        return run(scenario())


def test_a_flush_that_fails_retires_the_engine_and_the_retry_publishes_in_full(
    tiny_model, adapter, tmp_path, monkeypatch
):
    deployed = Deployed(tiny_model, tmp_path, adapter)
    try:
        deployed.coordinator.recover([deployed.base], committed=False)
        deployed.coordinator.adopt(deployed.candidate)
        refusal = FakeRefusal(monkeypatch, "flush")
        refusal.times = 1
        with pytest.raises(BarrierError, match="flush refused"):
            deployed.coordinator.publish(deployed.candidate)
        assert deployed.state() is MarkerState.UPDATING_WEIGHTS and deployed.publication.generation == 0
        deployed.publish_and_commit()
        assert deployed.publication.generation == 1, "the engine was not replaced"
        assert deployed.state() is MarkerState.COMPLETE and deployed.serves() == ["engine:1"]
    finally:
        deployed.engines.close()


def test_a_barrier_that_fails_at_the_start_is_said_and_survived(tiny_model, adapter, tmp_path, monkeypatch):
    """The first life ends in mid-publication; the second cannot pause twice, then goes on with the candidate."""
    first = Deployed(tiny_model, tmp_path, adapter)
    try:
        first.coordinator.recover([first.base], committed=False)
        first.coordinator.adopt(first.candidate)
        refusal = FakeRefusal(monkeypatch, "flush")
        refusal.times = 1
        with pytest.raises(BarrierError):
            first.coordinator.publish(first.candidate)
    finally:
        first.engines.close()

    second = Deployed(tiny_model, tmp_path, adapter)
    try:
        refusal = FakeRefusal(monkeypatch, "pause")
        refusal.times = 2  # the engine's, and then its replacement's
        with pytest.raises(ReefError, match="pause refused"):
            second.coordinator.recover([second.base], committed=False)
        assert second.publication.health() is not None, "whoever cannot pause must not pass for healthy"
        assert second.state() is MarkerState.UPDATING_WEIGHTS, "the candidate is not lost"
        found = second.coordinator.recover([second.base], committed=False)
        assert found is not None and found.content_id == second.candidate.content_id
        assert second.publication.health() is None and second.serves() == ["engine:0"]
        second.publish_and_commit()
        assert second.serves() == ["engine:1"]
    finally:
        second.engines.close()
