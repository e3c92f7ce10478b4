"""The deployment configuration: every component's own section, composed and validated once.

A value comes from the highest layer that names it::

    defaults  <  YAML file  <  environment (REEF_SECTION__KEY)  <  flags (--section.key)

A section may hold structs of its own; their keys have one dot more: `training.options.keep-lora-base-resident`.
In the environment hyphens become underscores, dots two of them: `recipe.batch-size` is `REEF_RECIPE__BATCH_SIZE`.
Variables without the double underscore are not configuration. Text from the environment and from flags is read by the
key's type; lists and mappings may be JSON or `a,b` and `k=v,k=v`. Everything that is wrong raises ConfigError and names
key and origin.
"""

from __future__ import annotations

import difflib
import enum
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml
from msgspec import inspect as kinds

from reef.errors import ConfigError
from reef.inference.local.config import LocalConfig
from reef.inference.provider.config import ProviderConfig
from reef.inference.sglang.config import STACKS, SGLangConfig
from reef.recipe.config import EvaluationConfig, RecipeConfig
from reef.records.config import PostgresConfig, SqliteConfig
from reef.runtime.config import ExecutionConfig
from reef.runtime.interfaces import PauseMode
from reef.service.config import NoTraining, ObservabilityConfig, ReefConfig, ServiceConfig
from reef.train.torch_backend.config import TorchConfig

DEFAULT_FILE = "reef.yaml"
DERIVED_DEFAULTS = {
    "recipe.name": "scored where something trains, else record-only",
    "inference.pause-mode": "`in_place`; `retract` with training.colocate",
    "inference.backend": "local; provider with inference.upstream-url",
}


# section -> backend -> struct; the first backend is the default. "" marks a section with one struct for all.
SECTIONS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "reef": {"": ServiceConfig},
    "inference": {"local": LocalConfig, "sglang": SGLangConfig, "provider": ProviderConfig},
    "training": {"none": NoTraining, "torch": TorchConfig},
    "recipe": {"": RecipeConfig},
    "storage": {"sqlite": SqliteConfig, "postgres": PostgresConfig},
    "execution": {"": ExecutionConfig},
    "evaluation": {"": EvaluationConfig},
    "observability": {"": ObservabilityConfig},
}


@dataclass(slots=True, frozen=True)
class Key:
    """One dotted key. `backends` names the section's backends that have it; empty: all."""

    section: str
    name: str
    kind: Any  # the annotated type
    default: Any  # msgspec.NODEFAULT: required
    description: str
    backends: tuple[str, ...] = ()
    secret: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    @property
    def variable(self) -> str:
        return f"REEF_{self.dotted}".replace(".", "__").replace("-", "_").upper()

    @property
    def expected(self) -> str:
        """What a value must be, in words: "int >= 1"."""
        if choices := self.choices:
            return " | ".join(choices)
        return _describe(kinds.type_info(self.kind))

    @property
    def choices(self) -> list[str]:
        """What a Literal or Enum allows, in its own order; else empty."""
        kind = get_args(self.kind)[0] if get_origin(self.kind) is Annotated else self.kind
        if get_origin(kind) is Literal:
            return [str(choice) for choice in get_args(kind)]
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return [str(member.value) for member in kind]
        return []


@dataclass(slots=True, frozen=True)
class Setting:
    """One value as a layer gave it; `text` when it still has to be read by its key's type."""

    value: Any
    origin: str  # "file reef.yaml:3", "env REEF_RECIPE__BATCH_SIZE", "flag --recipe.batch-size"
    layer: int  # 1 file, 2 environment, 3 flags
    text: bool


@dataclass(slots=True, frozen=True)
class Resolved:
    """A validated configuration, where each value came from, and what looks unintended."""

    config: ReefConfig
    values: dict[str, Any]  # by dotted key, in the order of SECTIONS
    origins: dict[str, str]  # by dotted key; "default" or a Setting's origin
    warnings: list[str]

    def to_yaml(self) -> str:
        """The whole configuration as a file, each value's origin as its comment; secrets are left out."""
        lines: list[str] = []
        for section in SECTIONS:
            lines.append(f"{section}:")
            struct = ""
            for dotted, value in self.values.items():
                key = known_keys()[dotted]
                if key.section != section:
                    continue
                parent, _, name = key.name.rpartition(".")
                if parent != struct:
                    struct = parent
                    lines += [f"  {parent}:"] if parent else []
                indent = "    " if parent else "  "
                text = f"{indent}{name}: {inline_yaml(value)}"
                if key.secret and value:
                    text = f"{indent}# {name}: (hidden)"
                lines.append(f"{text:<52}  # {self.origins[dotted]}")
        return "\n".join(lines) + "\n"


