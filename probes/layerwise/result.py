"""What `fit` found: one row a feature, per-sample predictions kept so that every interval can be recomputed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from probes.layerwise.intervals import effective_prompts, wilson
from probes.layerwise.probe import Probe

Metric = Literal["accuracy", "log_loss"]
NOT_FITTED = -1  # in `predicted`


@dataclass(frozen=True, eq=False)
class LayerwiseResult:
    """F features probed on the same M held-out rows. A feature that could not be fitted has NaN everywhere, predicted
    -1 and a `reason`; losses are in nats. Intervals run over the held-out prompts, for the probes as fitted.
    """

    names: tuple[str, ...]
    classes: tuple[Hashable, ...]
    row: Int[np.ndarray, " M"]  # which rows of the features were held out
    prompt: Int[np.ndarray, " M"]  # the prompt of each, numbered in order of appearance among all rows
    label: Int[np.ndarray, " M"]  # index into classes; permuted in the shuffled-label control
    frequencies: Float[np.ndarray, " classes"]  # of the classes in the training part
    predicted: Int[np.ndarray, "F M"]  # index into classes
    log_p_true: Float[np.ndarray, "F M"]  # log probability of the true class
    converged: Bool[np.ndarray, " F"]  # gradient <= tol; for impl "sklearn": it did not warn
    n_iter: Int[np.ndarray, " F"]
    gradient: Float[np.ndarray, " F"]  # largest gradient of the objective (objective.py) over C N
    objective: Float[np.ndarray, " F"]  # its value on the training part, nats
    n_constant: Int[np.ndarray, " F"]  # columns that are constant in the training part and so have weight 0
    reason: tuple[str, ...]  # why a feature could not be fitted, "" if it was
    settings: Mapping[str, Any]
    probes: tuple[Probe | None, ...] = field(default=())  # () after from_arrays

    @property
    def fitted(self) -> Bool[np.ndarray, " F"]:
        return np.asarray([not reason for reason in self.reason])

    @property
    def correct(self) -> Float[np.ndarray, "F M"]:
        """1 where the prediction is right, 0 where it is wrong."""
        return self._known(self.predicted == self.label)

    @property
    def accuracy(self) -> Float[np.ndarray, " F"]:
        return self.correct.mean(1)

    @property
    def log_loss(self) -> Float[np.ndarray, " F"]:
        """Mean of -log p(true class), nats."""
        return -self.log_p_true.mean(1)

    @property
    def chance(self) -> float:
        """Accuracy of always saying the training part's most frequent class (the first one, if several are)."""
        return float(self.chance_score("accuracy").mean())

    @property
    def chance_log_loss(self) -> float:
        """Log-loss of the class frequencies of the training part."""
        return -float(self.chance_score("log_loss").mean())

    def accuracy_interval(self, level: float = 0.95) -> Float[np.ndarray, "F 2"]:
        """Wilson interval over held-out prompts; conservative with several rows a prompt."""
        return wilson(self.accuracy, effective_prompts(self.prompt_rows), level)

    def score(self, metric: Metric) -> Float[np.ndarray, "F M"]:
        """Per row, higher is better: 0 or 1 (accuracy), log p of the true class (log_loss)."""
        if metric not in ("accuracy", "log_loss"):
            raise ValueError(f"metric is {metric!r}; expected 'accuracy' or 'log_loss'")
        return self.correct if metric == "accuracy" else self.log_p_true

    def chance_score(self, metric: Metric) -> Float[np.ndarray, " M"]:
        """The same for an answer that knows the training labels only."""
        if metric == "accuracy":
            return (self.label == int(self.frequencies.argmax())).astype(np.float64)
        return np.log(self.frequencies)[self.label]

    @property
    def prompt_rows(self) -> Int[np.ndarray, " P"]:
        """Rows of each held-out prompt, prompts in order of their number."""
        return np.unique(self.prompt, return_counts=True)[1]

    def prompt_sums(self, values: Float[np.ndarray, "any M"]) -> Float[np.ndarray, "any P"]:
        """Sums over the rows of each held-out prompt."""
        order = np.argsort(self.prompt, kind="stable")
        starts = np.concatenate([[0], np.cumsum(self.prompt_rows)[:-1]])
        return np.add.reduceat(values[:, order], starts, axis=1)

    def _known(self, values: np.ndarray) -> np.ndarray:
        return np.where(self.fitted[:, None], values.astype(np.float64), np.nan)

    def records(self, level: float = 0.95) -> list[dict[str, Any]]:
        """One plain dictionary a feature, for a table (pandas.DataFrame(result.records()))."""
        columns = {
            "name": list(self.names),
            "accuracy": self.accuracy.tolist(),
            "low": self.accuracy_interval(level)[:, 0].tolist(),
            "high": self.accuracy_interval(level)[:, 1].tolist(),
            "log_loss": self.log_loss.tolist(),
            "converged": self.converged.tolist(),
            "n_iter": self.n_iter.tolist(),
            "reason": list(self.reason),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and JSON-able metadata, all but the probes. Labels that JSON does not know are kept as their repr."""
        arrays = {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        classes = [c if isinstance(c, str | int | float | bool | None) else repr(c) for c in self.classes]
        return arrays, {
            "names": list(self.names),
            "classes": classes,
            "reason": list(self.reason),
            "settings": dict(self.settings),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], metadata: Mapping[str, Any]) -> LayerwiseResult:
        """What to_arrays gave, with `probes` ()."""
        missing = [name for name in _ARRAYS if name not in arrays] + [name for name in _LISTS if name not in metadata]
        if missing:
            raise ValueError(f"stored probe result lacks {', '.join(missing)}; expected what to_arrays() gave")
        parts: dict[str, Any] = {name: np.asarray(arrays[name]) for name in _ARRAYS}
        parts |= {name: tuple(metadata[name]) for name in _LISTS if name != "settings"}
        return cls(**parts, settings=dict(metadata["settings"]))


_LISTS = ("names", "classes", "reason", "settings")  # kept as metadata
_ARRAYS = tuple(f.name for f in fields(LayerwiseResult) if f.name not in (*_LISTS, "probes"))
