"""A few of the kills of `make crash`: each component, inside a publication, in the middle of recovery."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import needs

needs("torch", "transformers", "peft")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from crash.kills import DISK, KINDS, RECOVERY, WRITES, Kill, kills_of  # noqa: E402
from crash.model import make_model, token_of_byte  # noqa: E402
from crash.rescore import Rescorer  # noqa: E402
from crash.run import Run  # noqa: E402
from reef.points import Point  # noqa: E402

QUESTION = "Why?"
PATIENT = {"inference.health-timeout": 60}  # a busy machine may give an engine nothing for 10 s
KILLS = (
    Kill(Point.ENGINE_ACTIVATE, "before", "engine"),
    Kill(Point.TRAINER_WRITE, "before", "trainer"),
    Kill(Point.COMMIT, "after", "service", then=(Point.RESTORE, "after")),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("crash") / "model")


def test_every_point_is_killed_on_both_sides_in_some_deployment():
    killed = [kill for kind in KINDS for kill in kills_of(kind) if kill.victim != DISK]
    found = {(kill.point, kill.side) for kill in killed}
    assert {(point, side) for point in Point for side in ("before", "after")} <= found
    assert len(killed) >= 300 and len(RECOVERY) > 10
    assert {kill.point for kind in KINDS if kind.disk for kill in kills_of(kind)} == set(WRITES)


def test_a_cut_stream_is_explained_by_the_releases_that_made_it_and_by_no_others(model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.add_(0.003)
    other.save_pretrained(tmp_path / "artifacts" / "contents" / "other")
    first, second = {"content_id": "the base"}, {"content_id": "other"}
    rescorer = Rescorer(model, lambda: tmp_path)
    tokens = stream(model, [(base, 7), (other, 9)])
    assert rescorer.fragment(QUESTION, tokens, [first, second]) is None
    assert "of no committed release" in rescorer.fragment(QUESTION, tokens, [first])
    assert "of no committed release" in rescorer.fragment(QUESTION, tokens, [second, first])


def test_what_rounding_accounts_for_passes_and_nothing_else(model, tmp_path, monkeypatch):
    monkeypatch.setattr("crash.rescore.TOLERANCE", 1e-8)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompt, output = [5, 6, 7], list(range(20, 60))
    with torch.no_grad():
        table = base(torch.tensor([prompt + output])).logits[0].log_softmax(-1)
    logprobs = [table[len(prompt) - 1 + place, token].item() for place, token in enumerate(output)]
    spans = [{"start": 0, "end": len(output), "runtime_load_id": "a"}]
    answer = {"prompt_ids": prompt, "output_ids": output, "logprobs": logprobs, "spans": spans}
    releases = {"a": {"content_id": "the base"}}
    rescorer = Rescorer(model, lambda: tmp_path)
    assert rescorer.generation(answer, releases) is None and rescorer.ill_conditioned == 1
    answer["logprobs"] = [logprob + 1e-3 * (place == 30) for place, logprob in enumerate(logprobs)]
    assert "nat off a" in rescorer.generation(answer, releases)


def stream(model: Path, parts: list[tuple[Any, int]]) -> list[tuple[int, float]]:
    """Bytes and log-probabilities that a client sees when weights change under a request that keeps its cache."""
    tokenizer, byte_of_token = AutoTokenizer.from_pretrained(model), token_of_byte()
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    following, cache, seen = torch.tensor([ids]), None, []
    for weights, length in parts:
        for _ in range(length):
            with torch.no_grad():
                result = weights(input_ids=following, past_key_values=cache, use_cache=True)
            logprobs, cache = torch.log_softmax(result.logits[0, -1], dim=-1)[:256], result.past_key_values
            token = int(logprobs.argmax())
            seen.append((byte_of_token.index(token), float(logprobs[token])))
            following = torch.tensor([[token]])
    return seen


def test_nothing_is_lost_and_everything_serves_again(model, tmp_path):
    with Run(KINDS[0], model, tmp_path / "run", flags=PATIENT) as run:
        problems = [problem for kill in KILLS for problem in run.kill(kill).problems]
        run.conclude()
    assert "\n".join(problems) == ""
    assert "\n".join(run.audit.findings.everything()) == ""
    assert len(run.session.outcomes) == len(KILLS) and all(one.seconds is not None for one in run.session.outcomes)
    assert run.audit.releases > 2 and run.rescorer.answers > 10


def test_the_same_on_postgresql(model, tmp_path, postgres, schema):
    flags = {"storage.backend": "postgres", "storage.url": postgres.url, "storage.schema": schema, **PATIENT}
    with Run(KINDS[0], model, tmp_path / "run", flags=flags) as run:
        problems = run.kill(Kill(Point.COMMIT, "after", "service")).problems
        run.conclude()
    assert "\n".join(problems) == ""
    assert "\n".join(run.audit.findings.everything()) == ""
    assert len(run.session.outcomes) == 1 and run.audit.releases > 1
    assert postgres.execute(f"SELECT count(*) FROM {schema}.releases")[0][0] > 2
