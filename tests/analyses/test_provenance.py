"""Provenance: checkpoint hashes that a shell can repeat, commits, versions, configurations as JSON."""

import enum
import hashlib
import json
import math
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses import provenance
from models.errors import InputError


def checkpoint(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_bytes(weights)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"more")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("card")
    return folder


def test_checkpoint_hash_is_that_of_the_shell_and_of_data_alone(tmp_path):
    first = checkpoint(tmp_path / "a b")
    found = provenance.checkpoint_sha256(first)
    names = sorted(path.name for path in first.iterdir() if path.name != "README.md")
    lines = "".join(f"{hashlib.sha256((first / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert found == hashlib.sha256(lines.encode()).hexdigest()
    if shutil.which("sha256sum"):
        listed = subprocess.run(["sha256sum", *names], cwd=first, capture_output=True, check=True).stdout
        assert found == hashlib.sha256(listed).hexdigest()
    assert provenance.checkpoint_sha256(checkpoint(tmp_path / "same")) == found
    (first / "README.md").write_text("another card")
    assert provenance.checkpoint_sha256(str(first) + "/") == found
    assert provenance.checkpoint_sha256(checkpoint(tmp_path / "other", b"weightS")) != found
    (first / "config.json").write_text("{ }")  # noticed although the hash of the old content was kept
    assert provenance.checkpoint_sha256(first) != found


def test_file_hashes_are_kept(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "a")
    found = provenance.checkpoint_sha256(folder)
    monkeypatch.setattr(provenance.hashlib, "file_digest", None)  # reading again would fail
    assert provenance.checkpoint_sha256(folder) == found


def test_what_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in (("absent", "no such folder"), ("file", "a file"), (".", "without")):
        with pytest.raises(InputError, match=says):
            provenance.checkpoint_sha256(tmp_path / path)


def test_run_attributes_for_one_and_several_checkpoints(tmp_path):
    a, b = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", b"other")
    fixed = {"kernel_impl": "torch", "dtype": torch.bfloat16, "device": "cpu", "seed": 3}
    one = provenance.run_attributes(checkpoints={"a": a}, layer_kinds={"a": ["swa", "full"]}, **fixed)
    assert one["checkpoint"] == str(a)
    assert one["checkpoint_sha256"] == provenance.checkpoint_sha256(a)
    assert json.loads(one["layer_kinds"]) == {"a": ["swa", "full"]}
    assert (one["dtype"], one["device"], one["seed"], one["kernel_impl"]) == ("bfloat16", "cpu", 3, "torch")
    two = provenance.run_attributes(checkpoints={"b": b, "a": a}, layer_kinds={"a": [], "b": ["gdn"]}, **fixed)
    assert two["checkpoint_name"] == ["b", "a"]
    assert two["checkpoint_sha256"] == [provenance.checkpoint_sha256(b), provenance.checkpoint_sha256(a)]
    with pytest.raises(InputError, match="layer_kinds names"):
        provenance.run_attributes(checkpoints={"a": a}, layer_kinds={}, **fixed)


def test_environment_names_versions():
    found = provenance.environment()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert {"python", "h5py", "hybridscope", "git_commit", "transformers"} <= set(found)
    assert all(isinstance(value, str) and value for value in found.values())


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_of_a_checkout_and_unknown_elsewhere(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    inside = tmp_path / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert provenance.git_commit(tmp_path) == "unknown"  # installed
    git("init")
    assert provenance.git_commit(tmp_path) == "unknown"  # no commit yet
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert provenance.git_commit(tmp_path) == head
    (tmp_path / "untracked").write_text("")
    monkeypatch.setenv("GIT_DIR", "/nonexistent")  # as inside a git hook
    assert provenance.git_commit(tmp_path) == head
    (tmp_path / "f").write_text("2")
    assert provenance.git_commit(tmp_path) == f"{head}-dirty"
    assert provenance.git_commit(inside) == "unknown"  # installed inside somebody's repository
    monkeypatch.setenv("PATH", "")
    assert provenance.git_commit(tmp_path) == "unknown"  # no git program


class Way(enum.Enum):
    MEAN = "mean"


@dataclass(frozen=True)
class Inner:
    sinks: tuple[int, ...] = (0, 4)


@dataclass(frozen=True)
class Config:
    out: Path = Path("r.h5")
    overwrite: bool = False
    window: float = math.inf
    way: Way = Way.MEAN
    data: Path = Path("texts")
    inner: Inner = Inner()
    none: None = None


def test_code_counts_only_where_it_is_trusted_and_there(tmp_path):
    paths = {name: tmp_path / name for name in ("with", "without")}
    for path in paths.values():
        path.mkdir()
    (paths["with"] / "sub").mkdir()
    (paths["with"] / "b.py").write_text("b = 1\n")
    (paths["with"] / "sub" / "a.py").write_text("a = 1\n")
    assert provenance.trusted_code(False, paths) == {}
    assert provenance.trusted_code(True, {"without": paths["without"]}) == {}
    found = provenance.trusted_code(True, paths)
    command = "sha256sum b.py sub/a.py | sha256sum"
    done = subprocess.run(command, shell=True, cwd=paths["with"], capture_output=True, text=True, check=True)
    assert found == {"remote_code_sha256": {"with": done.stdout.split()[0]}}


def test_configuration_is_plain_and_leaves_out_where_things_go():
    found = provenance.configuration(Config(), dtype="float32", checkpoint_sha256={"a": "0"}, n=np.int64(3))
    assert found == {
        "window": "inf",
        "way": "mean",
        "data": "texts",
        "inner": {"sinks": [0, 4]},
        "none": None,
        "dtype": "float32",
        "checkpoint_sha256": {"a": "0"},
        "n": 3,
    }
    assert json.loads(provenance.canonical(found)) == found
    assert provenance.configuration(Config(out=Path("s.h5"), overwrite=True)) == provenance.configuration(Config())
    assert "data" not in provenance.configuration(Config(), exclude=("data",))
    assert provenance.canonical({"b": 1, "a": 2}) == provenance.canonical({"a": 2, "b": 1})
    with pytest.raises(InputError, match="of type object"):
        provenance.plain({"x": object()})


def test_differences_name_fields():
    stored = {"a": {"b": 1, "c": 2}, "gone": 0, "same": [1]}
    asked = {"a": {"b": 1, "c": 3}, "new": 0, "same": [1]}
    assert provenance.differences(stored, asked) == [
        "a.c: 2 stored, 3 asked",
        "gone: 0 stored, 'nothing' asked",
        "new: 'nothing' stored, 0 asked",
    ]
    assert provenance.differences(stored, stored) == []


def test_time_is_utc():
    assert provenance.now().endswith("+00:00")
