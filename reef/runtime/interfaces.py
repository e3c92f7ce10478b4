"""Values that cross rooms, and every contract between rooms.

Everything here is plain data or an ABC: no torch, no HTTP, no SQL. Log-probabilities are in nats, times are Unix
seconds (float), durations are seconds, token positions are zero-based and half-open.

Who talks to whom::

    service ──► scenario ──► CandidateBackend ──► TrainingRuntime ═══► Coordinator
       │            │                                                   │            │
       ▼            ▼                                                   ▼            ▼
    ChatService   Storage, ContentStore                          TrainingBackend  InferenceBackend
       │                                                                             │
       ▼                                                                             ▼
    InferenceRuntime: InferenceHandler ───────── data plane ──────────────────────► engines

The double arrow may cross processes and nodes. TrainingBackend and InferenceBackend never meet.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reef.errors import Unavailable

BASE_LANE = ""
"""The lane that serves the base model; a lane without a load of its own falls back to it."""

INCARNATION = "engine"
BASE_LOAD_ID = f"{INCARNATION}:0"
"""The runtime load ID of the base model, resident in every engine from its start and never dropped."""


# ---------------------------------------------------------------------------------------------- generation


class Ending(enum.StrEnum):
    """How a generation ended. Only STOP and LENGTH are complete, and only complete ones may train."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # the token budget
    CLIENT_LEFT = "client_left"  # the client went away, or asked to stop
    ENGINE_CUT = "engine_cut"  # the engine failed or was stopped in mid-generation

    @property
    def complete(self) -> bool:
        return self in (Ending.STOP, Ending.LENGTH)


@dataclass(slots=True, frozen=True)
class Span:
    """Output tokens [start, end) that one runtime load ID produced."""

    start: int
    end: int
    runtime_load_id: str


@dataclass(slots=True, frozen=True)
class Grammar:
    """What the output must match, from its first token to its end token."""

    kind: str  # "json_schema", "json_object", "regex", "choice" or "lark"
    value: str
    """JSON text of the schema, the expression, a JSON list of strings, or llguidance's Lark; "" with json_object."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """What to do with the logits. `temperature` 0 is greedy. Zero or 1.0 means "off" as noted."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0  # 1.0 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0.0 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1.0 is off
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)  # the stop string itself is not part of the text
    stop_token_ids: list[int] = field(default_factory=list)  # besides the model's own end tokens
    ignore_eos: bool = False
    seed: int | None = None  # reproducible whatever else is in the batch
    top_logprobs: int = 0  # alternatives reported for each output token
    grammar: Grammar | None = None  # tokens that break it are never drawn; `logprobs` stay those of the model


@dataclass(slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate. `lane` names whose weights answer; `runtime_load_id` pins one staged load instead."""

    request_id: str
    prompt_ids: list[int]  # [num_prompt_tokens]
    sampling: SamplingParams
    lane: str = BASE_LANE
    runtime_load_id: str | None = None


@dataclass(slots=True, kw_only=True)
class TokenChunk:
    """Some output tokens of one request, all from one runtime load ID. The last chunk has `ending` set.

    Lists have one entry per token of this chunk. `error` is set with ENGINE_CUT and says why.
    `stopped_by` is the stop string that matched, if one did; its tokens are in `token_ids`.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]  # of the sampled token, model distribution at temperature 1
    sampled_logprobs: list[float]  # of the sampled token, distribution it was drawn from
    runtime_load_id: str
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # temperature 1, best first
    ending: Ending | None = None
    stopped_by: str | None = None
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """The exact exchange with the engine for one choice: what training reads, captured and never re-tokenized."""

    prompt_ids: list[int]
    output_ids: list[int]  # [num_output_tokens], end tokens included
    logprobs: list[float]  # [num_output_tokens], temperature 1
    sampled_logprobs: list[float]  # [num_output_tokens], as sampled
    spans: list[Span]  # cover [0, num_output_tokens) exactly once
    ending: Ending
    cached_tokens: int = 0
    temperature: float = 1.0


@dataclass(slots=True, frozen=True)
class OutgoingRequest:
    """One request, complete but for some headers, as it leaves over HTTP for a router, an engine or a provider."""

    request_id: str
    lane: str
    path: str
    body: bytes


