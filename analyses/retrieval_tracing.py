"""When do retrieval heads form, and does retrieval hang on them? Follow them back through the checkpoints of a run.

    python -m analyses.retrieval_tracing runs/swa-32 runs/swa-512 --out results/retrieval_tracing.h5

Figure 5b of arXiv:2606.15378. Heads are found on the last checkpoint of a run by their attention mass on the needle's
value, on prompts of their own; on other prompts their mass, normalised entropy and copy score, the needle accuracy of
the model, and the distance of their query and key weights from the last checkpoint are measured at every checkpoint.
On the last one every head is mean-ablated, recurrent ones too: the accuracy that remains says which do the work.

    python -m analyses.retrieval_tracing RUN --preset released --out FILE.h5     # how the released script chooses heads
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

ANALYSIS = "retrieval_tracing"
TOP, QUERY = 4, -1
RELEASED_QUERY = -2
CPU_CHOOSING, GPU_CHOOSING = 8, 64
CPU_TRACING, GPU_TRACING = 16, 128
CPU_LENGTH, FOREIGN_LENGTH = 512, 4096  # of prompts; Hugging Face models may take far longer ones
CPU_DRAWS, GPU_DRAWS = 6, 32
Marks = Annotated[tuple[float, ...], tyro.conf.arg(metavar="X [X ...]")]


@dataclass(frozen=True)
class Config:
    """Find retrieval heads on the last checkpoint of each run and follow them back through all of them."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("RUN [RUN ...]")]
    """Runs: directories with the checkpoints of one training run (step_XXXXXXXX/ each), or single checkpoints, native
    or of Hugging Face."""
    out: Path = Path("results/retrieval_tracing.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    preset: Annotated[Literal["released"] | None, shown("released")] = None
    """released: heads as in the released script: the four with most mass from the last but one token of the prompt.
    Prompts end just before the value, so that token does not yet predict it (the default, --query -1, does)."""
    top: Annotated[int | None, shown("K")] = None
    """Heads to follow, those with the largest mean mass; default: 4."""
    threshold: Annotated[float | None, shown("MASS")] = None
    """Follow all heads with at least this mean mass instead."""
    query: Annotated[int | None, shown("POSITION")] = None
    """Whose attention counts as mass, from the prompt's end; default: -1, which predicts the first value token."""
    choosing: Annotated[int | None, shown("N")] = None
    """Prompts for choosing heads (and for their mean outputs); default: 8 on a CPU, 64 on a GPU."""
    tracing: Annotated[int | None, shown("N")] = None
    """Other prompts, for everything that is reported; default: 16 on a CPU, 128 on a GPU."""
    length: Annotated[int | None, shown("T")] = None
    """Tokens of a prompt with its answer; default: the training length, on a CPU at most 512, of a Hugging Face model
    at most 4096."""
    haystack: Literal["essay", "repeat", "noise"] = "essay"
    """Text round the needle."""
    prompts: Annotated[Path | None, shown("FILE.npz")] = None
    """Own prompts instead: ids [N, T] with the answer last, value [N, 2] and answer [N, 2], token ranges [first, stop).
    The first ones choose, the rest are traced; default: a third chooses."""
    accuracy_marks: Marks = (0.1, 0.5, 0.9)
    """Marks for needle accuracy (all digits, and share of digits); crossed upwards."""
    mass_marks: Marks = (0.1, 0.3, 0.5)
    """Marks for attention mass and copy score; crossed upwards."""
    entropy_marks: Marks = (0.75, 0.5, 0.25)
    """Marks for normalised entropy; crossed downwards."""
    distance_marks: Marks = (1.0, 0.5, 0.25)
    """Marks for the Q/K distance from the last checkpoint; crossed downwards (by construction all are, in the end)."""
    draws: Annotated[int | None, shown("N")] = None
    """Random pairs of heads ablated beside the top two; default: 6 on a CPU, 32 on a GPU."""
    no_ablation: Flag = False
    """Leave out the causal check, for which all tracing prompts go through the layers from every head's on."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32, bfloat16 or float16; default: float32 on a CPU, the stored one on a GPU. Attention rows are float32."""
    impl: Annotated[str | None, shown("IMPL")] = None
    """Who computes the kernels; default: the device's."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    seed: int = 0
    """Of prompts, random pairs and bootstrap."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        check_least(self, top=1, choosing=1, tracing=1, length=8, draws=0, seed=0)
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise InputError(f"--threshold is {self.threshold}; expected a mass above 0, at most 1")
        if self.threshold is not None and self.top is not None:
            raise InputError(f"--top {self.top} and --threshold {self.threshold} both choose heads; give one of them")
        if self.query is not None and self.query >= 0:
            raise InputError(f"--query is {self.query}; expected a position from the prompt's end: -1, -2, ...")
        for name in ("accuracy_marks", "mass_marks", "entropy_marks", "distance_marks"):
            if any(not 0 < mark < float("inf") for mark in getattr(self, name)):
                raise InputError(f"--{name.replace('_', '-')} has {getattr(self, name)}; expected numbers above 0")

    def resolved_query(self) -> int:
        """The query position, an option before the preset before the default."""
        default = RELEASED_QUERY if self.preset == "released" else QUERY
        return default if self.query is None else self.query

    def resolved_top(self) -> int | None:
        """How many heads are followed; None where a threshold decides."""
        return None if self.threshold is not None else self.top or TOP


def retrieval_tracing(config: Config) -> Result:
    """Runs the study, or what is missing of it, writes `config.out` and returns the stored result.

    First every checkpoint of every run, one in memory at a time, then ablations on the last ones. Groups RUN (curves,
    crossings), RUN/heads (checkpoint x layer x head), RUN/prompts (per-prompt values) and RUN/ablation. Raises
    InputError before any model runs.
    """
    from analyses.retrieval_tracing_plan import Plan
    from analyses.retrieval_tracing_summary import join
    from analyses.units import run_stages

    with planned(Plan, config, ANALYSIS) as (plan, common):
        return run_stages(plan.stages, lambda parts, load: join(plan, load), **common)


def main(config: Config) -> None:
    from analyses.retrieval_tracing_table import table

    show(retrieval_tracing(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
