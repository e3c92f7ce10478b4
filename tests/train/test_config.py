from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from reef.train.torch_backend.config import TorchConfig


def test_keys_are_hyphenated_and_have_descriptions():
    keys = [field.encode_name for field in msgspec.structs.fields(TorchConfig)]
    assert {"learning-rate", "micro-batch-tokens", "lora-target-modules"} <= set(keys)
    schema = msgspec.json.schema(TorchConfig)["$defs"]["TorchConfig"]["properties"]
    assert all(schema[key].get("description") for key in keys)


@pytest.mark.parametrize(("key", "value"), [("learning-rate", 0.0), ("lora-rank", 0), ("dtype", "float16")])
def test_out_of_bounds_is_refused_by_name(key, value):
    with pytest.raises(msgspec.ValidationError, match=key):
        msgspec.convert({key: value}, TorchConfig)


def test_an_adapter_on_the_head_is_refused():
    with pytest.raises(msgspec.ValidationError, match="lora-target-modules must not contain lm_head"):
        msgspec.convert({"lora-target-modules": ["q_proj", "lm_head"]}, TorchConfig)


@pytest.mark.parametrize("others", [{}, {"colocate": True, "mode": "full"}])
def test_only_the_base_of_colocated_adapters_may_stay(others):
    options = {"options": {"keep-lora-base-resident": True}}
    with pytest.raises(msgspec.ValidationError, match="keep-lora-base-resident must be false"):
        msgspec.convert(options | others, TorchConfig)
    assert msgspec.convert(options | {"colocate": True}, TorchConfig).options.keep_lora_base_resident


def test_the_configuration_imports_no_torch():
    code = "import sys, reef.train.torch_backend.backend; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
