"""Which layers carry long-range information? Restrict the receptive field of a group of layers and measure the harm.

    python -m analyses.receptive_field ckpt/ --out results/receptive_field.h5

Figure 3 of arXiv:2606.15378, with its confounds handled: every restriction is exact for every mixer (hooks.restrict);
log(LongPPL) beside matched non-key tokens, all tokens, repeated n-grams by gap and needle retrieval by distance; paired
intervals over documents and prompts, verdicts against a stated margin; sinks; the floor of a model that is given the
last w tokens only; mean-ablation; lengths beyond training; and, per layer, whether the restriction could have mattered
at all. Sizes in tokens, losses in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from analyses.command import planned, show
from models import command_line
from models.command_line import Flag, check_least, shown
from models.errors import InputError

if TYPE_CHECKING:
    from analyses.result import Result

ANALYSIS = "receptive_field"
GRID_WINDOWS = (1, 2, 4, 16, 64, 128, 256, 512, 1024, 2048)
CPU_DOCUMENTS, CPU_PROMPTS, GPU_PROMPTS = 4, 24, 64
DOMAINS = ("code", "documentation")


@dataclass(frozen=True)
class Config:
    """Measure what each model loses when its full-attention or its efficient layers see only their last w tokens."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("PATH [PATH ...]")]
    """Checkpoint directories, or directories of them (architectures, or the steps of a run)."""
    out: Path = Path("results/receptive_field.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    windows: Annotated[tuple[int, ...] | None, shown("W [W ...]")] = None
    """Visible tokens, self included; default: an eighth of the training length."""
    sinks: Annotated[tuple[int, ...] | None, shown("N [N ...]")] = None
    """First tokens that stay visible beside the window; default: 0, with --grid 0 and 4 (softmax layers only)."""
    reach: Annotated[tuple[int, ...], shown("R [R ...]")] = ()
    """Also: tokens that a group may cross in all, split over its layers."""
    ablate: Flag = False
    """Also: each group's mixers put out their mean over calibration tokens, the strongest restriction."""
    layers: Annotated[tuple[str, ...], shown("IDS [IDS ...]")] = ()
    """Also: these layers alone, at every window and number of sinks; each IDS is one set, absolute ids joined by
    commas: --layers 5 11 5,11."""
    floor: Flag = False
    """Also: the model given the last w tokens only, for every window."""
    lengths: Annotated[tuple[int, ...], shown("M [M ...]")] = (1,)
    """Also at M times the training length, e.g. 1 2 4: the same documents behind other texts, longer needle prompts."""
    margin: float = 0.1
    """Nats of harm below which a restriction counts as not mattering, stated before looking. 0.1: less than doubling
    the training tokens of the paper's 104M model gains in log(LongPPL), 0.12 to 0.23."""
    grid: Flag = False
    """Everything at one length: ten windows, 0 and 4 sinks, each single layer, the reach, means, the floor, all
    documents."""
    documents: Annotated[int | None, shown("N")] = None
    """Documents, those with the most key tokens; default: 4 on a CPU, all with --grid or on a GPU."""
    prompts: Annotated[int | None, shown("N")] = None
    """Needle prompts; default: 24 on a CPU, 64 with --grid or on a GPU."""
    context: Annotated[int | None, shown("T")] = None
    """Tokens taken for the training length; default: a native model's own, a Hugging Face model's up to the longest
    document."""
    prompt_length: Annotated[int | None, shown("T")] = None
    """Tokens of a needle prompt; default: a quarter of the training length on a CPU, else (--grid, --lengths, GPU)
    all."""
    haystack: str = "essay"
    """Text round the needle: essay, repeat or noise."""
    texts: Annotated[Path | None, shown("FOLDER")] = None
    """Folder of own documents (NAME.txt); needs --key-tokens. Default: those that ship with the package."""
    domain: str = "code"
    """Which of these: code (CPython modules) or documentation (Django's topic guides)."""
    key_tokens: Annotated[Path | None, shown("FOLDER")] = None
    """Folder of their key tokens (NAME.json), made by `python -m analyses.key_tokens`."""
    calibration: Annotated[Path | None, shown("FOLDER")] = None
    """Texts for the means of --ablate; default: the embedded CPython modules without key tokens."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32 or bfloat16; default: float32 on a CPU, the stored one on a GPU."""
    impl: Annotated[str | None, shown("IMPL")] = None
    """Who computes the kernels; default: the device's."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    seed: int = 0
    """Of the prompts and of the bootstrap."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        for value in self.lengths:
            if value < 1:
                raise InputError(f"--lengths has {value}; expected multiples of the training length: 1 or more")
        if not self.margin > 0:
            raise InputError(f"--margin is {self.margin}; expected nats, more than 0")
        if self.domain not in DOMAINS:
            raise InputError(f"--domain is {self.domain!r}; expected {' or '.join(DOMAINS)}")
        for name in ("windows", "reach"):
            for value in getattr(self, name) or ():
                if value < 1:
                    raise InputError(f"--{name} has {value}; expected tokens visible, self included: 1 or more")
        check_least(self, documents=1, prompts=1, prompt_length=1, context=1)
        if any(value < 0 for value in self.sinks or ()):
            raise InputError(f"--sinks has {min(self.sinks or ())}; expected 0 or more first tokens")


def receptive_field(config: Config) -> Result:
    """Runs the study, or what is missing of it, writes `config.out` and returns the stored result.

    One group a checkpoint, named after it: condition x {document, prompt, layer} values and a summary with paired 95 %
    bootstrap intervals (analyses.receptive_field_summary). Raises InputError before any model runs.
    """
    from analyses.receptive_field_plan import Plan
    from analyses.receptive_field_summary import join
    from analyses.units import run_units

    with planned(Plan, config, ANALYSIS) as (plan, common):
        return run_units(plan.units, plan.compute, lambda parts: join(plan, parts), **common)


def main(config: Config) -> None:
    from analyses.receptive_field_table import table

    show(receptive_field(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
