"""A scorer of one's own: the expected word alone 1.0, as the first word 0.6, anywhere 0.3, else 0.0."""

from __future__ import annotations

import re


def score(answer: str, expected: str) -> float:
    """Letter case and punctuation do not count."""
    words = re.findall(r"\w+", answer.lower())
    word = expected.lower()
    if words == [word]:
        return 1.0
    if words[:1] == [word]:
        return 0.6
    return 0.3 if word in words else 0.0
