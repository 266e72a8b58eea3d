"""Does a checkpoint behave as it says it does? A layer table, and one line for every property that was measured.

    python -m models.selfcheck PATH

Exit code 0 if nothing failed, 1 if something did, 2 for bad input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from models import command_line
from models.command_line import Flag, shown
from models.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from models.checks import Check

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Config:
    """Measure whether a checkpoint's layers, masks, cache and hook points do what they are said to do."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A checkpoint directory: native, of a released format, or Hugging Face."""
    quick: Flag = False
    """Only the cheap part, which the analyses run too: logits, row sums, causality, restrictions."""
    max_window: int = 1024
    """Sliding windows up to this many tokens are measured whole."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32, bfloat16 or float16; default: float32 on a CPU, the stored one on a GPU."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"--dtype is {self.dtype!r}; expected {', '.join(DTYPES)}")
        if self.max_window < 1:
            raise InputError(f"--max-window is {self.max_window}; expected at least 1 token")


def selfcheck(model: Any, quick: bool = False, max_window: int = 1024) -> Iterator[Check]:
    """The checks of a loaded model, one after the other as they are done."""
    from models.checks import run

    yield from run(model, quick, max_window)


def layer_table(model: Any) -> str:
    """One line a path: layer id, kind, window, heads, kv heads, class of the family's mixer."""
    rows = [("layer", "kind", "window", "heads", "kv heads", "mixer")]
    for layer in model.layers:
        for path, mixer in zip(layer.paths, layer.mixers, strict=True):
            site = getattr(mixer, "site", mixer)
            window = "-" if path.window is None else str(path.window)
            name = "not reached" if hasattr(mixer, "refusal") else type(site).__name__
            rows.append((str(layer.index), path.kind, window, str(path.heads), str(mixer.n_kv_heads), name))
        if not layer.paths:
            rows.append((str(layer.index), layer.kind, "-", "0", "0", type(layer.block).__name__))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(config: Config) -> int:
    import torch

    import models

    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    model = models.load(config.path, config.device, dtype, trust_remote_code=config.trust_remote_code)
    if source := getattr(model, "source_format", None):
        print(f"read as: {source}")
    print(layer_table(model), flush=True)
    failed = 0
    for check in selfcheck(model, config.quick, config.max_window):
        failed += check.verdict == "fail"
        print(f"{check.verdict:4}  {check.name}: {check.detail}", flush=True)
    print(f"{config.path}: {f'{failed} checks failed' if failed else 'no check failed'}")
    return int(failed > 0)


if __name__ == "__main__":
    command_line.run(main, Config, prog="python -m models.selfcheck")