class HeaderProvider(ABC):
    """Adds headers to requests that leave over HTTP: for a router, a gateway in front of engines, a provider."""

    @abstractmethod
    def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        """Headers for this request. Must not block. If it raises, nothing is sent and the request fails."""


class InferenceHandler(ABC):
    """Service side of one inference integration: requests in, token chunks out. It never touches weights."""

    header_provider: HeaderProvider | None = None  # set before `connect`

    def prepare(self, request: OutgoingRequest) -> Mapping[str, str]:
        """The configured headers for a request; an integration that speaks HTTP sends them with it."""
        return {} if self.header_provider is None else self.header_provider.headers(request)

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], endpoints: Callable[[], Sequence[str]]) -> InferenceHandler:
        """Build it, connected to nothing. `endpoints` says where the engines are, whenever it is asked.

        `config` is `inference.handler-config`. Raises ConfigError naming the key that is unknown or wrong.
        """

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream chunks until one has `ending`. Closing the iterator early aborts the request in the engine.

        Raises InvalidRequest for what the engine cannot honour (before the first chunk), Unavailable when the engine
        is not reachable. An engine that dies later yields a last chunk with ENGINE_CUT.
        """

    @abstractmethod
    async def connect(self) -> None:
        """Connect to every engine and verify it: what answers must speak the protocol and be the engine that was meant.

        Raises Unavailable (nobody answers), VerificationError (the wrong one does).
        """

    async def reconnect(self) -> None:
        """Connect again after engines were replaced; streams from those that still live go on until they end."""
        await self.connect()

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Most tokens (prompt plus output) a request may have."""


# ---------------------------------------------------------------------------------------------- records


@dataclass(slots=True, kw_only=True)
class InferenceRecord:
    """One stored exchange; `record_id` is the receipt. `response` is what the client saw, byte for byte."""

    record_id: str
    scenario: str
    created_at: float
    route: str  # "/v1/chat/completions"
    request: bytes
    response: bytes
    status: int
    release_id: str | None  # head of the chain when the request was admitted
    generations: list[Generation]
    tags: dict[str, str] = field(default_factory=dict)
    parent_id: str | None = None  # receipt of the answer of ours that the conversation goes on from
    fork_of: str | None = None  # receipt of the answer in whose place the conversation has another one
    train: bool = True  # False: training is off for it, whatever any recipe says
    redacted: bool = False  # something of request or response was taken out, and with it every token id
    sequence: int = 0  # total order in the store; assigned by it
    purged: dict[str, str] = field(default_factory=dict)  # fields that retention emptied -> sha256 of what they held


@dataclass(slots=True, kw_only=True)
class ReportRecord:
    """Feedback quoting receipts. Exactly one of `score` and `error` may be set; both may be absent."""

    record_id: str
    scenario: str
    created_at: float
    references: list[str]
    score: float | None = None
    feedback: str | dict[str, Any] | None = None
    error: str | None = None  # the grader failed: counted, never a score
    metadata: dict[str, Any] = field(default_factory=dict)
    train: bool = True  # as of an answer
    sequence: int = 0
    purged: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class InstructionRecord:
    """A training instruction given through the API."""

    record_id: str
    scenario: str
    created_at: float
    body: dict[str, Any]
    sequence: int = 0


Record = InferenceRecord | ReportRecord | InstructionRecord


class RecordKind(enum.StrEnum):
    INFERENCE = "inference"
    REPORT = "report"
    INSTRUCTION = "instruction"


class Disposition(enum.StrEnum):
    """Why a record or report is consumed. A consumed one never trains (again)."""

    TRAINED = "trained"  # in a batch whose candidate was released
    REJECTED = "rejected"  # in a batch whose candidate was rejected
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    INCOMPLETE = "incomplete"
    INELIGIBLE = "ineligible"  # no score, grader error, ambiguous choice, ...


@dataclass(slots=True, frozen=True)
class Consumption:
    record_id: str
    disposition: Disposition
    reason: str = ""


# ---------------------------------------------------------------------------------------------- the chain


class ReleaseKind(enum.StrEnum):
    BASE = "base"
    TRAINED = "trained"
    ROLLBACK = "rollback"
    PROMOTED = "promoted"


