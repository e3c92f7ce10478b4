"""The demo's task: sort customer messages into "positive" and "negative", answering with that one word.

Messages are sentences made of a frame, a noun and an adjective. The three splits share none of the three, so a rise
on the held-out split means that the model learned the task and not the messages.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

POSITIVE = "positive"
NEGATIVE = "negative"
LABELS = (POSITIVE, NEGATIVE)

INSTRUCTION = "Review: {message}\nIs the review positive or negative? Answer with one word."
MAX_TOKENS = 8


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """Words of one split; `frames` hold the places {noun} and {adjective}."""

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    nouns: tuple[str, ...]
    frames: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Example:
    """One message with the one-word answer that a person would give."""

    message: str
    expected: str  # one of LABELS

    @property
    def chat(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": INSTRUCTION.format(message=self.message)}]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAIN = Vocabulary(
    positive=_words(
        "wonderful excellent great fantastic amazing lovely perfect brilliant superb impressive pleasant enjoyable "
        "good nice beautiful charming reliable fine satisfying faultless"
    ),
    negative=_words(
        "terrible awful horrible dreadful disgusting bad poor useless disappointing annoying boring ugly faulty "
        "unpleasant overpriced unreliable unbearable irritating inadequate hopeless"
    ),
    nouns=_words(
        "hotel soup phone jacket laptop movie pizza room delivery blender sofa concert taxi lamp camera book salad "
        "website coffee mattress printer garden museum haircut chair keyboard breakfast"
    ),
    frames=(
        "The {noun} was {adjective}.",
        "I found the {noun} {adjective}.",
        "Your {noun} is {adjective}.",
        "Honestly, the {noun} was quite {adjective}.",
        "We thought the {noun} was {adjective}.",
        "My new {noun} turned out to be {adjective}.",
    ),
)

GATE = Vocabulary(
    positive=_words("terrific delightful splendid gorgeous remarkable flawless sensational adorable"),
    negative=_words("nasty lousy sloppy revolting rotten worthless frustrating defective"),
    nouns=_words("kettle bakery bicycle novel apartment headset burger raincoat"),
    frames=(
        "In my opinion the {noun} was {adjective}.",
        "So far the {noun} has been {adjective}.",
    ),
)

HELD_OUT = Vocabulary(
    positive=_words(
        "marvelous outstanding magnificent exceptional fabulous stunning incredible awesome exquisite phenomenal "
        "spectacular sublime admirable impeccable glorious commendable"
    ),
    negative=_words(
        "horrendous atrocious pathetic appalling wretched miserable abysmal unacceptable hideous shoddy dismal "
        "deplorable ghastly shameful pitiful substandard"
    ),
    nouns=_words(
        "restaurant tablet backpack podcast umbrella sandwich ferry microwave perfume gym watch cake translation "
        "guitar hostel toaster"
    ),
    frames=(
        "After a week, this {noun} still seems {adjective}.",
        "Everybody in my family calls that {noun} {adjective}.",
        "To sum up our experience: {adjective} {noun}, nothing more to say.",
        "Let me tell you, this is one {adjective} {noun}!",
    ),
)


def score(answer: str, expected: str) -> float:
    """Grade `answer`, ignoring case: exactly the word 1, the word and then more 0.6, the word somewhere 0.3, else 0.

    An answer that also names the other label somewhere earns nothing: naming both is no answer.
    """
    words = re.findall(r"[a-z]+", answer.lower())
    other = NEGATIVE if expected == POSITIVE else POSITIVE
    if expected not in words or other in words:
        return 0.0
    if answer.strip().lower() == expected:
        return 1.0
    return 0.6 if words[0] == expected else 0.3


def train_batches(seed: int, steps: int, prompts: int) -> list[list[Example]]:
    """Return `steps` batches of `prompts` training examples, both labels equally often in each."""
    draw = random.Random(f"train-{seed}")
    return [_examples(TRAIN, draw, prompts) for _ in range(steps)]


def gate_examples(seed: int) -> list[Example]:
    """The evaluation gate's examples, one for each adjective of its own split."""
    return _one_for_each_adjective(GATE, random.Random(f"gate-{seed}"))


def held_out_examples(seed: int) -> list[Example]:
    """Examples that no training step and no gate sees, one for each held-out adjective."""
    return _one_for_each_adjective(HELD_OUT, random.Random(f"held-out-{seed}"))


def _examples(words: Vocabulary, draw: random.Random, count: int) -> list[Example]:
    labels = [LABELS[index % 2] for index in range(count)]
    draw.shuffle(labels)
    return [_example(words, draw, draw.choice(_adjectives(words, label)), label) for label in labels]


def _one_for_each_adjective(words: Vocabulary, draw: random.Random) -> list[Example]:
    examples = [_example(words, draw, word, label) for label in LABELS for word in _adjectives(words, label)]
    draw.shuffle(examples)
    return examples


def _adjectives(words: Vocabulary, label: str) -> tuple[str, ...]:
    return words.positive if label == POSITIVE else words.negative


def _example(words: Vocabulary, draw: random.Random, adjective: str, label: str) -> Example:
    frame = draw.choice(words.frames)
    return Example(frame.format(noun=draw.choice(words.nouns), adjective=adjective), label)
