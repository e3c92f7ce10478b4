"""Bars on a terminal for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Told = Callable[[str, int, int], None]
"""Told (what, done, in all); 0 in all: nobody knows."""


@contextmanager
def bars(wanted: bool = True) -> Iterator[Told]:
    """A bar for each `what` on a terminal's standard error; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(console=console, transient=True, disable=not (wanted and console.is_terminal)) as shown:

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=total or None)

        yield told