@dataclass(slots=True, kw_only=True)
class Release:
    """One accepted version of a scenario. `content_id` is a hash of bytes; BASE content is the base model itself."""

    release_id: str
    scenario: str
    number: int  # 0 for the base, then 1, 2, ...
    parent_id: str | None
    kind: ReleaseKind
    content_id: str
    runtime_load_id: str
    created_at: float
    state_id: str | None = None  # content id of the trainer's optimizer state
    job_id: str | None = None
    source_release_id: str | None = None  # of a rollback: whose content it serves
    metrics: dict[str, Any] = field(default_factory=dict)


class CommitKind(enum.StrEnum):
    TRAINED = "trained"
    REJECTED = "rejected"
    NO_SIGNAL = "no_signal"
    DISCARDED = "discarded"  # ineligible records written off, nothing trained
    ROLLBACK = "rollback"
    PROMOTED = "promoted"


@dataclass(slots=True, kw_only=True)
class Commit:
    """One atomic step of a scenario: head move (if any), consumption, algorithm state and metrics together."""

    commit_id: str  # unique; committing the same id twice returns the first
    scenario: str
    kind: CommitKind
    created_at: float
    job_id: str | None = None
    expected_head: str | None = None  # compare-and-swap; required with `release`
    release: Release | None = None
    consumed: list[Consumption] = field(default_factory=list)
    algorithm_state: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    step: int = 0  # assigned by the store: 1, 2, ... per scenario


@dataclass(slots=True, kw_only=True)
class ScenarioState:
    """What the store knows of one scenario."""

    scenario: str
    created_at: float
    head: Release
    step: int
    algorithm_state: dict[str, Any]


@dataclass(slots=True, frozen=True)
class Retention:
    """Which records keep their bodies. Times are Unix seconds; None: no such limit."""

    consumed_before: float | None = None  # consumed ones from before this time are emptied
    max_bytes: int | None = None  # beyond it the oldest consumed ones are emptied, whatever their time
    unreported_before: float | None = None  # answers from before it that no report waits for are written off, too


@dataclass(slots=True, frozen=True)
class PurgeResult:
    """What one call did. `more`: calling again would do more."""

    records: int
    bytes: int  # that the records take less than before, as stored
    more: bool


