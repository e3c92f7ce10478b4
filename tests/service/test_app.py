"""The server as a process: its address, its ready line, its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from reef.errors import ConfigError
from reef.records.sqlite import SqliteStorage
from reef.service.app import GatewayServer
from reef.service.config import ServiceConfig
from tests.service.conftest import body
from tests.service.fakes import FakeDeployment


def test_a_port_in_use_is_a_configuration_error(tokenizer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"reef.port: cannot listen on 127.0.0.1:{port}"):
            GatewayServer(FakeDeployment(tokenizer, tmp_path), ServiceConfig(port=port))


def test_a_host_that_does_not_exist_is_a_configuration_error(tokenizer, tmp_path):
    config = ServiceConfig(host="nowhere.invalid", tokens=["t"])
    with pytest.raises(ConfigError, match="cannot listen on nowhere"):
        GatewayServer(FakeDeployment(tokenizer, tmp_path), config)


class Process:
    """`reef serve` on the tiny model, in a process of its own."""

    def __init__(self, model: Path, data: Path) -> None:
        arguments = [
            "serve", "--reef.port", "0", "--reef.data-dir", str(data), "--reef.shutdown-grace", "0.3",
            "--inference.model-path", str(model), "--inference.dtype", "float32", "--inference.threads", "1",
        ]  # fmt: skip
        command = [sys.executable, "-c", "from reef.cli import main; main()", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if "reef: try" in line:
                self.ready.set()
        self.ready.set()

    def __enter__(self) -> Process:
        assert self.ready.wait(240) and self.process.poll() is None, "".join(self.lines)
        self.url = next(line for line in self.lines if "ready at" in line).split("ready at ")[1].split(",")[0]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_mid_generation_ends_it_recorded_and_clean(tiny_model, tmp_path, run, number):
    with Process(tiny_model, tmp_path) as reef:
        content = body(stream=True, max_tokens=4000, ignore_eos=True)
        with httpx.stream("POST", f"{reef.url}/v1/chat/completions", json=content, timeout=200) as response:
            receipt = response.headers["x-reef-agent-record-id"]
            seen = b""
            for part in response.iter_raw():
                if not seen:
                    reef.process.send_signal(number)
                seen += part
        assert reef.process.wait(100) == 0, "".join(reef.lines)
    storage = SqliteStorage(tmp_path / "reef.db")
    run(storage.open())
    record = run(storage.get("default", [receipt]))[receipt]
    run(storage.close())
    assert record.generations[0].ending == "engine_cut" and record.generations[0].output_ids
    assert record.response == seen and b"shutting down" in seen
    assert "Traceback" not in "".join(reef.lines)
