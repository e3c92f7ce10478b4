from __future__ import annotations

from reef.inference.chat.history import SampledTurns
from reef.inference.chat.messages import Message
from tests.inference.chat.test_service import collect, request


def answer_once(chat, run, asked):
    _, stream = run(collect(chat, asked))
    chat.remember(stream, "receipt")
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
    ids = run(chat.prompt_ids(request("Hi", text, "Go on").conversation))
    whole = [*first.prompt_ids, *first.output_ids]
    assert ids[: len(whole)] == whole
    rendered = chat.tokenizer.render(request("Hi", text, "Go on").conversation.messages)
    assert chat.tokenizer._tokenizer.decode(ids) == rendered


def test_ids_are_kept_over_several_turns(chat, engine, run):
    spelled(engine, run, chat)
    first, text = answer_once(chat, run, request("Hi"))
    second, text2 = answer_once(chat, run, request("Hi", text, "Go on"))
    ids = run(chat.prompt_ids(request("Hi", text, "Go on", text2, "And?").conversation))
    whole = [*second.prompt_ids, *second.output_ids]
    assert ids[: len(whole)] == whole
    assert whole[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]


def test_an_edited_turn_is_tokenized_anew(chat, engine, run):
    spelled(engine, run, chat)
    answer_once(chat, run, request("Hi"))
    asked = request("Hi", "hello!", "Go on").conversation
    assert run(chat.prompt_ids(asked)) == chat.tokenizer.encode_now(chat.tokenizer.render(asked.messages))


def test_another_lane_does_not_see_them(chat, engine, run):
    spelled(engine, run, chat)
    _, text = answer_once(chat, run, request("Hi", lane="a"))
    asked = request("Hi", text, "Go on").conversation
    assert run(chat.prompt_ids(asked, "b")) != run(chat.prompt_ids(asked, "a"))


def assistant(content, **fields):
    return Message(role="assistant", content=content, **fields)


def remembered(turns, content, answer, text, ids, receipt="r"):
    turns.remember("", b"", [user(content)], answer, text, ids, num_prompt=1, receipt=receipt)


def user(content):
    return Message(role="user", content=content)


def test_the_oldest_are_forgotten_when_too_many_tokens_are_held():
    turns = SampledTurns(max_tokens=10)
    for name in "abc":
        remembered(turns, name, assistant("x"), "text", [1, 2, 3, 4])
    found = [turns.look_up("", b"", [user(name), assistant("x")]) for name in "abc"]
    assert [bool(known.turns) for known in found] == [False, True, True]
    assert turns.look_up("", b"", [user("a"), assistant("other")]).fork_of is None
    assert turns.look_up("", b"", [user("b"), assistant("other")]).fork_of == "r"


def test_text_that_renders_differently_does_not_begin_like_the_turn():
    turns = SampledTurns()
    remembered(turns, "a", assistant("x"), "a>x", [1, 2])
    (turn,) = turns.look_up("", b"", [user("a"), assistant("x")]).turns.values()
    assert turn.begins("a>x<end>") and not turn.begins("a> x<end>") and not turn.begins("a>")
