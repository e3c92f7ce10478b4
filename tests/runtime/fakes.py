"""Recording fakes for fault injection: engines and a trainer that behave, until they are told not to."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from reef.artifact.content import DirectoryContentStore
from reef.errors import EngineError, WorkerDied
from reef.runtime.coordinator import DeploymentPlan, Resources
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    EngineReport,
    GenerateRequest,
    InferenceBackend,
    InferenceHandler,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    TokenChunk,
    TrainingBackend,
    TrainJob,
    TrainResult,
    TransferSession,
    WeightKind,
    WeightLoad,
)


class Faults:
    """Raises the planted error the n-th time that an operation is called (1 is the next time)."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._planted: dict[tuple[str, int], BaseException] = {}  # (operation, number of the call)
        self._seen: Counter[str] = Counter()

    def plant(self, operation: str, error: BaseException, nth: int = 1) -> None:
        self._planted[operation, self._seen[operation] + nth] = error

    def hit(self, operation: str) -> None:
        self.calls.append(operation)
        self._seen[operation] += 1
        if error := self._planted.get((operation, self._seen[operation])):
            raise error


def text_of(path: str | None) -> str:
    """What the fake weights below `path` say; the base model says "base"."""
    return "base" if path is None else (Path(path) / "adapter_config.json").read_text()


def scores_of(text: str, num_tokens: int) -> list[float]:
    """Deterministic stand-in for a model's log-probabilities: they depend on the weights' text alone."""
    seed = zlib.crc32(text.encode())
    return [-(1.0 + (seed * (position + 3) % 97) / 97) for position in range(num_tokens - 1)]


class Device:
    """What engines and trainer share. Both holding it at once is the one thing that must never happen."""

    def __init__(self) -> None:
        self.holders: set[str] = set()

    def take(self, owner: str) -> None:
        self.holders.add(owner)
        assert len(self.holders) == 1, "two owners of one device"

    def leave(self, owner: str) -> None:
        self.holders.discard(owner)


def acknowledgement(owner: str, released: Collection[MemoryRegion]) -> MemoryReport:
    return MemoryReport(owner=owner, released=sorted(released), bytes_before=2, bytes_after=1, device_free=1)


class FakeEngines(InferenceBackend):
    """Two replicas that share one state; the second scores like the base for texts in `unapplied`.

    With a `device` they hold it unless everything is released, and those in `deaf` do not acknowledge a release.
    """

    def __init__(self, faults: Faults, slots: int = 8, device: Device | None = None) -> None:
        self.faults = faults
        self.device = device or Device()
        self.deaf: set[str] = set()
        self.slots = slots
        self.in_use: set[str] = set()  # loads that a request decodes with
        self.unapplied: set[str] = set()
        self.served: list[tuple[str, str]] = []  # (lane, runtime load ID) whenever something could be generated
        self._fresh()

    def _fresh(self) -> None:
        self.loads = {BASE_LOAD_ID: "base"}
        self.texts = {BASE_LOAD_ID: "base"}
        self.lanes: dict[str, str] = {}
        self.paused = False
        self.released: set[MemoryRegion] = set()
        self.device.take("engines")
        self.trouble: str | None = None  # what health says

    def start(self) -> None:
        self.faults.hit("start engines")
        self._fresh()

    def endpoints(self) -> list[str]:
        return ["engine-0", "engine-1"]

    def attach(self, session: TransferSession) -> None:
        self.faults.hit("attach engines")

    def pause(self, mode: PauseMode) -> None:
        self.faults.hit("pause")
        self.paused = True

    def resume(self) -> None:
        self.faults.hit("resume")
        assert not self.released, "resume without memory"
        self.paused = False
        self.served += list(self.lanes.items())

    def flush(self) -> None:
        self.faults.hit("flush")

    def stage(self, load: WeightLoad) -> None:
        self.faults.hit("stage")
        assert MemoryRegion.WEIGHTS not in self.released, "stage without memory"
        if len({*self.loads.values(), load.content_id} - {"base"}) > self.slots:
            raise EngineError(f"no slot for {load.runtime_load_id}")
        self.loads[load.runtime_load_id] = load.content_id
        self.texts[load.runtime_load_id] = text_of(load.path)

    def activate(self, lane: str, runtime_load_id: str) -> None:
        self.faults.hit("activate")
        assert self.paused, "activate while running"
        if runtime_load_id not in self.loads:
            raise EngineError(f"unknown load {runtime_load_id}")
        self.lanes[lane] = runtime_load_id

    def drop(self, runtime_load_id: str) -> None:
        self.faults.hit("drop")
        assert runtime_load_id not in self.lanes.values(), "drop of a load that serves"
        assert runtime_load_id != BASE_LOAD_ID
        self.loads.pop(runtime_load_id, None)

    def evict(self, runtime_load_id: str) -> bool:
        self.faults.hit("evict")
        if runtime_load_id in self.in_use:
            return False
        self.drop(runtime_load_id)
        return True

    @property
    def max_loads(self) -> int:
        return self.slots

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[list[float]]:
        text = self.texts[runtime_load_id]
        good = scores_of(text, len(token_ids))
        bad = scores_of("base" if text in self.unapplied else text, len(token_ids))
        return [good, bad]

    def reports(self) -> list[EngineReport]:
        common = {
            "lanes": dict(self.lanes),
            "loads": dict(self.loads),
            "paused": self.paused,
            "free_pages": 1,
            "total_pages": 1,
            "running": 0,
            "waiting": 0,
        }
        return [EngineReport(engine=f"engine-{rank}", **common) for rank in range(2)]

    def release_memory(self, regions: Collection[MemoryRegion]) -> list[MemoryReport]:
        self.faults.hit("release_memory")
        assert self.paused, "release while running"
        self.released |= set(regions)
        if MemoryRegion.WEIGHTS in self.released:
            self.loads, self.texts = {}, {}
        self.device.leave("engines")
        return self._acknowledge()

    def restore_memory(self) -> list[MemoryReport]:
        self.faults.hit("restore_memory")
        self.device.take("engines")
        if MemoryRegion.WEIGHTS in self.released:
            self.loads, self.texts = {BASE_LOAD_ID: "base"}, {BASE_LOAD_ID: "base"}
        self.released = set()
        return self._acknowledge()

    def _acknowledge(self) -> list[MemoryReport]:
        names = [f"engine-{rank}" for rank in range(2)]
        return [acknowledgement(name, set() if name in self.deaf else self.released) for name in names]

    def restart(self) -> None:
        self.faults.hit("restart")
        self._fresh()
        self.paused = True

    def health(self) -> str | None:
        return self.trouble

    def close(self) -> None:
        self.faults.hit("close engines")

    @property
    def probe_tolerance(self) -> float:
        return 1e-3


