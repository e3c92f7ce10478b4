"""Tokens and log-probabilities against transformers, on a tiny float32 model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from reef.errors import InvalidRequest
from reef.runtime.interfaces import Ending
from tests.inference.references import (
    engine,
    far,
    reference_greedy,
    reference_logprobs,
    reference_model,
    request,
    run,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return reference_model(tiny_model)


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 49000) for _ in range(generator.randint(low, high))] for _ in range(count)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, 200])
def test_greedy_equals_transformers_alone(tiny_model, model, kernels, length):
    prompt = prompts(1, length, length)[0]
    answer = run(engine(tiny_model, kernels=kernels), [request("a", prompt)])["a"]
    assert answer.token_ids == reference_greedy(model, prompt, 12)
    assert far(answer.logprobs, reference_logprobs(model, prompt, answer.token_ids)) < TOLERANCE
    assert answer.ending is Ending.LENGTH
    assert answer.sampled_logprobs == [0.0] * 12


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_greedy_equals_transformers_in_a_mixed_batch(tiny_model, model, kernels):
    """Prompts from 1 to 150 tokens in steps of 64: prefill chunks and decoding share steps."""
    several = prompts(20, 1, 150)
    answers = run(engine(tiny_model, kernels=kernels), [request(str(i), prompt) for i, prompt in enumerate(several)])
    for index, prompt in enumerate(several):
        assert answers[str(index)].token_ids == reference_greedy(model, prompt, 12)
        expected = reference_logprobs(model, prompt, answers[str(index)].token_ids)
        assert far(answers[str(index)].logprobs, expected) < TOLERANCE


def test_prefix_hit_changes_nothing(tiny_model, model):
    tested = engine(tiny_model)
    prompt = prompts(1, 100, 100)[0]
    first = run(tested, [request("a", prompt)])["a"]
    again = run(tested, [request("b", prompt)])["b"]
    longer = run(tested, [request("c", prompt + first.token_ids)])["c"]
    assert (first.cached_tokens, again.cached_tokens) == (0, 96)
    assert longer.cached_tokens == 104  # of the 111 tokens that had KV, the full pages
    assert again.token_ids == first.token_ids
    assert far(again.logprobs, first.logprobs) < TOLERANCE
    assert longer.token_ids == reference_greedy(model, prompt + first.token_ids, 12)


def test_samples_of_one_prompt_cost_one_prefill(tiny_model):
    tested = engine(tiny_model)
    prompt = prompts(1, 97, 97)[0]
    run(tested, [request(str(i), prompt, temperature=1.0, max_tokens=4) for i in range(8)])
    computed = tested.report().stats["computed_tokens"]
    assert computed == 97 + 7 * 1 + 8 * 3  # one prefill, one token each past the shared pages, three decodes each


def test_without_a_prefix_cache_nothing_is_shared(tiny_model):
    tested = engine(tiny_model, prefix_cache=False)
    prompt = prompts(1, 97, 97)[0]
    answers = run(tested, [request(str(i), prompt) for i in range(3)])
    assert {answer.cached_tokens for answer in answers.values()} == {0}
    report = tested.report()
    assert report.free_pages == report.total_pages


def test_retraction_for_want_of_pages_changes_nothing(tiny_model, model):
    """Ten requests of up to 100 tokens in a cache of 30 pages of 8."""
    tested = engine(tiny_model, kv_cache_tokens=240, max_context=128)
    several = prompts(10, 20, 60, seed=3)
    answers = run(tested, [request(str(i), prompt, max_tokens=40) for i, prompt in enumerate(several)])
    assert tested.report().stats["retractions"] > 0
    for index, prompt in enumerate(several):
        assert answers[str(index)].token_ids == reference_greedy(model, prompt, 40)
        expected = reference_logprobs(model, prompt, answers[str(index)].token_ids)
        assert far(answers[str(index)].logprobs, expected) < TOLERANCE


def test_every_page_is_free_at_the_end(tiny_model):
    tested = engine(tiny_model, kv_cache_tokens=240, max_context=128)
    run(tested, [request(str(i), prompt, max_tokens=30) for i, prompt in enumerate(prompts(8, 5, 60))])
    report = tested.report()
    assert report.free_pages + report.stats["cached_pages"] == report.total_pages
    tested.flush()
    assert tested.report().free_pages == report.total_pages


def test_score_is_what_is_served(tiny_model, model):
    tested = engine(tiny_model)
    prompt = prompts(1, 400, 400)[0]
    scores = tested.score("engine:0", prompt)
    assert far(scores, reference_logprobs(model, prompt[:1], prompt[1:])) < TOLERANCE


def test_end_tokens_stop(tiny_model):
    tested = engine(tiny_model)
    prompt = prompts(1, 10, 10)[0]
    free = run(tested, [request("a", prompt)])["a"].token_ids
    stopped = run(tested, [request("b", prompt, stop_token_ids=[free[4]])])["b"]
    first = free.index(free[4])
    assert (stopped.token_ids, stopped.ending) == (free[: first + 1], Ending.STOP)


def test_model_end_token_stops_unless_ignored(tiny_model):
    tested = engine(tiny_model)
    eos = {2: 1000.0}
    assert run(tested, [request("a", [5, 6], logit_bias=eos, ignore_eos=False)])["a"].token_ids == [2]
    assert run(tested, [request("b", [5, 6], logit_bias=eos, max_tokens=3)])["b"].token_ids == [2, 2, 2]


def test_stop_string_across_tokens(tiny_model):
    """Bias forces the text: the tokens of "Hello", " world", "!" in any order are never needed, one token repeats."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (token,) = tokenizer("ab", add_special_tokens=False).input_ids
    tested = engine(tiny_model)
    answer = run(tested, [request("a", [5], logit_bias={token: 1000.0}, stop=["baba", "zzz"])])["a"]
    assert answer.token_ids == [token] * 3  # ab|ab|ab holds "baba" only with the third
    assert (answer.ending, answer.stopped_by) == (Ending.STOP, "baba")


