"""The built wheel, in an environment that has nothing else, imports without any heavy library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.service.providers import FakeProvider, reply
from tests.structure import base_modules, read
from tests.test_cli_serve import ready_url

ROOT = Path(__file__).parent.parent
UNREACHABLE = re.compile(r"connection error|NewConnectionError|NameResolution|ConnectTimeout|from versions: none", re.I)

IMPORT_ALL = """
import importlib, importlib.abc, json, sys

BLOCKED = {"torch", "transformers", "ray", "sglang", "vllm", "slime", "tinker", "peft", "numpy", "safetensors"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is heavy")

sys.meta_path.insert(0, Blocker())
failures = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures[name] = repr(error)
import reef
print(json.dumps({"failures": failures, "file": reef.__file__}))
"""


def run(*command: str | Path, cwd: Path, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = out.glob("reef-*.whl")
    return path


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory, wheel) -> Path:
    """An environment with the wheel and its base dependencies only."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=True, symlinks=True)
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    installed = run(
        python, "-m", "pip", "install", "--quiet", "--no-compile", "--retries=1", "--disable-pip-version-check", wheel,
        cwd=home,
    )  # fmt: skip
    if installed.returncode != 0 and UNREACHABLE.search(installed.stderr):
        pytest.skip(f"the package index is unreachable: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    return python


def test_wheel_has_the_package_and_nothing_else(wheel) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"reef"}
    assert "reef/runtime/interfaces.py" in names  # a namespace package is easily left out
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "reef").rglob("*.py")}
    assert sources - set(names) == set()


def test_base_install_imports_every_base_module(empty_environment) -> None:
    modules = base_modules(read(ROOT))
    assert {"reef.cli", "reef.config", "reef.service.app", "reef.recipe", "reef.train.torch_backend.config"} <= {
        *modules
    }
    home = empty_environment.parent
    heavy = "reef.train.torch_backend.model"  # must fail, or the blocker blocks nothing
    done = run(empty_environment, "-I", "-c", IMPORT_ALL, json.dumps([*modules, heavy]), cwd=home)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert "is heavy" in result["failures"].pop(heavy)
    assert result["failures"] == {}
    assert ROOT not in Path(result["file"]).parents  # the installed one, not this checkout


def test_base_install_has_a_command_line(empty_environment) -> None:
    home = empty_environment.parent
    shown = run(home / "reef", "--help", cwd=home)
    assert shown.returncode == 0, shown.stderr
    assert "serve" in shown.stdout


def test_a_base_install_serves_an_external_provider(empty_environment, tmp_path) -> None:
    provider = FakeProvider()
    provider.answer = reply({"said": "hello"})
    command = [empty_environment, "-m", "reef.cli", "serve", "--inference.upstream-url", provider.url]
    command += ["--reef.port", "0", "--reef.data-dir", "data"]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*map(str, command)], cwd=tmp_path, stdout=sink, stderr=subprocess.STDOUT)
    try:
        url = ready_url(log, process)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "m"}, timeout=100)
        assert answer.json() == {"said": "hello"} and answer.headers["x-reef-agent-record-id"]
    finally:
        process.kill()
        process.wait(60)
        provider.close()