class Storage(ABC):
    """Records, chain, commits and consumption of one deployment in one database. All methods are safe to retry."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def append(self, record: Record) -> Record:
        """Store durably, then return the stored record. Same id and content: the stored one. Raises Conflict."""

    @abstractmethod
    async def get(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Record]:
        """Return those of `record_ids` that this scenario holds."""

    @abstractmethod
    async def page(
        self,
        scenario: str,
        *,
        kind: RecordKind | None = None,
        after: int = 0,
        since: float | None = None,
        until: float | None = None,
        limit: int = 100,
    ) -> list[Record]:
        """Records in order of `sequence`, those after `after` first; at most `limit`."""

    @abstractmethod
    async def pending_reports(self, scenario: str, after: int, limit: int) -> list[ReportRecord]:
        """Reports with sequence > `after` that are not consumed, in order."""

    @abstractmethod
    async def consumed(self, scenario: str, record_ids: Sequence[str]) -> dict[str, Disposition]:
        """Return the disposition of those of `record_ids` that are consumed."""

    @abstractmethod
    async def counts(self, scenario: str) -> dict[str, int]:
        """Records by kind ("inference", "report", ...) and consumption by "consumed.<disposition>"."""

    @abstractmethod
    async def create_scenario(self, base: Release) -> ScenarioState:
        """Create the scenario with its BASE release; if it exists, return it unchanged."""

    @abstractmethod
    async def scenario(self, scenario: str) -> ScenarioState | None: ...

    @abstractmethod
    async def scenarios(self) -> list[ScenarioState]: ...

    @abstractmethod
    async def commit(self, commit: Commit) -> Commit:
        """Apply in one transaction, all or nothing.

        Raises Conflict if the head is not `expected_head`, or if a record is consumed already (by another commit).
        """

    @abstractmethod
    async def commit_by_job(self, job_id: str) -> Commit | None: ...

    @abstractmethod
    async def commits(self, scenario: str, limit: int = 100) -> list[Commit]:
        """Newest first."""

    @abstractmethod
    async def releases(self, scenario: str, limit: int = 100) -> list[Release]:
        """Newest first."""

    @abstractmethod
    async def release(self, scenario: str, release_id: str) -> Release | None: ...

    @abstractmethod
    async def next_load_sequence(self) -> int:
        """A number that was never returned before, durable before it is returned. The base load is 0; first is 1."""

    @abstractmethod
    async def check(self) -> None:
        """Prove that a write can be made durable now; raises StorageError with the reason."""

    @abstractmethod
    async def take_lease(self, holder: str, seconds: float) -> bool:
        """Take or renew the deployment's training lease, which only its holder may commit under; False: another has it.

        It ends `seconds` later by the store's clock. `holder` is the same in each run of one process and no other's.
        A storage that never took it may commit while nobody holds it.
        """

    @abstractmethod
    async def end_lease(self) -> None:
        """Give the lease back, if this storage still holds it."""

    @abstractmethod
    async def lease_holder(self) -> str | None:
        """Who holds the training lease now, if anybody does."""

    @abstractmethod
    async def purge(self, retention: Retention, limit: int) -> PurgeResult:
        """Empty the oldest records that `retention` no longer keeps, at most `limit`. Never one that may still train.

        What is emptied keeps its id, its kind, its times, its fate and the hashes of what it held (`purged`).
        """


class ContentStore(ABC):
    """Content-addressed directories. The same bytes are stored once, whoever writes them."""

    @abstractmethod
    def put(self, directory: Path) -> str:
        """Take every regular file below `directory`, durably; return the content id. `directory` may be removed."""

    @abstractmethod
    def path(self, content_id: str) -> Path:
        """A read-only directory with the files. Raises NotFound."""

    @abstractmethod
    def exists(self, content_id: str) -> bool: ...

    @abstractmethod
    def retain(self, content_ids: set[str]) -> int:
        """Delete all other contents and the blobs nobody refers to; return the bytes freed."""


# ---------------------------------------------------------------------------------------------- training


@dataclass(slots=True, frozen=True)
class Objective:
    """A recipe names its objective; the trainer looks it up. Known names are the modules of train/objectives/."""

    name: str
    params: dict[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class TrainSample:
    """One generation with its learning signal."""

    record_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]  # behaviour, temperature 1, [num_output_tokens]
    advantages: list[float]  # [num_output_tokens]
    mask: list[bool] | None = None  # tokens that count; None: all
    release_id: str | None = None  # the head when the request was admitted


@dataclass(slots=True, kw_only=True)
class StepSignal:
    """All a trainer needs for one optimizer step, independent of any recipe."""

    objective: Objective
    samples: list[TrainSample]
    metrics: dict[str, float] = field(default_factory=dict)  # the recipe's own: mean score, groups, ...


@dataclass(slots=True, kw_only=True)
class TrainJob:
    """One step for one scenario, from its committed incumbent. Paths are directories of the content store."""

    job_id: str
    scenario: str
    step: int
    signal: StepSignal
    incumbent_path: str | None  # None: the base model
    state_path: str | None  # optimizer state; None: fresh
    output_path: str  # the trainer writes weights/ and state/ below it
    probe_ids: list[int]  # fixed token ids, [num_probe]
    consumed: list[Consumption] = field(default_factory=list)  # what the step's commit will consume
    algorithm_state: dict[str, Any] | None = None  # what it will make of the recipe's state


@dataclass(slots=True, kw_only=True)
class TrainResult:
    """What a step produced. `probe_logprobs` are of probe_ids[1:] given what precedes, [num_probe - 1]."""

    weights_path: str
    state_path: str
    metrics: dict[str, Any]
    probe_logprobs: list[float]  # under the candidate
    incumbent_probe_logprobs: list[float]


class WeightKind(enum.StrEnum):
    FULL = "full"
    LORA = "lora"


class MemoryRegion(enum.StrEnum):
    """Memory of a device that its owner can give up and take again."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    OPTIMIZER = "optimizer"


@dataclass(slots=True, kw_only=True)
class MemoryReport:
    """How one owner of memory acknowledges a release or a restore."""

    owner: str  # "engine-0", "trainer"
    released: list[MemoryRegion]  # regions that hold nothing now
    bytes_before: int  # what its process held of the device; resident memory on a CPU
    bytes_after: int
    device_free: int  # bytes that nobody held on the device afterwards


