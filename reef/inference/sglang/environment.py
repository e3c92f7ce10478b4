"""The Python environment that SGLang engines run in: built once per list of requirements, in the user's cache.

`python -m reef.inference.sglang.environment` builds it, and prints its interpreter; a second run installs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

from reef.directories import cache_directory
from reef.errors import ConfigError

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PLUGIN_PATH = Path(__file__).with_name("plugin")
"""On an engine's PYTHONPATH: Reef's plugin with its entry points."""

_STAMP = "reef-complete"


def directory() -> Path:
    """Where the environment of this Python version and these requirements lies, built or not."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(version.encode() + REQUIREMENTS.read_bytes()).hexdigest()[:16]
    return cache_directory() / "engines" / f"sglang-{digest}"


def interpreter() -> Path | None:
    """The environment's Python, or None where it is not built."""
    python = directory() / "bin" / "python"
    return python if (directory() / _STAMP).exists() and python.exists() else None


def require_interpreter(configured: str) -> Path:
    """The Python that engines run with. Raises ConfigError where there is none."""
    if configured:
        if not (python := Path(configured)).exists():
            raise ConfigError(f"inference.python: there is no interpreter at {configured}")
        return python
    if (found := interpreter()) is None:
        raise ConfigError("SGLang's environment is not built: run `make engine-sglang`, or set inference.python")
    return found


def build(pip_arguments: list[str]) -> Path:
    """Build the environment unless it is there; another process that builds it is waited for. Returns its Python."""
    target = directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := interpreter()) is not None:
            return found
        shutil.rmtree(target, ignore_errors=True)  # what an interrupted run left
        subprocess.run([sys.executable, "-m", "venv", target], check=True)
        python = target / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *pip_arguments]
        subprocess.run([*install, "-r", str(REQUIREMENTS)], check=True)
        subprocess.run([str(python), "-c", "import torch"], check=True)  # a build with CUDA lacks its libraries here
        (target / _STAMP).touch()
        return python


if __name__ == "__main__":
    started = time.monotonic()
    there = interpreter() is not None
    print(build(sys.argv[1:]))
    print("nothing to install" if there else f"installed in {time.monotonic() - started:.0f} s", file=sys.stderr)
