from __future__ import annotations

from reef.inference.chat.history import SampledTurns
from reef.inference.chat.messages import Message
from tests.inference.chat.test_service import collect, request


def answer_once(chat, run, asked):
    _, stream = run(collect(chat, asked))
    chat.remember(stream)
    return stream.generations[0], stream.choices[0].text


def spelled(engine, run, chat):
    """An answer whose tokens differ from what its text tokenizes to: one letter each."""
    letters = [chat.tokenizer.encode_now(letter)[0] for letter in "hello"]
    assert chat.tokenizer.encode_now("hello") != letters

    class Spelling:
        def __getattr__(self, name):
            return getattr(chat.tokenizer, name)

        def encode_now(self, text):
            return letters

    engine.tokenizer = Spelling()
    return letters


def test_a_continued_conversation_keeps_the_ids_that_were_sampled(chat, engine, run):
    letters = spelled(engine, run, chat)
    first, text = answer_once(chat, run, request("Hi"))
    assert first.output_ids == [*letters, 2]
    ids = run(chat.prompt_ids(request("Hi", text, "Go on").messages))
    whole = [*first.prompt_ids, *first.output_ids]
    assert ids[: len(whole)] == whole
    rendered = chat.tokenizer.render(request("Hi", text, "Go on").messages)
    assert chat.tokenizer._tokenizer.decode(ids) == rendered


def test_ids_are_kept_over_several_turns(chat, engine, run):
    spelled(engine, run, chat)
    first, text = answer_once(chat, run, request("Hi"))
    second, text2 = answer_once(chat, run, request("Hi", text, "Go on"))
    ids = run(chat.prompt_ids(request("Hi", text, "Go on", text2, "And?").messages))
    whole = [*second.prompt_ids, *second.output_ids]
    assert ids[: len(whole)] == whole
    assert whole[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]


def test_an_edited_turn_is_tokenized_anew(chat, engine, run):
    spelled(engine, run, chat)
    answer_once(chat, run, request("Hi"))
    messages = request("Hi", "hello!", "Go on").messages
    assert run(chat.prompt_ids(messages)) == chat.tokenizer.encode_now(chat.tokenizer.render(messages))


def test_another_lane_does_not_see_them(chat, engine, run):
    spelled(engine, run, chat)
    _, text = answer_once(chat, run, request("Hi", lane="a"))
    messages = request("Hi", text, "Go on").messages
    assert run(chat.prompt_ids(messages, "b")) != run(chat.prompt_ids(messages, "a"))


def test_the_oldest_are_forgotten_when_too_many_tokens_are_held():
    turns = SampledTurns(max_tokens=10)
    asked = [[Message(role="user", content=name)] for name in "abc"]
    for messages in asked:
        turns.remember("", messages, "x", "text", [1, 2, 3, 4])
    known = [turns.longest_prefix("", [*m, Message(role="assistant", content="x")], "text and more")[0] for m in asked]
    assert known == [[], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_text_that_renders_differently_is_not_matched():
    turns = SampledTurns()
    messages = [Message(role="user", content="a")]
    turns.remember("", messages, "x", "a>x", [1, 2])
    continued = [*messages, Message(role="assistant", content="x")]
    assert turns.longest_prefix("", continued, "a>x<end>") == ([1, 2], 3)
    assert turns.longest_prefix("", continued, "a> x<end>") == ([], 0)