@dataclass(slots=True, frozen=True)
class TransferSession:
    """How weights go from this trainer to these engines, until either is replaced.

    With "disk", sender and receivers see the same files at the same paths: the sender leaves `token` at
    `<directory>/token`, and every receiver reads it there.
    """

    transfer: str  # "disk"
    directory: str
    token: str


class TrainingBackend(ABC):
    """Worker side of one trainer. Blocking; called by the coordinator only, one call at a time."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def train(self, job: TrainJob) -> TrainResult:
        """One optimizer step from the incumbent. Writes under `job.output_path` and changes nothing else.

        Raises TrainingError (bad batch, non-finite loss), StorageError (the disk refused), WorkerDied.
        """

    @abstractmethod
    def health(self) -> str | None:
        """None when healthy, else the reason."""

    @abstractmethod
    def close(self) -> None: ...

    def release_memory(self) -> MemoryReport:
        """Give the device back until `restore_memory`; no step in between. Only a colocated trainer is asked.

        Whatever it raises, and a report in which WEIGHTS and OPTIMIZER are not released, makes it unusable: it is
        closed, and started again before the next step.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot share its devices")

    def restore_memory(self) -> MemoryReport:
        """Take the device for the next step, from nothing: a job names its incumbent and optimizer state."""
        raise NotImplementedError(f"{type(self).__name__} cannot share its devices")

    @property
    @abstractmethod
    def weight_kind(self) -> WeightKind: ...

    @property
    def immutable_candidates(self) -> bool:
        """True if a step never changes its incumbent, so that an interrupted one may be trained again."""
        return False

    @property
    def accepted_transfers(self) -> tuple[str, ...]:
        """Names of the ways this trainer can hand weights over, the best first."""
        return ("disk",)

    @abstractmethod
    def attach(self, session: TransferSession) -> None:
        """Begin a transfer session as its sender: leave the session's token where the receivers will look for it."""


# ---------------------------------------------------------------------------------------------- inference control


class PauseMode(enum.StrEnum):
    RETRACT = "retract"  # requests go back to the queue, their KV is dropped and recomputed; caches are flushed
    IN_PLACE = "in_place"  # requests freeze with their KV


@dataclass(slots=True, kw_only=True)
class WeightLoad:
    """One load of weights into an engine. `path` is a content directory; None is the base model as started."""

    runtime_load_id: str
    content_id: str
    kind: WeightKind
    path: str | None


@dataclass(slots=True, kw_only=True)
class PrefixUse:
    """What prefix sharing did for one lane, since the engine was started."""

    prompt_tokens: int = 0  # of the requests that were admitted
    hit_tokens: int = 0  # of those, found in the prefix cache
    hit_bytes: int = 0  # of keys and values that hits made unnecessary to compute
    recomputed_tokens: int = 0  # computed again, because a publication or want of pages had dropped them


@dataclass(slots=True, kw_only=True)
class EngineReport:
    """What one engine says of itself; verification compares it with what was asked."""

    engine: str  # "engine-0"
    lanes: dict[str, str]  # lane -> runtime load ID
    loads: dict[str, str]  # runtime load ID -> content id
    paused: bool
    free_pages: int
    total_pages: int
    running: int
    waiting: int
    leaked: dict[str, str] = field(default_factory=dict)  # runtime load ID -> why it could not be freed
    dtype: str = ""  # what it computes in, "float32" or "bfloat16"; empty: unknown
    stats: dict[str, float] = field(default_factory=dict)
    prefixes: dict[str, PrefixUse] = field(default_factory=dict)  # by lane


