"""Pure tensor functions, one folder per operation; `naive.py` is the law, `torch_form.py` computes it chunk by chunk.

Import operations from their folder: `from kernels.linear_decay import linear_decay`. This module imports nothing heavy,
because `import transformers` may look at it, and it carries no `__version__`, because transformers would read that as
the version of the Hugging Face package of the same name.
"""

import importlib.metadata


def _refuse_other_kernels() -> None:
    """Raise ImportError if the distribution `kernels` (Hugging Face) is installed: it owns the same import name."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'kernels' {version} (Hugging Face) is installed; expected none, because its top-level "
        "package 'kernels' has the name of this project's own and transformers would import the wrong one. "
        "Remedy: pip uninstall kernels"
    )


_refuse_other_kernels()