def test_top_logprobs_are_of_the_model(tiny_model, model):
    import torch

    prompt = prompts(1, 20, 20)[0]
    answer = run(engine(tiny_model), [request("a", prompt, top_logprobs=5, max_tokens=1, temperature=0.5)])["a"]
    with torch.no_grad():
        values, ids = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(5)
    assert [token for token, _ in answer.top_logprobs[0]] == ids.tolist()
    assert far([value for _, value in answer.top_logprobs[0]], values.tolist()) < TOLERANCE


def test_seed_decides_whatever_else_runs(tiny_model):
    prompt = prompts(1, 30, 30)[0]
    wanted = {"temperature": 1.0, "seed": 11, "max_tokens": 20, "top_p": 0.95}
    alone = run(engine(tiny_model), [request("a", prompt, **wanted)])["a"]
    others = [request(str(i), other, temperature=1.0, max_tokens=25) for i, other in enumerate(prompts(9, 3, 80))]
    tested = engine(tiny_model, kv_cache_tokens=256, max_context=128)
    crowded = run(tested, [*others, request("a", prompt, **wanted)])["a"]
    assert crowded.token_ids == alone.token_ids
    assert run(engine(tiny_model), [request("a", prompt, **{**wanted, "seed": 12})])["a"].token_ids != alone.token_ids


def test_abort_ends_with_client_left(tiny_model):
    tested = engine(tiny_model)
    tested.add(request("a", [5, 6, 7]))
    tested.add(request("b", [5, 6, 7, 8]))
    tested.step()
    tested.abort("a")
    tested.abort("unknown")
    answers = run(tested)
    assert answers["a"].ending is Ending.CLIENT_LEFT
    assert answers["b"].ending is Ending.LENGTH
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages


def test_fail_all_cuts_everything_and_recovers(tiny_model):
    tested = engine(tiny_model)
    for index in range(20):
        tested.add(request(str(index), [5, 6, 7, index + 3]))
    tested.step()
    chunks = tested.fail_all("disk on fire")
    assert {chunk.request_id for chunk in chunks} == {str(index) for index in range(20)}
    assert {(chunk.ending, chunk.error) for chunk in chunks} == {(Ending.ENGINE_CUT, "disk on fire")}
    assert not tested.has_work()
    assert tested.report().free_pages == tested.report().total_pages
    assert len(run(tested, [request("again", [5, 6])])["again"].token_ids) == 12


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_ids", {"prompt_ids": []}),
        ("prompt_ids", {"prompt_ids": [49152]}),
        ("prompt_ids", {"prompt_ids": [-1]}),
        ("prompt_ids", {"prompt_ids": [5] * 2048}),
        ("sampling.max_tokens", {"prompt_ids": [5] * 2040}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("runtime_load_id", {"load": "engine:77"}),
        ("sampling.temperature", {"temperature": -0.1}),
        ("sampling.temperature", {"temperature": float("nan")}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.top_k", {"top_k": -1}),
        ("sampling.min_p", {"min_p": 1.5}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
        ("sampling.logit_bias", {"logit_bias": {49152: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": {5: float("inf")}}),
        ("sampling.stop", {"stop": [""]}),
        ("sampling.stop_token_ids", {"stop_token_ids": [-5]}),
    ],
)
def test_refuses_by_name(shared_engine, field, changes):
    options = {"prompt_ids": [5, 6], **changes}
    with pytest.raises(InvalidRequest) as refusal:
        shared_engine.add(request("a", options.pop("prompt_ids"), **options))
    assert refusal.value.field == field
    assert not shared_engine.has_work()


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Path) -> Any:
    return engine(tiny_model)


def test_a_request_id_in_flight_is_refused(tiny_model):
    tested = engine(tiny_model)
    tested.add(request("a", [5, 6]))
    with pytest.raises(InvalidRequest, match="in flight"):
        tested.add(request("a", [5, 6]))
