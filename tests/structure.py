"""Reads the tree without importing it, and says where it breaks the rules of the architecture page."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIDDLE = {"records", "artifact", "inference", "train", "recipe"}
BASE = {"reef", "errors", "points", "directories", "device", "metrics", "tracing", "named", "progress", "interfaces"}
BELOW_SERVICE = BASE | MIDDLE | {"runtime", "scenario"}

# Which rooms a room may import, besides itself.
ALLOWED: dict[str, set[str]] = {
    "reef": set(),
    "errors": {"reef"},
    "points": {"reef"},
    "directories": {"reef"},
    "device": {"reef", "errors"},
    "metrics": {"reef"},
    "tracing": {"reef", "errors"},
    "named": {"reef", "errors"},
    "progress": {"reef"},
    "interfaces": {"reef", "errors"},
    "client": {"reef", "errors"},
    **dict.fromkeys(MIDDLE, BASE),
    "runtime": BASE | {"records", "artifact", "recipe"},  # no integration: neither inference nor train
    "scenario": BASE | MIDDLE | {"runtime"},
    "verify": BASE | {"records", "artifact", "inference"},  # re-scores what is recorded; no engine, no trainer
    "service": BELOW_SERVICE,
    "demo.model": {"reef", "errors", "directories"},
    "demo": BELOW_SERVICE | {"service", "client", "demo.model"},
    "config": BELOW_SERVICE | {"service"},
    "doctor": BELOW_SERVICE | {"service", "config", "client"},
    "cli_storage": BASE | {"records"},
    "cli": BELOW_SERVICE | {"service", "config", "client", "doctor", "demo", "demo.model", "verify", "cli_storage"},
}

# What a base install has besides the standard library.
BASE_LIBRARIES = {
    "click", "httptools", "msgspec", "prometheus_client", "yaml", "rich", "starlette", "uvicorn", "uvloop",
}  # fmt: skip

# Packages whose modules may load heavy libraries when they are imported; their `config` modules may not.
INTEGRATIONS = (
    "reef.inference.local",
    "reef.inference.sglang",
    "reef.train.torch_backend",
    "reef.train.objectives",
    "reef.records.migrations",
    "reef.records.postgres",
    "reef.runtime.executor.ray",
    "reef.demo",
    "reef.verify.reference",
)

FORBIDDEN_NAMES = {"Protocol", "runtime_checkable", "TYPE_CHECKING"}
TYPING = {"typing", "typing_extensions"}
SHAPELESS_MODULES = {"utils", "util", "helpers", "helper", "misc", "common"}

# Split, so that this file does not contain what it looks for.
_ROOTS = "|".join(("work", "root", "tmp", "home"))
MACHINE_PATH = re.compile(rf"(?<![\w.:/~$}}-])/(?:{_ROOTS})/[\w.]")
REGISTRY_HOST = re.compile(
    "|".join(re.escape(f"{name}.{end}") for name, end in (
        ("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("npmjs", "org"), ("docker", "io"),
        ("ghcr", "io"), ("quay", "io"), ("gcr", "io"), ("proxy.golang", "org"),
    ))
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module as written, with the package's own modules resolved as far as they exist."""

    target: str
    line: int
    at_import: bool  # not inside a function


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]


def read(root: Path) -> dict[str, Module]:
    """All modules of the package `reef` below `root`, by dotted name."""
    files = {_dotted(path.relative_to(root)): path for path in sorted((root / "reef").rglob("*.py"))}
    modules = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        modules[name] = Module(name, path, tree, tuple(_imports(tree, package, files.keys(), True)))
    return modules


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST, package: str, known: object, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import)
        elif isinstance(child, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*parents, child.module] if child.module else parents)
            for alias in child.names:
                submodule = f"{base}.{alias.name}"
                yield Import(submodule if submodule in known else base, child.lineno, at_import)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, known, at_import and not function)


