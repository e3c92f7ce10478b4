"""`reef doctor`: can this machine run this deployment? Each check looks at the real thing and changes nothing."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from reef import __version__
from reef.errors import ConfigError, ReefError
from reef.inference.local.config import LocalConfig
from reef.inference.provider.config import ProviderConfig
from reef.inference.sglang.config import SGLangConfig
from reef.inference.sglang.environment import require_interpreter
from reef.records.config import PostgresConfig, SqliteConfig
from reef.records.opening import describe
from reef.service.config import NoTraining, ReefConfig
from reef.train.torch_backend.config import TorchConfig

GIB = 1024**3
DISK_FAIL, DISK_WARN = GIB // 4, 2 * GIB  # bytes free under the data directory


@dataclass(slots=True, frozen=True)
class Check:
    """One finding. `advice` says what to do about a verdict that is not ok."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(config: ReefConfig | None, problem: ConfigError | None = None) -> list[Check]:
    """Run every check. Without a valid `config`, `problem` is reported and what needs one is left out."""
    checks = [_python(), _packages("", "base"), _machine(), _threads()]
    if config is None:
        reason = str(problem or "there is none")
        return [*checks, Check("configuration", "fail", reason, "-> what depends on it was not checked")]
    training = "nothing trains" if isinstance(config.training, NoTraining) else "it trains"
    checks.append(Check("configuration", "ok", f"valid; {training}"))
    checks += [_packages(extra, what) for extra, what in _extras(config)]
    data = Path(config.reef.data_dir)
    later: list[Callable[[], Check]] = [
        *_model_checks(config),
        lambda: _data_directory(data),
        lambda: _storage(config.storage, data),
        lambda: _port(config.reef.host, config.reef.port),
    ]
    return [*checks, *(check() for check in later)]


def _model_checks(config: ReefConfig) -> list[Callable[[], Check]]:
    inference = config.inference
    if isinstance(inference, ProviderConfig):
        return [lambda: _upstream(inference.upstream_url)]
    model = Path(inference.model_path)
    return [
        lambda: _model_files(model),
        lambda: _model_loads(model),
        lambda: _device(inference, config.training),
        lambda: _engine(inference),
    ]


def _upstream(url: str) -> Check:
    """Whether anybody listens there; nothing is asked."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if error := _unreachable(str(parts.hostname), port):
        return Check(
            "upstream", "fail", f"{parts.hostname}:{port}: {error}", "-> inference.upstream-url, or the network"
        )
    return Check("upstream", "ok", f"{parts.hostname}:{port} accepts connections")


def _unreachable(host: str, port: int) -> OSError | None:
    """Why nobody answers there, or None."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        return error
    return None


def _python() -> Check:
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("reef", "ok", f"Reef {__version__}, {where}")


def _extras(config: ReefConfig) -> Iterator[tuple[str, str]]:
    """Optional dependencies that this configuration uses, and what for."""
    if not isinstance(config.inference, ProviderConfig):
        yield "local", "model"
    if isinstance(config.storage, PostgresConfig):
        yield "postgres", "storage"
    if config.execution.executor == "ray" or config.execution.runtime == "ray_training":
        yield "ray", "execution"
    if config.observability.trace_endpoint is not None:
        yield "otel", "traces"


def _requirements(extra: str) -> Iterator[tuple[str, str]]:
    """(package, least version) of one extra of the installed Reef; "" is the base install."""
    for line in importlib.metadata.requires("reef") or []:
        requirement, _, marker = line.partition(";")
        if "extra" in marker and (not extra or f"'{extra}'" not in marker.replace('"', "'")):
            continue
        if extra and "extra" not in marker:
            continue
        if match := re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*(?:>=\s*([0-9.]+))?", requirement):
            yield match[1], match[2] or "0"


def _packages(extra: str, what: str) -> Check:
    found, wrong = [], []
    for package, least in _requirements(extra):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        found.append(f"{package} {version}")
        if _numbers(version) < _numbers(least):
            wrong.append(f"{package} {version} is older than {least}")
    target = f"'reef[{extra}]'" if extra else "reef"
    if wrong:
        return Check(f"packages ({what})", "fail", ", ".join(wrong), f"-> pip install {target}")
    return Check(f"packages ({what})", "ok", ", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _machine() -> Check:
    memory = available_memory()
    detail = f"{cores()} cores usable, {memory / GIB:.1f} GiB memory available"
    if memory < 1.5 * GIB:
        return Check("machine", "warn", detail, "-> engine and trainer each hold the model: close other programs")
    return Check("machine", "ok", detail)


def _threads() -> Check:
    limits = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}
    for name, text in limits.items():
        if not text.isdigit() or not 1 <= int(text) <= cores():
            return Check("threads", "warn", f"{name}={text} with {cores()} cores", f"-> unset {name}")
    given = ", ".join(f"{name}={text}" for name, text in limits.items())
    return Check("threads", "ok", given or "no limit in the environment")


def cores() -> int:
    """CPU cores this process may use, under affinity and the container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdigit():
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def available_memory() -> int:
    """Bytes that new processes can have, under the container's limit where there is one."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_read_words(Path(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return free


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _model_files(model: Path) -> Check:
    name = "model files"
    if not model.exists():
        return Check(
            name, "fail", f"{model} does not exist", "-> inference.model-path: a model's directory or GGUF file"
        )
    weights = [path for pattern in ("*.safetensors", "*.gguf") for path in model.glob(pattern)]
    if model.is_file():
        weights = [model]
    if not weights:
        return Check(name, "fail", f"no *.safetensors or *.gguf in {model}", "-> download the model's weights too")
    size = sum(path.stat().st_size for path in weights)
    detail = f"{len(weights)} file(s) of weights, {size / GIB:.2f} GiB"
    if 2 * size > available_memory():
        return Check(name, "warn", detail, "-> engine and trainer each hold them: memory may not suffice")
    return Check(name, "ok", detail)


