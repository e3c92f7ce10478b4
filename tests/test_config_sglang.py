"""SGLang's section through the layers: YAML, environment, flags; what is refused, and by which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from reef.config import resolve
from reef.errors import ConfigError
from reef.inference.sglang.config import SGLangConfig

YAML = """
inference:
  backend: sglang
  model-path: model
  options: {{chunked-prefill-size: 512, {option}}}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "reef.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("value", ["true", "false"])
def test_yaml_options_reach_the_engine(tmp_path, value) -> None:
    config = resolve(file=written(tmp_path, YAML.format(option=f"disable-radix-cache: {value}"))).config.inference
    assert isinstance(config, SGLangConfig)
    assert config.engine_options() == [{"chunked-prefill-size": 512, "disable-radix-cache": value == "true"}]


def test_flags_override_yaml(tmp_path) -> None:
    file = written(tmp_path, YAML.format(option="disable-radix-cache: true"))
    config = resolve(
        file=file,
        environ={"REEF_INFERENCE__PAUSE_MODE": "retract", "REEF_INFERENCE__ENGINES": "2"},
        flags={"inference.options": "disable-radix-cache=false,stream-interval=4"},
    ).config.inference
    assert isinstance(config, SGLangConfig)
    assert config.engine_options() == [{"disable-radix-cache": False, "stream-interval": 4}] * 2
    assert config.pause_mode == "retract"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("disable-radix-cache: maybe", "options.disable-radix-cache must be true or false, got 'maybe'"),
        ("tp-size: 2", "options.tp-size is set by inference.tensor-parallel-size"),
        ("weight_version: x", "'weight_version' must be written 'weight-version'"),
    ],
)
def test_yaml_that_reef_cannot_keep_is_refused(tmp_path, option, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(file=written(tmp_path, YAML.format(option=option)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"inference.pause-mode": "abort"}, r"inference\.pause-mode must be .*, got 'abort' \(flag"),
        ({"inference.page-size": "4"}, r"inference\.page-size .* needs inference\.backend local, but it is sglang"),
        ({"inference.endpoints": "10.0.0.1:1"}, r"endpoints must be http://host:port, got '10\.0\.0\.1:1'"),
        ({"inference.device": "cpu", "inference.num-gpus": "2"}, "device cpu has no GPUs"),
        ({"inference.groups": '[{"role": "decode"}]'}, "role must be regular, got decode"),
    ],
)
def test_flags_that_reef_cannot_keep_are_refused(flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(flags={"inference.backend": "sglang", "inference.model-path": "model", **flags})


TRAINED = {"training.backend": "torch", "inference.backend": "sglang", "inference.model-path": "model"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"training.lora-rank": "32"},
            r"lora-rank must be at most inference\.max-lora-rank, 16 \(default\), got 32 \(flag",
        ),
        ({"training.lora-target-modules": "q_proj,v_proj,in_proj"}, "lora-target-modules does not have in_proj"),
        ({"training.lora-target-modules": "q_proj,k_proj"}, "stacks k_proj, q_proj, v_proj, so v_proj must be there"),
        ({"training.lora-target-modules": "q_proj,v_proj,up_proj"}, "stacks gate_proj, up_proj, so gate_proj must be"),
    ],
)
def test_adapters_that_sglang_would_not_take_are_refused(flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(flags={**TRAINED, **flags})


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "o_proj,down_proj", "q_proj,k_proj,v_proj,gate_proj,up_proj"])
def test_adapters_of_whole_stacks_are_taken(targets) -> None:
    assert resolve(flags={**TRAINED, "training.lora-target-modules": targets}).config.training.mode == "lora"
    full = {**TRAINED, "training.mode": "full", "training.lora-target-modules": "up_proj"}
    assert resolve(flags=full).config.training.mode == "full"
