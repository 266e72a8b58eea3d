"""The house rules that a reader relies on: which package imports which, one door per heavy library, file sizes."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "hooks", "probes", "models", "analyses")
MAY_IMPORT = {
    "kernels": set(),
    "hooks": set(),
    "probes": set(),
    "models": {"kernels", "hooks"},
    "analyses": {"kernels", "hooks", "probes", "models"},
}
EXTRA_ARROWS = {("models/pretrain/", "probes")}
DOORS = {
    "transformers": ("models/huggingface",),
    "h5py": ("analyses/store.py",),
    "seaborn": ("analyses/figures/",),
    "matplotlib": ("analyses/figures/",),
}
FILE_LINES, FUNCTION_LINES = 300, 40


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows_and_doors(path):
    relative = path.relative_to(ROOT).as_posix()
    home = relative.split("/")[0]
    modules = {name.split(".")[0] for name in imported(ast.parse(path.read_text("utf-8")))}
    allowed = MAY_IMPORT[home] | {home} | {to for start, to in EXTRA_ARROWS if relative.startswith(start)}
    assert modules & set(PACKAGES) <= allowed
    for library, doors in DOORS.items():
        assert library not in modules or relative.startswith(doors), f"{library} is imported outside {doors}"


def test_nothing_reads_backwards():
    """A figure never loads a checkpoint, an analysis never draws, a model never saves results."""
    for path in sources():
        relative, names = path.relative_to(ROOT).as_posix(), imported(ast.parse(path.read_text("utf-8")))
        if relative.startswith("analyses/figures/"):
            heavy = {name for name in names if name.split(".")[0] in ("models", "kernels", "hooks", "torch")}
            assert heavy <= {"models", "models.command_line", "models.errors"}, relative
        elif relative.startswith("analyses/"):
            assert not {name for name in names if name.startswith("analyses.figures")}, relative


def test_the_arrow_test_sees_a_violation(tmp_path):
    tree = ast.parse("import transformers\nfrom models.config import HybridConfig\ndef f():\n    import h5py")
    assert {name.split(".")[0] for name in imported(tree)} == {"transformers", "models", "h5py"}


def test_house_budget():
    """Files <= 300 lines and functions <= 40, kernels excepted."""
    too_long = []
    for path in sources():
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith("kernels/"):
            continue
        text = path.read_text("utf-8")
        if text.count("\n") > FILE_LINES:
            too_long.append(f"{relative}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    too_long.append(f"{relative}:{node.lineno} {node.name}: {length} lines")
    assert not too_long


def test_no_catch_all_modules_and_no_test_packages():
    for path in ROOT.rglob("*.py"):
        if not {".venv", "corpus", "runs"} & set(path.relative_to(ROOT).parts):
            assert path.stem not in ("utils", "helpers", "common"), path
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_package_is_listed_and_typed():
    assert set(importlib.metadata.packages_distributions()) >= set(PACKAGES)
    for package in PACKAGES:
        assert "hybridscope" in importlib.metadata.packages_distributions()[package]
        assert (ROOT / package / "py.typed").exists()
        assert (ROOT / package / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [
        "analyses.receptive_field",
        "analyses.layerwise_probing",
        "analyses.gradient_influence",
        "analyses.retrieval_tracing",
        "analyses.causal_tracing",
        "analyses.scaling_law",
        "analyses.key_tokens",
        "models.pretrain",
        "models.selfcheck",
        "models.pretrain.corpus",
        "analyses.figures",
    ],
)
def test_help_is_fast_to_come(module):
    """--help must not import torch, transformers or TransformerLens: they take seconds."""
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "slow = {'torch', 'transformers', 'transformer_lens', 'matplotlib'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout.lower()


def test_tracked_binaries_stay_below_40_megabytes():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    binary = [f for f in files if f.suffix in (".safetensors", ".h5", ".png", ".pdf", ".bin", ".npy")]
    assert sum(os.path.getsize(f) for f in binary) < 40 * 2**20
