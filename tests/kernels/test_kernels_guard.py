"""The import guard against the other distribution that owns the name `kernels`."""

import os
import subprocess
import sys
from pathlib import Path

import kernels

ROOT = str(Path(kernels.__file__).parents[1])


def run_python(code, *folders):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), ROOT]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def installed(folder, name):
    """A folder that importlib.metadata takes for an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-0.19.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.19.0\n")
    return folder


def test_other_distribution_is_refused(tmp_path):
    result = run_python("import kernels.linear_decay", installed(tmp_path, "kernels"))
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: the distribution 'kernels' 0.19.0 (Hugging Face) is installed")
    assert message.endswith("pip uninstall kernels")


def test_another_name_is_no_clash(tmp_path):
    result = run_python(
        "import kernels, sys; print(kernels.__file__, 'torch' in sys.modules)", installed(tmp_path, "kernels-data")
    )
    assert result.stdout.split() == [kernels.__file__, "False"], result.stderr


def test_transformers_imports_beside_ours_and_does_not_take_it_for_its_own():
    code = (
        "import kernels, kernels.attention, transformers, transformers.integrations.hub_kernels\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "print(is_kernels_available(), kernels.__file__)"
    )
    result = run_python(code)
    assert result.stdout.split() == ["False", kernels.__file__], result.stderr


def test_importing_operations_does_not_load_the_compiler():
    code = (
        "import sys, kernels.attention, kernels.gated_delta_rule, kernels.linear_decay, kernels.short_conv\n"
        "print([m for m in ('torch._dynamo', 'transformers', 'triton') if m in sys.modules])"
    )
    assert run_python(code).stdout.strip() == "[]"
