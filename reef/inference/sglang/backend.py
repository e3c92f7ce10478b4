"""The worker's side of SGLang: lifecycle, weights and lanes of every engine. Control never goes through a router.

Adapters are loaded under their runtime load ID, a name that is never used for other bytes, and stay beside each other.
Full weights cannot: an engine holds one set, so `stage` only takes note of them and `activate` loads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from reef.errors import BarrierError, ConfigError, EngineError, EngineUncertain, ReefError, WorkerDied
from reef.inference.sglang.config import DISABLE, SGLangConfig
from reef.inference.sglang.control import EngineState, Refused
from reef.inference.sglang.engine import BorrowedEngine, Engine, ManagedEngine
from reef.inference.sglang.environment import require_interpreter
from reef.inference.sglang.router import Router
from reef.inference.sglang.table import engine_report, memory_report, table_entry
from reef.inference.sglang.weights import check_weights_directory
from reef.runtime.interfaces import (
    BASE_LOAD_ID,
    EngineReport,
    InferenceBackend,
    MemoryRegion,
    MemoryReport,
    PauseMode,
    TransferSession,
    WeightKind,
    WeightLoad,
)

log = logging.getLogger("reef.sglang")

T = TypeVar("T")

PLUGIN_VERSION = "2"

# Trainer and engine run the same model through different kernels; see the local engine for what was measured.
_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.1}
_PROBE_SECONDS = 2.0


class SGLangBackend(InferenceBackend):
    """Drives `config.num_engines` engines.

    `stage`, `activate` and the memory calls change every engine or raise EngineUncertain; an engine that did not
    answer, or whose weights are in doubt, is uncertain for good: `health` says so until `restart`.
    """

    def __init__(
        self,
        config: SGLangConfig,
        *,
        mode: PauseMode,
        lora: bool,
        colocated: bool = False,
        base_content_id: str = "",
        logs: Path | None = None,
    ) -> None:
        self._config = config
        self._mode = mode
        self._lora = lora
        self._base_content_id = base_content_id
        self._logs = logs
        self._engines: list[Engine] = [
            BorrowedEngine(f"engine-{number}", url, config) for number, url in enumerate(config.endpoints)
        ] or [
            ManagedEngine(f"engine-{number}", config, options, mode=mode, lora=lora, colocated=colocated, logs=logs)
            for number, options in enumerate(config.engine_options())
        ]
        self._router: Router | None = None
        self._share = True
        self._loads: dict[str, WeightLoad] = {}
        self._adapters: dict[str, str] = {}  # load -> SGLang's name of its bytes, which loads of the same bytes share
        self._lanes: dict[str, str] = {}
        self._weights = BASE_LOAD_ID  # the load whose full weights every engine holds
        self._holds_base = True  # whether those are the base model's
        self._paused: PauseMode | None = None  # by the barrier that holds
        self._dtype = ""
        self._doubt: str | None = None  # why the engines must be replaced
        self._silence: str | None = None  # what the watching thread found
        self._epoch: object | None = None  # of the engines that serve; None while they are started or stopped
        self._lock = Lock()  # guards _doubt
        self._closing = Event()
        self._watch: Thread | None = None
        self._threads = ThreadPoolExecutor(len(self._engines), thread_name_prefix="sglang")

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Raises ConfigError where an engine is not what the configuration says."""
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        self._launch()
        self._watch = Thread(target=self._look, name="sglang-watch", daemon=True)
        self._watch.start()

    def endpoints(self) -> list[str]:
        """Where requests go, the router or the only engine; then every engine."""
        engines = [engine.control.url for engine in self._engines]
        return [self._router.url if self._router is not None else engines[0], *engines]

    def restart(self) -> None:
        """Replace every engine of Reef's; put borrowed ones back to the base load. All are paused."""
        self._stop()
        self._launch()
        self.pause(PauseMode.IN_PLACE)

    def close(self) -> None:
        self._closing.set()
        try:
            self._stop()
        finally:
            router, self._router = self._router, None
            if router is not None:
                router.stop()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def health(self) -> str | None:
        """Never blocks: processes are looked at, and a thread asks each engine every few seconds."""
        deaths = [self._router.death()] if self._router is not None else []
        deaths += [engine.death() for engine in self._engines]
        return next((reason for reason in [*deaths, self._doubt, self._silence] if reason is not None), None)

    def _launch(self) -> None:
        for share in self._tries():
            self._start_engines(share)
            try:
                states = self._each(lambda engine: engine.control.state())
                if all(self._verify(engine, state, share) for engine, state in zip(self._engines, states, strict=True)):
                    break
            except BaseException:
                self._stop()
                raise
            self._stop()
        self._share = share
        self._loads, self._adapters, self._lanes = {}, {}, {}
        self._weights, self._holds_base, self._paused = BASE_LOAD_ID, True, None
        self._dtype = states[0].settings.dtype
        self._reset_borrowed(states)
        self._put_table()
        if len(self._engines) > 1:
            if self._router is None or self._router.death():
                python = require_interpreter(self._config.python)
                self._router = Router(python, self._logs, self._config.start_timeout)
            self._router.set_workers([engine.control.url for engine in self._engines], self._config.start_timeout)
        with self._lock:
            self._doubt = self._silence = None
        self._epoch = object()

    def _tries(self) -> tuple[bool, ...]:
        """Start with a prefix cache where it may turn out safe, and again without one if it does not."""
        best = [
            self._config.sharing(engine.options, self._mode, lora=self._lora, adapter_scoped=True, version_keyed=True)
            for engine in self._engines
        ]
        return (True, False) if any(sharing.prefix_cache for sharing in best) else (False,)

    def _start_engines(self, share: bool) -> None:
        try:
            for engine in self._engines:
                engine.start(share=share and engine.options.get(DISABLE) is not True)
            self._each(lambda engine: engine.wait(self._config.start_timeout))
        except BaseException:
            self._stop()
            raise

    def _verify(self, engine: Engine, state: EngineState, share: bool) -> bool:
        """Whether this engine may share prefixes the way it does. Raises ConfigError."""
        settings = state.settings
        if state.plugin != PLUGIN_VERSION:
            raise ConfigError(f"{engine.name} has version {state.plugin} of Reef's plugin, expected {PLUGIN_VERSION}")
        if settings.disaggregation_mode != "null" or settings.dp_size != 1:
            raise ConfigError(
                f"{engine.name} is a disaggregated or data-parallel engine: Reef serves with regular ones"
            )
        if self._lora and not settings.enable_lora:
            raise ConfigError(
                f"{engine.name} was started without --enable-lora, and adapters are to be published to it"
            )
        sharing = self._config.sharing(
            engine.options,
            self._mode,
            lora=self._lora,
            adapter_scoped=state.adapter_scoped,
            version_keyed=state.version_keyed,
        )
        shares = not settings.disable_radix_cache
        log.info("%s: prefix sharing is %s: %s", engine.name, "on" if shares else "off", sharing.reason)
        if not engine.owned and shares != sharing.prefix_cache:
            raise ConfigError(
                f"{engine.name} at {engine.control.url} has disable_radix_cache {not shares}, and must have "
                f"{not sharing.prefix_cache}: {sharing.reason}"
            )
        return sharing.prefix_cache or not share or not shares

    def _reset_borrowed(self, states: Sequence[EngineState]) -> None:
        """Nobody restarts a borrowed engine: take what an earlier Reef left in it away."""
        for engine, state in zip(self._engines, states, strict=True):
            if engine.owned:
                continue
            if state.weights != BASE_LOAD_ID:
                engine.control.pause(self._mode)
                if self._mode is PauseMode.RETRACT:
                    engine.control.flush()
                engine.control.update_weights(state.settings.model_path, BASE_LOAD_ID)
                engine.control.resume()
            engine.control.put_table({}, {}, BASE_LOAD_ID)
            for name in state.adapters:
                engine.control.unload_adapter(name)

    def _stop(self) -> None:
        self._epoch = None
        for engine in self._engines:
            engine.release()
        failures = [failure for failure in self._outcomes(lambda engine: engine.stop()) if failure is not None]
        if failures:
            raise failures[0]

    def _look(self) -> None:
        """Ask every engine now and then: one that hangs, or a borrowed one that died, has no exit code to look at."""
        while not self._closing.wait(_PROBE_SECONDS):
            found, epoch = None, self._epoch
            if epoch is None:
                continue
            for engine in self._engines:
                if engine.death() is not None:
                    continue
                try:
                    engine.control.state()
                except ReefError as error:
                    found = str(error)
            if epoch is self._epoch:  # else it was said of engines that are gone
                self._silence = found

    # ------------------------------------------------------------------ barrier

    def pause(self, mode: PauseMode) -> None:
        def stop(engine: Engine) -> None:
            engine.control.pause(mode)
            if mode is PauseMode.RETRACT:
                engine.control.flush()

        self._barrier(stop)
        self._paused = mode

    def flush(self) -> None:
        self._barrier(lambda engine: engine.control.flush())

    def resume(self) -> None:
        self._all("resume", lambda engine: engine.control.resume())
        self._paused = None

    def _barrier(self, call: Callable[[Engine], None]) -> None:
        try:
            self._all("the pause barrier", call)
        except ReefError as error:
            with self._lock:
                self._doubt = self._doubt or str(error)
            raise BarrierError(str(error)) from error

    # ------------------------------------------------------------------ weights

    def stages(self, load: WeightLoad) -> bool:
        """Adapters only. Base content is there already, or will be loaded: two scores of it, taken while others are
        answered, may differ in their last bits."""
        return load.kind is WeightKind.LORA

    def attach(self, session: TransferSession) -> None:
        """Engines read what this machine's disk has; SGLang says so itself where a borrowed one does not."""
        try:
            found = (Path(session.directory) / "token").read_text()
        except OSError as error:
            raise EngineError(f"{session.directory} is not readable here: {error.strerror}") from error
        if found != session.token:
            raise EngineError(f"{session.directory} is not the trainer's: another token is there")

    def stage(self, load: WeightLoad) -> None:
        name = load.runtime_load_id
        if name in self._loads or name == BASE_LOAD_ID:
            return
        if load.path is not None:
            check_weights_directory(load)
        if load.kind is WeightKind.LORA:
            twin = next((one for one, other in self._loads.items() if other.content_id == load.content_id), None)
            if twin is None:
                self._load_adapter(name, str(load.path))
            self._adapters[name] = name if twin is None else self._adapters[twin]
        self._loads[name] = load
        self._put_table()

    def _load_adapter(self, name: str, path: str) -> None:
        if not self._lora:
            raise EngineError(f"{name} is an adapter, and these engines were started for full weights")
        self._unload_retired()
        held = max(len(state.adapters) for state in self._states())
        if held >= self._config.max_loads:
            raise EngineError(f"{held} adapters are resident, the most that inference.max-loads allows")
        outcomes = self._outcomes(lambda engine: engine.control.load_adapter(name, path))
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures and all(isinstance(one, Refused) for one in failures):  # nobody is in doubt: undo it on the others
            for engine, outcome in zip(self._engines, outcomes, strict=True):
                if outcome is None:
                    self._undo(engine, name)
        self._raise_worst(f"loading {name}", outcomes)

    def _undo(self, engine: Engine, name: str) -> None:
        try:
            engine.control.unload_adapter(name)
        except ReefError as error:
            raise self._doubted(EngineUncertain(f"loading {name} could not be undone: {error}")) from error

    def activate(self, lane: str, runtime_load_id: str) -> None:
        load = self._loads.get(runtime_load_id)
        if load is None and runtime_load_id != BASE_LOAD_ID:
            raise EngineError(f"activate: {runtime_load_id} was never staged")
        if not all(state.paused for state in self._states()):
            raise EngineError("activate: the engines are not paused")
        if self._needs_full(lane, load):
            self._replace_full(lane, runtime_load_id, load)
        self._lanes[lane] = runtime_load_id
        self._put_table()

    def _needs_full(self, lane: str, load: WeightLoad | None) -> bool:
        """Whether other full weights must be loaded. A base lane leaves them to the lane that published them."""
        if load is not None and load.kind is WeightKind.LORA:
            if not self._holds_base:
                raise EngineError(f"an adapter cannot lie over the full weights of {self._weights}")
            return False
        if load is None or load.path is None:
            return not self._holds_base and self._lanes.get(lane) == self._weights
        return True

    def _replace_full(self, lane: str, runtime_load_id: str, load: WeightLoad | None) -> None:
        others = {name for name, served in self._lanes.items() if name != lane and not self._is_base(served)}
        if others:
            raise EngineError(f"SGLang holds one set of full weights, and other lanes are served: {sorted(others)}")
        if runtime_load_id == self._weights:
            return
        if in_use := sorted(name for state in self._states() for name, used in state.adapters.items() if used):
            raise EngineError(f"requests in flight still use the adapters {in_use}: nothing can be changed under them")
        path = self._path_of(load)
        self._all("replacing the weights", lambda engine: engine.control.update_weights(path, runtime_load_id))
        for engine, state in zip(self._engines, self._states(), strict=True):
            held = {state.weights, *(scheduler.weights for scheduler in state.schedulers)}
            if held != {runtime_load_id}:
                raise self._doubted(EngineUncertain(f"{engine.name} holds {sorted(held)}, expected {runtime_load_id}"))
        # Base weights that came back keep their new name: under the old one, requests that a barrier froze may have
        # cached what two sets of weights computed.
        self._weights, self._holds_base = runtime_load_id, load is None or load.path is None

    def _is_base(self, runtime_load_id: str) -> bool:
        load = self._loads.get(runtime_load_id)
        return load is None or (load.path is None and load.kind is WeightKind.FULL)

    def _path_of(self, load: WeightLoad | None) -> str:
        return self._config.model_path if load is None or load.path is None else load.path

    def drop(self, runtime_load_id: str) -> None:
        """Requests that name it are refused from now on. An adapter that others still use is unloaded after them."""
        if runtime_load_id not in self._loads:
            return
        if runtime_load_id in self._lanes.values() or (runtime_load_id == self._weights and not self._holds_base):
            raise EngineError(f"drop: {runtime_load_id} is served")
        del self._loads[runtime_load_id]
        self._adapters.pop(runtime_load_id, None)
        self._put_table()
        self._unload_retired()

    def evict(self, runtime_load_id: str) -> bool:
        adapter = self._adapters.get(runtime_load_id)
        if any(state.adapters.get(adapter or "") for state in self._states()):
            return False
        self.drop(runtime_load_id)
        return True

    @property
    def max_loads(self) -> int:
        return self._config.max_loads

    def _unload_retired(self) -> None:
        """Unload what no load names and no request uses: SGLang would hold every other load up until they end."""
        named = set(self._adapters.values())
        for engine in self._engines:
            for name, in_use in engine.control.state().adapters.items():
                if name not in named and not in_use:
                    engine.control.unload_adapter(name)

    def score(self, runtime_load_id: str, token_ids: list[int]) -> list[list[float]]:
        """A paused engine answers nothing: for as long as this takes, it goes on with what its lanes serve."""
        if self._paused is None:
            return self._each(lambda engine: engine.control.score(token_ids, runtime_load_id))
        self.resume()
        try:
            return self.score(runtime_load_id, token_ids)
        finally:
            self.pause(self._mode)

    def _put_table(self) -> None:
        base = self._weights if self._holds_base else BASE_LOAD_ID
        loads = {BASE_LOAD_ID: table_entry(self._base_content_id, None, base)}
        for name, load in self._loads.items():
            alias = self._is_base(name) and self._holds_base  # another name for the base that is there
            loads[name] = table_entry(load.content_id, self._adapters.get(name), base if alias else name)
        lanes = dict(self._lanes)
        self._all("telling the lanes", lambda engine: engine.control.put_table(lanes, loads, BASE_LOAD_ID))

    # ------------------------------------------------------------------ memory and reports

    def release_memory(self, regions: Collection[MemoryRegion]) -> list[MemoryReport]:
        """The engines must be paused by a barrier that retracted: SGLang dies when it is told so while it is busy.

        Adapters stay: SGLang keeps them in the host's memory.
        """
        if self._paused is not PauseMode.RETRACT:
            raise EngineError("memory can be released only behind a barrier that retracted")
        tags = sorted(region.value for region in regions)
        return self._hand_over("releasing memory", lambda engine: engine.control.release_memory(tags))

    def restore_memory(self) -> list[MemoryReport]:
        """Take the memory again; full weights are loaded again: a release without a backup loses them."""
        path = self._path_of(self._loads.get(self._weights))

        def restore(engine: Engine) -> None:
            released = {tag for scheduler in engine.control.state().schedulers for tag in scheduler.released}
            if not released:
                return  # SGLang dies when told to restore what it never released
            engine.control.restore_memory(sorted(released))
            if MemoryRegion.WEIGHTS in released:
                engine.control.update_weights(path, self._weights)

        return self._hand_over("restoring memory", restore)

    def _hand_over(self, what: str, call: Callable[[Engine], None]) -> list[MemoryReport]:
        before = self._states()
        self._all(what, call)
        return [
            memory_report(engine.name, first, second)
            for engine, first, second in zip(self._engines, before, self._states(), strict=True)
        ]

    def reports(self) -> list[EngineReport]:
        return [engine_report(engine.name, state) for engine, state in zip(self._engines, self._states(), strict=True)]

    @property
    def probe_tolerance(self) -> float:
        if not self._dtype:
            raise EngineError("the engines were never started")
        return _PROBE_TOLERANCE[self._dtype]

    # ------------------------------------------------------------------ calls

    def _states(self) -> list[EngineState]:
        return self._each(lambda engine: engine.control.state())

    def _each(self, call: Callable[[Engine], T]) -> list[T]:
        """Call every engine at once, for what is harmless when only some did it."""
        outcomes = self._outcomes(call)
        self._raise_worst("a call", outcomes)
        return outcomes

    def _all(self, what: str, call: Callable[[Engine], None]) -> None:
        """For changes that must reach every engine: a part of them is a doubt."""
        outcomes = self._outcomes(call)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures and len(failures) < len(outcomes):
            raise self._doubted(EngineUncertain(f"{what}: {failures[0]}; other engines did it")) from failures[0]
        self._raise_worst(what, outcomes)

    def _outcomes(self, call: Callable[[Engine], Any]) -> list[Any]:
        """What each engine's call returned or raised."""

        def attempt(engine: Engine) -> Any:
            try:
                return call(engine)
            except Exception as error:
                return error

        return list(self._threads.map(attempt, self._engines))

    def _raise_worst(self, what: str, outcomes: Sequence[Any]) -> None:
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        for kind in (WorkerDied, EngineUncertain, Exception):
            for failure in failures:
                if isinstance(failure, kind):
                    if isinstance(failure, EngineUncertain):
                        self._doubted(failure)
                    log.warning("%s failed: %s", what, failure)
                    raise failure

    def _doubted(self, error: EngineUncertain) -> EngineUncertain:
        with self._lock:
            self._doubt = self._doubt or str(error)
        return error
