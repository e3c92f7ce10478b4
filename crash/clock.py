"""A clock that can be set from outside, for one deployment: its Python reads the time through an offset in a file."""

from __future__ import annotations

from pathlib import Path

SHIFTED = """
import os, time
_real, _file = time.time, os.path.join(os.path.dirname(__file__), "offset")
def _shifted():
    with open(_file) as file:
        return _real() + float(file.read())
time.time, time.time_ns = _shifted, lambda: int(_shifted() * 1e9)
"""


class Clock:
    """Put `directory` first on the deployment's path: Python imports `sitecustomize` of it when it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "sitecustomize.py").write_text(SHIFTED)
        self.shift(0.0)

    def shift(self, seconds: float) -> None:
        """From now on `time.time()` is so far from the truth. Monotonic clocks do not jump, here as in reality."""
        scratch = self.directory / "next"
        scratch.write_text(str(seconds))
        scratch.rename(self.directory / "offset")