class InferenceBackend(ABC):
    """Worker side of one inference integration. Blocking; each call applies to every engine or raises.

    Loads and lanes: `stage` makes weights resident under a runtime load ID that serves only requests pinning it;
    `activate` points a lane at a staged load, and is legal only while paused.
    """

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Return when no engine will generate a token until `resume`. RETRACT also flushes. Raises BarrierError."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def flush(self) -> None:
        """Drop every cached prefix. Raises BarrierError if an engine refuses."""

    @abstractmethod
    def stage(self, load: WeightLoad) -> None:
        """Raises EngineError (nothing changed) or EngineUncertain. Staging what is resident is a no-op."""

    def stages(self, load: WeightLoad) -> bool:
        """Whether a staged `load` is resident, so that it can be scored and sampled, before a lane is pointed at it.

        Engines that hold one set of full weights answer no for another: for them `stage` only takes note, and
        `activate` loads and verifies.
        """
        return True

    @abstractmethod
    def activate(self, lane: str, runtime_load_id: str) -> None: ...

    @abstractmethod
    def drop(self, runtime_load_id: str) -> None:
        """Free a load that no lane serves; requests that pin it are cut. Dropping an unknown one is a no-op."""

    def evict(self, runtime_load_id: str) -> bool:
        """`drop` it unless a request still decodes with it on some engine; False if one does.

        An engine whose `drop` waits for such requests need not implement this.
        """
        self.drop(runtime_load_id)
        return True

    @abstractmethod
    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[list[float]]:
        """Log-probabilities of token_ids[1:] as each engine would serve them: [num_engines][num_tokens - 1]."""

    @abstractmethod
    def reports(self) -> list[EngineReport]: ...

    @abstractmethod
    def release_memory(self, regions: Collection[MemoryRegion]) -> list[MemoryReport]:
        """Free `regions` (of WEIGHTS and KV_CACHE) on every paused engine; one report each. New requests wait.

        With WEIGHTS go all loads, the base too. Whatever it raises, and a report that lacks a region, makes the engines
        unusable until `restart`.
        """

    @abstractmethod
    def restore_memory(self) -> list[MemoryReport]:
        """Take back what was released: an empty KV cache and, with WEIGHTS, the base load; others are staged again.

        The engines stay paused, and lanes keep their load IDs. Errors as with `release_memory`.
        """

    @abstractmethod
    def restart(self) -> None:
        """Replace every engine by a fresh one that has only the base load, and is paused."""

    @abstractmethod
    def health(self) -> str | None:
        """None when every engine is healthy, else the reason."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def max_loads(self) -> int:
        """Slots of one engine: how many sets of weights besides the base's may be resident. Default: no bound."""
        return sys.maxsize

    @property
    @abstractmethod
    def probe_tolerance(self) -> float:
        """Largest honest difference in nats between trainer and engine on the probe, given the engine's dtype."""

    @abstractmethod
    def endpoints(self) -> list[str]:
        """Where the engines' data planes listen, in order of engine: what this integration's handler connects to."""

    @property
    def accepted_transfers(self) -> tuple[str, ...]:
        """Names of the ways these engines can receive weights, the best first."""
        return ("disk",)

    @abstractmethod
    def attach(self, session: TransferSession) -> None:
        """Begin a transfer session as its receivers, after the sender. Raises EngineError if they do not meet."""


# ---------------------------------------------------------------------------------------------- jobs


class MarkerState(enum.StrEnum):
    """The life of one job.

    RUNNING -> CHECKPOINT -> UPDATING_WEIGHTS -> READY_TO_COMMIT -> HEAD_COMMITTED -> COMPLETE
                         \\-> REJECTING -> REJECTED
    """

    RUNNING = "running"
    CHECKPOINT = "checkpoint"
    UPDATING_WEIGHTS = "updating_weights"
    READY_TO_COMMIT = "ready_to_commit"
    HEAD_COMMITTED = "head_committed"
    COMPLETE = "complete"
    REJECTING = "rejecting"
    REJECTED = "rejected"


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A checkpoint that serves nobody yet."""

    job_id: str
    scenario: str
    content_id: str
    state_id: str | None
    kind: WeightKind
    runtime_load_id: str  # assigned, durable in the marker
    probe_logprobs: list[float]
    incumbent_probe_logprobs: list[float]
    origin: ReleaseKind = ReleaseKind.TRAINED
    source_release_id: str | None = None  # of a rollback or promotion: whose content it is
    metrics: dict[str, Any] = field(default_factory=dict)
    consumed: list[Consumption] = field(default_factory=list)
    algorithm_state: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Marker:
    """The coordinator's one durable record of the job in flight."""

    job_id: str
    scenario: str
    state: MarkerState
    updated_at: float
    candidate: Candidate | None = None  # from CHECKPOINT on
    error: str | None = None


