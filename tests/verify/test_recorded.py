"""`reef verify` on what a real engine said: clean when it did right, and each kind of wrong is found."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

import torch  # noqa: E402

from reef.artifact.base import Serving, read_serving, write_serving  # noqa: E402
from reef.artifact.content import contents_of  # noqa: E402
from reef.errors import ConfigError, NotFound, StorageError  # noqa: E402
from reef.inference.local.kv_cache import Node, PrefixCache  # noqa: E402
from reef.records.config import PostgresConfig  # noqa: E402
from reef.records.opening import location  # noqa: E402
from reef.runtime.interfaces import PauseMode, Span, WeightKind  # noqa: E402
from reef.verify.recorded import Selection, check  # noqa: E402
from reef.verify.reference import Reference, Weights  # noqa: E402
from reef.verify.report import Report  # noqa: E402
from tests.inference.references import make_adapter, make_full  # noqa: E402
from tests.verify.recording import Recording  # noqa: E402

PROMPT = list(range(300, 350))
LORA, FULL = WeightKind.LORA, WeightKind.FULL
RETRACT, IN_PLACE = PauseMode.RETRACT, PauseMode.IN_PLACE


@pytest.fixture(scope="module")
def weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "one": make_adapter(tiny_model, root / "one", seed=1),
        "two": make_adapter(tiny_model, root / "two", seed=2),
        "full": make_full(tiny_model, root / "full", seed=3),
    }


@pytest.fixture
def recording(tiny_model: Path, tmp_path: Path) -> Recording:
    return Recording(tiny_model, tmp_path / "data")


def verified(recording: Recording, selection: Selection | None = None, **options: Any) -> Report:
    return asyncio.run(check(recording.data, selection or Selection(), **options))


def complaints(report: Report) -> str:
    return "\n".join(f"{problem.record_id}: {problem.message}" for problem in report.scenarios[0].problems)


def tokens_by_release(report: Report) -> list[int]:
    return [release.tokens for release in report.scenarios[0].releases]


# ---------------------------------------------------------------------------------------------- what is right


@pytest.mark.parametrize("mode", [IN_PLACE, RETRACT])
def test_answers_across_publications_of_adapters_and_full_weights_are_clean(recording, weights, mode):
    recording.ask("crossing", PROMPT, max_tokens=40)
    recording.ask("base only", PROMPT, max_tokens=5)
    recording.step(10)
    for name, kind in (("one", LORA), ("full", FULL), ("two", LORA)):
        recording.publish(weights[name], kind, mode)
        recording.ask(name, PROMPT, max_tokens=6)
        recording.step(10)
    recording.step()
    recording.record()
    report = verified(recording, tolerance=1e-4)
    assert complaints(report) == "" and report.clean
    found = report.scenarios[0]
    assert found.answers == 5 and sum(tokens_by_release(report)) == 40 + 5 + 3 * 6
    assert max(release.worst for release in found.releases) < 1e-4
    frozen = [release.frozen_tokens for release in found.releases]
    crossed = [span.end - span.start for span in recording.answers["crossing"].spans]
    assert frozen == ([0, *crossed[1:]] if mode is IN_PLACE else [0, 0, 0, 0]), (frozen, crossed)


def test_a_frozen_request_that_had_to_give_way_later_is_clean(recording, weights):
    """For want of pages its mixed KV is dropped, and computed again under the newer load alone."""
    recording.ask("a", PROMPT, max_tokens=40)
    recording.step(10)
    recording.publish(weights["one"], LORA, IN_PLACE)
    recording.step(8)
    recording.engine._scheduler.retract(recording.engine._requests["a"], keep_prefix=True)
    recording.step(9)
    recording.publish(weights["two"], LORA, IN_PLACE)
    recording.step()
    recording.record()
    report = verified(recording)
    assert complaints(report) == ""
    assert [release.frozen_tokens for release in report.scenarios[0].releases] == [0, 8, 14]
    assert tokens_by_release(report) == [10, 16, 14]


def test_selections(recording):
    for number in range(6):
        recording.ask(str(number), [*PROMPT, number], max_tokens=3)
    recording.step()
    recording.record()
    assert verified(recording, Selection(since=2.0, until=5.0)).scenarios[0].answers == 3
    samples = [verified(recording, Selection(sample=2, seed=seed)) for seed in (0, 0, 1)]
    assert [sample.scenarios[0].answers for sample in samples] == [2, 2, 2]
    worst = [sample.scenarios[0].releases[0].worst for sample in samples]
    assert worst[0] == worst[1] != worst[2], "the seed draws the sample"
    assert verified(recording, Selection(sample=100)).scenarios[0].answers == 6
    with pytest.raises(NotFound, match="there are: reef"):
        verified(recording, Selection(scenario="other"))


def test_an_archive_that_cannot_be_written_is_read(recording, monkeypatch):
    recording.ask("a", PROMPT, max_tokens=4)
    recording.step()
    recording.record()
    monkeypatch.setattr("reef.records.schema.os.access", lambda path, mode: False)
    before = sorted(recording.data.rglob("*"))
    assert verified(recording).clean
    assert sorted(recording.data.rglob("*")) == before


def test_nothing_is_written_beside_a_service_and_without_one(recording):
    recording.ask("a", PROMPT, max_tokens=4)
    recording.step()
    recording.record()
    before = {path: path.read_bytes() for path in recording.data.rglob("*") if path.is_file()}
    assert verified(recording).clean
    after = {path: path.read_bytes() for path in recording.data.rglob("*") if path.is_file()}
    for name in ("reef.db-wal", "reef.db-shm"):  # SQLite's own: the first is empty
        assert not (after.pop(recording.data / name, b"") and name.endswith("wal"))
    assert after == before

    writer = sqlite3.connect(recording.data / "reef.db")  # holds the write lock, as a service does for a moment
    writer.execute("BEGIN IMMEDIATE")
    try:
        assert verified(recording).clean
    finally:
        writer.rollback()
        writer.close()


# ---------------------------------------------------------------------------------------------- what is wrong


class FakeStockCache(PrefixCache):
    """The prefix cache of an engine that keys entries by tokens alone, so that only flushing keeps it right."""

    flushes = True

    def match(self, load_id, tokens, limit) -> list[Node]:
        return super().match("any", tokens, limit)

    def extend(self, load_id, held, tokens, pages) -> None:
        super().extend("any", held, tokens, pages)

    def flush(self) -> None:
        if self.flushes:
            super().flush()


@pytest.mark.parametrize("flushes", [True, False])
def test_stale_kv_after_a_retract_without_flush(recording, weights, monkeypatch, flushes):
    monkeypatch.setattr(FakeStockCache, "flushes", flushes)
    monkeypatch.setattr("reef.inference.local.engine.PrefixCache", FakeStockCache)
    recording.engine._reset()
    recording.ask("before", PROMPT, max_tokens=4)
    recording.step()
    recording.publish(weights["one"], LORA, RETRACT)
    recording.ask("after", PROMPT, max_tokens=4)
    recording.step()
    recording.record()
    assert recording.answers["after"].cached_tokens == (0 if flushes else 48)
    report = verified(recording)
    assert report.clean == flushes
    if not flushes:
        assert complaints(report).startswith("after: 4 of tokens 0 to 4 are off release 1 (engine:1)")
        assert report.scenarios[0].releases[1].worst > 0.01 and report.scenarios[0].releases[0].worst < 1e-4
        assert report.scenarios[0].releases[1].worst_record == "after"


@pytest.mark.parametrize("said", [IN_PLACE, RETRACT])
def test_kv_that_was_kept_although_the_release_says_retract(recording, weights, said):
    recording.ask("a", PROMPT, max_tokens=20)
    recording.step(10)
    recording.publish(weights["one"], LORA, IN_PLACE, pause_mode=str(said))
    recording.step()
    recording.record()
    report = verified(recording)
    assert report.clean == (said is IN_PLACE)
    assert ("tokens 10 to 20 are off release 1" in complaints(report)) == (said is RETRACT)


def test_another_adapter_than_the_release_names(recording, weights):
    recording.publish(weights["one"], LORA, RETRACT, served=weights["two"])
    recording.ask("a", PROMPT, max_tokens=5)
    recording.step()
    recording.record()
    assert "a: 5 of tokens 0 to 5 are off release 1 (engine:1), the first is token 0" in complaints(verified(recording))


def crossing(recording: Recording, weights: dict[str, Path]) -> Any:
    recording.ask("a", PROMPT, max_tokens=20)
    recording.step(10)
    recording.publish(weights["one"], LORA, RETRACT)
    recording.step()
    return recording.answers["a"]


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([Span(0, 9, "engine:0"), Span(9, 20, "engine:1")], "1 of tokens 9 to 20 are off release 1"),
        ([Span(0, 12, "engine:0"), Span(12, 20, "engine:1")], "2 of tokens 0 to 12 are off release 0"),
        ([Span(0, 20, "engine:1")], "tokens 0 to 20 are off release 1"),
        ([Span(0, 10, "engine:1"), Span(10, 20, "engine:0")], "tokens 0 to 10 are off release 1"),
        ([Span(0, 10, "engine:0"), Span(10, 20, "engine:9")], "tokens 10 to 20 name engine:9, which no release"),
        ([Span(0, 10, "engine:0"), Span(11, 20, "engine:1")], "do not cover the output exactly once"),
        ([Span(0, 10, "engine:0"), Span(10, 19, "engine:1")], "cover 19 of 20 tokens"),
        ([], "cover 0 of 20 tokens"),
    ],
)
def test_wrong_spans(recording, weights, spans, complaint):
    answer = crossing(recording, weights)
    recording.append("right", [answer])
    recording.append("wrong", [answer, replace(answer, spans=spans)])
    found = complaints(verified(recording))
    assert found.startswith("wrong: choice 1: ") and complaint in found and "\n" not in found


def test_edited_answers(recording, weights):
    """With a digest that was made anew, as someone would who knows the format."""
    answer = crossing(recording, weights)
    output, logprobs = list(answer.output_ids), list(answer.logprobs)
    output[4] += 1
    logprobs[15] += 0.01
    recording.append("ids", [replace(answer, output_ids=output)])
    recording.append("numbers", [replace(answer, logprobs=logprobs)])
    recording.append("fewer", [replace(answer, logprobs=logprobs[:-1])])
    found = complaints(verified(recording)).splitlines()
    assert "the first is token 4," in found[0]
    worst = re.search(r"the first is token 15, the worst by ([0-9.]+) nat$", found[1])
    assert worst is not None and abs(float(worst[1]) - 0.01) < 1e-4
    assert found[2] == "fewer: 20 tokens have 19 log-probabilities"


def test_a_record_edited_in_the_database_does_not_hide_the_others(recording):
    for number in range(4):
        recording.ask(str(number), PROMPT, max_tokens=2)
    recording.step()
    recording.record()
    with sqlite3.connect(recording.data / "reef.db") as connection:
        (payload,) = connection.execute("SELECT payload FROM records WHERE record_id = '1'").fetchone()
        connection.execute("UPDATE records SET payload = ? WHERE record_id = '1'", (payload[:-1],))
        connection.execute("UPDATE records SET scenario = 'reef', digest = ? WHERE record_id = '2'", (b"0" * 16,))
    report = verified(recording)
    assert report.scenarios[0].answers == 2
    assert [line.split(":")[1] for line in complaints(report).splitlines()] == [
        " record 1 is damaged",
        " record 2 is damaged",
    ]


def test_an_adapter_changed_or_lost_on_disk(recording, weights):
    release = recording.publish(weights["one"], LORA, RETRACT)
    recording.ask("a", PROMPT, max_tokens=2)
    recording.step()
    recording.record()
    content = recording.contents.path(release.content_id)
    file = content / "adapter_model.safetensors"
    good = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "is damaged: its files are not those that were stored" in complaints(verified(recording))
    content.rename(content.with_name("gone"))
    assert f"content {release.content_id} is not in" in complaints(verified(recording))


# ---------------------------------------------------------------------------------------------- refusals


def test_another_base_model_is_refused(recording, weights):
    with pytest.raises(ConfigError, match="begun on another base model"):
        verified(recording, model_path=weights["full"])


def test_a_directory_that_says_no_model_wants_one(recording, tiny_model):
    (recording.data / "serving.json").unlink()
    assert read_serving(recording.data) is None
    with pytest.raises(ConfigError, match="give --model-path"):
        verified(recording)
    assert verified(recording, model_path=tiny_model).clean


def test_no_database_is_refused_and_none_is_made(recording, tmp_path):
    with pytest.raises(StorageError, match="there is no database"):
        verified(recording, database=str(tmp_path / "none.db"))
    assert not (tmp_path / "none.db").exists()


def test_a_reference_in_double_precision_counts_only_what_the_engine_rounded(recording, weights):
    recording.ask("base", PROMPT, max_tokens=30)
    recording.step(10)
    for name, kind in (("one", LORA), ("two", LORA), ("full", FULL)):
        recording.publish(weights[name], kind, IN_PLACE)
        recording.ask(name, PROMPT, max_tokens=6)
        recording.step(6)
    recording.step()
    worst = {}
    for dtype in (torch.float32, torch.float64):
        reference = Reference(
            recording.model, contents_of(recording.data / "artifacts"), recording.base_id, dtype=dtype
        )
        by_load = {release.runtime_load_id: Weights(release.content_id) for release in recording.releases}
        scores = [
            score.differences
            for answer in recording.answers.values()
            for score in reference.rescore(answer.prompt_ids, answer.output_ids, answer.logprobs, answer.spans, by_load)
        ]
        assert all(one.dtype is dtype for one in scores)
        worst[dtype] = torch.cat(scores)
    assert worst[torch.float64].max() < 1e-4
    assert not torch.equal(worst[torch.float64].float(), worst[torch.float32])


# ---------------------------------------------------------------------------------------------- PostgreSQL


def test_records_in_postgresql_are_found_without_a_password_in_the_directory(
    tiny_model, tmp_path, weights, postgres, schema, monkeypatch
):
    config = PostgresConfig(url=postgres.url, schema=schema, artifacts=str(tmp_path / "elsewhere"))
    recording = Recording(tiny_model, tmp_path / "data", f"{postgres.url}&schema={schema}")
    recording.ask("one", PROMPT, max_tokens=8)
    recording.step(3)
    recording.publish(weights["one"], LORA, RETRACT)
    recording.step()
    recording.record()
    (recording.data / "artifacts").rename(tmp_path / "elsewhere")
    write_serving(recording.data, Serving(str(tiny_model), "float32", location(config), str(tmp_path / "elsewhere")))
    assert "secret" not in (recording.data / "serving.json").read_text()

    with pytest.raises(StorageError, match="refuses the user or password"):
        verified(recording)
    monkeypatch.setenv("PGPASSWORD", "secret")
    report = verified(recording, tolerance=1e-4)
    assert report.clean and tokens_by_release(report) == [3, 5]
    with pytest.raises(StorageError, match="there is no database"):
        verified(recording, database=f"{postgres.url}&schema=none")
    assert not postgres.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'none'")

    answer = recording.answers["one"]
    recording.append("edited", [replace(answer, logprobs=[0.0, *answer.logprobs[1:]])])
    assert complaints(verified(recording)).startswith("edited: 1 of tokens 0 to 3 are off release 0")
