from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.inference.chat.detokenizer import TextStream, decode
from reef.inference.chat.tokenizer import ChatTokenizer
from tests.conftest import examples, needs

token_ids = st.lists(st.integers(0, 49151), max_size=40)
multibyte = st.text(alphabet="aé漢🦜\u200d\n b", max_size=20)


def chunks_of(text: str, stops: list[str], sizes: list[int]) -> tuple[list[str], TextStream]:
    """Push `text` in pieces of the given sizes, as if each piece were a token."""
    stream = TextStream(FakeVocabulary(text, sizes), stops)
    shown = [stream.push(index) for index in range(len(stream._tokenizer.pieces))]
    return [*shown, stream.finish()], stream


class FakeVocabulary:
    """Pieces of a text as tokens: byte strings that may cut a character."""

    special_ids = frozenset()
    strips_leading_space = False

    def __init__(self, text: str, sizes: list[int]) -> None:
        data, self.pieces = text.encode(), []
        for size in sizes:
            self.pieces.append(data[:size])
            data = data[size:]
        self.pieces.append(data)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def test_the_pieces_joined_are_the_model_s_own_decoding(tokenizer):
    @given(st.one_of(token_ids, multibyte.map(tokenizer.encode_now)))
    @settings(max_examples=examples(100))
    def check(ids):
        assert decode(tokenizer, ids) == tokenizer._tokenizer.decode(ids, skip_special_tokens=True)

    check()


def test_half_a_character_is_never_shown(tokenizer):
    @given(st.text(alphabet="é漢🦜a", min_size=1, max_size=12))
    @settings(max_examples=examples(60))
    def check(text):
        stream = TextStream(tokenizer)
        assert all("\ufffd" not in stream.push(token_id) for token_id in tokenizer.encode_now(text))
        assert stream.finish() == ""

    check()


def test_a_character_that_never_completes_is_shown_at_the_end(tokenizer):
    ids = tokenizer.encode_now("🦜")
    assert len(ids) > 1
    assert decode(tokenizer, ids[:-1]) == "\ufffd"


def test_special_tokens_are_invisible(tokenizer):
    ids = tokenizer.encode_now("a<|im_end|>b")
    assert 2 in ids
    assert decode(tokenizer, ids) == "ab"


stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet="abcé", max_size=30), stops, st.lists(st.integers(0, 5), max_size=30))
@settings(max_examples=examples(200))
def test_stop_strings_cut_alike_for_any_chunking(text, stop, sizes):
    by_character, whole = chunks_of(text, stop, [1] * len(text.encode()))
    pieces, stream = chunks_of(text, stop, sizes)
    assert "".join(pieces) == "".join(by_character)
    assert stream.stopped_by == whole.stopped_by
    assert stream.shown == len("".join(pieces))


@given(st.text(alphabet="abc", max_size=20), stops, st.lists(st.integers(0, 4), max_size=20))
@settings(max_examples=examples(150))
def test_what_is_shown_ends_before_the_first_complete_stop_string(text, stop, sizes):
    pieces, stream = chunks_of(text, stop, sizes)
    shown = "".join(pieces)
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if not ends:
        assert (shown, stream.stopped_by) == (text, None)
    else:
        assert shown + stream.stopped_by == text[: min(ends)]


def test_text_that_may_begin_a_stop_string_waits():
    stream = TextStream(FakeVocabulary("one END", [3, 1, 1, 1, 1]), ["END"])
    assert [stream.push(index) for index in range(4)] == ["one", " ", "", ""]
    assert stream.length == 6
    assert stream.push(4) == ""
    assert stream.stopped_by == "END"


def sentencepiece_tokenizer():
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "\u2581Hello", "\u2581world", "!", *[f"<0x{byte:02X}>" for byte in range(256)]]
    model = BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[0].content }}")


def test_a_sentencepiece_vocabulary_decodes_like_its_own_decoder():
    needs("transformers")
    own = sentencepiece_tokenizer()
    ids = [1, 2, 3, 4 + 0xC3, 4 + 0xA9, 1]
    assert decode(ChatTokenizer(own), ids) == own.decode(ids) == "Hello world!é Hello"
