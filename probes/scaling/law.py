"""The law L(N, D) = a N^-alpha + b D^-beta + c, a log-sum-exp of linear forms in log a, log b, log c, alpha, beta.

    log L = log( exp(log a - alpha log N) + exp(log b - beta log D) + exp(log c) )
Chinchilla's third approach (Hoffmann et al. 2022, arXiv:2203.15556) with c; without it (c = 0) the law of
arXiv:2606.15378. N: parameters without embeddings; D: training tokens; L: loss in nats (validation loss, log(LongPPL)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

PARAMETERS = ("a", "b", "alpha", "beta", "c")
LOGARITHMIC = ("a", "b", "c")
"""Fitted as logarithms, so positive."""
EXPONENT_LIMIT, LEVEL_LIMIT = 10.0, 16.0
"""Numerical limits, no prior: exponents, and logs of terms at the centre of the data, that no data could tell apart."""
Columns = tuple[tuple[str, int], ...]


def names_of(constant: bool) -> tuple[str, ...]:
    """The parameters of the law, in the order of every array of parameters."""
    return PARAMETERS if constant else PARAMETERS[:-1]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which number stands where: `columns` are (parameter, group), group -1 for one that all groups share.

    Inside a fit log a and log b are taken at the centre of the data (N and D divided by their geometric means), where
    they hardly depend on the exponents.
    """

    columns: Columns
    centre: tuple[float, float]
    """Means of log N and log D; (0, 0): log a and log b as in the law."""

    @classmethod
    def of(
        cls,
        n: Float[np.ndarray, " N"],
        d: Float[np.ndarray, " N"],
        *,
        constant: bool,
        groups: int = 1,
        shared: frozenset[str] = frozenset(),
        centred: bool = True,
    ) -> Layout:
        """Own parameters for each group but the `shared` ones."""
        columns = [
            (name, group) for name in names_of(constant) for group in ([-1] if name in shared else range(groups))
        ]
        centre = (float(np.log(n).mean()), float(np.log(d).mean())) if centred else (0.0, 0.0)
        return cls(tuple(columns), centre)

    def design(
        self, n: Float[np.ndarray, " N"], d: Float[np.ndarray, " N"], group: Int[np.ndarray, " N"] | None = None
    ) -> Float[np.ndarray, "K N P"]:
        """Log term k of point i is design[k, i] @ theta; K terms: N, D and, if the law has one, the constant."""
        group = np.zeros(len(n), dtype=int) if group is None else group
        log_n, log_d = np.log(n) - self.centre[0], np.log(d) - self.centre[1]
        one = np.ones(len(n))
        entries = {"a": (0, one), "alpha": (0, -log_n), "b": (1, one), "beta": (1, -log_d), "c": (2, one)}
        terms = 3 if any(name == "c" for name, _ in self.columns) else 2
        design = np.zeros((terms, len(n), len(self.columns)))
        for column, (name, owner) in enumerate(self.columns):
            term, value = entries[name]
            design[term, :, column] = value if owner == -1 else np.where(group == owner, value, 0.0)
        return design

    def limits(
        self, bounds: Mapping[str, tuple[float, float]] | None = None
    ) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, " P"]]:
        """Lower and upper bound of every column: the numerical limits, narrowed by `bounds` {alpha, beta or c: ...}."""
        low, high = np.empty(len(self.columns)), np.empty(len(self.columns))
        for column, (name, _) in enumerate(self.columns):
            widest = LEVEL_LIMIT if name in LOGARITHMIC else EXPONENT_LIMIT
            lower, upper = (bounds or {}).get(name, (-np.inf, np.inf))
            if name == "c":
                lower, upper = (float(np.log(max(edge, np.exp(-widest)))) for edge in (lower, upper))
            low[column], high[column] = max(lower, -widest), min(upper, widest)
        return low, high

    def parameters(self, theta: Float[np.ndarray, "F P"], group: int = 0) -> Float[np.ndarray, "F names"]:
        """a, b, alpha, beta (and c) of one group, in the units of the law."""
        column = {name: self.index(name, group) for name, _ in self.columns}
        found = {name: theta[:, at] for name, at in column.items()}
        found["a"] = found["a"] + found["alpha"] * self.centre[0]
        found["b"] = found["b"] + found["beta"] * self.centre[1]
        if "c" in found:
            found["c"] = np.where(found["c"] <= -LEVEL_LIMIT, -np.inf, found["c"])  # the constant is 0
        with np.errstate(over="ignore"):  # a or b of an exponent at its numerical limit
            return np.stack([np.exp(v) if name in LOGARITHMIC else v for name, v in found.items()], axis=1)

    def index(self, name: str, group: int = 0) -> int:
        """The column of a group's own or shared parameter."""
        return next(i for i, (other, owner) in enumerate(self.columns) if other == name and owner in (-1, group))


def predict(
    parameters: Mapping[str, float], n: Float[np.ndarray, " *N"], d: Float[np.ndarray, " *N"]
) -> Float[np.ndarray, " *N"]:
    """The loss that the law gives, nats; summed as logarithms, so a huge `a` with a huge exponent is no overflow."""
    with np.errstate(divide="ignore"):  # log 0 of a term that is not there
        log_a, log_b, log_c = (np.log(parameters.get(name, 0.0)) for name in LOGARITHMIC)
    size = np.logaddexp(log_a - parameters["alpha"] * np.log(n), log_b - parameters["beta"] * np.log(d))
    return np.exp(np.logaddexp(size, log_c))
