"""Where a result comes from: checkpoint hashes, versions, commit, settings; the root attributes of every result."""

import dataclasses
import datetime
import enum
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from models.errors import InputError

PROJECT = "hybridscope"
PACKAGES = (PROJECT, "torch", "numpy", "h5py", "transformers", "transformer-lens", "triton")
RUN_FIELDS = ("out", "overwrite", "debug", "trust_remote_code")  # of a Config, not changing data; but see trusted_code
HASHED = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "*.safetensors", "*.safetensors.index.json", "*.gguf",
)  # fmt: skip
_file_hashes: dict[tuple[str, int, int], str] = {}


def configuration(config: Any, exclude: Iterable[str] = RUN_FIELDS, **more: Any) -> dict[str, Any]:
    """A Config dataclass and `more` as plain JSON types: what decides whether two runs are the same run.

    Put in `more` what the config leaves open and what changes the data: resolved dtype and impl, checkpoint sha256.
    Exclude fields that only say where things are (output, paths of checkpoints whose sha256 is given).
    """
    excluded = set(exclude)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return plain({**{name: value for name, value in fields.items() if name not in excluded}, **more})


def run_attributes(
    *,
    checkpoints: Mapping[str, Path | str],
    layer_kinds: Mapping[str, Iterable[str]],
    kernel_impl: str,
    dtype: str,
    device: str,
    seed: int,
) -> dict[str, Any]:
    """Root attributes of a run on checkpoints {name: folder}; `layer_kinds` {name: kind of each layer} becomes JSON.

    `checkpoint`, `checkpoint_sha256` are text for one checkpoint, lists in the order of `checkpoint_name` for more.
    """
    if set(layer_kinds) != set(checkpoints):
        raise InputError(f"layer_kinds names {sorted(layer_kinds)}, checkpoints {sorted(checkpoints)}; use the same")
    hashes = [checkpoint_sha256(folder) for folder in checkpoints.values()]
    lists = {
        "checkpoint_name": list(checkpoints),
        "checkpoint": [str(folder) for folder in checkpoints.values()],
        "checkpoint_sha256": hashes,
    }
    return {
        **{name: values[0] if len(values) == 1 else values for name, values in lists.items()},
        "layer_kinds": canonical({name: list(kinds) for name, kinds in layer_kinds.items()}),
        "kernel_impl": str(kernel_impl),
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "seed": int(seed),
    }


def environment() -> dict[str, str]:
    """Versions of Python, the system, the packages of PACKAGES ("absent" if so) and the git commit of this checkout."""
    versions = {name.replace("-", "_"): _version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        **versions,
        "git_commit": git_commit(),
    }


def git_commit(root: Path | None = None) -> str:
    """HEAD of this checkout, plus "-dirty" when tracked files differ; "unknown" without checkout, git or commits."""
    root = root or Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # never the repository that happens to contain site-packages
        return "unknown"
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]):
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        if done.returncode:
            return "unknown"
        answers.append(done.stdout.strip())
    return answers[0] + ("-dirty" if answers[1] else "")


def checkpoint_sha256(folder: Path | str) -> str:
    """sha256 of a checkpoint folder: of what `sha256sum NAME...` prints for its HASHED files, names in byte order.

    Streamed (constant memory), and each file's hash kept while its size and modification time stay. Cards and training
    records do not count.
    """
    folder = Path(folder)
    names = _names(folder, HASHED)
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        found = "no such folder" if not folder.exists() else "a folder without *.safetensors"
        found = "a file" if folder.is_file() else found
        raise InputError(f"{folder}: {found}; give a checkpoint folder with config.json and *.safetensors")
    return _listing_sha256(folder, names)


def trusted_code(trusted: bool, checkpoints: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """remote_code_sha256={name: sha256 of its Python files, as checkpoint_sha256} for `configuration` of a run with
    --trust-remote-code; {} without the flag or such files, so that results of before are still the same run's."""
    found = {name: _names(path, ("**/*.py",)) for name, path in checkpoints.items()} if trusted else {}
    hashes = {name: _listing_sha256(checkpoints[name], files) for name, files in found.items() if files}
    return {"remote_code_sha256": hashes} if hashes else {}


def now() -> str:
    """Current time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def canonical(value: Any) -> str:
    """JSON text of plain data, the same for equal data."""
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """JSON types: paths and enums as text, sequences as lists, "nan" and "inf" as text, dataclasses as dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy and torch scalars
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    kind = type(value).__name__
    raise InputError(f"configuration holds {value!r} of type {kind}; use numbers, text, lists, dicts or paths")


def differences(stored: Any, asked: Any, name: str = "") -> list[str]:
    """Where two plain configurations differ: ["window: 2048 stored, 1024 asked", ...]."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        keys = list(dict.fromkeys((*stored, *asked)))
        absent = "nothing"
        return [
            line
            for key in keys
            for line in differences(stored.get(key, absent), asked.get(key, absent), f"{name}.{key}".strip("."))
        ]
    return [] if stored == asked else [f"{name}: {stored!r} stored, {asked!r} asked"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _names(folder: Path, patterns: Iterable[str]) -> list[str]:
    """The files of a folder, relative to it, in byte order."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _listing_sha256(folder: Path, names: Iterable[str]) -> str:
    lines = "".join(f"{_file_sha256(folder / name)}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    stat = path.stat()
    key = (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
    if key not in _file_hashes:
        with open(path, "rb") as file:
            _file_hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _file_hashes[key]
