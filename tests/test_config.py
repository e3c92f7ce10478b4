from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from runpy import run_path

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reef.config import SECTIONS, Key, Resolved, known_keys, nearest_key, resolve, section_keys
from reef.errors import ConfigError
from reef.service.config import NoTraining

MODEL = {"inference.model-path": "models/m"}
LEARNS = MODEL | {"training.backend": "torch"}


def from_file(tmp_path: Path, text: str, **layers: dict[str, str]) -> Resolved:
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    return resolve(file=path, **layers)


def refusal(**layers: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**layers)
    return str(caught.value)


def file_refusal(tmp_path: Path, text: str, flags: dict[str, str] = MODEL) -> str:
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, text, flags=flags)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- layers


def test_needs_no_file_and_defaults_come_from_the_sections() -> None:
    resolved = resolve(flags=MODEL)
    assert resolved.config.inference.model_path == "models/m"
    assert resolved.config.reef.port == 8900
    assert resolved.origins["reef.port"] == "default"
    assert resolved.origins["inference.model-path"] == "flag --inference.model-path"


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    text = "reef:\n  port: 1001\n  data-dir: a\n  default-scenario: s\n"
    environ = {"REEF_REEF__PORT": "1002", "REEF_REEF__DATA_DIR": "b"}
    resolved = from_file(tmp_path, text, environ=environ, flags=MODEL | {"reef.port": "1003"})
    section = resolved.config.reef
    assert (section.port, section.data_dir, section.default_scenario) == (1003, "b", "s")
    assert resolved.origins["reef.port"] == "flag --reef.port"
    assert resolved.origins["reef.data-dir"] == "env REEF_REEF__DATA_DIR"
    assert resolved.origins["reef.default-scenario"] == f"file {tmp_path}/deployment.yaml:4"
    assert resolved.origins["reef.host"] == "default"


def test_variables_without_double_underscore_are_not_configuration() -> None:
    resolve(flags=MODEL, environ={"REEF_URL": "x", "REEF_TOKEN": "y", "REEF_CACHE": "z", "HOME": "h"})


def one_line_of_text(key: Key) -> bool:
    """Its default can be written on a command line as it is."""
    return not key.secret and key.default is not None and key.default != {} and key.name != "backend"


REQUIRED = {"inference.model-path": "models/m", "inference.upstream-url": "http://127.0.0.1:8"}


@pytest.mark.parametrize("dotted", [key.dotted for key in known_keys().values() if one_line_of_text(key)])
def test_every_key_is_a_flag_a_variable_and_a_file_key(dotted: str, tmp_path: Path) -> None:
    key = known_keys()[dotted]
    shown = REQUIRED[dotted] if key.required else msgspec.to_builtins(key.default)
    value = (
        ",".join(shown)
        if isinstance(shown, list | tuple)
        else str(shown).lower()
        if isinstance(shown, bool)
        else str(shown)
    )
    base = MODEL | ({f"{key.section}.backend": key.backends[0]} if key.backends else {})
    if key.backends == ("provider",):
        base = {"inference.backend": "provider", "inference.upstream-url": "http://127.0.0.1:9"}
    if key.section == "storage" and key.backends == ("postgres",):
        base |= {"storage.url": "postgresql://localhost/reef"}
    by_flag = resolve(flags=base | {dotted: value})
    by_variable = resolve(flags={k: v for k, v in base.items() if k != dotted}, environ={key.variable: value})
    plain = list(shown) if isinstance(shown, tuple) else shown
    text = yaml.safe_dump({key.section: {key.name: plain}})
    by_file = from_file(tmp_path, text, flags={k: v for k, v in base.items() if k != dotted})
    assert by_flag.values[dotted] == by_variable.values[dotted] == by_file.values[dotted] == shown
    assert by_flag.origins[dotted].startswith("flag")
    assert by_variable.origins[dotted].startswith("env")
    assert by_file.origins[dotted].startswith("file")


def test_every_key_is_described() -> None:
    assert [key.dotted for key in known_keys().values() if not key.description] == []


def test_every_section_of_the_architecture_is_there() -> None:
    assert list(SECTIONS) == [
        "reef",
        "inference",
        "training",
        "recipe",
        "storage",
        "execution",
        "evaluation",
        "observability",
    ]


# ---------------------------------------------------------------------------------------------- text to values


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ["a"]), ("a, b", ["a", "b"]), ('["a,b", "c"]', ["a,b", "c"]), ("", []), ("[]", [])],
)
def test_lists_are_json_or_commas(text: str, expected: list[str]) -> None:
    assert resolve(flags=MODEL | {"reef.redact": text}).config.reef.redact == expected


