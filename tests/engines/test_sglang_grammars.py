"""What a real SGLang engine can be made to say in the format of each family: the tests of the local engine, on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace

import pytest

from tests.conftest import needs

needs("torch", "llguidance", "openai")

from reef.inference.chat.tokenizer import ChatTokenizer  # noqa: E402
from reef.inference.sglang.backend import SGLangBackend  # noqa: E402
from reef.runtime.interfaces import PauseMode  # noqa: E402
from tests.engines.sglang import SECONDS, sglang_config  # noqa: E402
from tests.inference.chat.families import FAMILIES, save_model  # noqa: E402
from tests.service.conftest import serving  # noqa: E402
from tests.service.test_families_forced import (  # noqa: E402, F401
    test_a_call_or_the_answer_in_its_form,
    test_a_named_tool_is_forced_whole_or_streamed,
    test_any_tool_is_forced_and_the_conversation_goes_on,
)

pytestmark = pytest.mark.timeout(3600)  # a server starts in half a minute, on a busy machine in many


def kin(name: str) -> list[str]:
    """Families that one engine serves: their tokenizers are of one kind, and each gets the tokens of all."""
    return [other for other in FAMILIES if FAMILIES[other].sentencepiece == FAMILIES[name].sentencepiece]


@pytest.fixture(scope="module")
def engine_of(engine_python, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    with ExitStack() as running:

        @cache
        def start(first: str) -> str:
            model = save_model(first, tmp_path_factory.mktemp("engine"), kin(first))
            backend = SGLangBackend(sglang_config(model), mode=PauseMode.IN_PLACE, lora=True)
            running.callback(backend.close)
            backend.start()
            return backend.endpoints()[0]

        yield lambda name: start(kin(name)[0])


@pytest.fixture(scope="module", params=FAMILIES)
def real(request, engine_of, tmp_path_factory) -> Iterator[SimpleNamespace]:
    root = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, root / "model", kin(request.param))
    flags = {"inference.backend": "sglang", "inference.endpoints": engine_of(request.param), "inference.device": "cpu"}
    with serving(root / "data", model, **flags) as gateway:
        gateway.openai = gateway.openai.with_options(timeout=SECONDS)
        yield SimpleNamespace(name=request.param, gateway=gateway, tokenizer=ChatTokenizer.load(model))
