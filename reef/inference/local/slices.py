"""Long work in slices, for a thread that others wait for.

A function that returns `Slices[T]` is a generator: it stops after every slice, and returns the result at the end. Its
slices run one after another on one thread; what else that thread does between two of them, the work must expect.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Slices = Generator[None, None, T]


def whole(slices: Slices[T]) -> T:
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result
