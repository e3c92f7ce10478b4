"""What a deployment names as `package.module:name`: handlers, executors, header providers, recipes, hooks.

A callable may also lie in a file, `folder/file.py:name`; without `:name`, `build` is meant.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from reef.errors import ConfigError

T = TypeVar("T")


def load(path: str) -> Any:
    """What "package.module:name" names. Raises whatever importing it raises."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def load_subclass(key: str, path: str, kind: type) -> Any:
    """The subclass of `kind` at "package.module:Class". Raises ConfigError naming the configuration's `key`."""
    module, _, name = path.partition(":")
    if not (module and name):
        raise ConfigError(f"{key} must be package.module:Class, got {path!r}")
    try:
        found = load(path)
    except Exception as error:  # a module of the user's may raise anything while it is imported
        raise ConfigError(f"{key}: cannot load {path}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{key} must be a subclass of {kind.__name__}, got {path}")
    return found


def load_callable(key: str, path: str, known: str) -> Callable[..., Any]:
    """The callable that `path` names; `known` are the other words that `key` takes. Raises ConfigError."""
    module_name, _, attribute = path.partition(":")
    if not module_name.endswith(".py") and "." not in module_name and ":" not in path:
        raise ConfigError(f"{key} must be {known}, or package.module:name, got {path!r}")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        found = getattr(module, attribute or "build")
    except Exception as error:  # as above
        raise ConfigError(f"{key}: cannot load {path}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: {path} must be callable, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def call(key: str, path: str, target: Callable[..., T], *arguments: Any) -> T:
    """What `target`, which `path` named, returns. Raises ConfigError for whatever else the user's code raises."""
    try:
        return target(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {path} failed: {type(error).__name__}: {error}") from error


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
