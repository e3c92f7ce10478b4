from __future__ import annotations

import itertools
import sys

import msgspec
import pytest

from reef.errors import ConfigError
from reef.inference.sglang.config import DISABLE, SGLangConfig, flags
from reef.inference.sglang.engine import ManagedEngine
from reef.runtime.interfaces import PauseMode

RETRACT, IN_PLACE = PauseMode.RETRACT, PauseMode.IN_PLACE


def config(**changes) -> SGLangConfig:
    """Validated as the deployment file is."""
    plain = {name.replace("_", "-"): value for name, value in changes.items()}
    return msgspec.convert({"model-path": "model", **plain}, SGLangConfig)


@pytest.mark.parametrize(
    ("colocated", "disjoint_sharing", "expected"),
    [(False, False, IN_PLACE), (False, True, RETRACT), (True, False, RETRACT), (True, True, RETRACT)],
)
def test_pause_mode_follows_from_how_engines_are_placed(colocated, disjoint_sharing, expected) -> None:
    assert config().pausing(colocated=colocated, disjoint_prefix_sharing=disjoint_sharing) is expected
    assert (
        config(pause_mode="retract").pausing(colocated=colocated, disjoint_prefix_sharing=disjoint_sharing) is RETRACT
    )


def test_in_place_is_refused_where_retract_is_needed() -> None:
    asked = config(pause_mode="in_place")
    with pytest.raises(ConfigError, match=r"must be retract, got in_place: training\.colocate is true"):
        asked.pausing(colocated=True, disjoint_prefix_sharing=False)
    with pytest.raises(ConfigError, match=r"training\.options.disjoint-prefix-sharing is true"):
        asked.pausing(colocated=False, disjoint_prefix_sharing=True)


def test_unknown_pause_mode_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid enum value 'abort'"):
        config(pause_mode="abort")


@pytest.mark.parametrize(
    ("mode", "lora", "adapter_scoped", "version_keyed"),
    list(itertools.product((RETRACT, IN_PLACE), (False, True), (False, True), (False, True))),
)
def test_sharing_is_on_exactly_where_it_is_safe(mode, lora, adapter_scoped, version_keyed) -> None:
    found = {"lora": lora, "adapter_scoped": adapter_scoped, "version_keyed": version_keyed}
    safe = (mode is RETRACT or version_keyed) and (not lora or adapter_scoped)
    unset = config().sharing({}, mode, **found)
    assert unset.prefix_cache is safe
    assert not unset.version_keys or version_keyed
    assert config().sharing({DISABLE: True}, mode, **found).prefix_cache is False  # an opt-out is kept
    if safe:
        assert config().sharing({DISABLE: False}, mode, **found).prefix_cache is True
    else:
        with pytest.raises(ConfigError, match=f"inference.options.{DISABLE} must not be false: "):
            config().sharing({DISABLE: False}, mode, **found)


@pytest.mark.parametrize(("mode", "expected"), [(RETRACT, True), (IN_PLACE, False)])
def test_stock_keys_share_only_behind_a_flush(mode, expected) -> None:
    stock = config(version_keys=False)
    sharing = stock.sharing({}, mode, lora=True, adapter_scoped=True, version_keyed=True)
    assert (sharing.prefix_cache, sharing.version_keys) == (expected, False)


def test_a_group_may_ask_for_itself() -> None:
    asked = config(
        options={"chunked-prefill-size": 512},
        groups=[{"engines": 2}, {"options": {DISABLE: False}}],
        version_keys=False,
    )
    assert asked.num_engines == 3
    options = asked.engine_options()
    assert options == [{"chunked-prefill-size": 512}] * 2 + [{"chunked-prefill-size": 512, DISABLE: False}]
    found = {"lora": False, "adapter_scoped": True, "version_keyed": True}
    assert asked.sharing(options[0], IN_PLACE, **found).prefix_cache is False
    with pytest.raises(ConfigError, match="publications pause in_place"):
        asked.sharing(options[2], IN_PLACE, **found)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disaggregated_groups_are_refused(role) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"groups\[0\].role must be regular, got {role}: .* retract"):
        config(groups=[{"role": role}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"tp-size": 2}}, "options.tp-size is set by inference.tensor-parallel-size"),
        ({"options": {"model-path": "x"}}, "options.model-path is set by inference.model-path"),
        ({"options": {"port": 1}}, "options.port is set by Reef"),
        ({"options": {"disable_radix_cache": True}}, "'disable_radix_cache' must be written 'disable-radix-cache'"),
        ({"options": {DISABLE: "no"}}, f"options.{DISABLE} must be true or false, got 'no'"),
        ({"groups": [{"options": {"dp-size": 2}}]}, r"groups\[0\].options.dp-size is set by Reef"),
        ({"groups": [{}], "engines": 2}, "groups takes the place of engines"),
        ({"endpoints": ["http://a:1"], "engines": 2}, "engines is for engines that Reef starts, got 2"),
        ({"endpoints": ["a:1"]}, "endpoints must be http://host:port, got 'a:1'"),
        ({"engines": 2, "tensor_parallel_size": 2, "num_gpus": 2}, r"num-gpus must be engines x .* \(4\), got 2"),
        ({"device": "cpu", "num_gpus": 1}, "device cpu has no GPUs"),
        ({"device": "cpu", "tensor_parallel_size": 2}, "device cpu has no GPUs"),
        ({"engines": 0}, "`int` >= 1"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(changes, message) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        config(**changes)


@pytest.mark.parametrize(("options", "backend"), [({}, "llguidance"), ({"grammar-backend": "xgrammar"}, "xgrammar")])
def test_engines_take_every_grammar_of_ours_unless_told_otherwise(options, backend) -> None:
    made = config(python=sys.executable, options=options)
    [given] = made.engine_options()
    engine = ManagedEngine("engine", made, given, mode=IN_PLACE, lora=False, colocated=False, logs=None)
    command = engine.command(1, share=True)
    assert command.count("--grammar-backend") == 1 and command[command.index("--grammar-backend") + 1] == backend


def test_options_become_flags() -> None:
    assert flags({"a": True, "b": False, "c": 3, "d": ["x", "y"]}) == ["--a", "--c", "3", "--d", "x", "y"]
