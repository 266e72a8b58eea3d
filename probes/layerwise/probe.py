"""A fitted probe, z = ((x - mean) / scale) coef^T + intercept, and what fitting it gave."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

CLASSIFIERS = ("multinomial", "one-vs-rest")


@dataclass(frozen=True, eq=False)
class Probe:
    """Weights in standardised units; coef / scale are those in units of the features.

    Two classes have one row: the score of the second class against the first, as in scikit-learn.
    """

    mean: Float[np.ndarray, " D"]  # over the training part
    scale: Float[np.ndarray, " D"]  # its standard deviation; inf where the feature is constant there (weight 0)
    coef: Float[np.ndarray, "rows D"]
    intercept: Float[np.ndarray, " rows"]
    classifier: str

    def scores(self, x: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N rows"]:
        """Scores in float64 of rows in the units that the probe was fitted on."""
        return ((np.asarray(x, np.float64) - self.mean) / self.scale) @ self.coef.T + self.intercept

    def log_probabilities(self, x: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N classes"]:
        """log p of each class, in nats; its argmax is the prediction."""
        return log_probabilities(self.scores(x), self.classifier)


@dataclass(frozen=True, eq=False)
class Fit:
    """One feature's probe and its scores on the test rows, or the reason why there are none."""

    probe: Probe | None = None
    scores: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))  # [M, rows] float64
    converged: bool = False
    n_iter: int = 0
    gradient: float = float("nan")  # max |dF| / (C N)
    objective: float = float("nan")  # F in nats
    n_constant: int = 0  # columns that are constant in the training part
    reason: str = ""


def log_probabilities(scores: Float[np.ndarray, "... rows"], classifier: str) -> Float[np.ndarray, "... classes"]:
    """multinomial: log softmax. one-vs-rest: the sigmoids, normalised to sum to 1. One row: sigmoid against the rest.

    What predict_proba of scikit-learn's LogisticRegression and OneVsRestClassifier gives, without its underflow.
    """
    z = np.asarray(scores, np.float64)
    if z.shape[-1] == 1:
        return np.concatenate([_log_sigmoid(-z), _log_sigmoid(z)], -1)
    logs = z if classifier == "multinomial" else _log_sigmoid(z)
    top = logs.max(-1, keepdims=True)
    return logs - top - np.log(np.exp(logs - top).sum(-1, keepdims=True))


def predict(scores: Float[np.ndarray, "... rows"]) -> np.ndarray:
    """Codes of the predicted classes: the highest score, which saturated probabilities would tie."""
    return (scores[..., 0] > 0).astype(np.int64) if scores.shape[-1] == 1 else scores.argmax(-1)


def _log_sigmoid(z: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -z)
