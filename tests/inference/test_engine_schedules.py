"""Whatever is done in whatever order, every page is accounted for and every token has the right log-probability."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reef.runtime.interfaces import Ending, PauseMode
from tests.conftest import examples
from tests.inference.references import (
    Answer,
    collect,
    engine,
    far,
    full_load,
    lora_load,
    make_adapter,
    make_full,
    reference_logprobs,
    reference_model,
    request,
)

TOLERANCE = 1e-4
LANES = ("", "blue", "red")


class Weights:
    """Made once: two adapters and a full set over the tiny model, with their references."""

    def __init__(self) -> None:
        from tests.models import tiny_llama

        root = Path(tempfile.mkdtemp(prefix="reef-test-"))
        self.base = tiny_llama()
        self.loads = [
            lora_load("engine:1", make_adapter(self.base, root / "one", seed=21)),
            lora_load("engine:2", make_adapter(self.base, root / "two", seed=22, targets=("v_proj", "down_proj"))),
            full_load("engine:3", make_full(self.base, root / "three", seed=23)),
        ]
        self.models: dict[str, Any] = {
            "engine:0": reference_model(self.base),
            "engine:1": reference_model(self.base, root / "one"),
            "engine:2": reference_model(self.base, root / "two"),
            "engine:3": reference_model(root / "three"),
        }


_made: list[Weights] = []


def weights() -> Weights:
    if not _made:
        _made.append(Weights())
    return _made[0]


class Schedules(RuleBasedStateMachine):
    """Random calls against one engine with 24 pages of 4 tokens; prompts share prefixes on purpose.

    A request whose lane is switched in place goes on with mixed KV, which has no simple reference: its
    log-probabilities are compared up to the switch only. All others are compared in full.
    """

    @initialize(prefix_cache=st.booleans(), kernels=st.sampled_from(["auto", "torch"]))
    def build(self, prefix_cache: bool, kernels: str) -> None:
        self.weights = weights()
        self.engine = engine(
            self.weights.base,
            kv_cache_tokens=96,
            page_size=4,
            max_context=64,
            max_batch_tokens=12,
            max_running=5,
            prefix_cache=prefix_cache,
            kernels=kernels,
        )
        for load in self.weights.loads:
            self.engine.stage(load)
        self.lanes = dict.fromkeys(LANES, "engine:0")
        self.paused = False
        self.requests: dict[str, Any] = {}
        self.answers: dict[str, Answer] = {}
        self.mixed: dict[str, int] = {}  # request -> tokens before its KV was mixed

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, 40),
        count=st.integers(1, 16),
        lane=st.sampled_from(LANES),
        pin=st.sampled_from([None, None, None, None, "engine:0", "engine:1", "engine:3"]),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def add(self, kind: int, length: int, count: int, lane: str, pin: str | None, temperature: float) -> None:
        prompt = [1000 * (kind + 1) + position for position in range(length)]
        self.send(prompt, lane=lane, load=pin, max_tokens=count, temperature=temperature, seed=7)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), pin=st.sampled_from([None, "engine:0", "engine:1", "engine:2", "engine:3"]))
    def add_next_turn(self, data: st.DataObject, pin: str | None) -> None:
        """A prompt that goes on where an earlier request has got to, under any weights."""
        before = data.draw(st.sampled_from(sorted(self.requests)))
        prompt = self.requests[before].prompt_ids + self.answers[before].token_ids
        lane = self.requests[before].lane
        self.send(prompt[:50], lane=lane, load=pin, max_tokens=3)

    def send(self, prompt: list[int], **options: Any) -> None:
        request_id = str(len(self.requests))
        one = request(request_id, prompt, **options)
        self.requests[request_id] = one
        self.answers[request_id] = Answer()
        self.engine.add(one)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            chunks = self.engine.step()
            if self.paused:
                assert not any(chunk.token_ids for chunk in chunks)
            collect(self.answers, chunks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.engine.pause(mode)
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule(lane=st.sampled_from(LANES[1:]), load_id=st.sampled_from(["engine:0", "engine:1", "engine:2", "engine:3"]))
    def activate(self, lane: str, load_id: str) -> None:
        if self.lanes[lane] != load_id:
            for sequence in self.engine._scheduler.running:
                one = sequence.request
                if (
                    one.lane == lane
                    and one.runtime_load_id is None
                    and sequence.num_output
                    and sequence.num_pending == 1
                ):
                    self.mixed.setdefault(one.request_id, sequence.num_output)
        self.engine.activate(lane, load_id)
        self.lanes[lane] = load_id

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.engine.resume()
        self.paused = False

    @rule(lane=st.sampled_from(LANES[1:]), load_id=st.sampled_from(["engine:0", "engine:1", "engine:2"]))
    def publish_in_place(self, lane: str, load_id: str) -> None:
        """What a publication does, in one go: in flight requests go on, and then some."""
        self.pause(PauseMode.IN_PLACE)
        self.activate(lane, load_id)
        self.resume()
        self.step(6)

    @rule()
    def flush(self) -> None:
        self.engine.flush()

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "engine"):
            return
        check_accounting(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        for _ in range(2000):
            if not self.engine.has_work():
                break
            collect(self.answers, self.engine.step())
        for request_id, one in self.requests.items():
            self.check_answer(one, self.answers[request_id])
        self.engine.flush()
        report = self.engine.report()
        assert (report.free_pages, report.running, report.waiting) == (report.total_pages, 0, 0)

    def check_answer(self, one: Any, answer: Answer) -> None:
        assert answer.ending in (Ending.LENGTH, Ending.CLIENT_LEFT)
        if answer.ending is Ending.LENGTH:
            assert len(answer.token_ids) == one.sampling.max_tokens
        if one.runtime_load_id is not None:
            assert set(answer.load_ids) <= {one.runtime_load_id}
        comparable = self.mixed.get(one.request_id, len(answer.token_ids))
        start = 0
        while start < comparable:
            load_id = answer.load_ids[start]
            end = start
            while end < comparable and answer.load_ids[end] == load_id:
                end += 1
            context = one.prompt_ids + answer.token_ids[:start]
            expected = reference_logprobs(self.weights.models[load_id], context, answer.token_ids[start:end])
            assert far(answer.logprobs[start:end], expected) < TOLERANCE
            start = end


def check_accounting(tested: Any) -> None:
    """Free, in the tree, held by one sequence: each page exactly once, and as many readers as sequences that read."""
    pool, cache, scheduler = tested._pool, tested._cache, tested._scheduler
    tree = []
    nodes = [child for root in cache._roots.values() for child in root.children.values()]
    while nodes:
        node = nodes.pop()
        tree.append(node)
        nodes += node.children.values()
    detached = {node for sequence in scheduler.running for node in sequence.nodes if node.detached}
    private = [page for sequence in scheduler.running for page in sequence.pages[len(sequence.nodes) :]]
    places = pool.free_pages() + [node.page for node in tree] + [node.page for node in detached] + private
    assert sorted(places) == list(range(1, pool.total + 1))
    assert cache.num_pages == len(tree)
    assert cache.num_evictable == sum(node.readers == 0 for node in tree)
    for node in [*tree, *detached]:
        assert node.readers == sum(node in sequence.nodes for sequence in scheduler.running)
    for sequence in scheduler.running:
        assert [node.page for node in sequence.nodes] == sequence.pages[: len(sequence.nodes)]
        assert sequence.num_computed <= len(sequence.pages) * cache.page_size
    assert all(not sequence.pages and sequence.num_computed == 0 for sequence in scheduler.waiting)


Schedules.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=50, suppress_health_check=list(HealthCheck)
)
TestSchedules = Schedules.TestCase
