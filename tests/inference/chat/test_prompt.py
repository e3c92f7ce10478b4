"""Prompts of conversations that go on from answers of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.inference.chat.messages import Conversation, Message, Tool, ToolCall
from reef.inference.chat.service import ChatService
from reef.runtime.interfaces import Grammar, SamplingParams
from tests.conftest import examples
from tests.inference.chat.engines import FakeEngine
from tests.inference.chat.templates import HARMONY, MARKERS, THINKING, with_template
from tests.inference.chat.test_service import collect, request

HELLO = Message(role="user", content="Hi")
GO_ON = Message(role="user", content="Go on")
ADD = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


class Talk:
    """A chat service on a scripted engine, and a conversation with it."""

    def __init__(self, tokenizer, run) -> None:
        self.tokenizer, self.run = tokenizer, run
        self.engine = FakeEngine(tokenizer)
        self.chat = ChatService(tokenizer, self.engine)
        self.receipts = 0

    def answer(
        self, conversation: Conversation, *parts: str, receipt: str | None = None, end: int | None = 2, **changes
    ):
        """The engine says `parts`, each tokenized by itself; return the message and the generation."""
        ids = [token_id for part in parts for token_id in self.tokenizer.encode_now(part)]
        self.engine.expect(ids=[*ids, *([] if end is None else [end])])
        if end is None:
            changes["max_tokens"] = len(ids)
        self.receipts += 1
        receipt = receipt or f"r{self.receipts}"
        asked = request(conversation=conversation, call_ids=f"call_{receipt}", **changes)
        _, stream = self.run(collect(self.chat, asked))
        self.chat.remember(stream, receipt)
        return stream.choices[0].answer.message(stream.prompt.prefill), stream.generations[0]

    def prompt(self, conversation: Conversation):
        return self.run(self.chat._prompts.build("", conversation))

    def text(self, ids) -> str:
        return self.tokenizer._tokenizer.decode(ids)


@pytest.fixture
def talk(tokenizer, run) -> Talk:
    return Talk(tokenizer, run)


@pytest.fixture
def thinker(tokenizer, run) -> Talk:
    return Talk(with_template(tokenizer, THINKING), run)


def ask(*messages: Message, **fields) -> Conversation:
    return Conversation(messages=messages, **fields)


def whole(generation) -> list[int]:
    return [*generation.prompt_ids, *generation.output_ids]


# ------------------------------------------------------------------ answers that stay as they were sampled


def test_any_sampled_tokens_are_replayed(talk):
    """Special tokens, halves of characters, any end: the next prompt begins with the ids as they were."""

    @given(st.lists(st.integers(0, 49151), min_size=1, max_size=12), st.booleans())
    @settings(max_examples=examples(40))
    def check(ids, ends):
        answered = [token_id for token_id in ids if token_id != 2]
        talk.engine.expect(ids=[*answered, 2] if ends or not answered else answered)
        limit = None if ends or not answered else len(answered)
        talk.receipts += 1
        first = Message(role="user", content=f"Hi {talk.receipts}")
        _, stream = talk.run(collect(talk.chat, request(conversation=ask(first), max_tokens=limit)))
        talk.chat.remember(stream, f"r{talk.receipts}")
        generation = stream.generations[0]
        prompt = talk.prompt(ask(first, Message(role="assistant", content=stream.choices[0].text), GO_ON))
        assert prompt.ids[: len(whole(generation))] == whole(generation)
        rest = talk.text(prompt.ids[len(whole(generation)) :])
        closing = "" if generation.output_ids[-1] in talk.tokenizer.special_ids else "<|im_end|>"
        assert rest == closing + "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.parent_id == f"r{talk.receipts}"

    check()


def test_a_merge_across_the_turn_s_boundary_does_not_happen(talk):
    tokenizer = talk.tokenizer
    message, generation = talk.answer(ask(HELLO), "\n\n", "Yes", end=None)
    rendered = tokenizer.render([HELLO]) + "\n\nYes"
    assert tokenizer.encode_now(rendered) != whole(generation)  # the text's own tokens group the newlines otherwise
    prompt = talk.prompt(ask(HELLO, message, GO_ON))
    assert prompt.ids[: len(whole(generation))] == whole(generation)


def test_a_completion_holding_special_tokens(talk):
    special = talk.tokenizer.encode_now("<|endoftext|>")
    assert len(special) == 1
    message, generation = talk.answer(ask(HELLO), "one ", "<|endoftext|>", " two")
    assert message.content == "one  two" and special[0] in generation.output_ids
    prompt = talk.prompt(ask(HELLO, message, GO_ON))
    assert prompt.ids[: len(whole(generation))] == whole(generation)


def test_text_that_spells_a_special_token_stays_text(talk):
    message, generation = talk.answer(ask(HELLO), "<", "|im", "_end", "|", ">", " is a marker")
    assert message.content == "<|im_end|> is a marker" and generation.output_ids.count(2) == 1
    prompt = talk.prompt(ask(HELLO, message, GO_ON))
    assert prompt.ids[: len(whole(generation))] == whole(generation)


# ------------------------------------------------------------------ tool calls and reasoning

COMPACT = ('<tool_call>{"name"', ':"add","arg', 'uments":{"a":1', "}}</tool_call>")


def test_a_call_that_the_template_writes_otherwise_keeps_its_ids(thinker):
    conversation = ask(HELLO, tools=[ADD])
    message, generation = thinker.answer(conversation, *COMPACT)
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [("call_r1_0_0", "add", '{"a":1}')]
    result = Message(role="tool", content="2", tool_call_id="call_r1_0_0")
    prompt = thinker.prompt(ask(HELLO, message, result, tools=[ADD]))
    assert prompt.ids[: len(whole(generation))] == whole(generation)
    assert thinker.text(prompt.ids[len(whole(generation)) :]) == (
        "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda call: replace(call, id="other"),
        lambda call: replace(call, arguments='{ "a": 1 }'),
    ],
)
def test_clients_may_rewrite_ids_and_spacing(thinker, change):
    message, generation = thinker.answer(ask(HELLO, tools=[ADD]), *COMPACT)
    sent = replace(message, tool_calls=tuple(map(change, message.tool_calls)))
    prompt = thinker.prompt(ask(HELLO, sent, GO_ON, tools=[ADD]))
    assert prompt.ids[: len(whole(generation))] == whole(generation) and prompt.fork_of is None


def test_clients_may_strip_white_space_around_an_answer(talk):
    message, generation = talk.answer(ask(HELLO), " hi", " \n")
    assert message.content == " hi \n"
    prompt = talk.prompt(ask(HELLO, replace(message, content="hi"), GO_ON))
    assert prompt.ids[: len(whole(generation))] == whole(generation) and prompt.parent_id == "r1"


def test_other_arguments_are_a_fork(thinker):
    message, _ = thinker.answer(ask(HELLO, tools=[ADD]), *COMPACT)
    sent = replace(message, tool_calls=(ToolCall("call_r1_0_0", "add", '{"a":2}'),))
    prompt = thinker.prompt(ask(HELLO, sent, GO_ON, tools=[ADD]))
    assert (prompt.parent_id, prompt.fork_of) == (None, "r1") and '"a": 2' in thinker.text(prompt.ids)


@pytest.mark.parametrize("tools", [[], [ADD, Tool(name="other")]])
def test_other_tools_change_the_prompt_and_contents_keep_their_ids(thinker, tools):
    message, generation = thinker.answer(ask(HELLO, tools=[ADD]), "h", "e", "l", "l", "o", "\n", *COMPACT)
    prompt = thinker.prompt(ask(HELLO, message, GO_ON, tools=tools))
    assert prompt.parent_id == "r1" and prompt.ids[: len(whole(generation))] != whole(generation)
    assert ("<tools>" in thinker.text(prompt.ids)) == bool(tools) == ('"other"' in thinker.text(prompt.ids))
    letters = generation.output_ids[:5]
    assert any(prompt.ids[at : at + 5] == letters for at in range(len(prompt.ids)))


def test_of_equal_answers_that_with_the_same_tools_is_meant(thinker):
    message, first = thinker.answer(ask(HELLO, tools=[ADD]), "h", "i")
    thinker.answer(ask(HELLO), "hi")
    prompt = thinker.prompt(ask(HELLO, message, GO_ON, tools=[ADD]))
    assert prompt.parent_id == "r1" and prompt.ids[: len(whole(first))] == whole(first)


THOUGHT = ("<think>\n", "so ", "so\n", "</think>", "\n\n")


def test_reasoning_that_clients_leave_out_stays_while_the_turn_lasts(thinker):
    message, generation = thinker.answer(ask(HELLO, tools=[ADD]), *THOUGHT, *COMPACT)
    assert message.reasoning == "so so"
    result = Message(role="tool", content="2", tool_call_id="call_r1_0_0")
    prompt = thinker.prompt(ask(HELLO, replace(message, reasoning=""), result, tools=[ADD]))
    assert prompt.ids[: len(whole(generation))] == whole(generation)
    same = thinker.prompt(ask(HELLO, message, result, tools=[ADD]))
    assert same.ids == prompt.ids


def test_a_template_that_drops_earlier_reasoning_has_its_way_and_the_rest_keeps_its_ids(thinker):
    message, generation = thinker.answer(ask(HELLO), *THOUGHT, "h", "e", "l", "l", "o")
    prompt = thinker.prompt(ask(HELLO, replace(message, reasoning=""), GO_ON))
    text = thinker.text(prompt.ids)
    assert "so so" not in text and "assistant\nhello<|im_end|>\n<|im_start|>user\nGo on" in text
    letters = generation.output_ids[-6:-1]
    assert len(letters) == 5 and thinker.tokenizer.encode_now("hello") != letters
    start = len(generation.prompt_ids)
    assert prompt.ids[:start] == generation.prompt_ids and prompt.ids[start : start + 5] == letters
    assert (prompt.parent_id, prompt.fork_of) == ("r1", None)


def test_several_such_turns_keep_theirs(thinker):
    messages = [HELLO]
    for words in (("a", "b", "c"), ("d", "e", "f"), ("g", "h", "i")):
        message, _ = thinker.answer(ask(*messages), *THOUGHT, *words)
        messages += [replace(message, reasoning=""), GO_ON]
    ids = thinker.prompt(ask(*messages)).ids
    for words in ("abc", "def", "ghi"):
        letters = [thinker.tokenizer.encode_now(letter)[0] for letter in words]
        assert any(ids[at : at + 3] == letters for at in range(len(ids)))
    assert thinker.text(ids) == thinker.tokenizer.render(messages)


def test_reasoning_that_a_client_changed_is_a_fork(thinker):
    message, _ = thinker.answer(ask(HELLO), *THOUGHT, "hello")
    prompt = thinker.prompt(ask(HELLO, replace(message, reasoning="else"), GO_ON))
    assert (prompt.parent_id, prompt.fork_of) == (None, "r1")


def test_reasoning_left_open_by_the_prompt_is_read_as_reasoning(tokenizer, run):
    opened = THINKING.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    talk = Talk(with_template(tokenizer, opened), run)
    message, _ = talk.answer(ask(HELLO), "so so\n", "</think>", "\n\n", "Yes")
    assert (message.reasoning, message.content) == ("so so", "Yes")


def test_gpt_oss_channels_are_special_tokens(tokenizer, run):
    talk = Talk(with_template(tokenizer, HARMONY, MARKERS), run)
    conversation = ask(HELLO, tools=[ADD])
    call = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    end = talk.tokenizer.encode_now("<|call|>")[0]
    message, generation = talk.answer(
        conversation, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", call, '{"a":1}', end=end
    )
    assert (message.reasoning, message.content) == ("Hm.", "")
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("add", '{"a":1}')]
    result = Message(role="tool", content="2", tool_call_id=message.tool_calls[0].id)
    prompt = talk.prompt(ask(HELLO, message, result, tools=[ADD]))
    assert prompt.ids[: len(whole(generation))] == whole(generation)
    assert talk.text(prompt.ids[len(whole(generation)) :]) == "<|start|>tool<|message|>2<|end|><|start|>assistant"


# ------------------------------------------------------------------ forks


def test_an_edited_turn_forks_and_what_follows_goes_on_from_it(talk):
    message, first = talk.answer(ask(HELLO), "h", "i")
    edited = replace(message, content="hi!")
    fork = talk.prompt(ask(HELLO, edited, GO_ON))
    assert (fork.parent_id, fork.fork_of) == (None, "r1")
    assert fork.ids == talk.tokenizer.encode_now(talk.tokenizer.render([HELLO, edited, GO_ON]))
    second, generation = talk.answer(ask(HELLO, edited, GO_ON), "y", "o")
    after = talk.prompt(ask(HELLO, edited, GO_ON, second, GO_ON))
    assert (after.parent_id, after.fork_of) == ("r2", None)
    assert after.ids[: len(whole(generation))] == whole(generation)
    assert whole(first) != after.ids[: len(whole(first))]


def test_a_turn_edited_after_one_of_ours_forks_from_there(talk):
    one, first = talk.answer(ask(HELLO), "h", "i")
    two, _ = talk.answer(ask(HELLO, one, GO_ON), "y", "o")
    prompt = talk.prompt(ask(HELLO, one, GO_ON, replace(two, content="no"), GO_ON))
    assert (prompt.parent_id, prompt.fork_of) == ("r1", "r2")
    assert prompt.ids[: len(whole(first))] == whole(first)


def test_turns_of_another_origin_are_no_fork(talk):
    prompt = talk.prompt(ask(HELLO, Message(role="assistant", content="Not ours"), GO_ON))
    assert (prompt.parent_id, prompt.fork_of) == (None, None)


def test_equal_texts_of_other_tokens_are_told_apart(talk):
    message, letters = talk.answer(ask(HELLO), "h", "e", "l", "l", "o")
    _, word = talk.answer(ask(HELLO), "hello")
    assert letters.output_ids != word.output_ids
    newest = talk.prompt(ask(HELLO, message, GO_ON))
    asked_for = talk.prompt(ask(HELLO, message, GO_ON, receipts=frozenset({"r1"})))
    assert newest.ids[: len(whole(word))] == whole(word) and newest.parent_id == "r2"
    assert asked_for.ids[: len(whole(letters))] == whole(letters) and asked_for.parent_id == "r1"


def test_the_ids_of_calls_tell_equal_calls_apart(thinker):
    conversation = ask(HELLO, tools=[ADD])
    message, first = thinker.answer(conversation, *COMPACT)
    thinker.answer(conversation, "".join(COMPACT))
    prompt = thinker.prompt(ask(HELLO, message, GO_ON, tools=[ADD]))
    assert prompt.parent_id == "r1" and prompt.ids[: len(whole(first))] == whole(first)


# ------------------------------------------------------------------ the rest


def test_a_prefilled_answer_goes_on_and_is_remembered_as_one_turn(talk):
    prefill = Message(role="assistant", content="It is f")
    message, generation = talk.answer(ask(HELLO, prefill, prefill=True), "ine")
    assert talk.text(generation.prompt_ids).endswith("assistant\nIt is f") and message.content == "It is fine"
    assert talk.tokenizer.encode_now(talk.text(whole(generation))) != whole(generation)
    prompt = talk.prompt(ask(HELLO, message, GO_ON))
    assert prompt.ids[: len(whole(generation))] == whole(generation)


def test_a_prefilled_answer_goes_on_in_its_channel(tokenizer, run):
    talk = Talk(with_template(tokenizer, HARMONY, MARKERS), run)
    (end,) = talk.tokenizer.encode_now("<|return|>")
    prefill = Message(role="assistant", content="It is f")
    for grammar in (None, Grammar("json_object", "")):
        message, generation = talk.answer(ask(HELLO, prefill, prefill=True, grammar=grammar), "ine", end=end)
        assert talk.text(generation.prompt_ids).endswith("<|channel|>final<|message|>It is f")
        assert message.content == "It is fine"


def test_a_forced_call_begins_behind_the_prompt(talk):
    conversation = ask(HELLO, tools=[ADD], tool_choice="required", tool_name="add")
    message, generation = talk.answer(conversation, '{"a"', ": 5}")
    assert talk.text(generation.prompt_ids).endswith('assistant\n<tool_call>\n{"name": "add", "arguments": ')
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("add", '{"a": 5}')]
    assert talk.engine.seen[0].sampling.grammar.kind == "json_schema"
    prompt = talk.prompt(ask(HELLO, message, GO_ON, tools=[ADD]))
    assert prompt.ids[: len(whole(generation))] == whole(generation)


def test_a_lead_that_holds_the_whole_name_begins_the_call(tokenizer, run):
    talk = Talk(with_template(tokenizer, THINKING, tool_format="mistral-args"), run)
    message, generation = talk.answer(ask(HELLO, tools=[ADD], tool_choice="required"), '{"a"', ": 5}")
    assert talk.text(generation.prompt_ids).endswith("[TOOL_CALLS]add[ARGS]")
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("add", '{"a": 5}')]


def test_one_call_is_enough_where_calls_may_not_be_parallel(talk):
    conversation = ask(HELLO, tools=[ADD], parallel_calls=False)
    message, generation = talk.answer(conversation, *COMPACT, "\n", *COMPACT)
    assert len(message.tool_calls) == 1
    assert talk.text(generation.output_ids).endswith("}}")
    assert generation.ending.complete and len(generation.logprobs) == len(generation.output_ids)


def test_answers_are_recalled_from_their_generations(thinker, run):
    """As after a restart: nothing but the request and the recorded tokens is at hand."""
    conversation = ask(HELLO, tools=[ADD])
    message, generation = thinker.answer(conversation, *THOUGHT, *COMPACT, receipt="old")
    fresh = Talk(thinker.tokenizer, run)
    asked = request(conversation=conversation, call_ids="call_old", sampling=SamplingParams())
    run(fresh.chat.recall(asked, [generation], "old"))
    result = Message(role="tool", content="2", tool_call_id="call_old_0_0")
    prompt = fresh.prompt(ask(HELLO, message, result, tools=[ADD]))
    assert prompt.ids == thinker.prompt(ask(HELLO, message, result, tools=[ADD])).ids
    assert prompt.ids[: len(whole(generation))] == whole(generation) and prompt.parent_id == "old"
