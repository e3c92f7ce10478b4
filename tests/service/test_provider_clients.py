"""The official clients against a Reef whose provider is another Reef: a process of its own with the tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs

needs("openai", "anthropic")

import anthropic  # noqa: E402
import openai  # noqa: E402

from tests.service.conftest import Running  # noqa: E402
from tests.service.providers import in_front  # noqa: E402
from tests.test_cli_serve import ready_url  # noqa: E402

KEY = "upstream-key"
GREEDY = {"temperature": 0}  # a draw might be the end token
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def upstream(tiny_model: Path, tmp_path_factory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("upstream")
    log = root / "log"
    command = [sys.executable, "-m", "reef.cli", "serve", "--reef.port", "0", "--reef.data-dir", "data"]
    command += ["--inference.model-path", str(tiny_model), "--inference.threads", "1"]
    environment = {**os.environ, "REEF_REEF__TOKENS": KEY}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield ready_url(log, process, seconds=240)  # on a busy machine, importing torch alone takes minutes
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture(scope="module")
def reef(upstream: str, tmp_path_factory) -> Iterator[Running]:
    with in_front(upstream, tmp_path_factory.mktemp("front"), upstream_api_key=KEY) as found:
        yield found


@pytest.fixture
def claude(reef) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=reef.url, api_key="none", max_retries=0, timeout=100) as client:
        yield client


def recorded(reef: Running) -> dict:
    return reef.records(limit=1000)[-1]


def test_chat(reef):
    raw = reef.openai.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, max_tokens=4, seed=1)
    answer, record = raw.parse(), recorded(reef)
    assert answer.usage.completion_tokens == 4 and answer.choices[0].finish_reason == "length"
    assert raw.headers["x-reef-agent-record-id"] == record["agent_record_id"]
    assert (record["response"], record["status"]) == (raw.text, 200)
    assert record["agent_record_id"] not in raw.text  # the body is the provider's, with a receipt of its own


def test_chat_streamed(reef):
    stream = reef.openai.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    record = recorded(reef)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-2].reef == {"agent_record_id": record["agent_record_id"]}
    assert record["generations"] == [] and record["response"].endswith("data: [DONE]\n\n")
    assert record["response"].count('"reef"') == 1


def test_two_streamed_choices(reef):
    stream = reef.openai.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3, n=2, stream=True, seed=1)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason) == [0, 1]
    assert [hasattr(chunk, "reef") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_legacy_completions(reef):
    chunks = list(reef.openai.completions.create(model="m", prompt="Once", max_tokens=4, stream=True, **GREEDY))
    assert chunks[-1].reef == {"agent_record_id": recorded(reef)["agent_record_id"]}
    assert reef.openai.completions.create(model="m", prompt="Once", max_tokens=4, **GREEDY).usage.completion_tokens == 4


def test_responses(reef):
    whole = reef.openai.responses.create(model="m", input="Hello", max_output_tokens=16, **GREEDY)
    again = reef.openai.responses.retrieve(whole.id)
    assert again.output_text == whole.output_text
    with reef.openai.responses.stream(model="m", input="Hello", max_output_tokens=16, **GREEDY) as stream:
        events = list(stream)
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.reef == {"agent_record_id": recorded(reef)["agent_record_id"]}
    assert recorded(reef)["generations"] == []


def test_messages(reef, claude):
    whole = claude.messages.create(model="m", max_tokens=4, messages=MESSAGES, extra_body=GREEDY)
    assert whole.usage.output_tokens == 4 and recorded(reef)["route"] == "/v1/messages"
    with claude.messages.stream(model="m", max_tokens=4, messages=MESSAGES, extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert final.usage.output_tokens == 4 and recorded(reef)["generations"] == []
    assert f'"reef":{{"agent_record_id":"{recorded(reef)["agent_record_id"]}"}}' in recorded(reef)["response"]
    assert claude.messages.count_tokens(model="m", messages=MESSAGES).input_tokens > 0


def test_models_in_both_shapes(reef, claude):
    assert [found.id for found in reef.openai.models.list()] == [found.id for found in claude.models.list()]


def test_the_providers_refusal_is_the_clients_error(reef, claude):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        reef.openai.chat.completions.create(model="m", messages=MESSAGES, temperature=9)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="m", max_tokens=0, messages=MESSAGES)


def test_tools_pass(reef):
    answer = reef.openai.chat.completions.create(
        model="m",
        messages=MESSAGES,
        max_tokens=64,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="none",
        **GREEDY,
    )
    assert answer.choices[0].message.tool_calls is None


def test_a_report_on_a_providers_answer_is_kept(reef):
    receipt = recorded(reef)["agent_record_id"]
    stored = reef.http.post("/reef/report", json={"references": [receipt], "score": 1.0})
    assert stored.status_code == 200
    assert reef.http.get("/reef/scenarios/default").json()["counts"]["report"] == 1