class FakeTrainer(TrainingBackend):
    """Writes one file per candidate whose text is the job id. Colocated, it trains only while it has the device."""

    immutable = True

    def __init__(self, faults: Faults, device: Device | None = None) -> None:
        self.faults = faults
        self.device = device
        self.trained: list[str] = []
        self.trouble: str | None = None  # what health says
        self.deaf = False  # does not acknowledge a release

    def start(self) -> None:
        self.faults.hit("start trainer")
        self._take()
        self.trouble = None

    def _take(self) -> None:
        if self.device is not None:
            self.device.take("trainer")

    def release_memory(self) -> MemoryReport:
        self._alive("trainer.release")
        assert self.device is not None
        if not self.deaf:
            self.device.leave("trainer")
        return acknowledgement("trainer", () if self.deaf else (MemoryRegion.WEIGHTS, MemoryRegion.OPTIMIZER))

    def restore_memory(self) -> MemoryReport:
        self._alive("trainer.restore")
        self._take()
        return acknowledgement("trainer", ())

    def _alive(self, operation: str) -> None:
        self.faults.hit(operation)
        if self.trouble is not None:
            raise WorkerDied(self.trouble)

    def attach(self, session: TransferSession) -> None:
        self.faults.hit("attach trainer")

    def train(self, job: TrainJob) -> TrainResult:
        self._alive("train")
        assert self.device is None or "trainer" in self.device.holders, "a step without the device"
        self.trained.append(job.job_id)
        weights, state = Path(job.output_path) / "weights", Path(job.output_path) / "state"
        for directory in (weights, state):
            directory.mkdir(parents=True, exist_ok=True)
        (weights / "adapter_config.json").write_text(job.job_id)
        (state / "state.json").write_text(job.job_id)
        return TrainResult(
            weights_path=str(weights),
            state_path=str(state),
            metrics={"loss": 0.5},
            probe_logprobs=scores_of(job.job_id, len(job.probe_ids)),
            incumbent_probe_logprobs=scores_of(text_of(job.incumbent_path), len(job.probe_ids)),
        )

    def health(self) -> str | None:
        return self.trouble

    def close(self) -> None:
        self.faults.hit("close trainer")
        self.trouble = "the trainer is not started"
        if self.device is not None:
            self.device.leave("trainer")

    @property
    def weight_kind(self) -> WeightKind:
        return WeightKind.LORA

    @property
    def immutable_candidates(self) -> bool:
        return self.immutable


class FakeResources(Resources):
    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def open(self) -> None:
        self.faults.hit("open resources")

    def close(self) -> None:
        self.faults.hit("close resources")


class IdleHandler(InferenceHandler):
    """Nobody generates in these tests."""

    def __init__(self, endpoints: Callable[[], Sequence[str]] = list) -> None:
        self.endpoints = endpoints
        self.connected: list[list[str]] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any], endpoints: Callable[[], Sequence[str]]) -> IdleHandler:
        return cls(endpoints)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        raise AssertionError("nothing should be generated")

    async def connect(self) -> None:
        self.connected.append(list(self.endpoints()))

    async def close(self) -> None: ...

    @property
    def max_context(self) -> int:
        return 64


def plan_of(
    path: Path,
    engines: FakeEngines,
    trainer: FakeTrainer | None,
    pause_mode: PauseMode = PauseMode.IN_PLACE,
    *,
    colocate: bool = False,
) -> DeploymentPlan:
    """A deployment of fakes on the real contents and marker below `path`."""
    return DeploymentPlan(
        resources=FakeResources(engines.faults),
        inference=engines,
        training=trainer,
        directory=path,
        contents=DirectoryContentStore(path / "artifacts"),
        base_content_id="base",
        pause_mode=pause_mode,
        probe_ids=list(range(8)),
        colocate=colocate,
    )
