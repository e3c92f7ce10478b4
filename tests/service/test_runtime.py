"""The pair of runtimes that a configuration names, and the handler it brings."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reef.config import resolve
from reef.errors import ConfigError
from reef.runtime.interfaces import OutgoingRequest
from tests.conftest import needs

needs("torch", "transformers")

from reef.service.runtime import make_handler  # noqa: E402
from tests.runtime.fakes import IdleHandler  # noqa: E402


def config(**flags: str):
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in flags.items()}
    return resolve(flags={"inference.model-path": "m", **named}).config


def test_a_handler_of_ones_own_is_built_from_its_config():
    handler = make_handler(config(inference__handler_factory="tests.runtime.fakes:IdleHandler"), lambda: ["engine-0"])
    assert type(handler) is IdleHandler and handler.endpoints() == ["engine-0"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"inference__handler_factory": "nowhere:Handler"}, "inference.handler-factory: cannot load nowhere:Handler"),
        ({"inference__handler_factory": "reef.errors:ReefError"}, "must be a subclass of InferenceHandler"),
        ({"inference__handler_config": "max-in-flight=0"}, "inference.handler-config: .*max-in-flight"),
        ({"inference__handler_config": "nonsense=1"}, "inference.handler-config: .*nonsense"),
    ],
)
def test_a_handler_that_cannot_be_used_is_a_configuration_error(flags, message):
    with pytest.raises(ConfigError, match=message):
        make_handler(config(**flags), list)


def test_the_coordinator_command_lists_what_serve_does():
    shown = subprocess.run(
        [sys.executable, "-m", "reef.cli", "coordinator", "--help"], capture_output=True, text=True, timeout=200
    )
    assert shown.returncode == 0
    assert "--execution.coordinator-port" in shown.stdout and "coordinator_training" in shown.stdout


def test_the_configured_header_providers_are_the_handlers():
    found = config(inference__backend="sglang", inference__header_providers="tests.inference.test_headers:Affinity")
    handler = make_handler(found, lambda: ["http://router"])
    prepared = handler.prepare(OutgoingRequest("r", "support", "/generate", b""))
    assert prepared["x-routing-key"] == "support"
