"""The gateway on the real deployment: the tiny model in the local engine, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import openai
import pytest

from reef.config import resolve
from reef.service.app import build
from tests.service.conftest import Running, running
from tests.service.test_endings import leave_after

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"model": "m", "messages": HELLO, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def real(tiny_model, tmp_path_factory) -> Iterator[Running]:
    flags = {
        "inference.model-path": str(tiny_model),
        "inference.dtype": "float32",
        "inference.threads": "1",
        "execution.executor": "uni",
        "recipe.name": "scored",
        "reef.data-dir": str(tmp_path_factory.mktemp("real")),
    }
    with running(build(resolve(file=None, environ={}, flags=flags).config)) as found:
        yield found


def record_of(real: Running, receipt: str, scenario: str = "default") -> dict:
    return next(record for record in real.records(scenario, limit=1000) if record["agent_record_id"] == receipt)


def decoded(real: Running, record: dict) -> str:
    ids = record["generations"][0]["output_ids"]
    return real.deployment.chat.tokenizer._tokenizer.decode(ids, skip_special_tokens=True)


def test_the_text_is_what_the_recorded_ids_decode_to(real):
    answer = real.openai.chat.completions.create(**GREEDY)
    record = record_of(real, answer.model_extra["reef"]["agent_record_id"])
    generation = record["generations"][0]
    assert answer.choices[0].message.content == decoded(real, record)
    assert answer.usage.completion_tokens == len(generation["output_ids"]) == len(generation["logprobs"]) == 12
    assert all(logprob < 0 for logprob in generation["logprobs"])
    assert generation["spans"] == [{"start": 0, "end": 12, "runtime_load_id": "engine:0"}]
    assert real.openai.chat.completions.create(**GREEDY).choices[0].message.content == decoded(real, record)


def test_streams_at_once_each_show_what_is_recorded_for_them(real, run):
    async def ask(client: openai.AsyncOpenAI, seed: int) -> tuple[str, str]:
        text, receipt = "", ""
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"Say {seed}"}], stream=True, max_tokens=30, seed=seed
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            receipt = (chunk.model_extra.get("reef") or {}).get("agent_record_id", receipt)
        return text, receipt

    async def crowd() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    answers = run(crowd())
    assert len({receipt for _, receipt in answers}) == 16
    for text, receipt in answers:
        assert text == decoded(real, record_of(real, receipt))


def test_the_dashboard_shows_engine_scenario_and_answer(real):
    receipt = real.openai.chat.completions.create(**GREEDY).model_extra["reef"]["agent_record_id"]
    page = real.http.get("/dashboard").text
    for shown in ("<td>engine-0</td>", "<h2>default</h2>", "/v1/chat/completions 200 length", receipt):
        assert shown in page


def test_a_stop_string_ends_the_answer_before_it(real):
    whole = real.openai.chat.completions.create(**GREEDY).choices[0].message.content
    stop = whole[len(whole) // 2 :][:5]
    shown = whole[: whole.index(stop)]
    stopped = real.openai.chat.completions.create(**GREEDY, stop=stop)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (shown, "stop")
    streamed = list(real.openai.chat.completions.create(**GREEDY, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == shown


def test_a_seed_makes_several_choices_reproducible_and_different(real):
    ask = lambda: real.openai.chat.completions.create(model="m", messages=HELLO, seed=5, n=3, max_tokens=8)  # noqa: E731
    first, second = ([choice.message.content for choice in ask().choices] for _ in range(2))
    assert first == second and len(set(first)) == 3


def test_reported_logprobs_are_the_recorded_ones(real):
    answer = real.openai.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    record = record_of(real, answer.model_extra["reef"]["agent_record_id"])
    shown = [token.logprob for token in answer.choices[0].logprobs.content]
    assert shown == pytest.approx(record["generations"][0]["logprobs"], abs=1e-6)
    for token in answer.choices[0].logprobs.content:  # greedy: the sampled token is the best one
        assert token.top_logprobs[0].token == token.token


def test_a_continued_conversation_hits_the_cached_prefix(real):
    first = real.openai.chat.completions.create(**GREEDY)
    messages = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "Go on"}]
    second = real.openai.chat.completions.create(**{**GREEDY, "messages": messages})
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
    records = [record_of(real, answer.model_extra["reef"]["agent_record_id"]) for answer in (first, second)]
    before, after = (record["generations"][0] for record in records)
    assert after["prompt_ids"][:known] == before["prompt_ids"] + before["output_ids"]


def test_a_client_that_leaves_frees_the_engine(real):
    headers = {"x-reef-scenario": "leavers"}
    seen = leave_after(real, b'"content":" ', headers=headers, stream=True, seed=1, max_tokens=4000, ignore_eos=True)
    record = real.wait_for_records(1, "leavers")[0]
    assert record["generations"][0]["ending"] == "client_left"
    assert record["agent_record_id"].encode() in seen
    for _ in range(5000):
        if real.http.get("/reef/status").json()["engines"][0]["running"] == 0:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the engine still generates")


def test_what_is_reported_is_validated_by_the_recipe(real):
    receipt = real.chat(max_tokens=2).headers["x-reef-agent-record-id"]
    report = lambda **body: real.http.post("/reef/report", json={"references": [receipt], **body})  # noqa: E731
    assert report(score=1, metadata={"group": 5}).json()["error"]["param"] == "metadata.group"
    assert report(score=0.5, agent_record_id="once").status_code == 200
    assert report(score=0.5, agent_record_id="once").json()["agent_record_id"] == "once"
    assert report(score=0.75, agent_record_id="once").status_code == 409
    status = real.http.get("/reef/scenarios/default").json()
    assert status["counts"]["report"] == 1


def test_health_and_contract_of_the_real_deployment(real):
    assert real.http.get("/healthz").json() == {"status": "ok", "reasons": []}
    assert real.http.get("/reef/scenarios/default/contract").json()["recipe"] == "scored"
    assert real.http.get("/v1/models").json()["data"][0]["id"] == real.deployment.models()[0]
