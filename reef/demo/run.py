"""`reef demo`: before, during, after, rolled back."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.markup import escape

from reef.demo import task
from reef.demo.agent import Agent, Graded, Step, mean_score
from reef.demo.model import cache_directory, smollm2_directory
from reef.demo.server import Server
from reef.demo.show import Screen, TrainingView, save_curve
from reef.errors import ConfigError, ReefError

SCENARIO = "reviews"
MODEL = "SmolLM2-135M-Instruct"
STEPS = 12
PROMPTS = 8
ROLLOUTS = 8
LEARNING_RATE = 5e-4
DTYPE = "float32"
"""CPUs without matrix units train bfloat16 many times slower, and its rounding changes greedy answers with the batch."""
REQUIRED_RISE = 0.5
START_TIMEOUT = 300.0
GATE_MARGIN = 0.1
SHOWN = 4
"""Held-out examples that are shown before, after and rolled back."""


@dataclass(slots=True, frozen=True)
class Options:
    seed: int
    steps: int
    output: Path
    keep: bool

    @property
    def data(self) -> Path:
        return self.output / "data"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the demo measured."""

    before: list[Graded]
    steps: list[Step]
    after: list[Graded]
    rolled_back: list[Graded]
    releases: list[dict[str, Any]]
    feedback_count: int

    @property
    def rise(self) -> float:
        return mean_score(self.after) - mean_score(self.before)

    @property
    def base_returned(self) -> bool:
        """Every greedy answer after the rollback is the base's, character for character."""
        return answers(self.before) == answers(self.rolled_back)


def answers(graded: Sequence[Graded]) -> list[str]:
    return [item.answer for item in graded]


def main(seed: int = 0, steps: int | None = None, output: Path = Path(".reef/demo"), keep: bool = False) -> int:
    """Run the demo: 0 if the held-out mean rose by REQUIRED_RISE and the base came back, 1 if not, 130 on Ctrl-C.

    Writes report.json and curve.png into `output`. `keep` keeps the deployment's data there too.
    """
    options = Options(seed=seed, steps=steps or STEPS, output=output.resolve(), keep=keep)
    screen = Screen(phases=6)
    began = time.monotonic()
    # A terminated demo must stop its server just like an interrupted one.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    server: Server | None = None
    try:
        _introduce(screen, options)
        model = _prepare_model(screen)
        server = Server(_flags(options, model), options.output / "server.log")
        _start(screen, server)
        outcome = asyncio.run(_learn(screen, options, server))
        return _conclude(screen, options, outcome, time.monotonic() - began)
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.say("\n[bold]interrupted[/]")
        return 130
    except ReefError as error:
        screen.say(f"\n[bold red]the demo failed:[/] {escape(str(error))}")
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
        _clean_up(screen, options, server)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------------------------------------- the phases


def _introduce(screen: Screen, options: Options) -> None:
    screen.say("[bold]Reef demo: a small language model learns from feedback while it serves[/]")
    screen.say(
        f"""
    A shop wants each customer review answered with exactly one word, positive or negative. An agent asks
    {MODEL} through the OpenAI API, grades each answer and reports the score to Reef:
    the word alone is worth 1, the word first 0.6, the word somewhere 0.3, anything else 0.
    Reef trains on {options.steps} batches of {PROMPTS * ROLLOUTS} scored answers. Seed {options.seed}."""
    )