@pytest.mark.parametrize("text", ["clip=0.2,kind=x,on=true", '{"clip": 0.2, "kind": "x", "on": true}'])
def test_mappings_are_json_or_pairs(text: str) -> None:
    resolved = resolve(flags=MODEL | {"recipe.objective-params": text})
    assert resolved.config.recipe.objective_params == {"clip": 0.2, "kind": "x", "on": True}


def test_an_optional_value_can_be_unset(tmp_path: Path) -> None:
    resolved = from_file(tmp_path, "recipe:\n  score-min: -1\n", flags=MODEL | {"recipe.score-min": "null"})
    assert resolved.config.recipe.score_min is None


def test_the_file_reads_exponents_without_a_point_as_numbers(tmp_path: Path) -> None:
    resolved = from_file(tmp_path, "training:\n  backend: torch\n  learning-rate: 5e-4\n", flags=MODEL)
    assert resolved.values["training.learning-rate"] == 5e-4


# ---------------------------------------------------------------------------------------------- refusals


def test_missing_model_path_says_how_to_set_it() -> None:
    message = refusal()
    assert "inference.model-path is required" in message
    assert "--inference.model-path" in message
    assert "REEF_INFERENCE__MODEL_PATH" in message


def test_unknown_flag_names_the_nearest_key_and_the_layer() -> None:
    message = refusal(flags=MODEL | {"recipe.batchsize": "1"})
    assert "recipe.batchsize" in message and "flag" in message and "recipe.batch-size" in message


def test_unknown_variable_names_the_nearest_key_and_the_layer() -> None:
    message = refusal(flags=MODEL, environ={"REEF_RECIPES__BATCH_SIZ": "1"})
    assert "env REEF_RECIPES__BATCH_SIZ" in message and "recipe.batch-size" in message


def test_unknown_file_key_names_the_nearest_key_the_file_and_the_line(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "recipe:\n  name: scored\n  batch_size: 4\n")
    assert "recipe.batch_size" in message and "recipe.batch-size" in message and "deployment.yaml:3" in message


def test_unknown_section_names_the_nearest_one(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "trainin:\n  backend: torch\n")
    assert "trainin " in message and "nearest known one is training" in message


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("reef.prot", "reef.port"),
        ("inference.learning-rate", "training.learning-rate"),
        ("Recipe.Batch_Size", "recipe.batch-size"),
        ("tokens", "reef.tokens"),
    ],
)
def test_nearest_key(slip: str, meant: str) -> None:
    assert nearest_key(slip) == meant


@pytest.mark.parametrize("value", ["0", "many", "1.5", ""])
def test_a_wrong_value_names_key_expectation_value_and_origin(value: str) -> None:
    message = refusal(flags=MODEL | {"recipe.batch-size": value})
    assert message == f"recipe.batch-size must be int >= 1, got {value!r} (flag --recipe.batch-size)"


def test_a_wrong_choice_lists_the_choices() -> None:
    message = refusal(flags=MODEL | {"training.backend": "jax"})
    assert "none | torch" in message and "'jax'" in message


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(value: str) -> None:
    message = refusal(flags=LEARNS | {"training.learning-rate": value})
    assert message.startswith("training.learning-rate must be") and "flag --training.learning-rate" in message


def test_a_wrong_type_in_the_file_names_the_line(tmp_path: Path) -> None:
    message = file_refusal(tmp_path, "reef:\n  host: localhost\n  port: '8900'\n")
    assert message.startswith("reef.port must be int") and "deployment.yaml:3" in message


def test_a_check_across_fields_names_both_and_where_they_came_from() -> None:
    message = refusal(flags=MODEL | {"recipe.score-min": "2"}, environ={"REEF_RECIPE__SCORE_MAX": "1"})
    assert "score-min" in message and "score-max" in message
    assert "flag --recipe.score-min" in message and "env REEF_RECIPE__SCORE_MAX" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "reef.example", ""])
def test_a_network_address_needs_tokens(host: str) -> None:
    message = refusal(flags=MODEL | {"reef.host": host})
    assert "reef.host" in message and "reef.tokens" in message
    assert resolve(flags=MODEL | {"reef.host": host, "reef.tokens": "t"}).config.reef.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert resolve(flags=MODEL | {"reef.host": host}).config.reef.tokens == []