def room(module: str) -> str | None:
    """The room that a dotted name lies in, or None."""
    exact = {"reef": "reef", "reef.runtime.interfaces": "interfaces", "reef.demo.model": "demo.model"}
    if module in exact:
        return exact[module]
    top = module.split(".")[1]
    return top if top in ALLOWED else None


def violations(root: Path) -> list[str]:
    """Every broken rule, one line each; empty when the tree is right."""
    modules = read(root)
    found = [line for module in modules.values() for line in _module_violations(module, root)]
    if (root / "reef/runtime/__init__.py").exists():
        found.append("reef/runtime/__init__.py must not exist: reef.runtime is a namespace package")
    return [*found, *_cycle(modules), *_heavy(modules, root)]


def _module_violations(module: Module, root: Path) -> Iterator[str]:
    where = module.path.relative_to(root)
    here = room(module.name)
    if here is None:
        yield f"{where} lies in no room; give it one in tests/structure.py"
        return
    if module.name.rpartition(".")[2] in SHAPELESS_MODULES:
        yield f"{where} needs a name that says what is in it"
    for one in module.imports:
        there = room(one.target) if _own(one.target) else None
        if there is not None and there != here and there not in ALLOWED[here]:
            yield f"{where}:{one.line} {here} must not import {there} ({one.target})"
    for line, name in _typing_names(module.tree):
        if name in FORBIDDEN_NAMES:
            yield f"{where}:{line} uses {name}; contracts are ABCs"


def _typing_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names taken from `typing`, imported or by attribute. (`asyncio.Protocol` is something else.)"""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    aliases = [alias for node in imports for alias in node.names if alias.name in TYPING]
    bound = {alias.asname or alias.name for alias in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in TYPING:
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.lineno, node.attr


def _own(target: str) -> bool:
    return target == "reef" or target.startswith("reef.")


def _cycle(modules: dict[str, Module]) -> list[str]:
    graph = {
        name: {one.target for one in module.imports if one.target in modules and one.target != name}
        for name, module in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def heavy_chain(modules: dict[str, Module], name: str) -> list[str] | None:
    """How importing this module loads what a base install has not: the modules on the way, then the library."""
    seen: set[str] = set()
    stack = [[name]]
    while stack:
        chain = stack.pop()
        if chain[-1] in seen:
            continue
        seen.add(chain[-1])
        module = modules[chain[-1]]
        for one in module.imports:
            library = one.target.split(".")[0]
            if not one.at_import:
                continue
            if not _own(one.target) and library not in BASE_LIBRARIES | sys.stdlib_module_names:
                return [*chain, library]
            stack += [[*chain, loaded] for loaded in _with_parents(one.target) if loaded in modules]
    return None


def _with_parents(target: str) -> list[str]:
    """Importing a.b.c also runs a and a.b."""
    parts = target.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def base_modules(modules: dict[str, Module]) -> list[str]:
    """Modules that a base install must be able to import."""
    return [name for name in modules if name.endswith(".config") or not name.startswith(INTEGRATIONS)]


def _heavy(modules: dict[str, Module], root: Path) -> Iterator[str]:
    for name in base_modules(modules):
        if (chain := heavy_chain(modules, name)) is not None:
            where = modules[name].path.relative_to(root)
            yield f"{where} loads {chain[-1]}, which a base install has not: {' -> '.join(chain)}"


def tracked_files(root: Path) -> list[Path]:
    """Files that git has or would take; every file where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        timeout=240,
        check=False,
    )
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    files = [root / name for name in names if name] or sorted(root.rglob("*"))
    return [path for path in files if path.is_file()]


def text_violations(root: Path, files: list[Path]) -> Iterator[str]:
    """Paths of one machine and hosts of package registries, in any text file."""
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(lines, 1):
            for what, pattern in (("a machine path", MACHINE_PATH), ("a registry host", REGISTRY_HOST)):
                if found := pattern.search(line):
                    yield f"{path.relative_to(root)}:{number} names {what}: {found.group()}"
