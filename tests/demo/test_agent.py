"""The agent and the server process, on a real `reef serve` with the tiny random model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("openai")

from reef.demo import run
from reef.demo.agent import Agent
from reef.demo.server import Server
from reef.demo.show import Screen
from reef.demo.task import held_out_examples, train_batches
from reef.errors import Unavailable, WorkerDied

MODEL = "tiny"
SCENARIO = "reviews"


def serve(model: Path, directory: Path) -> Server:
    flags = {
        "reef.port": 0,
        "reef.data-dir": directory / "data",
        "reef.default-scenario": SCENARIO,
        "inference.model-path": model,
        "inference.served-model-name": MODEL,
        "inference.kv-cache-tokens": 8192,
        "training.backend": "torch",
        "recipe.batch-size": 8,
        "execution.executor": "uni",
    }
    server = Server([f"--{key}={value}" for key, value in flags.items()], directory / "server.log")
    server.start()
    for _ in server.starting(timeout=240):
        pass
    return server


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    running = serve(tiny_model, tmp_path_factory.mktemp("demo"))
    yield running
    running.stop()


def agent(server: Server) -> Agent:
    return Agent(server.url, MODEL, SCENARIO, seed=0)


def test_evaluation_is_greedy_and_keeps_the_order(server):
    async def evaluate_twice():
        async with agent(server) as one:
            examples = held_out_examples(0)[:6]
            return examples, await one.evaluate(examples), await one.evaluate(examples)

    examples, first, second = asyncio.run(evaluate_twice())
    assert [item.example for item in first] == examples
    assert [item.answer for item in first] == [item.answer for item in second]
    assert len({item.receipt for item in first + second}) == 12


def test_a_step_reports_every_answer_and_ends_with_its_commit(server):
    async def one_step():
        async with agent(server) as one:
            step = await one.step(1, train_batches(0, 1, 2)[0], rollouts=4)
            return step, await one.feedback_count(), await one.releases()

    step, feedback, releases = asyncio.run(one_step())
    assert step.outcome == "no_signal"  # a random model earns nothing anywhere
    assert step.mean_score == 0.0
    assert (step.metrics["reports"], step.metrics["groups"]) == (8, 2)
    assert feedback == 8
    assert [release["kind"] for release in releases] == ["base"]


def test_a_refusal_is_raised_in_the_servers_words(server):
    async def roll_back_to_nowhere():
        async with agent(server) as one:
            await one.rollback("release-7")

    with pytest.raises(Unavailable, match=r"404.*release-7"):
        asyncio.run(roll_back_to_nowhere())


def test_a_server_that_dies_ends_the_story_with_the_end_of_its_log(tiny_model, tmp_path):
    server = serve(tiny_model, tmp_path)
    pid = server.pid

    async def story():
        asyncio.get_running_loop().call_later(1.0, os.kill, pid, signal.SIGKILL)
        await run._learn(Screen(6), run.Options(seed=0, steps=10_000, output=tmp_path, keep=False), server)

    try:
        with pytest.raises(WorkerDied, match=r"(?s)exit code -9.*reef: ready at"):
            asyncio.run(story())
    finally:
        server.stop()
    assert not server.alive


def test_a_server_that_cannot_start_says_why(tmp_path):
    server = Server([f"--inference.model-path={tmp_path / 'no-such-model'}"], tmp_path / "server.log")
    server.start()
    with pytest.raises(WorkerDied, match=re.escape("no-such-model")):
        for _ in server.starting(timeout=240):
            pass
    server.stop()


def test_stop_before_start_and_twice_is_harmless(tmp_path):
    server = Server([], tmp_path / "server.log")
    server.stop()
    server.start()
    server.stop()
    server.stop()
    assert not server.alive