def resolve(
    *, file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Resolved:
    """Merge the layers, validate each value and each section, and compose. Raises ConfigError.

    `environ` may be the whole environment; `flags` maps dotted keys to text.
    """
    settings: dict[str, Setting] = {}
    if file is not None:
        settings.update(_from_file(file))
    settings.update(_from_environment(environ or {}))
    settings.update(_from_flags(flags or {}))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sections: dict[str, Any] = {}
    if _colocates(settings):
        settings.setdefault("inference.pause-mode", Setting("retract", "default with training.colocate", 0, text=False))
    if (upstream := settings.get("inference.upstream-url")) is not None:
        chosen = Setting("provider", "default with inference.upstream-url", upstream.layer, text=False)
        settings.setdefault("inference.backend", chosen)
    for section in SECTIONS:
        backend = _choose_backend(section, settings, values, origins)
        if section == "recipe":
            settings.setdefault("recipe.name", _default_recipe(values["training.backend"]))
        sections[section] = _build_section(section, backend, settings, values, origins)
    config = ReefConfig(**sections)
    _check_colocation(config, origins)
    _check_tokens(values["reef.tokens"], origins["reef.tokens"])
    _check_provider(config, origins)
    _check_adapters(config, origins)
    return Resolved(config, values, origins, _warnings(config))


def _default_recipe(training_backend: str) -> Setting:
    name = "record-only" if training_backend == "none" else "scored"
    return Setting(name, f"default with training.backend {training_backend}", 0, text=False)


def _colocates(settings: Mapping[str, Setting]) -> bool:
    keys = known_keys()
    backend = settings.get("training.backend")
    colocate = settings.get("training.colocate")
    if backend is None or colocate is None or _read(keys["training.backend"], backend) == "none":
        return False
    return bool(_read(keys["training.colocate"], colocate))


def _check_colocation(config: ReefConfig, origins: Mapping[str, str]) -> None:
    """Raises ConfigError: memory whose requests are frozen in place cannot be lent."""
    if isinstance(config.inference, ProviderConfig):
        return
    if getattr(config.training, "colocate", False) and config.inference.pause_mode is not PauseMode.RETRACT:
        raise ConfigError(
            f"inference.pause-mode must be retract with training.colocate ({origins['training.colocate']}): the "
            f"trainer takes the memory that requests would be frozen in; got {config.inference.pause_mode} "
            f"({origins['inference.pause-mode']})"
        )


def _check_tokens(tokens: list[Any], origin: str) -> None:
    """Raises ConfigError for a token in a file: what lies there must not open anything."""
    plain = [token for token in tokens if isinstance(token, str) and not token.startswith("sha256:")]
    if plain and origin.startswith("file "):
        raise ConfigError(f"reef.tokens in a file must be digests ({origin}): write what `reef token` prints")


def _check_provider(config: ReefConfig, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for a trainer of weights that are somebody else's."""
    if isinstance(config.inference, ProviderConfig) and not isinstance(config.training, NoTraining):
        raise ConfigError(
            f"training.backend must be none with inference.backend provider ({origins['inference.backend']}): an "
            f"external provider has no weights to train; got {origins['training.backend']}"
        )


def _check_adapters(config: ReefConfig, origins: Mapping[str, str]) -> None:
    """Raises ConfigError for adapters that SGLang would not take: too large, of other layers, or of half a stack."""
    engine, training = config.inference, config.training
    if not isinstance(engine, SGLangConfig) or isinstance(training, NoTraining) or training.mode != "lora":
        return
    if training.lora_rank > engine.max_lora_rank:
        raise ConfigError(
            f"training.lora-rank must be at most inference.max-lora-rank, {engine.max_lora_rank} "
            f"({origins['inference.max-lora-rank']}), got {training.lora_rank} ({origins['training.lora-rank']})"
        )
    targets = set(training.lora_target_modules)
    where = f"training.lora-target-modules ({origins['training.lora-target-modules']})"
    if others := targets.difference(engine.lora_target_modules):
        raise ConfigError(f"{where}: inference.lora-target-modules does not have {', '.join(sorted(others))}")
    for stack, needed in STACKS.items():
        if targets & stack and (missing := needed - targets):
            raise ConfigError(
                f"{where}: SGLang stacks {', '.join(sorted(stack))}, so {', '.join(sorted(missing))} must be there, too"
            )


def _warnings(config: ReefConfig) -> list[str]:
    """What is legal and yet probably not meant."""
    trains = not isinstance(config.training, NoTraining)
    if trains and config.recipe.name == "record-only":
        return ["recipe.name is record-only: training.backend starts a trainer that will never be used"]
    if not trains and config.recipe.name != "record-only":
        return [f"recipe.name is {config.recipe.name} but training.backend is none: reports wait, nothing trains"]
    return []


# ---------------------------------------------------------------------------------------------- keys


@cache
def section_keys(section: str, backend: str) -> dict[str, Key]:
    """The keys of one section under one backend, by dotted name; the section's `backend` key comes first."""
    structs = SECTIONS[section]
    found: dict[str, Key] = {}
    if "" not in structs:
        choices: Any = Literal[tuple(structs)]
        key = Key(section, "backend", choices, next(iter(structs)), "the integration that does it")
        found[key.dotted] = key
    for name, item in _leaves(structs[backend]):
        if item.name == "backend" and found:
            continue
        default = item.default if item.default_factory is msgspec.NODEFAULT else item.default_factory()
        info = kinds.type_info(item.type)
        schema, extra = {}, {}
        if isinstance(info, kinds.Metadata):
            schema, extra = info.extra_json_schema or {}, info.extra or {}
        description = str(schema.get("description", ""))
        owners = tuple(owner for owner, struct in structs.items() if name in _names(struct))
        key = Key(
            section,
            name,
            item.type,
            default,
            description,
            owners if len(owners) < len(structs) else (),
            bool(extra.get("secret")),
        )
        found[key.dotted] = key
    return found


def _leaves(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """The fields that have values, by name; those of a struct within the struct by `<its name>.<name>`."""
    for item in msgspec.structs.fields(struct):
        name = prefix + item.encode_name
        if (inner := _struct_of(item)) is not None:
            yield from _leaves(inner, f"{name}.")
        else:
            yield name, item


@cache
def _names(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for name, _ in _leaves(struct))


def _struct_of(item: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    kind = get_args(item.type)[0] if get_origin(item.type) is Annotated else item.type
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


@cache
def known_keys() -> dict[str, Key]:
    """Every key of every section and backend, by dotted name."""
    found: dict[str, Key] = {}
    for section, structs in SECTIONS.items():
        for backend in structs:
            for dotted, key in section_keys(section, backend).items():
                found.setdefault(dotted, key)
    return found


NATIVE_FLAGS = {
    "rollout-num-gpus": "inference.num-gpus",
    "num-gpus-per-engine": "inference.tensor-parallel-size",
    "rollout-num-gpus-per-engine": "inference.tensor-parallel-size",
    "rollout-num-engines": "inference.engines",
    "colocate": "training.colocate",
}
"""What trainers call resources of the engines, which belong to section `inference`; and one key of our own."""
ENGINE_FLAGS = ("sglang-", "vllm-")


def _unknown(dotted: str, origin: str) -> ConfigError:
    section, _, name = dotted.replace("_", "-").partition(".")
    name = name.removeprefix("options.")
    if section == "training" and (name in NATIVE_FLAGS or name.startswith(ENGINE_FLAGS)):
        owner = NATIVE_FLAGS.get(name, "a key of section inference")
        return ConfigError(f"{dotted} ({origin}) is not the trainer's to say: set {owner} instead")
    return ConfigError(f"unknown key {dotted} ({origin}); the nearest known one is {nearest_key(dotted)}")


def nearest_key(dotted: str) -> str:
    """The known key most like `dotted`; a likeness of names counts more than one of sections, an equal name most."""
    section, _, name = dotted.lower().replace("_", "-").partition(".")

    def likeness(key: Key) -> float:
        likely = 0.4 * _ratio(section, key.section) + 0.6 * _ratio(name or section, key.name)
        return likely + 0.2 * (name == key.name)

    return max(known_keys().values(), key=likeness).dotted


def _ratio(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


# ---------------------------------------------------------------------------------------------- layers


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-4` as a number, as YAML 1.2 does, and dates as text; a key given twice is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in first:
                problem = f"{key.value} is given twice, first in line {first[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _from_file(path: Path) -> dict[str, Setting]:
    try:
        with path.open("rb") as stream:
            loader = _Loader(stream)
            return dict(_settings_below(loader, loader.get_single_node(), path, ""))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{path}:{line}: {error.problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a scalar such as `!!int x`
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _settings_below(loader: _Loader, node: yaml.Node | None, path: Path, where: str) -> Iterator[tuple[str, Setting]]:
    """What one mapping of the file sets: the file itself, a section, or a struct within one. It may be empty."""
    if not isinstance(node, yaml.MappingNode):
        content = None if node is None else loader.construct_object(node, deep=True)
        if content is not None:
            raise ConfigError(
                f"{where or 'the file'} must be a mapping of keys to values, got {_show(content)} "
                f"(file {path}:{node.start_mark.line + 1 if node else 1})"
            )
        return
    loader.flatten_mapping(node)
    for key, value in node.value:
        dotted = f"{where}.{key.value}".lstrip(".")
        origin = f"file {path}:{key.start_mark.line + 1}"
        if dotted in known_keys():
            yield dotted, Setting(loader.construct_object(value, deep=True), origin, 1, text=False)
        elif any(known.startswith(f"{dotted}.") for known in known_keys()):
            yield from _settings_below(loader, value, path, dotted)
        elif where:
            raise _unknown(dotted, origin)
        else:
            near = max(SECTIONS, key=lambda known: _ratio(dotted, known))
            raise ConfigError(f"unknown section {dotted} ({origin}); the nearest known one is {near}")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    by_variable = {key.variable: key for key in known_keys().values()}
    settings: dict[str, Setting] = {}
    for name, text in environ.items():
        if not name.startswith("REEF_") or "__" not in name:
            continue
        if (key := by_variable.get(name)) is None:
            section, _, rest = name.removeprefix("REEF_").partition("__")
            raise _unknown(f"{section}.{rest}".lower().replace("_", "-"), f"env {name}")
        settings[key.dotted] = Setting(text, f"env {name}", 2, text=True)
    return settings


def _from_flags(flags: Mapping[str, str]) -> dict[str, Setting]:
    for dotted in flags:
        if dotted not in known_keys():
            raise _unknown(dotted, f"flag --{dotted}")
    return {dotted: Setting(text, f"flag --{dotted}", 3, text=True) for dotted, text in flags.items()}


# ---------------------------------------------------------------------------------------------- values


def _choose_backend(section: str, settings: dict[str, Setting], values: dict[str, Any], origins: dict[str, str]) -> str:
    """Settle `<section>.backend`, and refuse settings that only another backend has.

    Such a setting is dropped silently if a higher layer chose the backend: `--training.backend none` switches off
    what a file configures.
    """
    structs = SECTIONS[section]
    if "" in structs:
        return ""
    dotted = f"{section}.backend"
    key = known_keys()[dotted]
    chosen = settings.get(dotted, Setting(key.default, "default", 0, text=False))
    backend = str(_read(key, chosen))
    values[dotted], origins[dotted] = backend, chosen.origin
    for name in [name for name in settings if name.startswith(f"{section}.")]:
        if name in section_keys(section, backend):
            continue
        setting = settings.pop(name)
        if setting.layer >= chosen.layer:
            owners = ", ".join(known_keys()[name].backends)
            raise ConfigError(
                f"{name} ({setting.origin}) needs {dotted} {owners}, but it is {backend} ({chosen.origin})"
            )
    return backend


def _build_section(
    section: str, backend: str, settings: dict[str, Setting], values: dict[str, Any], origins: dict[str, str]
) -> msgspec.Struct:
    keys = section_keys(section, backend)
    for key in keys.values():
        if backend and key.name == "backend":  # settled already
            continue
        setting = settings.get(key.dotted)
        if setting is None and key.required:
            raise ConfigError(
                f"{key.dotted} is required: {key.description}; set --{key.dotted}, {key.variable} or the key in a file"
            )
        values[key.dotted] = key.default if setting is None else _read(key, setting)
        origins[key.dotted] = setting.origin if setting else "default"
    try:
        return _construct(SECTIONS[section][backend], f"{section}.", values)
    except ValueError as error:
        message = str(error) if str(error).startswith(f"{section}.") else f"{section}: {error}"
        blamed = [key for key in keys.values() if key.dotted in settings and key.name in message]
        origins_text = ", ".join(settings[key.dotted].origin for key in blamed)
        raise ConfigError(f"{message} ({origins_text})" if blamed else message) from error


def _construct(struct: type[msgspec.Struct], prefix: str, values: dict[str, Any]) -> msgspec.Struct:
    arguments: dict[str, Any] = {}
    for item in msgspec.structs.fields(struct):
        name, inner = prefix + item.encode_name, _struct_of(item)
        arguments[item.name] = values[name] if inner is None else _construct(inner, f"{name}.", values)
    return struct(**arguments)


def _read(key: Key, setting: Setting) -> Any:
    """The setting's value as its key's type. Raises ConfigError."""
    try:
        value = _read_text(kinds.type_info(key.kind), setting.value) if setting.text else setting.value
        converted = msgspec.convert(value, key.kind, strict=not setting.text)
    except (msgspec.ValidationError, ValueError) as error:
        shown = "a hidden value" if key.secret else _show(setting.value)
        raise ConfigError(f"{key.dotted} must be {key.expected}, got {shown} ({setting.origin})") from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{key.dotted} must be finite, got {converted} ({setting.origin})")
    return converted


def _read_text(info: kinds.Type, text: str) -> Any:
    """Text from a flag or the environment as what msgspec can convert to `info`."""
    match info:
        case kinds.Metadata(type=inner):
            return _read_text(inner, text)
        case kinds.UnionType(types=members) if any(isinstance(member, kinds.NoneType) for member in members):
            rest = [member for member in members if not isinstance(member, kinds.NoneType)]
            return None if text in ("null", "none") else _read_text(rest[0], text)
        case kinds.ListType() | kinds.VarTupleType() | kinds.SetType() | kinds.FrozenSetType():
            if text.lstrip().startswith("["):
                return json.loads(text)
            return [item.strip() for item in text.split(",") if item.strip()]
        case kinds.DictType() | kinds.StructType():
            if text.lstrip().startswith("{"):
                return json.loads(text)
            return {name: _read_scalar(value) for name, value in _read_pairs(text)}
        case _:
            return text


def _read_pairs(text: str) -> Iterator[tuple[str, str]]:
    for item in text.split(",") if text.strip() else ():
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"expected name=value, got {item!r}")
        yield name.strip(), value.strip()


def _read_scalar(text: str) -> Any:
    """A number, a truth value or text, as YAML tells them apart."""
    value = yaml.load(text, _Loader)
    return value if isinstance(value, bool | int | float | str) else text


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_LINE_BREAKS = frozenset("\x85\u2028\u2029")


def inline_yaml(value: Any) -> str:
    """`value` as YAML on one line."""
    builtin = msgspec.to_builtins(value)
    text: str = yaml.safe_dump(builtin, default_flow_style=True, width=math.inf, allow_unicode=True)
    if not _LINE_BREAKS.isdisjoint(text):  # YAML would fold them into spaces
        text = yaml.safe_dump(builtin, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def _describe(info: kinds.Type) -> str:
    match info:
        case kinds.Metadata(type=inner):
            return _describe(inner)
        case kinds.IntType() | kinds.FloatType():
            word = "int" if isinstance(info, kinds.IntType) else "number"
            limits = ((">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le))
            bounds = [f"{sign} {limit:.15g}" for sign, limit in limits if limit is not None]
            return " ".join([word, " and ".join(bounds)]).rstrip()
        case kinds.BoolType():
            return "true or false"
        case kinds.LiteralType(values=choices):
            return " | ".join(str(choice) for choice in choices)
        case kinds.NoneType():
            return "none"
        case kinds.UnionType(types=members):
            return " or ".join(_describe(member) for member in members)
        case kinds.ListType(item_type=item) | kinds.VarTupleType(item_type=item) | kinds.SetType(item_type=item):
            return f"list of {_describe(item)}"
        case kinds.StrType(pattern=pattern) if pattern:
            return f"text matching {pattern}"
        case kinds.StrType(min_length=1):
            return "text, not empty"
        case kinds.StrType():
            return "text"
        case _:
            return "mapping"
