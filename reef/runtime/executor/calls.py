"""Between an owner and a worker in another process: results, errors, last words, and a common end."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from reef.errors import ReefError
from reef.named import load

CONSTRUCT = ""
"""The method name of the first call, whose arguments build the worker."""

_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """End with the process `parent`, however it ends.

    The kernel watches the thread that spawned this process: it must live as long as the parent does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def attempt(run: Callable[[bytes], Any], call: bytes) -> tuple[bool, bytes]:
    """Return (True, pickled result) or (False, pickled exception)."""
    try:
        return True, pickle.dumps(run(call))
    except Exception as error:
        return False, pickle.dumps(portable(error))


def portable(error: Exception) -> Exception:
    """A copy for the owner, with the traceback as a note.

    Only Reef's and Python's own classes cross: another would make the owner import the library that defines it.
    """
    copy: Exception = ReefError(f"{type(error).__name__}: {error}")
    if type(error).__module__ in (ReefError.__module__, "builtins"):
        with suppress(Exception):  # an exception whose constructor takes more than its arguments
            copy = pickle.loads(pickle.dumps(error))
    copy.add_note(f"In the worker:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return copy


def resolve(future: Future[Any], name: str, succeeded: bool, payload: bytes) -> None:
    """Undo `attempt`, for who waits."""
    try:
        value = pickle.loads(payload)
    except Exception as error:
        succeeded, value = False, ReefError(f"{name}: unreadable answer: {error}")
    if succeeded:
        future.set_result(value)
    else:
        future.set_exception(value)


class Served:
    """The worker where it runs. The first call, CONSTRUCT, builds it."""

    def __init__(self) -> None:
        self._worker: Any = None

    def run(self, call: bytes) -> Any:
        method, args, kwargs = pickle.loads(call)
        if method != CONSTRUCT:
            return getattr(self._worker, method)(*args, **kwargs)
        self._worker = load(*args)(**kwargs)
        return None

    def close(self) -> None:
        if (close := getattr(self._worker, "close", None)) is not None:
            close()


def tail(log: IO[bytes], offset: int) -> str:
    """What was written to `log` last, from `offset` on, as a suffix for an error message."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(offset, end - _TAIL_BYTES))
    text = log.read().decode(errors="replace").strip()
    return f"; its last output:\n{text}" if text else ""
