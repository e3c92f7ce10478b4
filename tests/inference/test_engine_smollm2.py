"""The real model, in bfloat16 as it is served."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.inference.references import engine, request, run


def test_smollm2_knows_the_capital_of_france(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tested = engine(smollm2, dtype="auto")
    prompt = tokenizer("The capital of France is").input_ids
    answer = run(tested, [request("a", prompt, max_tokens=8)])["a"]
    assert "Paris" in tokenizer.decode(answer.token_ids)
