"""`reef serve` as a process of its own that can be armed with a plan, killed, watched and started again."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from reef.client import ReefClient
from reef.points import ENVIRONMENT_VARIABLE, Plan, fired, plan_kill

ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 120.0
HEALTH_SECONDS = 10.0
_CLAIMS: list[socket.socket] = []


class Unrecovered(Exception):
    """The deployment did not serve again, or did not do what it must."""


class Deployment:
    """One data directory and one port; as many runs of the service as it is started."""

    def __init__(
        self,
        directory: Path,
        flags: Mapping[str, object],
        *,
        wrapper: Sequence[str] = (),
        paths: Sequence[Path] = (),
    ) -> None:
        """`wrapper` is put before the command; its Python looks into `paths` first."""
        self.directory = directory
        self.data = directory / "data"
        self.port = _own_port()
        self.client = ReefClient(f"http://127.0.0.1:{self.port}", timeout=120.0)
        self.flags = {"reef.data-dir": self.data, "reef.port": self.port, **flags}
        self.runs = 0
        self._wrapper = wrapper
        self._paths = [str(path) for path in paths]
        self._plan = directory / "plan"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Spawn the service; it is not ready yet."""
        self.runs += 1
        environment = {name: value for name, value in os.environ.items() if not name.startswith("REEF_")}
        environment |= {
            ENVIRONMENT_VARIABLE: str(self._plan),
            "PYTHONPATH": os.pathsep.join(filter(None, [*self._paths, str(ROOT), environment.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
        }
        options = [f"--{key}={value}" for key, value in self.flags.items()]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*self._wrapper, sys.executable, "-m", "reef.cli", "serve", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
            )

    @property
    def seen(self) -> Path:
        """The data directory as the service sees it."""
        return self.data

    @property
    def log(self) -> Path:
        return self.directory / f"service-{self.runs}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_until_dead(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL the service alone; what it started has to follow by itself."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, as an operator would. Raises Unrecovered if it does not end, or leaves a process behind."""
        if self._process is None:
            return
        self._process.terminate()
        if not self.wait_until_dead(STOP_SECONDS):
            self.end()
            raise Unrecovered(f"did not stop within {STOP_SECONDS:g} s of SIGTERM")
        self.wait_for_no_process()

    def end(self) -> None:
        """Whatever it takes: nothing of this deployment runs afterwards."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    # ------------------------------------------------------------------ processes

    def processes(self) -> list[int]:
        """Every living process that was started for this deployment, however far down: they share a variable."""
        mark = f"{ENVIRONMENT_VARIABLE}={self._plan}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # ended meanwhile, or somebody else's
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def worker(self, component: str) -> int | None:
        """The pid of "engine" or "trainer" (rank 0), or None while there is none: whoever writes its log."""
        for pid in self.processes():
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/1").endswith(f"/logs/{component}-0.log"):
                    return pid
        return None

    def wait_for_no_process(self, seconds: float = 60.0) -> None:
        """Raises Unrecovered if something outlives the service."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            if time.monotonic() > deadline:
                raise Unrecovered(f"these outlived the service by {seconds:g} s: {[_command(pid) for pid in left]}")
            time.sleep(0.02)

    # ------------------------------------------------------------------ plans

    def arm(self, plan: Plan) -> None:
        with suppress(FileNotFoundError):
            fired(self._plan).unlink()
        plan_kill(self._plan, plan)

    def disarm(self) -> None:
        with suppress(FileNotFoundError):
            self._plan.unlink()

    def signal(self, component: str, number: int) -> None:
        """Nothing happens where there is none."""
        pid = self.pid if component == "service" else self.worker(component)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def fired_at(self) -> float | None:
        """When the plan fired (Unix seconds), or None."""
        try:
            return fired(self._plan).stat().st_ctime
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ answers

    def healthy(self) -> str | None:
        """None when healthz says 200, else what it says instead."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HEALTH_SECONDS)
        try:
            connection.request("GET", "/healthz")
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return f"no answer: {error!r}"
        finally:
            connection.close()
        return None if response.status == 200 else f"{response.status}: {answer}"

    def wait_until_healthy(self, seconds: float) -> None:
        """Raises Unrecovered with the reason and the end of the log."""
        deadline = time.monotonic() + seconds
        while (reason := self.healthy()) is not None:
            if not self.running:
                raise Unrecovered(f"the service ended with code {self._process and self._process.returncode}")
            if time.monotonic() > deadline:
                raise Unrecovered(f"not healthy within {seconds:g} s: {reason}")
            time.sleep(0.05)

    def tail(self, lines: int = 15) -> str:
        """The end of the service's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _command(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200].replace(bytes(1), b' ').decode()}"
    return str(pid)


def _own_port() -> int:
    """A TCP port for a service that comes and goes, which nobody takes while it is down.

    It lies below those that the system gives out by itself. The UDP port of the same number, held until this process
    ends, says to everybody who asks here that it is taken.
    """
    for port in range(20_000, 30_000):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with suppress(OSError), socket.socket() as probe:
            claim.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise OSError("no port from 20000 to 29999 is free")
