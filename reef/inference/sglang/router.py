"""SGLang's router in front of several engines: traffic goes through it, control never does."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from reef.errors import EngineError
from reef.inference.sglang.process import LeasedProcess, free_port

_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 15.0
_LAUNCH = "import sys; sys.modules['sglang'] = None; from sglang_router.launch_router import main; main()"
"""The router tries to import SGLang for its tracing, which takes half a minute and fails on CPU builds of torch."""


class Router:
    """One router process; workers are added and removed while it runs."""

    def __init__(self, python: Path, logs: Path | None, start_timeout: float) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = [str(python), "-c", _LAUNCH, "--host", "127.0.0.1", "--port", str(self._port)]
        # A request is never sent twice: whether to ask again is the client's to decide.
        command += ["--policy", "cache_aware", "--disable-retries", "--disable-circuit-breaker"]
        command += ["--prometheus-port", str(free_port())]
        log = None if logs is None else logs / "router.log"
        self._process = LeasedProcess("router", command, {**os.environ, "PYTHONPATH": ""}, log)
        try:
            self._process.wait_until(self._listens, start_timeout)
        except BaseException:
            self._process.stop(_STOP_SECONDS)
            raise

    def workers(self) -> list[str]:
        """Addresses of the engines that traffic goes to."""
        return [worker["url"] for worker in self._listed() if worker["is_healthy"]]

    def set_workers(self, urls: Sequence[str], seconds: float) -> None:
        """Add what is missing, remove what is not among `urls`; return when the router uses exactly these."""
        known = {worker["url"]: worker["id"] for worker in self._listed()}
        for url in known.keys() - set(urls):
            self._call("DELETE", f"/workers/{quote(known[url], safe='')}")
        for url in set(urls) - known.keys():
            self._call("POST", "/workers", {"url": url, "worker_type": "regular"})
        self._process.wait_until(lambda: sorted(self.workers()) == sorted(urls), seconds)

    def death(self) -> str | None:
        return self._process.death()

    def stop(self) -> None:
        self._process.stop(_STOP_SECONDS)

    def _listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", "/workers")["workers"]
        return found

    def _listens(self) -> bool:
        try:
            self._call("GET", "/workers")
        except EngineError:
            return False
        return True

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the router did not answer {method} {path}: {error}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise EngineError(f"the router refused {method} {path} with {response.status}: {answer.decode()[:300]}")
        return json.loads(answer) if answer else None
