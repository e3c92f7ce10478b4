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

import yaml
from rich.markup import escape

from reef.demo import task
from reef.demo.agent import Agent, Graded, Step, mean_score
from reef.demo.model import smollm2_directory
from reef.demo.server import Server
from reef.demo.show import Screen, TrainingView, save_curve
from reef.directories import cache_directory
from reef.errors import ConfigError, ReefError

SCENARIO = "reviews"
MODEL = "SmolLM2-135M-Instruct"
STEPS = 12
PROMPTS = 8
ROLLOUTS = 8
LEARNING_RATE = 5e-4
DTYPE = "float32"
"""Most CPUs train bfloat16 many times slower, and its rounding lets greedy answers change with the batch."""
REQUIRED_RISE = 0.5
START_TIMEOUT = 300.0
"""Seconds."""
WATCH_SECONDS = 0.25
GATE_MARGIN = 0.1
"""A candidate whose mean on the gate is lower than the incumbent's by more is rejected."""
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

    @property
    def deployment(self) -> Path:
        return self.output / "reef.yaml"


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
        server = Server(["--config", str(_write_deployment(options, model))], options.output / "server.log")
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


def _write_deployment(options: Options, model: Path) -> Path:
    """Write the deployment file that `reef serve` gets, and the gate's prompts; return the file."""
    shutil.rmtree(options.data, ignore_errors=True)
    options.output.mkdir(parents=True, exist_ok=True)
    gate = options.output / "gate.jsonl"
    lines = (
        json.dumps({"messages": item.chat, "expected": item.expected}) for item in task.gate_examples(options.seed)
    )
    gate.write_text("\n".join(lines) + "\n")
    sections = {
        "reef": {"port": 0, "data-dir": str(options.data), "default-scenario": SCENARIO, "shutdown-grace": 1},
        "inference": {
            "model-path": str(model),
            "served-model-name": MODEL,
            "dtype": DTYPE,
            "pause-mode": "in_place",
        },
        "training": {
            "backend": "torch",
            "mode": "lora",
            "dtype": DTYPE,
            "lora-rank": 16,
            "lora-alpha": 32,
            "learning-rate": LEARNING_RATE,
            "seed": options.seed,
        },
        "recipe": {
            "name": "scored",
            "batch-size": PROMPTS * ROLLOUTS,
            "advantage": "group",
            "objective": "policy_gradient",
        },
        "evaluation": {
            "plugin": "held-out",
            "prompts": str(gate),
            "scorer": "reef.demo.task:score",
            "max-tokens": task.MAX_TOKENS,
            "concurrency": 32,
            "margin": GATE_MARGIN,
        },
    }
    options.deployment.write_text(yaml.safe_dump(sections, sort_keys=False))
    return options.deployment


def _start(screen: Screen, server: Server) -> None:
    screen.heading("reef serve, with a trainer beside the engine")
    with screen.waiting("starting engine and trainer") as note:
        server.start()
        for reason in server.starting(START_TIMEOUT):
            note(reason)
    screen.say(f"    it answers at {server.url}/v1, as any OpenAI endpoint would")


async def _learn(screen: Screen, options: Options, server: Server) -> Outcome:
    """Tell the story as long as the server lives. Raises WorkerDied with the end of its log when it does not."""
    async with Agent(server.url, MODEL, SCENARIO, options.seed) as agent:
        story = asyncio.create_task(_story(screen, options, agent))
        death = asyncio.create_task(_until_dead(server))
        try:
            await asyncio.wait({story, death}, return_when=asyncio.FIRST_COMPLETED)
            if not story.done() or story.exception() is not None:
                await asyncio.wait({death}, timeout=2 * WATCH_SECONDS)
                server.check()  # a dead server explains more than the call that failed
            return await story
        finally:
            story.cancel()
            death.cancel()
            await asyncio.gather(story, death, return_exceptions=True)


async def _until_dead(server: Server) -> None:
    while server.alive:
        await asyncio.sleep(WATCH_SECONDS)


async def _story(screen: Screen, options: Options, agent: Agent) -> Outcome:
    examples = task.held_out_examples(options.seed)
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
    screen.say("\n    the release chain")
    screen.chain(releases)
    return Outcome(
        before=before,
        steps=steps,
        after=after,
        rolled_back=rolled_back,
        releases=releases,
        feedback_count=await agent.feedback_count(),
    )


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
    learned = outcome.rise >= REQUIRED_RISE - 1e-9  # forgives rounding
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
        reef = Path(sys.executable).parent / "reef"
        screen.say(f"look around with: {reef} serve --config {options.deployment} --reef.port 8900")
    else:
        shutil.rmtree(options.data, ignore_errors=True)
    screen.say(f"kept in {options.output}: {', '.join(sorted(item.name for item in options.output.iterdir()))}")