class TrainingRuntime(ABC):
    """Service side of training and publication. Every call may be retried with the same job id."""

    @abstractmethod
    async def start(self) -> None:
        """Start, or find, what trains and publishes. Raises what a component raised, with everything closed again."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate:
        """RUNNING -> CHECKPOINT, then stage the candidate for sampling. Raises TrainingError, WorkerDied."""

    @abstractmethod
    async def adopt(self, candidate: Candidate) -> Candidate:
        """Begin at CHECKPOINT with bytes that exist already (rollback, promotion)."""

    @abstractmethod
    async def publish(self, candidate: Candidate) -> None:
        """CHECKPOINT -> UPDATING_WEIGHTS -> READY_TO_COMMIT: paused, transferred, verified; nothing serves it yet."""

    @abstractmethod
    async def acknowledge(self, job_id: str, release: Release) -> None:
        """The release is committed: HEAD_COMMITTED, resume, COMPLETE."""

    async def commit_candidate(self, candidate: Candidate, release: Release) -> None:  # noqa: B027
        """Tell a trainer that keeps candidates of its own which one was committed. Repeating it is harmless."""

    @abstractmethod
    async def reject(self, job_id: str, reason: str) -> None:
        """REJECTING -> REJECTED: incumbent resources restored, the candidate's freed."""

    @abstractmethod
    async def remember(self, release: Release) -> None:
        """A scenario was created: from now on its head is this base release."""

    @abstractmethod
    async def recover(self, storage: Storage) -> Candidate | None:
        """Bring the engines to the heads in `storage` and settle the marker; call it once, before serving.

        Returns the candidate of an interrupted job that is to be evaluated and published again, or None. A runtime
        whose coordinator is replaced later asks `storage` again by itself.
        """

    @abstractmethod
    async def marker(self) -> Marker | None:
        """The durable marker as it stands."""

    @abstractmethod
    def health(self) -> str | None:
        """Why nothing can be trained now; None when it can, or when nothing is meant to train."""


class InferenceRuntime(ABC):
    """Service side of the engines: the data plane, the door for new requests, and what the engines say."""

    @property
    @abstractmethod
    def handler(self) -> InferenceHandler: ...

    @abstractmethod
    def health(self) -> str | None:
        """Why the engines cannot serve now; None when they can."""

    def admit(self) -> None:
        """Let a new request in. Raises Unavailable, with the reason, while the engines cannot serve."""
        if (reason := self.health()) is not None:
            raise Unavailable(reason)

    async def reports(self) -> list[EngineReport]:
        """What the engines say of themselves; empty while they cannot answer."""
        return []

    @property
    def pause_phases(self) -> dict[str, float]:
        """Where the time went for which the newest publication held the engines, in seconds; empty before the first."""
        return {}

    @property
    def memory(self) -> dict[str, Any] | None:
        """What engines and trainer acknowledged at the newest colocated step; None where they share nothing."""
        return None

    @property
    def residency(self) -> dict[str, Any]:
        """What the engines hold besides the base load, for people."""
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. The engines themselves end with the training runtime, which owns the coordinator."""


@dataclass(slots=True, kw_only=True)
class CoordinatorStatus:
    """What a coordinator says of itself and of what it watches. Reasons are None while all is well."""

    incarnation: str  # another one has other engines, and must be told the heads again
    generation: int  # how often this one replaced its engines
    endpoints: list[str]  # of the engines' data planes
    engines: str | None  # why they cannot serve
    trainer: str | None  # why it cannot train
    pause_phases: dict[str, float] = field(default_factory=dict)
    memory: dict[str, list[MemoryReport]] = field(default_factory=dict)  # of the newest hand-overs, if colocated
    step_seconds: float | None = None  # for which the newest colocated step kept requests waiting
    residency: dict[str, Any] = field(default_factory=dict)  # what the engines hold besides the base load
    restarts: dict[str, int] = field(default_factory=dict)  # component -> how often this coordinator replaced it


class CandidateBackend(ABC):
    """What a trainer in a scenario drives: from a job to a candidate, from there to a release or to nothing.

    Every call may be repeated with the same job.
    """

    @abstractmethod
    async def train(self, job: TrainJob, runtime_load_id: str) -> Candidate: ...

    @abstractmethod
    async def adopt(self, candidate: Candidate) -> Candidate:
        """Take bytes that exist already as a candidate."""

    @abstractmethod
    def sampler(self, candidate: Candidate, head: Release) -> CandidateSampler:
        """How an evaluation asks the candidate, and the head that it would replace."""

    @abstractmethod
    async def publish(self, candidate: Candidate) -> None:
        """Return behind the commit gate: in the engines, verified, paused."""

    @abstractmethod
    async def commit(self, candidate: Candidate, release: Release) -> None:
        """The release is durable: open the gate."""

    @abstractmethod
    async def reject(self, job_id: str, reason: str) -> None: ...


# ---------------------------------------------------------------------------------------------- recipes


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a processor hands out: samples with their signal, and what they consume when the step commits."""

    samples: list[TrainSample]
    consumed: list[Consumption]
    metrics: dict[str, float]
    signal: bool = True  # False: nothing to learn here ("no signal")


