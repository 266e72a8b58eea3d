"""Several architectures at once: do they share the N term ("speed, not ceiling"), the D term, all, or nothing?

    free       L_k = a_k N^-alpha_k + b_k D^-beta_k (+ c_k)
    shared N   L_k = a N^-alpha (+ c)  + b_k D^-beta_k      the ceiling is common, the speed towards it is not
    shared D   L_k = a_k N^-alpha_k (+ c_k) + b D^-beta     the speed is common, the ceiling is not
    one        L   = a N^-alpha + b D^-beta (+ c)
Each restricted law is compared with the free one by the likelihood ratio of Huber's density (likelihood.py), with one
scale of residuals for all, against its distribution when the restricted law is true: losses are made from the
restricted fit and residuals drawn from the free one, and both laws are fitted again. AICc and BIC stand beside it.
Simulated (80 sets of 46 points, noise 2 %): a true shared N term is rejected at the 5 % level in 5 % (normal noise) and
6 % (Laplace) of the sets, a false shared D term (b 3500 against 2000) in 95 %.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from probes.scaling import likelihood
from probes.scaling.fitting import DELTA, checked, fit
from probes.scaling.identifiability import distinct
from probes.scaling.law import Layout, names_of
from probes.scaling.solver import Problem, huber, log_sum, minimise

RESAMPLES, LEVEL = 300, 0.05
SHARED = {
    "free": frozenset[str](),
    "shared N": frozenset({"a", "alpha", "c"}),
    "shared D": frozenset({"b", "beta"}),
    "one": frozenset({"a", "alpha", "b", "beta", "c"}),
}


@dataclass(frozen=True, eq=False)
class JointLaw:
    """One of the four laws fitted; `parameters` has a row an architecture (columns: `names` of the JointFit)."""

    name: str
    parameters: Float[np.ndarray, "A P"]
    n_parameters: int
    objective: float
    log_likelihood: float
    aicc: float
    bic: float
    predicted: Float[np.ndarray, " N"]
    """Loss at each point, nats."""
    statistic: float
    """2 (log-likelihood of the free law - of this one); 0 for the free law."""
    null: Float[np.ndarray, " R"]
    """The statistic of R simulated sets for which this law is true; empty for the free law."""

    @property
    def p_value(self) -> float:
        """Share of the null that is at least as large (with the observed one counted in); NaN for the free law."""
        if not len(self.null):
            return float("nan")
        return float((1 + (self.null >= self.statistic).sum()) / (1 + len(self.null)))


@dataclass(frozen=True, eq=False)
class JointFit:
    """The four laws, by name; rows of parameters in the order of `architectures`."""

    architectures: tuple[str, ...]
    names: tuple[str, ...]
    laws: dict[str, JointLaw]
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """What the tests at the 5 % level say about "speed, not ceiling"; a law that is not rejected is not proven."""
        kept = {name: law.p_value > LEVEL for name, law in self.laws.items() if name != "free"}
        if kept["one"]:
            return "one law fits all architectures: no difference is shown"
        if kept["shared N"] and not kept["shared D"]:
            return "speed, not ceiling: a common N term is compatible with the points, a common D term is not"
        if kept["shared D"] and not kept["shared N"]:
            return "ceiling, not speed: a common D term is compatible with the points, a common N term is not"
        if kept["shared N"]:
            return "undecided: a common N term and a common D term are each compatible with the points"
        return "both differ: neither a common N term nor a common D term is compatible with the points"


def fit_joint(
    n: Float[np.ndarray, " N"],
    d: Float[np.ndarray, " N"],
    loss: Float[np.ndarray, " N"],
    architecture: Sequence[Hashable],
    *,
    constant: bool = False,
    delta: float = DELTA,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> JointFit:
    """Fits the four laws of this module and compares them. Units as in `fit`; no bounds.

    Starts: the separate fits, their mean, and a fit to all points. ValueError as in `fit`, or for fewer than two
    architectures, or an architecture with too few points for a law of its own. A few seconds for 60 points.
    """
    n, d, loss = checked(n, d, loss, constant)
    names = list(dict.fromkeys(architecture))
    if len(names) < 2 or len(list(architecture)) != len(n):
        raise ValueError(f"{len(names)} architectures, {len(list(architecture))} labels, {len(n)} points; expected "
                         "two architectures or more, and one label a point")  # fmt: skip
    group = np.array([names.index(label) for label in architecture])
    for index, name in enumerate(names):
        if (count := int((group == index).sum())) <= len(names_of(constant)):
            least = len(names_of(constant)) + 1
            raise ValueError(f"architecture {name!r} has {count} points; expected {least} or more")
    study = _Study(n, d, np.log(loss), group, constant, delta)
    laws = study.laws(_separate(n, d, loss, group, constant, delta), resamples, np.random.default_rng(seed))
    warnings = [f"{name}: {count} distinct {letter}, so its {letter} term is hardly determined"
                for index, name in enumerate(names) for letter, sizes in (("N", n), ("D", d))
                if (count := distinct(sizes[group == index])) < 3]  # fmt: skip
    return JointFit(tuple(map(str, names)), names_of(constant), laws, tuple(warnings))


def _separate(
    n: np.ndarray, d: np.ndarray, loss: np.ndarray, group: np.ndarray, constant: bool, delta: float
) -> Float[np.ndarray, "A P"]:
    """log a, log b, alpha, beta (, log c) of a fit to each architecture, then of one to all; not centred."""
    rows = []
    for chosen in (*(group == index for index in range(group.max() + 1)), np.ones(len(n), bool)):
        found = fit(n[chosen], d[chosen], loss[chosen], constant=constant, delta=delta)
        theta, centre = found.theta.copy(), found.layout.centre
        theta[0] += theta[2] * centre[0]
        theta[1] += theta[3] * centre[1]
        rows.append(theta)
    return np.array(rows)


@dataclass(frozen=True, eq=False)
class _Study:
    """All points, centred together; `target` is the log loss."""

    n: np.ndarray
    d: np.ndarray
    target: np.ndarray
    group: Int[np.ndarray, " N"]
    constant: bool
    delta: float

    def layout(self, name: str) -> Layout:
        groups = int(self.group.max()) + 1
        return Layout.of(self.n, self.d, constant=self.constant, groups=groups, shared=SHARED[name])

    def laws(self, separate: np.ndarray, resamples: int, rng: np.random.Generator) -> dict[str, JointLaw]:
        """All four on the observed losses, each restricted one with its null."""
        observed = self.target[None]
        thetas = {name: self.solve(name, observed, self.starts(name, separate))[0] for name in SHARED if name != "free"}
        begin = [self.starts("free", separate)[0], *(self.as_free(name, theta) for name, theta in thetas.items())]
        thetas = {"free": self.solve("free", observed, begin)[0], **thetas}
        predicted = {name: self.predicted(name, theta[0]) for name, theta in thetas.items()}
        points, count = len(self.target), thetas["free"].shape[1]
        residual = (self.target - predicted["free"]) * np.sqrt(points / max(points - count, 1))
        found = {}
        for name, theta in thetas.items():
            null = np.empty(0)
            if name != "free":
                simulated = predicted[name] + rng.choice(residual, (resamples, points))
                null = self.null(name, simulated, theta, thetas["free"])
            found[name] = self.law(name, theta[0], predicted, null)
        return found

    def law(self, name: str, theta: np.ndarray, predicted: dict[str, np.ndarray], null: np.ndarray) -> JointLaw:
        points, layout = len(self.target), self.layout(name)
        losses = {key: float(huber(predicted[key] - self.target, self.delta).sum()) for key in ("free", name)}
        top = likelihood.log_likelihood(losses[name], points, self.delta)
        rows = [layout.parameters(theta[None], group)[0] for group in range(int(self.group.max()) + 1)]
        return JointLaw(
            name, np.array(rows), len(theta), losses[name], top, likelihood.aicc(top, len(theta), points),
            likelihood.bic(top, len(theta), points), np.exp(predicted[name]),
            self.statistic(losses[name], losses["free"]), null,
        )  # fmt: skip

    def null(self, name: str, target: np.ndarray, theta: np.ndarray, free: np.ndarray) -> Float[np.ndarray, " R"]:
        """The statistic of simulated sets for which the law `name` is true."""
        restricted, worse = self.solve(name, target, [theta])
        better = self.solve("free", target, [self.as_free(name, restricted), free])[1]
        return np.array([self.statistic(*pair) for pair in zip(worse, better, strict=True)])

    def statistic(self, restricted: float, free: float) -> float:
        return float(likelihood.statistic(np.array([restricted]), free, len(self.target), self.delta)[0])

    def predicted(self, name: str, theta: np.ndarray) -> Float[np.ndarray, " N"]:
        """log loss"""
        return log_sum(theta[None], self.layout(name).design(self.n, self.d, self.group))[0]

    def solve(
        self, name: str, target: Float[np.ndarray, "R N"], starts: Sequence[Float[np.ndarray, "_ P"]]
    ) -> tuple[Float[np.ndarray, "R P"], Float[np.ndarray, " R"]]:
        """Parameters and objective of each row of log losses. The free law falls apart into one problem a group."""
        layout = self.layout(name)
        design = layout.design(self.n, self.d, self.group)
        low, high = layout.limits()
        if name != "free":
            return self._best(design, target, starts, low, high)
        theta, objective = np.empty((len(target), len(low))), np.zeros(len(target))
        for group in range(int(self.group.max()) + 1):
            own, mine = [owner == group for _, owner in layout.columns], self.group == group
            part = [start[:, own] for start in starts]
            theta[:, own], loss = self._best(design[:, mine][:, :, own], target[:, mine], part, low[own], high[own])
            objective += loss
        return theta, objective

    def _best(
        self, design: np.ndarray, target: np.ndarray, starts: Sequence[np.ndarray], low: np.ndarray, high: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(target), len(low))
        low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        problem = Problem(design, target, np.ones_like(target), low, high, self.delta)
        found = [minimise(problem, np.broadcast_to(start, shape)) for start in starts]
        best = np.argmin([solution.objective for solution in found], axis=0)
        rows = np.arange(len(target))
        theta = np.array([solution.theta for solution in found])[best, rows]
        return theta, np.array([solution.objective for solution in found])[best, rows]

    def starts(self, name: str, separate: np.ndarray) -> list[Float[np.ndarray, "1 P"]]:
        """Own parameters from the separate fits, shared ones from their mean; all from the common fit; and halfway."""
        layout, order = self.layout(name), names_of(self.constant)
        rows = separate.copy()
        rows[:, 0] -= rows[:, 2] * layout.centre[0]
        rows[:, 1] -= rows[:, 3] * layout.centre[1]
        own, everywhere = rows[:-1], rows[-1]
        columns = [(order.index(parameter), owner) for parameter, owner in layout.columns]
        apart = np.array([own[:, at].mean() if owner < 0 else own[owner, at] for at, owner in columns])
        alike = np.array([everywhere[at] for at, _ in columns])
        return [apart[None], alike[None], (apart + alike)[None] / 2]

    def as_free(self, name: str, theta: Float[np.ndarray, "R P"]) -> Float[np.ndarray, "R P"]:
        """The parameters of a restricted law as those of the free one."""
        layout = self.layout(name)
        return theta[:, [layout.index(parameter, owner) for parameter, owner in self.layout("free").columns]]
