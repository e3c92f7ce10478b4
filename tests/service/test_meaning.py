"""A small real model through every API: what it is asked reaches it as it was meant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.conftest import Running, serving
from tests.service.test_messages import client

CAPITAL = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def model(smollm2, tmp_path_factory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("meaning"), smollm2) as found:
        found.openai.timeout = 60
        yield found


def test_a_question_in_every_api(model):
    chat = model.openai.chat.completions.create(
        model="m", messages=[{"role": "user", "content": CAPITAL}], temperature=0, max_tokens=24
    )
    response = model.openai.responses.create(model="m", input=CAPITAL, temperature=0, max_output_tokens=24)
    message = client(model).messages.create(
        model="m", max_tokens=24, messages=[{"role": "user", "content": CAPITAL}], extra_body={"temperature": 0}
    )
    answers = [chat.choices[0].message.content, response.output_text, message.content[0].text]
    assert "Paris" in answers[0] and len(set(answers)) == 1


def test_a_bare_prompt_and_a_prefilled_answer_are_gone_on_with(model):
    bare = model.openai.completions.create(model="m", prompt="The capital of France is", temperature=0, max_tokens=4)
    assert "Paris" in bare.choices[0].text
    turns = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The capital of France is"}]
    message = client(model).messages.create(model="m", max_tokens=4, messages=turns, extra_body={"temperature": 0})
    assert message.content[0].text.strip().startswith("Paris")