def test_a_wrong_secret_is_not_shown() -> None:
    message = refusal(flags=MODEL, environ={"REEF_REEF__TOKENS": '["hunter2", 3]'})
    assert "reef.tokens" in message and "hunter2" not in message
    message = refusal(flags=MODEL, environ={"REEF_REEF__TOKENS": "hunter 2"})
    assert "reef.tokens" in message and "hunter" not in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("reef: {port: 1}\nreef: {port: 2}\n", "deployment.yaml:2: reef is given twice, first in line 1"),
        ("reef:\n  port: 1\n  port: 1\n", "deployment.yaml:3: port is given twice, first in line 2"),
        ("recipe:\n  options: {a: 1, a: 2}\n", "a is given twice"),
        ("- a\n", "must be a mapping"),
        ("reef: 3\n", "reef must be a mapping"),
        ("reef: [}\n", "deployment.yaml:1:"),
        ("reef: {}\n---\nreef: {}\n", "deployment.yaml:2:"),
        ("reef: {port: !!python/name:os.system }\n", "deployment.yaml:1:"),
        ("&a [*a]\n", "deployment.yaml:1: found unconstructable recursive node"),
        ("? [a]\n: b\n", "deployment.yaml:1:"),
        ("a: \x00\n", "is not YAML"),
        ("reef: {port: 2024-13-45}\n", "reef.port must be int"),
        ("reef: {port: !!int x}\n", "is not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("recipe:\n  options: &a\n    again: *a\n", "deployment.yaml:2: found unconstructable recursive node"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, part: str) -> None:
    assert part in file_refusal(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        resolve(file=tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n", "reef:\n", "{}\n"])
def test_an_empty_file_or_section_is_fine(tmp_path: Path, text: str) -> None:
    assert from_file(tmp_path, text, flags=MODEL).config.reef.port == 8900


@given(text=st.text(max_size=60), dotted=st.sampled_from(sorted(known_keys())))
def test_any_flag_text_is_a_value_or_a_refusal(text: str, dotted: str) -> None:
    with suppress(ConfigError):
        resolve(flags=MODEL | {dotted: text})


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(value=DOCUMENTS, dotted=st.sampled_from(sorted(known_keys())))
@example(value={"\x85": "\u2028"}, dotted="recipe.options")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_value_is_a_value_or_a_refusal(value: object, dotted: str, tmp_path: Path) -> None:
    key = known_keys()[dotted]
    with suppress(ConfigError):
        resolved = from_file(tmp_path, yaml.safe_dump({key.section: {key.name: value}}), flags=MODEL)
        assert from_file(tmp_path, resolved.to_yaml()).config == resolved.config or key.secret


# ---------------------------------------------------------------------------------------------- backends, sections


def test_a_key_of_another_backend_is_refused() -> None:
    message = refusal(flags=MODEL | {"training.learning-rate": "1e-4"})
    assert "training.learning-rate" in message and "needs training.backend torch" in message and "none" in message


def test_a_higher_layer_may_switch_the_backend_off(tmp_path: Path) -> None:
    text = "training:\n  backend: torch\n  learning-rate: 1e-4\n"
    resolved = from_file(tmp_path, text, flags=MODEL | {"training.backend": "none"})
    assert isinstance(resolved.config.training, NoTraining)
    assert "training.learning-rate" not in resolved.values


def test_the_recipe_follows_the_trainer_unless_it_is_named() -> None:
    assert resolve(flags=MODEL).config.recipe.name == "record-only"
    learns = resolve(flags=LEARNS)
    assert learns.config.recipe.name == "scored"
    assert learns.origins["recipe.name"].startswith("default")
    assert resolve(flags=LEARNS | {"recipe.name": "record-only"}).config.recipe.name == "record-only"


def test_unintended_combinations_are_allowed_with_a_warning() -> None:
    assert resolve(flags=MODEL).warnings == resolve(flags=LEARNS).warnings == []
    assert "never be used" in resolve(flags=LEARNS | {"recipe.name": "record-only"}).warnings[0]
    assert "nothing trains" in resolve(flags=MODEL | {"recipe.name": "scored"}).warnings[0]


# ---------------------------------------------------------------------------------------------- printing


def test_the_printed_file_resolves_to_the_same_configuration(tmp_path: Path) -> None:
    flags = LEARNS | {
        "recipe.objective-params": "clip=0.2",
        "recipe.options": '{"a": ["x: y", null], "b": "# no"}',
        "inference.model-path": "a dir: with # odd 'characters' é",
    }
    resolved = resolve(flags=flags)
    again = from_file(tmp_path, resolved.to_yaml())
    assert again.config == resolved.config
    assert resolved.to_yaml().count("\n") == len(resolved.values) + len(SECTIONS) + 2, (
        "and training.options, reef.permissions"
    )


def test_the_printed_file_shows_origins_and_hides_secrets() -> None:
    text = resolve(flags=MODEL, environ={"REEF_REEF__TOKENS": "hunter2,other"}).to_yaml()
    assert "hunter2" not in text and "other" not in text
    lines = {line.split(":")[0].strip(" #"): line.rsplit("# ", 1)[1] for line in text.splitlines() if "# " in line}
    assert lines["tokens"] == "env REEF_REEF__TOKENS"
    assert lines["model-path"] == "flag --inference.model-path"
    assert lines["max-body-bytes"] == "default"


def test_documentation_is_current() -> None:
    root = Path(__file__).parents[1]
    script = root / "docs" / "generate.py"
    assert run_path(str(script))["render"]() == (root / "docs" / "configuration.md").read_text()


def test_backends_of_one_section_know_their_own_keys() -> None:
    assert set(section_keys("training", "none")) == {"training.backend"}
    assert "training.learning-rate" in section_keys("training", "torch")


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("training.rollout-num-gpus", "inference.num-gpus"),
        ("training.options.rollout_num_gpus_per_engine", "inference.tensor-parallel-size"),
        ("training.options.colocate", "training.colocate"),
        ("training.options.sglang-mem-fraction-static", "a key of section inference"),
    ],
)
def test_a_trainers_own_flag_for_the_engines_is_refused_by_name(flag, instead):
    with pytest.raises(ConfigError, match=f"{flag} .* is not the trainer's to say: set {instead} instead"):
        resolve(flags={"inference.model-path": "m", "training.backend": "torch", flag: "2"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inference.engines": "2", "inference.num-gpus": "1"}, "num-gpus must be 0 or one for each of the 2 engines"),
        ({"inference.device": "cuda", "inference.num-gpus": "0"}, "num-gpus must be >= 1 with device cuda"),
        ({"inference.device": "cpu", "inference.num-gpus": "1"}, "num-gpus must be 0 with device cpu"),
        ({"inference.tensor-parallel-size": "2"}, "inference.tensor-parallel-size must be 1"),
    ],
)
def test_the_engines_resources(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(flags={"inference.model-path": "m", **settings})


def test_num_gpus_decides_what_the_device_leaves_open():
    def device(number: str) -> str:
        return resolve(
            flags={"inference.model-path": "m", "inference.num-gpus": number}
        ).config.inference.resolved_device

    assert (device("0"), device("1")) == ("cpu", "cuda")


KEEP = "training.options.keep-lora-base-resident"


def test_a_struct_within_a_section_has_dotted_keys_in_every_layer(tmp_path):
    file = tmp_path / "reef.yaml"
    file.write_text(
        "inference: {model-path: m}\n"
        "training:\n  backend: torch\n  colocate: true\n  options:\n    keep-lora-base-resident: true\n"
    )
    for resolved in (
        resolve(file=file),
        resolve(environ={"REEF_TRAINING__OPTIONS__KEEP_LORA_BASE_RESIDENT": "true"},
                flags={**LEARNS, "training.colocate": "true"}),
        resolve(flags={**LEARNS, "training.colocate": "true", KEEP: "true"}),
    ):  # fmt: skip
        assert resolved.config.training.options.keep_lora_base_resident and resolved.values[KEEP] is True
    again = tmp_path / "again.yaml"
    again.write_text(resolved.to_yaml())
    assert resolve(file=again).config == resolved.config
    file.write_text("training:\n  backend: torch\n  options: {keep-lora-bass: true}\n")
    with pytest.raises(ConfigError, match=rf"unknown key training.options.keep-lora-bass .*:3.*{KEEP}"):
        resolve(file=file)
    file.write_text("training:\n  backend: torch\n  options: 3\n")
    with pytest.raises(ConfigError, match=r"training\.options must be a mapping"):
        resolve(file=file)
    with pytest.raises(ConfigError, match=rf"training: options.keep-lora-base-resident .*flag --{KEEP}"):
        resolve(flags={**LEARNS, KEEP: "true"})


def test_what_is_shared_must_retract():
    colocated = {**LEARNS, "training.colocate": "true"}
    resolved = resolve(flags=colocated)
    assert resolved.config.inference.pause_mode == "retract"
    assert resolved.origins["inference.pause-mode"] == "default with training.colocate"
    assert resolve(flags=LEARNS).config.inference.pause_mode == "in_place"
    with pytest.raises(ConfigError, match=r"pause-mode must be retract with training.colocate .*got in_place \(flag"):
        resolve(flags={**colocated, "inference.pause-mode": "in_place"})
    switched_off = resolve(environ={"REEF_TRAINING__COLOCATE": "true"}, flags={**LEARNS, "training.backend": "none"})
    assert switched_off.config.inference.pause_mode == "in_place"
