"""The rules of the architecture page, and a proof of each: a planted violation is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import room, text_violations, tracked_files, violations

ROOT = Path(__file__).parent.parent


def test_tree_keeps_the_architecture() -> None:
    assert "\n".join(violations(ROOT)) == ""


def test_no_machine_path_and_no_registry_host() -> None:
    assert "\n".join(text_violations(ROOT, tracked_files(ROOT))) == ""


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"reef/__init__.py": "", "reef/errors.py": "", "reef/runtime/interfaces.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"reef/recipe/scored.py": "import reef.errors\nfrom reef.runtime import interfaces\nfrom reef import errors"},
        {"reef/cli.py": "def f():\n    from reef.demo import run", "reef/demo/run.py": "import torch, reef.client"},
        {"reef/service/app.py": "import starlette, json, msgspec\nfrom reef.records.sqlite import S"},
        {"reef/inference/local/engine.py": "import torch", "reef/inference/local/config.py": "import msgspec"},
        {"reef/inference/chat/tokenizer.py": "def load():\n    import transformers"},
        {"reef/train/a/__init__.py": "from reef.train.a import b", "reef/train/a/b.py": "from reef.train.a import c",
         "reef/train/a/c.py": ""},
        {"reef/service/a.py": "import asyncio\nclass A(asyncio.Protocol): pass"},
        {"reef/runtime/deployment.py": 'LOCAL = "reef.inference.local.backend:LocalBackend"'},
    ],
)  # fmt: skip
def test_good_trees_pass(tmp_path, files) -> None:
    assert violations(plant(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"reef/train/a.py": "import reef.inference.chat"}, "train/a.py:1 train must not import inference"),
        ({"reef/inference/a.py": "from reef.train import b"}, "inference must not import train"),
        ({"reef/recipe/a.py": "def f():\n    from reef.records import b"}, "a.py:2 recipe must not import records"),
        ({"reef/artifact/a.py": "from ..records import b"}, "artifact must not import records (reef.records)"),
        ({"reef/records/a.py": "async def f():\n    import reef.artifact.b"}, "records must not import artifact"),
        ({"reef/runtime/a.py": "from reef.inference.local.backend import B"}, "runtime must not import inference"),
        ({"reef/runtime/a.py": "def f():\n    import reef.train.torch_backend"}, "runtime must not import train"),
        ({"reef/runtime/interfaces.py": "from reef.records import a"}, "interfaces must not import records"),
        ({"reef/runtime/interfaces.py": "import reef.runtime.scheduler"}, "interfaces must not import runtime"),
        ({"reef/records/a.py": "from reef.runtime.scheduler import S"}, "records must not import runtime"),
        ({"reef/errors.py": "from reef.runtime import interfaces"}, "errors must not import interfaces"),
        ({"reef/scenario/a.py": "import reef.service.app"}, "scenario must not import service"),
        ({"reef/service/a.py": "from reef.config import resolve"}, "service must not import config"),
        ({"reef/service/a.py": "from reef import cli", "reef/cli.py": ""}, "service must not import cli"),
        ({"reef/service/a.py": "import reef.demo.run"}, "service must not import demo"),
        ({"reef/config.py": "import reef.demo.run"}, "config must not import demo"),
        ({"reef/demo/run.py": "from reef.config import resolve"}, "demo must not import config"),
        ({"reef/demo/model.py": "from reef.service import app"}, "demo.model must not import service"),
        ({"reef/demo/model.py": "from reef.runtime import interfaces"}, "demo.model must not import interfaces"),
        ({"reef/client.py": "from reef.service import app"}, "client must not import service"),
        ({"reef/scenario/a.py": "from typing import Protocol"}, "a.py:1 uses Protocol"),
        ({"reef/scenario/a.py": "import typing\nif typing.TYPE_CHECKING: pass"}, "a.py:2 uses TYPE_CHECKING"),
        ({"reef/scenario/a.py": "import typing as t\nclass A(t.Protocol): pass"}, "a.py:2 uses Protocol"),
        ({"reef/scenario/a.py": "from typing_extensions import runtime_checkable as rc"}, "uses runtime_checkable"),
        ({"reef/records/a.py": "import reef.records.b", "reef/records/b.py": "from . import a"},
         "import cycle: reef.records."),
        ({"reef/records/a.py": "import reef.records.b", "reef/records/b.py": "def f():\n    from . import a"},
         "import cycle"),
        ({"reef/service/a.py": "import torch"}, "service/a.py loads torch, which a base install has not"),
        ({"reef/service/a.py": "try:\n    import numpy.typing\nexcept ImportError: pass"}, "loads numpy"),
        ({"reef/service/a.py": "class A:\n    import httpx"}, "loads httpx"),
        ({"reef/service/a.py": "from reef.inference.local.b import B", "reef/inference/local/b.py": "import torch"},
         "reef.service.a -> reef.inference.local.b -> torch"),
        ({"reef/service/a.py": "import reef.inference.local.b", "reef/inference/local/__init__.py": "import peft",
          "reef/inference/local/b.py": ""}, "reef.service.a -> reef.inference.local -> peft"),
        ({"reef/train/torch_backend/config.py": "import torch"}, "torch_backend/config.py loads torch"),
        ({"reef/runtime/__init__.py": ""}, "reef.runtime is a namespace package"),
        ({"reef/things.py": ""}, "things.py lies in no room"),
        ({"reef/service/utils.py": ""}, "utils.py needs a name that says what is in it"),
    ],
)  # fmt: skip
def test_planted_violation_is_found(tmp_path, files, message) -> None:
    found = violations(plant(tmp_path, files))
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data = '/" + "work/main'", "a.md:2 names a machine path"),
        ("see /" + "root/.cache", "names a machine path"),
        ("cd /" + "tmp/x", "names a machine path"),
        ("pip install -i https://" + "pypi" + ".org/simple", "names a registry host"),
        ("FROM ghcr" + ".io/x", "names a registry host"),
    ],
)
def test_planted_text_is_found(tmp_path, line, message) -> None:
    (tmp_path / "a.md").write_text(f"fine\n{line}\n")
    [found] = text_violations(tmp_path, [tmp_path / "a.md"])
    assert message in found


@pytest.mark.parametrize("line", ["reef/work/a", "https://host/tmp/x", "$HOME/tmp/x", "./work/x", "GET /v1/models"])
def test_innocent_text_passes(tmp_path, line) -> None:
    (tmp_path / "a.md").write_text(line)
    assert list(text_violations(tmp_path, [tmp_path / "a.md"])) == []


def test_rooms() -> None:
    assert room("reef.runtime.interfaces") == "interfaces"
    assert room("reef.runtime.executor.mp") == "runtime"
    assert room("reef.demo.model") == "demo.model"
    assert room("reef.elsewhere") is None
