from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from reef.errors import ConfigError, InvalidRequest
from reef.inference.chat.messages import Message, ToolCall
from reef.inference.chat.tokenizer import ChatTokenizer

HELLO = [Message(role="user", content="Hello")]


def test_a_conversation_becomes_what_the_model_s_template_makes_of_it(tokenizer):
    expected = tokenizer._tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_now(tokenizer.render(HELLO)) == expected


def test_long_text_is_tokenized_on_a_thread_with_the_same_result(tokenizer, run, monkeypatch):
    text = "The quick brown fox. " * 5000

    threads, real = [], tokenizer._encode

    def noted(text: str) -> list[int]:
        threads.append(threading.current_thread())
        return real(text)

    monkeypatch.setattr(tokenizer, "_encode", noted)
    assert run(tokenizer.encode(text)) == real(text)
    assert run(tokenizer.encode(text[:1000])) == real(text[:1000])
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


def test_a_tokenizer_that_names_its_class_is_the_one_that_auto_finds_and_needs_no_torch(tokenizer, smollm2):
    from transformers import AutoTokenizer

    auto = ChatTokenizer(AutoTokenizer.from_pretrained(smollm2))
    assert type(auto._tokenizer) is type(tokenizer._tokenizer)
    text = "A reef, Ünïcode and <|im_end|>\n\t42"
    assert auto.encode_now(text) == tokenizer.encode_now(text) and auto.render(HELLO) == tokenizer.render(HELLO)
    code = (
        "import sys; from reef.inference.chat.tokenizer import ChatTokenizer; ChatTokenizer.load(sys.argv[1]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, smollm2], timeout=240).returncode == 0


def test_a_template_that_refuses_names_the_field(tokenizer):
    class Refusing:
        backend_tokenizer = tokenizer._backend
        added_tokens_decoder = tokenizer._tokenizer.added_tokens_decoder
        chat_template = "set"

        def apply_chat_template(self, messages, **kwargs):
            from jinja2 import TemplateError

            if messages[0]["role"] == "system":
                raise TemplateError("roles must alternate")
            return ""

    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        ChatTokenizer(Refusing()).render([Message(role="system", content="1")])
    assert caught.value.field == "messages"


def test_a_model_without_a_chat_template_is_refused(tokenizer):
    class Bare:
        backend_tokenizer = tokenizer._backend
        chat_template = None

    with pytest.raises(ConfigError, match="chat template"):
        ChatTokenizer(Bare())


def test_tool_calls_reach_the_template_with_parsed_arguments():
    call = Message(
        role="assistant", content="", tool_calls=(ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "x", "{"))
    )
    functions = [entry["function"] for entry in call.for_template()["tool_calls"]]
    assert functions == [{"name": "add", "arguments": {"a": 1}}, {"name": "x", "arguments": "{"}]


def test_token_bytes_of_padding_rows_are_empty(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
