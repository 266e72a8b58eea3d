"""How does the loss fall with parameters N and tokens D, and what of that do the points really determine?

    python -m analyses.scaling_law analyses/data/scaling_swa128.tsv --out results/scaling_law.h5

L(N, D) = a N^-alpha + b D^-beta (+ c), the scaling law of arXiv:2606.15378, fitted by Huber's loss of log L to its
optimum, without bounds unless asked for. Every fit comes with profile-likelihood and bootstrap intervals, the largest
model held out as a test, and warnings where the points leave something open. Several architectures are fitted jointly
too: do they share the N term, the D term, all or nothing ("speed, not ceiling")? Losses in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from analyses.command import show
from models import command_line
from models.command_line import Flag, check_least, shown
from models.errors import InputError

if TYPE_CHECKING:
    from analyses.result import Result

ANALYSIS = "scaling_law"


@dataclass(frozen=True)
class Config:
    """Fit L = a N^-alpha + b D^-beta, with and without a constant, to the points of tables or training runs."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, shown("PATH [PATH ...]")]
    """Tables (TSV or CSV with columns n, d or d_over_n, loss or longppl; optional architecture, scale, run), runs of
    models.pretrain, or folders of runs."""
    out: Path = Path("results/scaling_law.h5")
    """The result (HDF5). A finished one of the same configuration is printed again, another is kept."""
    loss_column: Annotated[str | None, shown("NAME")] = None
    """Column of the loss, where a table has several or another name."""
    perplexity: Flag = False
    """That column holds exp(loss), as in the released table; longppl and perplexity columns always do."""
    last: Flag = False
    """Of training runs, the final checkpoint only (the others have not seen the learning rate decay)."""
    min_tokens: str = "0"
    """Leave out points with fewer training tokens; K, M and B are 10^3, 10^6 and 10^9."""
    alpha: Annotated[tuple[float, float] | None, shown("LOW HIGH")] = None
    """Bounds of alpha; default: none."""
    beta: Annotated[tuple[float, float] | None, shown("LOW HIGH")] = None
    """Bounds of beta; default: none."""
    released: Flag = False
    """Also the released fit (its starts, bounds and early stop), and the optimum under its bounds, for comparison."""
    delta: float = 1e-3
    """Where Huber's loss turns from quadratic to linear, in log loss."""
    over: Literal["within-n", "points", "runs"] = "within-n"
    """What the bootstrap draws: points within each model size, any points, or whole runs."""
    resamples: int = 1000
    """Of each bootstrap."""
    joint_resamples: int = 300
    """Simulated sets for each test between architectures."""
    level: float = 0.95
    """Of all intervals."""
    seed: int = 0
    """Of the resamples."""
    overwrite: Flag = False
    """Replace a result of another configuration."""

    def __post_init__(self) -> None:
        check_least(self, resamples=1, joint_resamples=1)
        if not 0 < self.level < 1:
            raise InputError(f"--level is {self.level}; expected a share between 0 and 1, such as 0.95")
        if not (math.isfinite(self.delta) and self.delta > 0):
            raise InputError(f"--delta is {self.delta}; expected a positive number, in units of log loss")
        for name in ("alpha", "beta"):
            low, high = getattr(self, name) or (0.0, 0.0)
            if not low <= high:
                raise InputError(f"--{name} is {low} {high}; expected the lower bound first")


def scaling_law(config: Config) -> Result:
    """Fits every law, writes `config.out` and returns the stored result; InputError before any fit.

    Group NAME for each architecture (fit x parameter, intervals, profiles, bootstrap samples, residuals), group `joint`
    for several (law, comparisons with their null distributions).
    """
    from analyses.scaling_law_plan import Plan
    from analyses.scaling_law_summary import join
    from analyses.units import run_units

    plan = Plan(config)
    return run_units(
        plan.units,
        plan.compute,
        lambda parts: join(plan, parts),
        target=config.out,
        analysis=ANALYSIS,
        config=plan.identity(),
        attributes=plan.attributes,
        overwrite=config.overwrite,
    )


def main(config: Config) -> None:
    from analyses.scaling_law_summary import table

    show(scaling_law(config), table, config.out)


if __name__ == "__main__":
    command_line.run(main, Config, prog=f"python -m analyses.{ANALYSIS}")
