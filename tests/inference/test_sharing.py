"""Prefix sharing across publications, row by row of docs/prefix-sharing.md, each judged by `reef verify` too.

A shared prefix of 2,000 tokens, as agents have it; what is reused is all of the prompt but its last page.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft", "llguidance")

from reef.runtime.interfaces import MemoryRegion, PauseMode, WeightKind  # noqa: E402
from reef.verify.recorded import Selection, check  # noqa: E402
from tests.inference.references import lora_load, make_adapter, make_full, request, run  # noqa: E402
from tests.verify.recording import SCENARIO, Recording  # noqa: E402

PREFIX = [300 + 7 * number % 1000 for number in range(2000)]
REUSED = 2000  # whole pages of 8 before the last token of PREFIX and one more
LORA = WeightKind.LORA
RETRACT, IN_PLACE = PauseMode.RETRACT, PauseMode.IN_PLACE


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(tiny_model, root / str(seed), seed=seed) for seed in (1, 2)]


def record(model: Path, directory: Path, **options: Any) -> Recording:
    return Recording(
        model, directory / "data", **{"kv_cache_tokens": 8192, "max_batch_tokens": 512, "max_running": 16, **options}
    )


def cached(recording: Recording, name: str) -> int:
    """Prompt tokens that one more request finds."""
    recording.ask(name, [*PREFIX, len(recording.answers)], max_tokens=3)
    recording.step()
    return recording.answers[name].cached_tokens


def assert_clean(recording: Recording) -> None:
    recording.record()
    report = asyncio.run(check(recording.data, Selection()))
    assert report.clean, report.lines()
    assert report.scenarios[0].answers == len(recording.answers)
    engine = recording.engine
    engine.pause(RETRACT)
    assert engine.report().free_pages == engine.report().total_pages, "a page is lost"


def test_in_place_without_sharing_reuses_nothing_and_four_requests_go_on(tiny_model, adapters, tmp_path):
    recording = record(tiny_model, tmp_path, prefix_cache=False)
    assert [cached(recording, name) for name in ("first", "second")] == [0, 0]
    for number in range(4):
        recording.ask(f"in flight {number}", [*PREFIX[:100], number], max_tokens=20)
    recording.step(10)
    before = recording.engine.report().stats["computed_tokens"]
    recording.publish(adapters[0], LORA, IN_PLACE)
    recording.step()
    for number in range(4):
        spans = recording.answers[f"in flight {number}"].spans
        assert [span.runtime_load_id for span in spans] == ["engine:0", "engine:1"] and spans[1].end == 20
    left = sum(20 - recording.answers[f"in flight {number}"].spans[0].end for number in range(4))
    assert recording.engine.report().stats["computed_tokens"] - before == left, "nothing is computed again"
    assert_clean(recording)


@pytest.mark.parametrize("mode", [RETRACT, IN_PLACE], ids=["retract and flush", "keys of load and lane"])
@pytest.mark.parametrize("kind", list(WeightKind))
def test_full_reuse_before_none_right_after_a_publication_full_reuse_again(tiny_model, adapters, tmp_path, mode, kind):
    weights = adapters[0] if kind is LORA else make_full(tiny_model, tmp_path / "full", seed=5)
    recording = record(tiny_model, tmp_path)
    assert [cached(recording, name) for name in ("cold", "warm")] == [0, REUSED]
    recording.publish(weights, kind, mode)
    assert [cached(recording, name) for name in ("cold again", "warm again")] == [0, REUSED]
    use = recording.engine.report().prefixes[SCENARIO]
    assert (use.prompt_tokens, use.hit_tokens, use.recomputed_tokens) == (4 * 2001, 2 * REUSED, 0)
    # At least 99% of what can be shared within a version: all whole pages.
    assert use.hit_tokens >= 0.99 * 2 * 2000 and use.hit_bytes == use.hit_tokens * 2 * 2 * 2 * 16 * 4
    assert_clean(recording)


def test_a_retracted_request_is_computed_again_and_counted(tiny_model, adapters, tmp_path):
    recording = record(tiny_model, tmp_path)
    recording.ask("a", PREFIX, max_tokens=20)
    recording.step(10)
    computed = len(recording.answers["a"].output_ids) - 1 + len(PREFIX)
    recording.publish(adapters[0], LORA, RETRACT)
    recording.step()
    assert recording.engine.report().prefixes[SCENARIO].recomputed_tokens == computed
    assert_clean(recording)


def test_two_adapters_never_share_and_a_publication_clears(tiny_model, adapters, tmp_path):
    recording = record(tiny_model, tmp_path)
    tested = recording.engine
    for number, adapter in enumerate(adapters, 1):
        tested.stage(lora_load(f"other:{number}", adapter))

    def hits(name: str, load: str) -> int:
        return run(tested, [request(name, [*PREFIX, 5], load=load, max_tokens=2)])[name].cached_tokens

    assert [hits(str(number), load) for number, load in enumerate(["other:1", "other:1", "other:2", "other:2"])] == [
        0, REUSED, 0, REUSED
    ]  # fmt: skip
    recording.publish(adapters[0], LORA, RETRACT)
    assert [hits(name, name) for name in ("other:1", "other:2")] == [0, 0]
    tested.drop("other:1")
    assert hits("kept", "other:2") == REUSED
    assert_clean(recording)


def test_colocated_with_memory_released_and_restored_in_between(tiny_model, adapters, tmp_path):
    recording = record(tiny_model, tmp_path)
    assert [cached(recording, name) for name in ("cold", "warm")] == [0, REUSED]
    recording.ask("crossing", [*PREFIX, 1, 2, 3], max_tokens=20)
    recording.step(10)
    tested, content = recording.engine, recording.contents.put(adapters[0])
    tested.pause(RETRACT)
    report = tested.report()
    assert (report.free_pages, report.waiting) == (report.total_pages, 1)
    tested.release_memory([MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE])
    tested.restore_memory()
    release = recording.publish(adapters[0], LORA, RETRACT)
    assert release.content_id == content and tested.report().stats["cached_pages"] == 0
    recording.step()
    assert recording.answers["crossing"].spans[1].runtime_load_id == "engine:1"
    assert [cached(recording, name) for name in ("again", "warm again")] == [REUSED, REUSED]  # "crossing" computed it
    assert_clean(recording)
