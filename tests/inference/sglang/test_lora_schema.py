"""The functional checks where SGLang is absent, broken or different; with the real one they are tested in engines/."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from reef.inference.sglang.lora_schema import (
    adapter_scoped_prefix_cache_supported,
    version_keyed_prefix_cache_supported,
)


class FakeKey:
    def __init__(self, token_ids, extra_key) -> None:
        self.token_ids, self.extra_key = list(token_ids), extra_key


class FakeCache:
    """Shares a prefix where tokens and key are the same."""

    @classmethod
    def create_simulated(cls) -> FakeCache:
        return cls()

    def insert(self, params) -> None:
        self.stored = params.key

    def match_prefix(self, params):
        same = self.stored.token_ids == params.key.token_ids and self.stored.extra_key == params.key.extra_key
        return SimpleNamespace(device_prefix_len=len(self.stored.token_ids) if same else 0)


class FakeRequest:
    def __init__(self, *, origin_input_ids, lora_id, **_) -> None:
        self.origin_input_ids = origin_input_ids
        self.extra_key = lora_id


class FakeUnscopedRequest(FakeRequest):
    def __init__(self, **given) -> None:
        super().__init__(**{**given, "lora_id": None})


class FakeCarelessRequest(FakeRequest):
    """Tells only whether there is an adapter."""

    def __init__(self, **given) -> None:
        super().__init__(**{**given, "lora_id": "some" if given["lora_id"] else None})


class FakePrivateCache(FakeCache):
    """Shares nothing with anybody."""

    def match_prefix(self, params):
        return SimpleNamespace(device_prefix_len=0)


def install(monkeypatch: pytest.MonkeyPatch, request: type, cache: type = FakeCache, key: type = FakeKey) -> None:
    names = {
        "sglang.srt.managers.schedule_batch": {"Req": request},
        "sglang.srt.sampling.sampling_params": {"SamplingParams": SimpleNamespace},
        "sglang.srt.mem_cache.radix_cache": {"RadixKey": key, "RadixCache": cache},
        "sglang.srt.mem_cache.base_prefix_cache": {
            "InsertParams": SimpleNamespace,
            "MatchPrefixParams": SimpleNamespace,
        },
    }
    for name, content in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_scoped(monkeypatch) -> None:
    pytest.importorskip("torch")
    install(monkeypatch, FakeRequest)
    assert adapter_scoped_prefix_cache_supported() is True


@pytest.mark.parametrize(
    ("request_class", "cache", "key"),
    [
        (FakeUnscopedRequest, FakeCache, FakeKey),
        (FakeCarelessRequest, FakeCache, FakeKey),
        (FakeRequest, FakePrivateCache, FakeKey),
        (FakeRequest, object, FakeKey),
        (FakeRequest, FakeCache, object),
        (object, FakeCache, FakeKey),
    ],
    ids=["not keyed by adapter", "keyed by any adapter", "never shared", "no tree", "no key", "no request"],
)
def test_whatever_is_missing_or_different_answers_no(monkeypatch, request_class, cache, key) -> None:
    pytest.importorskip("torch")
    install(monkeypatch, request_class, cache, key)
    assert adapter_scoped_prefix_cache_supported() is False
    assert version_keyed_prefix_cache_supported() is False


def test_without_sglang_the_answer_is_no(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    assert adapter_scoped_prefix_cache_supported() is False
    assert version_keyed_prefix_cache_supported() is False
