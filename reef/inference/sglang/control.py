"""Control of one SGLang engine over HTTP. Blocking; one connection per call."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import msgspec

from reef.errors import EngineError, EngineUncertain, WorkerDied
from reef.runtime.interfaces import PauseMode


class Refused(EngineError):
    """The engine answered, and not with success: it did nothing, except where a caller knows better."""


class SchedulerState(msgspec.Struct, frozen=True):
    """What an engine's scheduler says of itself."""

    weights: str
    paused: bool
    running: int
    waiting: int
    compiling: int
    free_tokens: int
    cached_tokens: int
    total_tokens: int
    resident_bytes: int  # of the device; on a CPU, of the process
    device_free: int
    released: list[str]


class Settings(msgspec.Struct, frozen=True):
    model_path: str
    dtype: str
    disable_radix_cache: bool
    enable_lora: bool | None  # null: off
    disaggregation_mode: str
    tp_size: int
    dp_size: int


class EngineState(msgspec.Struct, frozen=True):
    """Answer of `GET /reef/state`, which Reef's plugin adds to the engine."""

    plugin: str
    weights: str
    lanes: dict[str, str]
    loads: dict[str, dict[str, Any]]
    adapters: dict[str, int]  # name -> requests that use it
    schedulers: list[SchedulerState]
    max_context: int
    vocab_size: int
    settings: Settings
    adapter_scoped: bool
    version_keyed: bool

    @property
    def paused(self) -> bool:
        return all(scheduler.paused for scheduler in self.schedulers)


class EngineControl:
    """Every call answers within `timeout` seconds or raises.

    WorkerDied: nobody listens. EngineUncertain: the call was sent and not answered, so it may have been done.
    Refused: the engine said no.
    """

    def __init__(self, name: str, url: str, timeout: float) -> None:
        self.name = name
        self.url = url
        self._timeout = timeout
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"an engine's address must be http://host:port, got {url!r}")
        self._host, self._port = parts.hostname, parts.port or 80

    def state(self) -> EngineState:
        """Raises Refused if Reef's plugin is not in the engine, EngineError if it is another version's."""
        answer = self._call("GET", "/reef/state")
        try:
            return msgspec.json.decode(answer, type=EngineState)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.name} does not say its state as Reef's plugin does: {error}") from error

    def answers(self) -> bool:
        """Whether the engine serves; never raises for one that does not."""
        try:
            self._call("GET", "/model_info")
        except (EngineError, WorkerDied):
            return False
        return True

    def pause(self, mode: PauseMode) -> None:
        """Returns when the scheduler has paused: the answer to the question after it proves that it was reached."""
        self._call("POST", "/pause_generation", {"mode": mode.value})
        if not self.state().paused:
            raise EngineUncertain(f"{self.name} did not pause")

    def resume(self) -> None:
        self._call("POST", "/continue_generation", {})

    def flush(self) -> None:
        self._call("POST", "/flush_cache")

    def load_adapter(self, name: str, path: str) -> None:
        self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": False})

    def unload_adapter(self, name: str) -> None:
        """Returns when the last request that uses it has ended, and it is gone."""
        self._call("POST", "/unload_lora_adapter", {"lora_name": name})

    def update_weights(self, path: str, weights: str) -> None:
        """Replace the full weights of a paused engine. A refusal does not say how far it got: EngineUncertain."""
        body = {"model_path": path, "weight_version": weights, "flush_cache": False, "abort_all_requests": False}
        try:
            self._call("POST", "/update_weights_from_disk", body)
        except Refused as error:
            raise EngineUncertain(str(error)) from error

    def put_table(self, lanes: dict[str, str], loads: dict[str, dict[str, Any]], default: str) -> None:
        self._call("PUT", "/reef/table", {"lanes": lanes, "loads": loads, "default": default})

    def score(self, token_ids: list[int], load: str) -> list[float]:
        """Log-probabilities of token_ids[1:]; the engine must not be paused."""
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": f"reef:load:{load}",
        }
        meta = msgspec.json.decode(self._call("POST", "/generate", body))["meta_info"]
        return [entry[0] for entry in meta["input_token_logprobs"][1:]]

    def release_memory(self, tags: list[str]) -> None:
        self._call("POST", "/release_memory_occupation", {"tags": tags})

    def restore_memory(self, tags: list[str]) -> None:
        self._call("POST", "/resume_memory_occupation", {"tags": tags})

    def _call(self, method: str, path: str, body: Any = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise WorkerDied(f"{self.name} does not answer at {self.url}: {error}") from error
            try:
                content = None if body is None else msgspec.json.encode(body)
                connection.request(method, path, content, {"content-type": "application/json"})
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                what = f"{type(error).__name__}: {error}"
                raise EngineUncertain(f"{self.name} did not answer {method} {path}: {what}") from error
        finally:
            connection.close()
        if response.status != 200:
            text = answer.decode(errors="replace").strip()[:500]
            raise Refused(f"{self.name} refused {method} {path} with {response.status}: {text}")
        return answer
