from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest

from reef.demo import task
from reef.demo.task import GATE, HELD_OUT, TRAIN, Vocabulary, score

SPLITS = {"train": TRAIN, "gate": GATE, "held-out": HELD_OUT}


def content_words(words: Vocabulary) -> set[str]:
    return {*words.positive, *words.negative, *words.nouns}


@pytest.mark.parametrize(("left", "right"), [*combinations(SPLITS, 2)])
def test_splits_share_no_adjective_noun_or_frame(left, right):
    first, second = SPLITS[left], SPLITS[right]
    assert not content_words(first) & content_words(second)
    assert not set(first.frames) & set(second.frames)


@pytest.mark.parametrize(("left", "right"), [*combinations(SPLITS, 2)])
def test_no_adjective_is_part_of_one_in_another_split(left, right):
    pairs = [
        (one, other)
        for one in (*SPLITS[left].positive, *SPLITS[left].negative)
        for other in (*SPLITS[right].positive, *SPLITS[right].negative)
    ]
    assert [pair for pair in pairs if pair[0] in pair[1] or pair[1] in pair[0]] == []


@pytest.mark.parametrize("words", [*SPLITS.values()], ids=[*SPLITS])
def test_words_of_a_split_are_distinct_and_labels_balanced(words):
    everything = [*words.positive, *words.negative, *words.nouns]
    assert len(set(everything)) == len(everything)
    assert len(words.positive) == len(words.negative)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_or_gate_word_is_ever_trained_on(seed):
    trained = {word for batch in task.train_batches(seed, 200, 8) for item in batch for word in spoken(item.message)}
    assert content_words(TRAIN) <= trained
    assert not (content_words(HELD_OUT) | content_words(GATE)) & trained


def spoken(message: str) -> set[str]:
    return set(re.findall(r"[a-z]+", message.lower()))


def test_batches_follow_the_seed_and_grow_by_appending():
    assert task.train_batches(3, 2, 8) == task.train_batches(3, 5, 8)[:2]
    assert task.train_batches(3, 2, 8) != task.train_batches(4, 2, 8)


def test_batches_have_both_labels_equally_often():
    for batch in task.train_batches(0, 10, 8):
        assert Counter(item.expected for item in batch) == {"positive": 4, "negative": 4}


def test_held_out_asks_for_every_held_out_adjective_once():
    examples = task.held_out_examples(1)
    found = [(word, item.expected) for item in examples for word in spoken(item.message) & content_words(HELD_OUT)]
    labels = {**dict.fromkeys(HELD_OUT.positive, "positive"), **dict.fromkeys(HELD_OUT.negative, "negative")}
    assert sorted((word, label) for word, label in found if word in labels) == sorted(labels.items())
    assert examples == task.held_out_examples(1) != task.held_out_examples(2)


def test_the_question_does_not_tell_the_answer():
    texts = {item.chat[0]["content"].replace(item.message, "") for item in task.held_out_examples(0)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("answer", "graded"),
    [
        ("positive", 1.0),
        ("Positive", 1.0),
        (" positive\n", 1.0),
        ("positive.", 0.6),
        ("Positive: the review", 0.6),
        ('"positive"', 0.6),
        ("The review is positive.", 0.3),
        ("positively", 0.0),
        ("positive or negative", 0.0),
        ("It is not negative but positive", 0.0),
        ("negative", 0.0),
        ("Good.", 0.0),
        ("...", 0.0),
        ("", 0.0),
    ],
)
def test_score(answer, graded):
    assert score(answer, "positive") == graded


def test_score_is_symmetric_in_the_labels():
    assert score("negative", "negative") == 1.0
    assert score("positive", "negative") == 0.0
    assert score("Negative!", "negative") == 0.6
