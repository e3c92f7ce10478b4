"""Structured output: what grammars allow, the queue that compiles them, and the engine around both."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

from reef.errors import InvalidRequest, Unavailable
from reef.inference.chat.tokenizer import ChatTokenizer
from reef.inference.local.engine import LocalEngine
from reef.inference.local.grammar import (
    FIELD,
    GrammarQueue,
    GrammarState,
    GrammarVocabulary,
    check_grammar,
)
from reef.runtime.interfaces import Ending, Grammar, MemoryRegion, PauseMode
from tests.inference.references import (
    Answer,
    collect,
    engine,
    far,
    lora_load,
    make_adapter,
    reference_logprobs,
    reference_model,
    request,
)

PROMPT = list(range(200, 233))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["coral", "fish"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "depth"],
    "additionalProperties": False,
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))
CHOICE = Grammar("choice", '["yes", "no", "maybe\\n\\"so\\""]')


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_model)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: ChatTokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, 49152 + 64, [2, 0])


@pytest.fixture(scope="module")
def tested(tiny_model: Path) -> LocalEngine:
    return engine(tiny_model)


def run(tested: LocalEngine, *requests: Any) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for one in requests:
        tested.add(one)
    finish(tested, answers)
    return answers


def finish(tested: LocalEngine, answers: dict[str, Answer]) -> None:
    deadline = time.monotonic() + 200
    while tested.report().running + tested.report().waiting or tested.has_work():
        assert time.monotonic() < deadline
        if tested.has_work():
            collect(answers, tested.step())
        else:
            time.sleep(0.001)  # a grammar compiles


def asked(name: str, grammar: Grammar | None, **options: Any) -> Any:
    return request(name, PROMPT, **{"grammar": grammar, "temperature": 1.0, "ignore_eos": False, **options})


def text_of(tokenizer: ChatTokenizer, answer: Answer) -> str:
    return b"".join(tokenizer.token_bytes(one) for one in answer.token_ids if one not in (0, 2)).decode()


# ---------------------------------------------------------------------------------------------- grammars


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        (CHOICE, ["yes", "no", 'maybe\n"so"'], ["yess", "maybe"]),
        (Grammar("regex", r"[a-c]{2}\d+"), ["ab1", "cc123"], ["ab", "ad1", "ab1x"]),
        (Grammar("json_object", ""), ["{}", '{"a": [1, {"b": null}]}', '{\n  "a": "é"\n}'], ["[]", "{}\n", "1"]),
        (OBJECT, ['{"name": "a", "kind": "fish", "depth": 7}'], ['{"name": "a", "kind": "cat", "depth": 7}', "{}"]),
        (Grammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}'), ["[true,false]"],
         ["[true,true,true]", "[1]"]),
    ],
)  # fmt: skip
def test_what_a_grammar_allows(vocabulary, tokenizer, grammar, matching, others):
    compiled = vocabulary.compile(grammar)
    for text in matching + others:
        state, fits = compiled.copy(), True
        for token_id in tokenizer.encode_now(text):
            fits = fits and bool(state.allowed()[token_id])
            state.accept(token_id)
        complete = fits and (state.finished or bool(state.allowed()[2]))
        assert complete == (text in matching), text


def test_no_more_white_space_than_an_indented_line_needs(vocabulary, tokenizer):
    state = vocabulary.compile(Grammar("json_object", ""))
    for token_id in tokenizer.encode_now('{"a": '):
        state.accept(token_id)
    tokens = [tokenizer.token_bytes(one) for one in np.flatnonzero(state.allowed())]
    assert tokens and not any(token.isspace() for token in tokens)


def test_special_and_unused_ids_are_never_allowed(vocabulary, tokenizer):
    allowed = vocabulary.compile(Grammar("regex", "(?s).*")).allowed()
    assert allowed.shape == (49152 + 64,) and allowed[[0, 2]].all()
    assert not allowed[49152:].any()
    assert not allowed[sorted(tokenizer.special_ids - {0, 2})].any()


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("xml", "", "the kind of a grammar must be one of json_schema, json_object, regex, choice, lark, got 'xml'"),
        ("json_schema", "{", "json_schema must be JSON: "),
        ("json_schema", "[" * 100_000, "json_schema must be JSON: "),
        ("json_schema", "true", "json_schema must be a JSON object, got 'true'"),
        ("json_schema", '{"type": "wat"}', "json_schema: Invalid type: wat"),
        ("json_schema", '{"$ref": "#/nowhere"}', "json_schema: Pointer '/nowhere' does not exist"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'json_schema: Unimplemented keys: ["uniqueItems"]'),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "json_schema: Unsatisfiable schema"),
        ("json_schema", '{"x": "' + "y" * 2000 + '"}', "json_schema must have at most 1000 bytes, got 2009"),
        ("regex", "(a", "regex parse error: (a ^ error: unclosed group"),
        ("regex", "(" * 50 + "a" + "){1,50}" * 50, "regex: "),
        ("choice", "[]", "choice must be a list of one or more strings"),
        ("choice", '["a", 1]', "choice must be a list of one or more strings"),
        ("choice", "yes", "choice must be JSON: "),
        ("json_schema", '{"enum": ["\\ud800"]}', "json_schema: Value is not JSON serializable"),
        ("lark", "start: nothing", "lark: "),
    ],
)  # fmt: skip
def test_a_wrong_grammar_is_refused_and_says_why(vocabulary, kind, value, message):
    grammar = Grammar(kind, value)
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(grammar, max_bytes=200_000 if value.startswith("[[") else 1000)
        vocabulary.compile(grammar)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.field == FIELD == "sampling.grammar"


# ---------------------------------------------------------------------------------------------- the queue


class FakeCompiler:
    """Compiles when it is let, one grammar at a time; `wrong` raises."""

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self.gate = threading.Event()
        self.begun: list[str] = []

    def __call__(self, grammar: Grammar) -> GrammarState:
        self.begun.append(grammar.value)
        assert self.gate.wait(200)
        if grammar.value == "wrong":
            raise InvalidRequest("regex: no", FIELD)
        return self.state.copy()


@pytest.fixture
def compiler(vocabulary) -> Iterator[FakeCompiler]:
    made = FakeCompiler(vocabulary.compile(CHOICE))
    yield made
    made.gate.set()


def queue(compiler: Callable[[Grammar], GrammarState], **options: Any) -> tuple[GrammarQueue, threading.Event]:
    woken = threading.Event()
    return GrammarQueue(lambda: compiler, **{"timeout": 200.0, "limit": 3, "wake": woken.set, **options}), woken


def taken(tested: GrammarQueue, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    deadline = time.monotonic() + 200
    while len(found) < count:
        assert time.monotonic() < deadline
        found.update(tested.take())
        time.sleep(0.001)
    return found


def regex(value: str) -> Grammar:
    return Grammar("regex", value)


def test_equal_grammars_compile_once_and_each_request_has_its_own_state(compiler):
    tested, woken = queue(compiler)
    assert [tested.submit(name, regex("a")) for name in ("1", "2")] == [None, None]
    assert tested.take() == [] and not tested.finished and not woken.is_set()
    compiler.gate.set()
    found = taken(tested, 2)
    assert woken.wait(60) and compiler.begun == ["a"]
    assert found["1"] is not found["2"]
    assert isinstance(tested.submit("3", regex("a")), GrammarState), "it is known by now"


def test_an_idle_queue_keeps_no_thread(compiler):
    tested, _ = queue(compiler)
    compiler.gate.set()
    for value in ("a", "b"):
        tested.submit(value, regex(value))
        taken(tested, 1)
        while any(thread.name == "grammars" for thread in threading.enumerate()):
            time.sleep(0.001)  # until the test's own timeout


def test_a_wrong_grammar_fails_its_own_requests_only(compiler):
    tested, _ = queue(compiler)
    for name, value in (("1", "wrong"), ("2", "good"), ("3", "wrong")):
        tested.submit(name, regex(value))
    compiler.gate.set()
    found = taken(tested, 3)
    assert str(found["1"]) == str(found["3"]) == "regex: no"
    assert isinstance(found["2"], GrammarState)


def test_the_queue_is_bounded(compiler):
    tested, _ = queue(compiler)
    for value in ("a", "b", "c"):
        tested.submit(value, regex(value))
    with pytest.raises(Unavailable, match="3 grammars wait to be compiled"):
        tested.submit("d", regex("d"))
    tested.submit("another", regex("c"))  # waits with the first
    tested.cancel("b")
    tested.submit("d", regex("d"))
    compiler.gate.set()
    assert taken(tested, 4).keys() == {"a", "c", "another", "d"}
    assert compiler.begun == ["a", "c", "d"], "what nobody waits for is not compiled"


def test_one_that_takes_too_long_is_refused_and_the_next_goes_on(compiler):
    tested, _ = queue(compiler, timeout=0.05)
    for value in ("a", "b", "c"):
        tested.submit(value, regex(value))
    found = taken(tested, 3)
    assert [type(found[value]) for value in ("a", "b", "c")] == [InvalidRequest, InvalidRequest, Unavailable]
    assert str(found["a"]) == "regex takes longer than 0.05 s to compile"
    compiler.gate.set()
    tested._timeout, deadline = 200.0, time.monotonic() + 200
    while not isinstance(outcome := taken(tested, 1)["c"] if tested.submit("c", regex("c")) is None else None,
                         GrammarState | None):  # fmt: skip
        assert isinstance(outcome, Unavailable) and time.monotonic() < deadline


# ---------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_output_matches_and_ends_where_the_grammar_does(tested, tokenizer, temperature):
    grammars = {"object": OBJECT, "choice": CHOICE, "regex": regex(r"[a-c]{3}(x|yy)?")}
    answers = run(
        tested,
        *(asked(name, grammar, temperature=temperature, max_tokens=200, seed=3) for name, grammar in grammars.items()),
        asked("free", None, temperature=temperature, max_tokens=9, ignore_eos=True),
    )
    assert {name: answer.ending for name, answer in answers.items() if name != "free"} == dict.fromkeys(
        grammars, Ending.STOP
    )
    jsonschema.validate(json.loads(text_of(tokenizer, answers["object"])), SCHEMA)
    assert text_of(tokenizer, answers["choice"]) in json.loads(CHOICE.value)
    assert re.fullmatch(r"[a-c]{3}(x|yy)?", text_of(tokenizer, answers["regex"]))
    assert len(answers["free"].token_ids) == 9


def test_an_end_token_is_drawn_only_where_more_could_follow(tested, tokenizer):
    bias = {2: 50.0, tokenizer.encode_now("a")[0]: 50.0}  # or "ab", which is one token, might be drawn and be all
    answers = run(tested, asked("fixed", Grammar("choice", '["yes"]')), asked("open", regex("a|ab"), logit_bias=bias))
    assert 2 not in answers["fixed"].token_ids and answers["fixed"].ending is Ending.STOP
    assert answers["open"].token_ids[-1] == 2 and answers["open"].ending is Ending.STOP


def test_the_end_of_a_grammar_ends_even_if_end_tokens_are_ignored(tested):
    answer = run(tested, asked("a", regex("a|ab"), ignore_eos=True, max_tokens=50))["a"]
    assert answer.ending is Ending.STOP and len(answer.token_ids) <= 3


def test_the_token_budget_still_counts(tested):
    answer = run(tested, asked("a", regex("[ab]{40}"), max_tokens=5))["a"]
    assert answer.ending is Ending.LENGTH and len(answer.token_ids) == 5


def test_bias_and_stop_strings_work_inside_the_grammar(tested, tokenizer):
    ids = {text: tokenizer.encode_now(text)[0] for text in ("yes", "no", "maybe")}
    bias = {ids["yes"]: -100.0, ids["maybe"]: 100.0, 1000: 100.0}  # 1000 is no beginning of a choice
    answer = run(tested, asked("a", Grammar("choice", '["yes", "no", "maybe"]'), logit_bias=bias, temperature=0.0))["a"]
    assert text_of(tokenizer, answer) == "maybe"
    stopped = run(tested, asked("b", regex("ab{50}"), stop=["bbb"], max_tokens=60))["b"]
    assert (stopped.ending, stopped.stopped_by) == (Ending.STOP, "bbb") and len(stopped.token_ids) < 60


def test_logprobs_are_the_models_and_sampled_ones_of_what_was_allowed(tested, tiny_model, vocabulary):
    grammar = Grammar("choice", '["yes", "no", "maybe"]')
    answer = run(tested, asked("a", grammar, top_logprobs=3))["a"]
    model = reference_model(tiny_model)
    assert far(answer.logprobs, reference_logprobs(model, PROMPT, answer.token_ids)) < 1e-4
    allowed = np.flatnonzero(vocabulary.compile(grammar).allowed()).tolist()
    every = [reference_logprobs(model, PROMPT, [token_id])[0] for token_id in allowed]
    expected = answer.logprobs[0] - np.logaddexp.reduce(every)
    assert abs(answer.sampled_logprobs[0] - expected) < 1e-4
    best = answer.top_logprobs[0]
    assert len(best) == 3 and best[0][1] > answer.logprobs[0] + 1, "alternatives are the model's, not the grammar's"


def test_the_same_draws_with_and_without_others_in_the_batch(tested):
    alone = run(tested, asked("a", OBJECT, seed=5, max_tokens=150))["a"]
    others = [asked(str(number), OBJECT if number % 2 else None, max_tokens=40) for number in range(6)]
    assert run(tested, asked("a", OBJECT, seed=5, max_tokens=150), *others)["a"].token_ids == alone.token_ids


def test_a_wrong_grammar_is_refused_without_a_chunk(tested):
    with pytest.raises(InvalidRequest, match="must be JSON"):
        tested.add(asked("at once", Grammar("json_schema", "{")))
    assert run(tested, asked("later", Grammar("json_schema", '{"type": "wat"}')), asked("good", CHOICE)).keys() == {
        "good"
    }
    [(name, error)] = tested.take_refused()
    assert (name, str(error)) == ("later", "json_schema: Invalid type: wat")
    assert not tested.has_work() and tested.report().waiting == 0


def test_a_grammar_that_cannot_go_on_cuts_its_own_request(tested):
    """Too complex to follow, which shows only after some tokens."""
    answers = run(tested, asked("a", regex("(([a-z]{1,300}){1,300}){1,300}"), max_tokens=300), asked("b", CHOICE))
    assert answers["a"].ending is Ending.ENGINE_CUT and answers["a"].error.startswith("the grammar cannot go on: ")
    assert answers["b"].ending is Ending.STOP
    tested.flush()
    assert tested.report().free_pages == tested.report().total_pages


# ---------------------------------------------------------------------------------------------- publications


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    return make_adapter(tiny_model, tmp_path_factory.mktemp("grammar") / "lora", seed=11)


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_grammar_goes_on_across_a_publication(tiny_model, tokenizer, adapter, mode):
    tested, answers = engine(tiny_model), {}
    tested.stage(lora_load("engine:1", adapter))
    tested.add(asked("a", OBJECT, lane="blue", max_tokens=200, seed=1))
    while "a" not in answers or len(answers["a"].token_ids) < 6:
        collect(answers, tested.step())
    tested.pause(mode)
    tested.activate("blue", "engine:1")
    tested.resume()
    finish(tested, answers)
    jsonschema.validate(json.loads(text_of(tokenizer, answers["a"])), SCHEMA)
    assert answers["a"].load_ids == ["engine:0"] * 6 + ["engine:1"] * (len(answers["a"].load_ids) - 6)


def test_grammars_compile_through_a_pause_a_flush_and_a_release_of_memory(tiny_model, tokenizer, adapter, vocabulary):
    tested, answers = engine(tiny_model), {}
    gate = threading.Event()

    def slow(grammar: Grammar) -> GrammarState:
        assert gate.wait(200)
        return vocabulary_of_engine(grammar)

    vocabulary_of_engine = GrammarVocabulary(tokenizer, tested.vocab_size, [2, 0]).compile
    tested._grammars._compile = slow
    tested.stage(lora_load("engine:1", adapter))
    for number in range(4):
        tested.add(asked(str(number), OBJECT, lane="blue", max_tokens=200))
    tested.add(asked("gone", OBJECT, lane="blue"))
    tested.add(asked("free", None, lane="blue", max_tokens=20, ignore_eos=True))
    for _ in range(5):
        collect(answers, tested.step())
    assert len(answers["free"].token_ids) == 5, "who waits for a grammar holds up nobody"
    tested.pause(PauseMode.RETRACT)
    tested.flush()
    report = tested.report()
    assert report.free_pages == report.total_pages and (report.running, report.waiting) == (0, 6)
    assert report.stats["compiling"] == 5
    tested.abort("gone")
    collect(answers, tested.step())
    assert answers.pop("gone").ending is Ending.CLIENT_LEFT
    tested.release_memory([MemoryRegion.WEIGHTS, MemoryRegion.KV_CACHE])
    tested.restore_memory()
    tested.stage(lora_load("engine:1", adapter))
    tested.activate("blue", "engine:1")
    gate.set()
    while not tested.has_work():  # compiled while paused
        time.sleep(0.001)
    assert tested.step() == [] and tested.report().stats["compiling"] == 0
    tested.resume()
    finish(tested, answers)
    for number in range(4):
        jsonschema.validate(json.loads(text_of(tokenizer, answers[str(number)])), SCHEMA)
        assert set(answers[str(number)].load_ids) == {"engine:1"}
    assert answers["free"].load_ids == ["engine:0"] * 5 + ["engine:1"] * 15


def test_fail_all_cuts_who_waits_for_a_grammar(tiny_model):
    tested = engine(tiny_model)
    tested.add(asked("a", OBJECT))
    [chunk] = tested.fail_all("broken")
    assert (chunk.request_id, chunk.ending, chunk.error) == ("a", Ending.ENGINE_CUT, "broken")
    assert run(tested, asked("a", CHOICE))["a"].ending is Ending.STOP