class Processor(ABC):
    """A recipe's batch builder: pure bookkeeping, no tensors, no I/O. Rebuilt from unconsumed reports at start."""

    @abstractmethod
    def ingest(
        self,
        report: ReportRecord,
        records: Mapping[str, InferenceRecord],
        consumed: Mapping[str, Disposition] | None = None,
    ) -> list[Consumption]:
        """Take one report with the records it quotes; return what can never train, with the reason.

        `consumed` says which of those records the store holds as consumed: they never train again. Taking a report that
        waits already changes nothing.
        """

    @abstractmethod
    def expire(self, head_number: int, now: float, release_numbers: Mapping[str, int]) -> list[Consumption]:
        """Write off what became too stale: `release_numbers` maps release ids to their numbers in the chain."""

    @abstractmethod
    def ready(self, now: float) -> bool: ...

    @abstractmethod
    def build(self, now: float) -> Batch:
        """Build the next batch without forgetting it; the same call gives the same batch until acknowledged."""

    @abstractmethod
    def acknowledge(self, batch: Batch) -> None:
        """The batch is committed, in whatever way: forget it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Algorithm state to be committed with the step being built (JSON values only)."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """What waits and why, for people: pending, waiting_for_group, too_young, ..."""


class Recipe(ABC):
    """The method: which records are eligible, how they become a batch, the objective, the gate."""

    name: str

    @abstractmethod
    def processor(self, algorithm_state: Mapping[str, Any]) -> Processor | None:
        """A fresh processor that continues from the committed state; None: this recipe never trains."""

    @abstractmethod
    def prepare(self, batch: Batch) -> StepSignal: ...

    @abstractmethod
    def validate_report(self, report: ReportRecord) -> None:
        """Raises InvalidRequest naming the field."""

    @abstractmethod
    def contract(self) -> dict[str, Any]:
        """What this recipe wants of its client: report schema, eligibility, batch, objective."""


# ---------------------------------------------------------------------------------------------- evaluation


class CandidateSampler(ABC):
    """How an evaluation plugin asks the model: greedy or sampled chat completions under pinned weights."""

    @abstractmethod
    async def chat(self, messages: list[dict[str, Any]], sampling: SamplingParams, *, candidate: bool) -> str:
        """The answer's text under the candidate (True) or the incumbent (False)."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """`scores` are whatever the plugin measured; stored with the commit."""

    scores: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Decision:
    selected: bool
    reason: str


class Evaluator(ABC):
    """An evaluation plugin. Anything it raises rejects the candidate (fail closed)."""

    @abstractmethod
    async def evaluate(self, candidate: Candidate, sampler: CandidateSampler) -> Evaluation: ...

    @abstractmethod
    def decide(self, candidate: Candidate, evaluation: Evaluation) -> Decision: ...


# ---------------------------------------------------------------------------------------------- executors


class Executor(ABC):
    """Where workers run. A worker is an object; its public methods are called by name.

    A timeout stops the waiting, not the work, and nothing is ever sent twice.
    """

    @abstractmethod
    def start(self) -> None:
        """Start every worker; raises WorkerDied with the worker's own error."""

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def rpc(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call one worker. The future raises what the method raised, or WorkerDied."""

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        return [self.rpc(rank, method, *args, **kwargs) for rank in range(self.world_size)]

    @abstractmethod
    def health(self) -> str | None:
        """None while every worker lives, else the reason."""

    @abstractmethod
    def on_failure(self, listener: Callable[[str], None]) -> None:
        """Call `listener` once, from any thread, when a worker dies unasked."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Stop the workers and leave no process behind."""
