"""What the demo prints: live where there is a terminal, plain lines elsewhere; and the learning curve as PNG."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from reef.demo.agent import Graded, Step

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_HEIGHT = 8
MAX_CHART_WIDTH = 72
INDENT = 4
PLAIN_WIDTH = 140


def chart(values: Sequence[float], slots: int, height: int = CHART_HEIGHT) -> list[str]:
    """Bars of `values` (each 0 to 1) over an axis with room for `slots` of them; the first line is the top."""
    width = max(1, min(4, MAX_CHART_WIDTH // max(1, slots)))
    filled = [max(1, round(min(max(value, 0.0), 1.0) * height * 8)) for value in values]
    lines = []
    for row in reversed(range(height)):
        label = {height // 2: "0.5", 0: "0.0", height - 1: "1.0"}.get(row, "   ")
        bars = "".join(
            (BLOCKS[min(max(eighths - row * 8, 0), 8)] * max(1, width - 1)).ljust(width) for eighths in filled
        )
        lines.append(f"{label} │{bars}")
    return [*lines, "    └" + "─" * (width * slots)]


def duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Screen:
    """The demo's output. A phase has a number, a title and what came of it."""

    def __init__(self, phases: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH
        self._phases, self._phase = phases, 0

    @property
    def live(self) -> bool:
        return self._console.is_terminal

    def say(self, what: RenderableType = "") -> None:
        self._console.print(what, soft_wrap=not self.live)

    def heading(self, title: str) -> None:
        self._phase += 1
        self.say(f"\n[bold cyan]{self._phase}/{self._phases}[/] [bold]{title}[/]")

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something is under way, with its seconds; the yielded function adds a detail."""
        began = time.monotonic()
        if not self.live:
            self.say(f"    {what} ...")
            yield lambda detail: None
        else:
            detail = [""]
            spinner = Spinner("dots")

            def line() -> RenderableType:
                seconds = f"{time.monotonic() - began:.0f} s"
                spinner.update(text=Text.from_markup(f"{what}  [dim]{seconds}  {escape(detail[0])}[/]"))
                return spinner

            def note(text: str) -> None:
                detail[0] = text

            with Live(get_renderable=line, console=self._console, transient=True, refresh_per_second=8):
                yield note
        self.say(f"    {what}: done in {time.monotonic() - began:.1f} s")

    def answers(self, title: str, graded: Sequence[Graded]) -> None:
        """What was asked, what the model said, and what that is worth."""
        table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2, 0, 0))
        for name in ("customer review", "model's answer", "right", "score"):
            table.add_column(name, header_style="dim", overflow="fold")
        for item in graded:
            colour = "green" if item.score == 1.0 else "yellow" if item.score > 0 else "red"
            table.add_row(
                escape(item.example.message),
                escape(repr(item.answer)),
                item.example.expected,
                f"[{colour}]{item.score:.1f}[/]",
            )
        self.say(Padding(table, (0, 0, 0, INDENT), expand=False))

    def chain(self, releases: Sequence[dict[str, Any]]) -> None:
        """The release chain, oldest first."""
        numbers = {release["release_id"]: release["number"] for release in releases}
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("release", "kind", "release_id", "content", "served as", "scores it learned from"):
            table.add_column(name, header_style="dim", no_wrap=True)
        for release in releases:
            score = release["metrics"].get("mean_score")
            note = "" if score is None else f"mean {score:.2f}"
            if release["source_release_id"] is not None:
                note = f"content of release {numbers[release['source_release_id']]}"
            content = release["content_id"].rpartition(":")[2][:12]
            cells = (str(release["number"]), release["kind"], release["release_id"], content)
            table.add_row(*cells, release["runtime_load_id"], note)
        self.say(Padding(table, (0, 0, 0, INDENT), expand=False))


class TrainingView:
    """Progress of the training loop; a context manager."""

    def __init__(self, screen: Screen, steps: int) -> None:
        self._screen, self._steps = screen, steps
        self._done: list[Step] = []
        self._began = time.monotonic()
        self._doing = ""
        self._progress = Progress(TextColumn("    {task.description}"), BarColumn(40), auto_refresh=False)
        self._task = self._progress.add_task(f"step 1/{steps}", total=steps)
        self._live = Live(get_renderable=self._render, console=screen._console, transient=True, refresh_per_second=4)

    def __enter__(self) -> TrainingView:
        if self._screen.live:
            self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._live.stop()

    def note(self, doing: str) -> None:
        self._doing = doing

    def add(self, step: Step) -> None:
        self._done.append(step)
        if not self._screen.live:
            self._screen.say(f"    {self._line(step)}, {duration(self._left())} left")

    def _left(self) -> float:
        """Seconds, if the steps to come take as long as the median one so far."""
        if not self._done:
            return 0.0
        took = sorted(step.answer_seconds + step.learn_seconds for step in self._done)
        return took[len(took) // 2] * (self._steps - len(self._done))

    def _line(self, step: Step) -> str:
        result = f"release {step.release}" if step.outcome == "trained" else f"{step.outcome} {step.reason}".strip()
        return (
            f"step {step.number}/{self._steps}  mean score {step.mean_score:.2f}  "
            f"{step.tokens_per_second:.0f} tokens/s, learned in {step.learn_seconds:.1f} s: {result}"
        )

    def _render(self) -> RenderableType:
        current = min(len(self._done) + 1, self._steps)
        self._progress.update(self._task, completed=len(self._done), description=f"step {current}/{self._steps}")
        doing = f"    [dim]{duration(time.monotonic() - self._began)}  {escape(self._doing)}[/]"
        facts, sample = "    [dim]the first scores are on their way[/]", ""
        if self._done:
            last = self._done[-1]
            facts = (
                f"    mean score [bold]{last.mean_score:.2f}[/]   {last.tokens_per_second:.0f} tokens/s   "
                f"serving release {last.release}   about {duration(self._left())} left"
            )
            sample = f"    [dim]{escape(last.sample.example.message)}[/]  {escape(repr(last.sample.answer))}"
        return Group(self._progress, *(Text.from_markup(line) for line in (doing, facts, sample)), self.chart())

    def chart(self) -> Text:
        lines = chart([step.mean_score for step in self._done], self._steps)
        return Text("\n".join(f"    {line}" for line in lines), style="green")


def save_curve(path: Path, steps: Sequence[Step], before: float, after: float, seed: int) -> None:
    """Write the learning curve as PNG. Needs no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    numbers = [step.number for step in steps]
    axes.plot(numbers, [step.mean_score for step in steps], marker="o", color="tab:blue", label="training (sampled)")
    judged = [(step.number + 0.5, step.gate) for step in steps if step.gate is not None]
    axes.plot([x for x, _ in judged], [gate for _, gate in judged], ".:", color="tab:green", label="gate (greedy)")
    axes.plot([0.5, numbers[-1] + 0.5], [before, after], "D", color="tab:orange", label="held-out (greedy)")
    for x, value in ((0.5, before), (numbers[-1] + 0.5, after)):
        axes.annotate(f"{value:.2f}", (x, value), textcoords="offset points", xytext=(0, -14), ha="center")
    axes.set(
        xlabel="training step",
        ylabel="mean score",
        ylim=(-0.03, 1.05),
        title=f"SmolLM2-135M-Instruct learns one-word sentiment (seed {seed})",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
