"""Negative controls: what the same SGLang does without Reef's plugin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from reef.inference.sglang.control import EngineControl, Refused
from reef.inference.sglang.engine import ManagedEngine
from reef.inference.sglang.process import LeasedProcess, free_port
from reef.runtime.interfaces import PauseMode
from tests.engines.sglang import PREFIX, SECONDS, sglang_config
from tests.engines.test_sglang_sharing import slow_schema

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many


@pytest.fixture(scope="module")
def stock(engine_python, tiny_model, tmp_path_factory) -> Iterator[EngineControl]:
    """The same command line and CPU platform, with every general plugin switched off."""
    config = sglang_config(tiny_model)
    engine = ManagedEngine("stock", config, {}, mode=PauseMode.IN_PLACE, lora=False, colocated=False, logs=None)
    environment = {**engine.environment(), "SGLANG_PLUGINS": "none"}
    port = free_port()
    log = tmp_path_factory.mktemp("stock") / "log"
    process = LeasedProcess("stock", engine.command(port, share=True), environment, log)
    control = EngineControl("stock", f"http://127.0.0.1:{port}", SECONDS)
    try:
        process.wait_until(control.answers, 900)
        yield control
    finally:
        process.stop()


def generate(control: EngineControl, prompt_ids, max_tokens=4, **sampling) -> dict:
    body = {"input_ids": prompt_ids, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, **sampling}}
    return json.loads(control._call("POST", "/generate", body))["meta_info"]


def test_it_is_stock(stock) -> None:
    with pytest.raises(Refused, match="404"):
        stock.state()


def test_flush_behind_a_pause_fails_while_a_grammar_compiles(stock) -> None:
    refusals: list[str] = []
    with ThreadPoolExecutor(1) as clients:
        for number in range(9):  # until a pause falls between a request's arrival and the end of its compilation
            asked = clients.submit(generate, stock, [5, 6], 30, json_schema=slow_schema(number))
            time.sleep(1.0)
            stock._call("POST", "/pause_generation", {"mode": "retract"})
            try:
                stock.flush()
            except Refused as refused:
                refusals.append(str(refused))
            stock.resume()
            assert asked.result(SECONDS)["completion_tokens"] > 0
            if refusals:
                break
    assert "refused POST /flush_cache with 400" in refusals[0]


def test_old_prefix_serves_under_new_weights(stock, weights) -> None:
    """The hazard that Reef's keys remove: in_place keeps the cache, and its keys know nothing of weights."""
    generate(stock, PREFIX[:500])
    stock._call("POST", "/pause_generation", {"mode": "in_place"})
    stock.update_weights(str(weights[0]), "engine:1")
    stock.resume()
    meta = generate(stock, PREFIX[:500])
    assert (meta["weight_version"], meta["cached_tokens"]) == ("engine:1", 499)
