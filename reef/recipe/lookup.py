"""From the names in a deployment file to objects: built-in ones by name, your own by path.

A path is `package.module:name` or `folder/file.py:name`; without `:name`, `build` is meant. A recipe's is called with
the section's config, an evaluator's also with the training runtime; both may be a class or a function.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from reef.errors import ConfigError
from reef.recipe.config import EvaluationConfig, RecipeConfig
from reef.recipe.evaluation import AlwaysEvaluator, HeldOutEvaluator, Scorer, contains, exact, load_prompts
from reef.recipe.record_only import RecordOnlyRecipe
from reef.recipe.scored import ScoredRecipe
from reef.runtime.interfaces import Evaluator, Recipe, TrainingRuntime


def build_recipe(config: RecipeConfig) -> Recipe:
    """Raises ConfigError for an unknown name or a path that does not lead to a recipe."""
    if config.name == "scored":
        return ScoredRecipe(config)
    if config.name == "record-only":
        return RecordOnlyRecipe(config)
    recipe = _construct("recipe.name", config.name, "scored or record-only", config)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe.name: what {config.name} builds must be a Recipe, got {type(recipe).__name__}")
    return recipe


def build_evaluator(config: EvaluationConfig, runtime: TrainingRuntime | None = None) -> Evaluator:
    """Raises ConfigError for an unknown name, a path that leads to no evaluator, or unreadable held-out prompts."""
    if config.plugin == "always":
        return AlwaysEvaluator()
    if config.plugin == "held-out":
        return HeldOutEvaluator(config, load_prompts(config), build_scorer(config.scorer))
    made = _construct("evaluation.plugin", config.plugin, "always or held-out", config, runtime)
    if not isinstance(made, Evaluator):
        raise ConfigError(
            f"evaluation.plugin: what {config.plugin} builds must be an Evaluator, got {type(made).__name__}"
        )
    return made


def build_scorer(name: str) -> Scorer:
    """Raises ConfigError for an unknown name or a path that leads to nothing callable."""
    if name == "exact":
        return exact
    if name == "contains":
        return contains
    return load_callable("evaluation.scorer", name, "exact or contains")


def _construct(field: str, path: str, known: str, *arguments: Any) -> object:
    """What the callable that `path` names gives."""
    target = load_callable(field, path, known)
    try:
        return target(*arguments)
    except ConfigError:
        raise
    except Exception as error:  # as in load_callable: the user's code
        raise ConfigError(f"{field}: {path} failed: {type(error).__name__}: {error}") from error


def load_callable(field: str, path: str, known: str) -> Callable[..., Any]:
    """The callable that `path` names; `known` are the other words that `field` takes. Raises ConfigError."""
    module_name, _, attribute = path.partition(":")
    if not module_name.endswith(".py") and "." not in module_name and ":" not in path:
        raise ConfigError(f"{field} must be {known}, or package.module:name, got {path!r}")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        found = getattr(module, attribute or "build")
    except Exception as error:  # a module of the user's may raise anything while it is imported
        raise ConfigError(f"{field}: cannot load {path}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{field}: {path} must be callable, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve(strict=True)
    name = f"_reef_plugin_{hashlib.sha256(str(resolved).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
