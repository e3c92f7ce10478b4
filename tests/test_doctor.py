from __future__ import annotations

import json
import socket
import sqlite3
import sys
from pathlib import Path

import pytest

from reef.config import resolve
from reef.doctor import Check, available_memory, cores, examine
from reef.errors import ConfigError


def checks(tmp_path: Path, **flags: str) -> dict[str, Check]:
    given = {"inference.model-path": str(tmp_path), "reef.data-dir": str(tmp_path / "data"), "reef.port": "0"}
    given.update({name.replace("__", ".").replace("_", "-"): text for name, text in flags.items()})
    return {check.name: check for check in examine(resolve(flags=given).config)}


def test_without_a_valid_configuration_the_rest_is_still_checked() -> None:
    found = {check.name: check for check in examine(None, ConfigError("recipe.batch-size must be int"))}
    assert found["configuration"].verdict == "fail"
    assert "recipe.batch-size must be int" in found["configuration"].detail
    assert found["reef"].verdict == found["packages (base)"].verdict == "ok"
    assert "port" not in found


def test_packages_are_those_that_the_project_declares(tmp_path: Path) -> None:
    found = checks(tmp_path)
    assert "msgspec" in found["packages (base)"].detail and "torch" not in found["packages (base)"].detail
    assert "torch" in found["packages (model)"].detail


def test_a_free_port_and_a_taken_one(tmp_path: Path) -> None:
    assert checks(tmp_path)["port"].verdict == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = checks(tmp_path, reef__port=str(port))["port"]
    assert found.verdict == "fail" and f"127.0.0.1:{port}: is in use" in found.detail and "reef.port" in found.advice


def test_the_data_directory_is_not_created(tmp_path: Path) -> None:
    found = checks(tmp_path)["data directory"]
    assert found.verdict in ("ok", "warn") and "made on first use" in found.detail
    assert not (tmp_path / "data").exists()


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    found = checks(tmp_path)["data directory"]
    assert found.verdict == "fail" and "reef.data-dir" in found.advice


def test_a_sound_database_and_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "reef.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    connection.close()
    assert "sound: 1 tables" in checks(tmp_path, storage__path=str(path))["database"].detail
    path.write_bytes(b"not a database, but long enough to be read as one" * 100)
    found = checks(tmp_path, storage__path=str(path))["database"]
    assert found.verdict == "fail" and "not a database" in found.detail


def test_a_model_path_without_weights(tmp_path: Path) -> None:
    assert checks(tmp_path)["model files"].verdict == "fail"
    gone = checks(tmp_path, inference__model_path=str(tmp_path / "gone"))
    assert gone["model files"].verdict == gone["model loads"].verdict == "fail"


def test_a_directory_that_transformers_cannot_load(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    found = checks(tmp_path)
    assert found["model files"].verdict == "ok"
    assert found["model loads"].verdict == "fail" and "\n" not in found["model loads"].detail


def test_a_real_model_loads(tmp_path: Path, tiny_model: Path) -> None:
    found = checks(tmp_path, inference__model_path=str(tiny_model))
    assert found["model files"].verdict == found["model loads"].verdict == "ok"
    assert found["model loads"].detail.startswith("llama, 49152 tokens")


def test_more_threads_than_cores_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores() + 1))
    found = checks(tmp_path)["threads"]
    assert found.verdict == "warn" and "unset OMP_NUM_THREADS" in found.advice


def test_the_machine_has_cores_and_memory() -> None:
    assert cores() >= 1
    assert available_memory() > 0


def test_what_is_configured_is_what_is_looked_for(tmp_path: Path) -> None:
    assert {name for name in checks(tmp_path) if name.startswith("packages")} == {"packages (base)", "packages (model)"}
    given = {"storage__backend": "postgres", "storage__url": "postgresql://nobody@127.0.0.1:1/none"}
    found = checks(tmp_path, execution__executor="ray", **given)
    assert {"packages (storage)", "packages (execution)"} <= set(found)
    assert found["database"].verdict == "fail" and "127.0.0.1:1" in found["database"].detail


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        refused = checks(tmp_path, inference__device="cuda")["device"]
        assert refused.verdict == "fail" and "inference.device is cuda" in refused.detail
        assert checks(tmp_path, training__backend="torch", training__device="cuda")["device"].verdict == "fail"
    assert checks(tmp_path, inference__device="cpu")["device"].detail.endswith(torch.__version__)


def test_a_compiler_for_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks(tmp_path)["engine"]
    assert found.verdict == "warn" and "no C++ compiler" in found.detail
    assert checks(tmp_path, inference__kernels="torch")["engine"].verdict == "ok"


def test_sglang_where_it_is_and_where_it_is_not(tmp_path: Path) -> None:
    given = {"inference__backend": "sglang", "inference__python": sys.executable}
    found = checks(tmp_path, **given)["engine"]
    assert found.verdict == "fail" and "has no SGLang" in found.detail and "make engine-sglang" in found.advice
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        there = {"inference__backend": "sglang", "inference__endpoints": endpoint}
        assert checks(tmp_path, **there)["engine"].verdict == "ok"
    assert checks(tmp_path, **there)["engine"].verdict == "fail"
