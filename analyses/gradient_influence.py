"""How far back does a prediction's gradient reach, and does what lies there matter for the loss?

    python -m analyses.gradient_influence ckpt/ --out results/gradient_influence.h5

G(d) = E_x || ds(x) / de_{t-d} ||_2, Figure 5a of arXiv:2606.15378, on native checkpoints and Hugging Face directories:
per text and distance, with intervals over texts, the flat baseline it falls to and where it meets it, shares of the
total influence beyond windows, raw and without that baseline, the slope at which it falls beyond them, and the noise of
the number format. Beside it the direct form of the same claim: how the loss at the same targets grows when only the
last w tokens are given. Distances and windows in tokens, losses in nats, influence in units of the score per unit of
embedding.

A Llama from a local directory as in the paper:

    python -m analyses.gradient_influence Llama-3.1-8B/ --preset paper --texts TEXTS/ --out results/llama.h5

Without one, SmolLM2-135M (Apache-2.0) can stand in; analyses/data/README.md makes a directory of it in a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from analyses.command import planned, show
from models import command_line
from models.command_line import Flag, check_least, shown
from models.errors import InputError

if TYPE_CHECKING:
    from analyses.result import Result

ANALYSIS = "gradient_influence"
PAPER_WINDOWS, MINIATURE_WINDOWS = (128, 512, 2048), (32, 128, 512)
CPU_TEXTS, CPU_LENGTH = 8, 2048
N_TARGETS, NOISE_TEXTS = 20, 4
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"score": "logit_sum", "n_targets": 20, "length": 8192, "max_texts": 1000},
}


@dataclass(frozen=True)
class Config:
    """Measure how strongly each earlier token's embedding acts on the predictions at the end of a text."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("PATH [PATH ...]")]
    """Checkpoint directories, native or Hugging Face, or directories of them (architectures, steps of a run)."""
    texts: Annotated[tuple[Path, ...] | None, shown("TEXTS [TEXTS ...]")] = None
    """.txt files, .jsonl files (text under text, input, prompt or context) or folders of them; default: CPython modules
    that ship with the package. Too short ones are skipped and counted."""
    out: Path = Path("results/gradient_influence.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    preset: Annotated[Literal["paper"] | None, shown("paper")] = None
    """paper: logit_sum, the last 20 positions, 8192 tokens, at most 1000 texts; options given beside it win."""
    score: Annotated[
        Literal["log_prob", "logit_sum", "argmax_logit"] | None, shown("log_prob|logit_sum|argmax_logit")
    ] = None
    """What is differentiated, averaged over the targets; default: log_prob, of the true next token."""
    n_targets: Annotated[int | None, shown("N")] = None
    """Targets: the last N positions; default: 20."""
    length: Annotated[int | None, shown("T")] = None
    """Tokens of each text, the first T; with log_prob the last of them is only predicted. Default: the training length,
    on a CPU at most 2048."""
    max_texts: Annotated[int | None, shown("N")] = None
    """Texts, the first N that are long enough; default: 8 on a CPU, all on a GPU."""
    windows: Annotated[tuple[int, ...] | None, shown("W [W ...]")] = None
    """Windows to mark; default: 128, 512, 2048 from 8192 tokens on, else 32, 128, 512 and an eighth of them."""
    layers: Flag = False
    """Also the influence of every layer's input."""
    groups: Flag = False
    """Also the influence that passes through the full mixers only, and through the efficient mixers only."""
    noise_texts: int = NOISE_TEXTS
    """Texts computed again in float32, where the model is not: the number format's error of every gradient."""
    compact: Flag = False
    """Store the values of each text to two digits (5 bits of mantissa, within 1.6 %): a file of a third of the size.
    Means and all that is derived from them are those of the exact values."""
    keep_gb: Annotated[float | None, shown("GB")] = None
    """Activations kept for backward, in 10^9 bytes; blocks beyond compute theirs again, for a third more time. Default:
    4 on a CPU, half of what is free on a GPU. Does not change the numbers."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32, bfloat16 or float16; default: float32 on a CPU, the stored one on a GPU."""
    impl: Annotated[str | None, shown("IMPL")] = None
    """Who computes the kernels of a native checkpoint; default: the device's."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    seed: int = 0
    """Of the bootstrap."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        check_least(self, n_targets=1, length=8, max_texts=1, noise_texts=0)
        if self.keep_gb is not None and not self.keep_gb >= 0:
            raise InputError(f"--keep-gb is {self.keep_gb}; expected 0 (nothing is kept) or more")
        for value in self.windows or ():
            if value < 1:
                raise InputError(f"--windows has {value}; expected tokens, 1 or more")

    def resolved(self, name: str) -> Any:
        """The option as given, else as the preset has it, else None."""
        given = getattr(self, name)
        return given if given is not None else PRESETS.get(self.preset or "", {}).get(name)


def gradient_influence(config: Config) -> Result:
    """Runs the study, or what is missing of it, writes `config.out` and returns the stored result.

    Groups NAME (curves and shares with 95 % intervals over texts), NAME/texts (values of each text) and, where asked
    for or due, NAME/layers, NAME/groups, NAME/noise, for every checkpoint. Raises InputError before any model runs.
    """
    from analyses.gradient_influence_plan import Plan
    from analyses.gradient_influence_summary import join
    from analyses.units import run_units

    with planned(Plan, config, ANALYSIS) as (plan, common):
        return run_units(plan.units, plan.compute, lambda parts: join(plan, parts), **common)


def main(config: Config) -> None:
    from analyses.gradient_influence_table import table

    show(gradient_influence(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