def _prepare_model(screen: Screen) -> Path:
    """The model's directory. A first conversion needs torch, the demo does not, so it runs in a process of its own."""
    screen.heading("The model")
    with screen.waiting(f"{MODEL} as safetensors in {cache_directory()}"):
        converted = subprocess.run(
            [sys.executable, "-c", "from reef.demo.model import smollm2_directory as make; make()"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if converted.returncode != 0:
        raise ConfigError(f"the model could not be prepared:\n{converted.stderr.strip()[-2000:]}")
    return smollm2_directory()


def _flags(options: Options, model: Path) -> dict[str, object]:
    """The deployment, as dotted flags of `reef serve`."""
    shutil.rmtree(options.data, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    gate = options.output / "gate.jsonl"
    lines = (
        json.dumps({"messages": item.chat, "expected": item.expected}) for item in task.gate_examples(options.seed)
    )
    gate.write_text("\n".join(lines) + "\n")
    return {
        "reef.port": 0,
        "reef.data-dir": options.data,
        "reef.default-scenario": SCENARIO,
        "inference.model-path": model,
        "inference.served-model-name": MODEL,
        "inference.dtype": DTYPE,
        "inference.pause-mode": "in_place",
        "training.backend": "torch",
        "training.dtype": DTYPE,
        "training.mode": "lora",
        "training.lora-rank": 16,
        "training.lora-alpha": 32,
        "training.learning-rate": LEARNING_RATE,
        "training.seed": options.seed,
        "recipe.name": "scored",
        "recipe.batch-size": PROMPTS * ROLLOUTS,
        "recipe.advantage": "group",
        "recipe.objective": "policy_gradient",
        "evaluation.plugin": "held-out",
        "evaluation.prompts": gate,
        "evaluation.scorer": "reef.demo.task:score",
        "evaluation.max-tokens": task.MAX_TOKENS,
        "evaluation.concurrency": 32,
        "evaluation.margin": GATE_MARGIN,
    }


def _start(screen: Screen, server: Server) -> None:
    screen.heading("reef serve, with a trainer beside the engine")
    with screen.waiting("starting engine and trainer") as note:
        server.start()
        for reason in server.starting(START_TIMEOUT):
            note(reason)
    screen.say(f"    it answers at {server.url}/v1, as any OpenAI endpoint would")


async def _learn(screen: Screen, options: Options, server: Server) -> Outcome:
    """Before, during, after, rolled back."""
    examples = task.held_out_examples(options.seed)
    async with Agent(server.url, MODEL, SCENARIO, options.seed) as agent, asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_watch(server))
        screen.heading(f"Before: {len(examples)} held-out reviews, greedy, no training yet")
        before = await _held_out(screen, agent, examples)
        screen.heading(f"During: {options.steps} steps, each {PROMPTS} reviews x {ROLLOUTS} sampled answers")
        steps = await _train(screen, agent, options)
        screen.heading("After: the same held-out reviews; their adjectives, nouns and phrasing were never trained on")
        after = await _held_out(screen, agent, examples)
        screen.heading("Rolled back: release 0 again, published as a new release")
        with screen.waiting("rolling back"):
            await agent.rollback((await agent.releases())[0]["release_id"])
        rolled_back = await _held_out(screen, agent, examples)
        releases = await agent.releases()
        screen.chain(releases)
        count = await agent.feedback_count()
        watch.cancel()
    return Outcome(
        before=before, steps=steps, after=after, rolled_back=rolled_back, releases=releases, feedback_count=count
    )


async def _watch(server: Server) -> None:
    """Ends every wait for a server that is gone."""
    while True:
        server.check()
        await asyncio.sleep(0.5)


async def _held_out(screen: Screen, agent: Agent, examples: Sequence[task.Example]) -> list[Graded]:
    with screen.waiting(f"asking {len(examples)} reviews"):
        graded = await agent.evaluate(examples)
    screen.answers(f"held-out mean {mean_score(graded):.3f}; the first {SHOWN}:", graded[:SHOWN])
    return graded


async def _train(screen: Screen, agent: Agent, options: Options) -> list[Step]:
    steps: list[Step] = []
    with TrainingView(screen, options.steps) as view:
        for number, batch in enumerate(task.train_batches(options.seed, options.steps, PROMPTS), 1):
            steps.append(await agent.step(number, batch, ROLLOUTS, view.note))
            view.add(steps[-1])
    screen.say("    mean score of the sampled answers, step by step")
    screen.say(view.chart())
    return steps


# ---------------------------------------------------------------------------------------------- the end


def _conclude(screen: Screen, options: Options, outcome: Outcome, seconds: float) -> int:
    before, after = mean_score(outcome.before), mean_score(outcome.after)
    save_curve(options.output / "curve.png", outcome.steps, before, after, options.seed)
    _write_report(options, outcome, seconds)
    learned = outcome.rise >= REQUIRED_RISE
    verdict = "[green]learned[/]" if learned else f"[red]below the {REQUIRED_RISE} that the demo asks for[/]"
    screen.say(f"\n[bold]held-out {before:.3f} -> {after:.3f}: {outcome.rise:+.3f}[/], {verdict}")
    same = sum(old == new for old, new in zip(answers(outcome.before), answers(outcome.rolled_back), strict=True))
    exactly = "[green]exactly the base's[/]" if outcome.base_returned else "[red]not the base's[/]"
    screen.say(f"rolled back: {same} of {len(outcome.before)} greedy answers are {exactly}, character for character")
    screen.say(f"{outcome.feedback_count} reports, {len(outcome.releases)} releases, {seconds:.0f} s")
    screen.say(f"written: {options.output / 'report.json'}, {options.output / 'curve.png'}")
    return 0 if learned and outcome.base_returned else 1


def _write_report(options: Options, outcome: Outcome, seconds: float) -> None:
    report = {
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "held_out_before": mean_score(outcome.before),
        "held_out_after": mean_score(outcome.after),
        "held_out_after_rollback": mean_score(outcome.rolled_back),
        "rollback_answers_equal": outcome.base_returned,
        "feedback_count": outcome.feedback_count,
        "releases": [
            {name: value for name, value in release.items() if name != "metrics"} for release in outcome.releases
        ],
        "steps": [_step_view(step) for step in outcome.steps],
        "settings": {
            "model": MODEL,
            "steps": options.steps,
            "prompts": PROMPTS,
            "rollouts": ROLLOUTS,
            "max_tokens": task.MAX_TOKENS,
            "learning_rate": LEARNING_RATE,
            "required_rise": REQUIRED_RISE,
        },
        "held_out": [
            {
                "message": old.example.message,
                "expected": old.example.expected,
                "before": old.answer,
                "after": new.answer,
                "after_rollback": back.answer,
            }
            for old, new, back in zip(outcome.before, outcome.after, outcome.rolled_back, strict=True)
        ],
    }
    (options.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def _step_view(step: Step) -> dict[str, Any]:
    numbers = {name: value for name, value in step.metrics.items() if isinstance(value, int | float)}
    return {
        "step": step.number,
        "mean_score": step.mean_score,
        "tokens": step.tokens,
        "answer_seconds": round(step.answer_seconds, 3),
        "learn_seconds": round(step.learn_seconds, 3),
        "outcome": step.outcome,
        "reason": step.reason,
        "release": step.release,
        "gate": step.gate,
        "metrics": numbers,
    }


def _clean_up(screen: Screen, options: Options, server: Server | None) -> None:
    if server is None:
        return
    with screen.waiting("stopping reef serve"):
        server.stop()
    if options.keep:
        screen.say(
            f"kept {options.data}; look around with: reef serve --reef.data-dir {options.data} "
            f"--reef.default-scenario {SCENARIO} --inference.model-path {smollm2_directory()} --training.backend torch"
        )
    else:
        shutil.rmtree(options.data, ignore_errors=True)
    screen.say(f"kept in {options.output}: {', '.join(sorted(item.name for item in options.output.iterdir()))}")
