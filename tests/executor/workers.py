"""Workers that the executor tests run for real."""

from __future__ import annotations

import os
import sys
import threading
import time

from reef.errors import EngineUncertain, InvalidRequest


class Foreign(Exception):
    """An exception class that the owner must not have to import."""


class Counter:
    def __init__(self, start: int = 0, broken: bool = False, delay: float = 0.0) -> None:
        time.sleep(delay)
        if broken:
            print("about to break")
            raise ValueError("start must be >= 0, got -1")
        self.value = start
        self.closed_file: str | None = None

    def set(self, value: int) -> None:
        self.value = value

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    def where(self) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def wait_for(self, path: str) -> str:
        """Busy until there is a file at `path`."""
        while not os.path.exists(path):
            time.sleep(0.005)
        return "there"

    def echo(self, value: object) -> object:
        return value

    def directory(self) -> str:
        return os.getcwd()

    def note_and_die(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("here\n")
        os._exit(1)

    def invalid(self) -> None:
        raise InvalidRequest("too hot", field="sampling.temperature")

    def uncertain(self) -> None:
        raise EngineUncertain("half a transfer")

    def foreign(self) -> None:
        raise Foreign("from afar")

    def unpicklable(self) -> object:
        return threading.Lock()

    def exit(self, code: int) -> None:
        print("last words", file=sys.stderr)
        os._exit(code)

    def write_on_close(self, path: str) -> None:
        self.closed_file = path

    def fork(self) -> int:
        """A child that holds every open file until it is killed."""
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        return pid

    def close(self) -> None:
        if self.closed_file is not None:
            with open(self.closed_file, "w") as file:
                file.write(str(self.value))


class Stubborn:
    """Ignores every polite way to end it."""

    def __init__(self) -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def close(self) -> None:
        time.sleep(600)


class Slow:
    def __init__(self) -> None:
        time.sleep(600)


class Dies:
    def __init__(self) -> None:
        print("cannot live")
        os._exit(7)