def _model_loads(model: Path) -> Check:
    """Load the model's configuration and tokenizer, offline; weights are not read."""
    name = "model loads"
    if not model.exists():
        return Check(name, "fail", f"{model} does not exist", "-> inference.model-path")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        return Check(name, "fail", str(error), "-> pip install 'reef[local]'")
    source = {"gguf_file": model.name} if model.is_file() else {}
    directory = model.parent if model.is_file() else model
    try:
        loaded = AutoConfig.from_pretrained(directory, **source)
        tokenizer = AutoTokenizer.from_pretrained(directory, **source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Check(name, "fail", reason, "-> inference.model-path must hold what `transformers` loads")
    detail = f"{loaded.model_type}, {len(tokenizer)} tokens, context {getattr(loaded, 'max_position_embeddings', '?')}"
    if tokenizer.chat_template is None:
        return Check(name, "fail", f"{detail}, no chat template", "-> use the instruct or chat variant of the model")
    return Check(name, "ok", detail)


def _device(inference: LocalConfig | SGLangConfig, training: NoTraining | TorchConfig) -> Check:
    name = "device"
    wanted = {"inference.device": getattr(inference, "resolved_device", inference.device)}
    if not isinstance(training, NoTraining):
        wanted["training.device"] = training.device
    try:
        import torch
    except ImportError as error:
        return Check(name, "fail", str(error), "-> pip install 'reef[local]'")
    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in found)
        needed = inference.num_gpus or 0
        if needed > len(found):
            return Check(name, "fail", f"{gpus}; {build}", f"-> inference.num-gpus is {needed}: there are {len(found)}")
        return Check(name, "ok", f"{gpus}; CUDA {torch.version.cuda}; {build}")
    if refused := [key for key, device in wanted.items() if device == "cuda"]:
        advice = "-> `nvidia-smi` must list it, and torch be a build with CUDA; or set it to cpu"
        return Check(name, "fail", f"{' and '.join(refused)} is cuda, but {build} finds no CUDA device", advice)
    if shutil.which("nvidia-smi"):
        return Check(name, "warn", f"CPU: {build} cannot use this machine's GPU", "-> install a torch build with CUDA")
    return Check(name, "ok", f"CPU; {build}")


def _engine(inference: LocalConfig | SGLangConfig) -> Check:
    name = "engine"
    if isinstance(inference, SGLangConfig):
        return _sglang(inference)
    if inference.kernels == "auto" and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        advice = "-> install one for faster decoding on CPUs, or set inference.kernels to torch"
        return Check(name, "warn", "Reef's own; no C++ compiler for its kernels", advice)
    return Check(name, "ok", "Reef's own")


def _sglang(inference: SGLangConfig) -> Check:
    name = "engine"
    for endpoint in inference.endpoints:
        address = urlsplit(endpoint)
        if error := _unreachable(str(address.hostname), address.port or 80):
            return Check(name, "fail", f"SGLang at {endpoint}: {error}", "-> start it, or correct inference.endpoints")
    if inference.endpoints:
        return Check(name, "ok", f"SGLang at {', '.join(inference.endpoints)} accepts connections")
    try:
        python = require_interpreter(inference.python)
    except ConfigError as error:
        return Check(name, "fail", str(error), "-> make engine-sglang")
    asking = [str(python), "-c", "from importlib.metadata import version; print(version('sglang'))"]
    done = subprocess.run(asking, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Check(name, "fail", f"{python} has no SGLang: {reason}", "-> make engine-sglang, or inference.python")
    return Check(name, "ok", f"SGLang {done.stdout.strip()} in {python}")


def _data_directory(data: Path) -> Check:
    name = "data directory"
    place = data.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"reef")
            os.fsync(probe.fileno())
    except OSError as error:
        return Check(name, "fail", f"cannot write in {place}: {error.strerror}", "-> choose another reef.data-dir")
    free = shutil.disk_usage(place).free
    detail = f"{data} is writable, {free / GIB:.1f} GiB free" + (
        "" if place == data.absolute() else ", made on first use"
    )
    if free < DISK_WARN:
        advice = "-> each release stores its weights: free some space, or move reef.data-dir"
        return Check(name, "fail" if free < DISK_FAIL else "warn", detail, advice)
    return Check(name, "ok", detail)


def _storage(config: SqliteConfig | PostgresConfig, data: Path) -> Check:
    if isinstance(config, SqliteConfig):
        return _database(Path(config.path or data / "reef.db"))
    try:
        return Check("database", "ok", describe(config, data))
    except ReefError as error:
        return Check("database", "fail", str(error), "-> section storage")


def _database(path: Path) -> Check:
    name = "database"
    if not path.exists():
        return Check(name, "ok", f"{path} is made on first use (SQLite {sqlite3.sqlite_version})")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
        try:
            verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            tables = int(connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as error:
        return Check(name, "fail", f"{path}: {error}", "-> restore it from a backup, or choose another storage.path")
    if verdict != "ok":
        return Check(name, "fail", f"{path}: {verdict}", "-> restore it from a backup")
    return Check(name, "ok", f"{path} opens and is sound: {tables} tables, {path.stat().st_size / 1e6:.1f} MB")


def _port(host: str, port: int) -> Check:
    name = "port"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        advice = "-> stop what listens there (another Reef?), or set reef.port"
        reason = "is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
        return Check(name, "fail", f"{host}:{port}: {reason}", advice)
    return Check(name, "ok", f"{host}:{port} is free")
