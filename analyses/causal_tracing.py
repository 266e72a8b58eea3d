"""What carries the needle's value to the token that says it, and is it in the recurrent state at all?

    python -m analyses.causal_tracing ckpt/nano/step_00002441 --out results/causal_tracing.h5

The causal counterparts of probing and of attention mass. Two prompts differ in the needle's value only: activations of
one are put into the other (value-swap patching), layer by layer, for mixer, MLP, residual stream and single heads, at
the value's tokens, behind them and at the last token; how much of the logit difference comes back (denoising) or is
left (noising)? Attention knockout hides the value from the tokens that say it, through layers, groups and heads; for
recurrent layers, the value is not written into the state they read. The state probe asks how long after the needle its
class can be read from a recurrent state, beside the usual probe at the last token and the same of an untrained twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from analyses.command import planned, show
from models import command_line
from models.command_line import Flag, check_least, shown
from models.errors import InputError

if TYPE_CHECKING:
    from analyses.result import Result

ANALYSIS = "causal_tracing"
CPU_PAIRS, GPU_PAIRS = 8, 64
CPU_SAMPLES, GPU_SAMPLES = 160, 1000
CPU_LENGTH, FOREIGN_LENGTH = 256, 4096  # of prompts; Hugging Face models may take far longer ones


@dataclass(frozen=True)
class Config:
    """Patch, knock out and probe the way of a needle's value through the model."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("PATH [PATH ...]")]
    """Checkpoint directories, native or Hugging Face, or directories of them."""
    out: Path = Path("results/causal_tracing.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    pairs: Annotated[int | None, shown("N")] = None
    """Pairs of prompts for patching and knockouts; default: 8 on a CPU, 64 on a GPU."""
    length: Annotated[int | None, shown("T")] = None
    """Tokens of a prompt with its answer; default: the training length, on a CPU at most 256, of a Hugging Face model
    at most 4096."""
    haystack: Literal["essay", "repeat", "noise"] = "essay"
    """Text round the needle."""
    values: Literal["easy", "hard"] = "easy"
    """Needle values, eight of them: easy (differ in the first digit) or hard (in the last; the others are given)."""
    separation: float = 1.0
    """Nats of logit difference between clean and corrupted run from which a pair counts; the others are reported."""
    layers_at_once: int = 3
    """Consecutive layers of a window of knockouts; 1: no windows."""
    no_heads: Flag = False
    """Leave out patches and knockouts of single heads, most of the cost."""
    samples: Annotated[int | None, shown("N")] = None
    """Prompts for probing states and the last token; default: 160 on a CPU, 1000 on a GPU; 0: no probes."""
    width: int = 256
    """Numbers a recurrent state is sketched to before it is probed; 0: the whole state."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32, bfloat16 or float16; default: float32 on a CPU, the stored one on a GPU."""
    impl: Annotated[str | None, shown("IMPL")] = None
    """Who computes the kernels of a native checkpoint; default: the device's."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    seed: int = 0
    """Of prompts, sketches, splits, random weights and bootstrap."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        check_least(self, pairs=1, length=8, layers_at_once=1, width=0, seed=0)
        if self.samples is not None and self.samples != 0 and self.samples < 32:
            raise InputError(f"--samples is {self.samples}; expected 32 or more (8 classes, half held out), or 0: none")
        if not 0 < self.separation < float("inf"):
            raise InputError(f"--separation is {self.separation}; expected nats above 0")


def causal_tracing(config: Config) -> Result:
    """Runs the study, or what is missing of it, writes `config.out` and returns the stored result.

    Groups NAME (layers, counts), NAME/patching, NAME/knockout and NAME/probes, each with per-sample values and
    intervals over prompts. Raises InputError before any model runs.
    """
    from analyses.causal_tracing_plan import Plan
    from analyses.causal_tracing_summary import join
    from analyses.units import run_stages

    with planned(Plan, config, ANALYSIS) as (plan, common):
        return run_stages(plan.stages, lambda parts, load: join(plan, load), **common)


def main(config: Config) -> None:
    from analyses.causal_tracing_table import table

    show(causal_tracing(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
