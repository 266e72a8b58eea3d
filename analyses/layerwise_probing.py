"""After which layer can the needle be read at the last token, and which layers put it there?

    python -m analyses.layerwise_probing ckpt/ --out results/layerwise_probing.h5

Figure 4 of arXiv:2606.15378: a linear probe for the needle's class on the residual stream after every layer, and the
gain from layer to layer, split into mixer and MLP; with the controls that decide whether it means anything: the same
architecture untrained, shuffled labels, the needle taken out, the embedding and the needle's position alone. One
statistic was chosen beforehand: the share of the gain that sits in full-attention layers, tested by permuting layer
kinds. Lengths in tokens, log-losses in nats, intervals over held-out prompts.

    python -m analyses.layerwise_probing PATH --preset paper --out FILE.h5       # the released settings
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

ANALYSIS = "layerwise_probing"
CPU_SAMPLES, GPU_SAMPLES = 160, 2000
CPU_LENGTH = 256
CPU_HAYSTACKS, GPU_HAYSTACKS = ("repeat", "noise"), ("repeat", "essay", "noise")
CPU_TEST_SIZE, TEST_SIZE = 0.5, 0.2
CLASSES, C, CLASSIFIER, VALUES = 8, 0.1, "multinomial", "easy"
Control = Literal["shuffled", "random", "null"]
SHUFFLED: Control = "shuffled"
RANDOM: Control = "random"
NULL: Control = "null"
CONTROLS = (SHUFFLED, RANDOM, NULL)
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "samples": 10_000, "classes": 8, "values": "hard", "after_shared": True, "haystack": ("repeat",), "C": 0.1,
        "classifier": "one-vs-rest", "test_size": 0.2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Probe the residual stream after every layer for the class of the needle."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("PATH [PATH ...]")]
    """Checkpoint directories, native or Hugging Face, or directories of them (architectures, steps of a run)."""
    out: Path = Path("results/layerwise_probing.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    preset: Annotated[Literal["paper"] | None, shown("paper")] = None
    """paper: 10,000 samples, 8 hard classes, repeat, one-vs-rest, C 0.1, a fifth held out; options given beside it win.
    Hard values share their first digits: where the tokenizer makes these tokens of their own they are given
    (--after-shared), else the last prompt token is probed, as in the released scripts."""
    samples: Annotated[int | None, shown("N")] = None
    """Prompts of each haystack; default: 160 on a CPU, 2000 on a GPU."""
    length: Annotated[int | None, shown("T")] = None
    """Tokens given, the probed one last; default: the training length, on a CPU at most 256."""
    haystack: Annotated[tuple[Literal["repeat", "essay", "noise"], ...] | None, shown("NAME [NAME ...]")] = None
    """Text round the needle: repeat, essay, noise; default: repeat and noise, on a GPU all three."""
    texts: Annotated[tuple[Path, ...] | None, shown("TEXTS [TEXTS ...]")] = None
    """Texts for essay: .txt, .jsonl or folders of them; default: a presidential message of 1905."""
    values: Annotated[Literal["easy", "hard"] | None, shown("easy|hard")] = None
    """Needle values: easy (differ in the first digit, the default) or hard (in the last)."""
    classes: Annotated[int | None, shown("N")] = None
    """How many of them, 2 to 8; default: 8."""
    after_shared: Flag = False
    """Give the answer tokens that all values share, and probe the last of them instead of the last prompt token."""
    depth: Annotated[tuple[float, ...] | None, shown("SHARE [SHARE ...]")] = None
    """Shares of the haystack in front of the needle, crossed with the classes; default: drawn uniformly."""
    form: Literal["single", "multi_key"] = "single"
    """multi_key: further needles with other keys, whose values are no class."""
    distractors: int = 3
    """Of these, in multi_key."""
    controls: Annotated[tuple[Control, ...], shown("NAME [NAME ...]")] = CONTROLS
    """shuffled labels; random: the same architecture untrained; null: noise without the needle. Default: all."""
    classifier: Annotated[Literal["multinomial", "one-vs-rest"] | None, shown("multinomial|one-vs-rest")] = None
    """Logistic regression; default: multinomial. one-vs-rest has liblinear's objective."""
    C: Annotated[float | None, shown("C")] = None
    """Inverse strength of its L2 penalty; default: 0.1."""
    test_size: Annotated[float | None, shown("SHARE")] = None
    """Share of the prompts that is held out; default: 0.5 on a CPU, 0.2 on a GPU."""
    whole_prompts: Flag = False
    """Compute every prompt whole, also where prompts of a haystack begin alike (repeat)."""
    keep_features: Flag = False
    """Store the features too: samples x (2 layers + 1) x width numbers for every model and haystack."""
    device: Annotated[str | None, shown("DEVICE")] = None
    """cpu or cuda; default: a GPU if there is one."""
    dtype: Annotated[str | None, shown("DTYPE")] = None
    """float32, bfloat16 or float16; default: float32 on a CPU, the stored one on a GPU. Features are float32."""
    impl: Annotated[str | None, shown("IMPL")] = None
    """Who computes the kernels of a native checkpoint; default: the device's."""
    trust_remote_code: Flag = False
    """Run the Python files that a Hugging Face directory brings for its model or tokenizer; read them first."""
    seed: int = 42
    """Of prompts, split, shuffled labels, random weights and bootstrap."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        check_least(self, samples=4, length=2, classes=2, seed=0)
        if self.classes is not None and self.classes > CLASSES:
            raise InputError(f"--classes is {self.classes}; the value sets have {CLASSES}")
        if self.distractors < 1:
            raise InputError(f"--distractors is {self.distractors}; expected 1 or more (--form single has none)")
        if self.depth is not None and not (self.depth and all(0 <= share <= 1 for share in self.depth)):
            raise InputError(f"--depth is {' '.join(map(str, self.depth))}; expected shares between 0 and 1")
        if self.C is not None and not 0 < self.C < float("inf"):
            raise InputError(f"--C is {self.C}; expected a number above 0")
        if self.test_size is not None and not 0 < self.test_size < 1:
            raise InputError(f"--test-size is {self.test_size}; expected a share between 0 and 1")
        if self.haystack is not None and not self.haystack:
            raise InputError("--haystack names none; expected repeat, essay or noise")

    def resolved(self, name: str) -> Any:
        """The option as given, else as the preset has it, else None (a flag: False)."""
        given = getattr(self, name)
        return given or PRESETS.get(self.preset or "", {}).get(name, given)


def layerwise_probing(config: Config) -> Result:
    """Runs the study, or what is missing of it, writes `config.out` and returns the stored result.

    First features, in units of checkpoint x haystack x weights x batch, then probes; features go once the result is
    there, unless kept. Groups NAME (layers) and NAME/HAYSTACK, NAME/null: per-sample predictions of every control,
    accuracies, gains, and the share of the gain. Raises InputError before any model runs.
    """
    from analyses.layerwise_probing_plan import Plan
    from analyses.layerwise_probing_summary import join
    from analyses.units import run_stages

    with planned(Plan, config, ANALYSIS) as (plan, common):
        return run_stages(plan.stages, lambda parts, load: join(plan, parts, load), **common)


def main(config: Config) -> None:
    from analyses.layerwise_probing_table import table

    show(layerwise_probing(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
