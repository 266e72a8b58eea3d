"""What a fit depends on beside features, labels and prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from probes.layerwise.probe import CLASSIFIERS

IMPLS = ("torch", "sklearn")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Settings:
    """Arguments of `fit`. A weak penalty (C N above 1e4 or so) leaves the objective flat near its optimum: use float64
    and a smaller tol there.
    """

    classifier: str  # "multinomial" (intercept free), or "one-vs-rest" (liblinear: intercept penalised)
    C: float  # inverse strength of the L2 penalty, as in scikit-learn
    max_iter: int
    tol: float  # on max |dF| / (C N); "sklearn" hands it on, and liblinear compares it with the initial gradient
    test_size: float  # share of the prompts that is held out
    seed: int  # of the split and of the shuffled labels
    shuffled: bool  # the control: labels permuted within each side of the same split
    impl: str  # "torch" (all layers of a chunk at once), or "sklearn" (the reference, one after the other)
    dtype: str  # of the standardised features and the weights; moments are float64
    device: str  # given as None: CUDA where there is one, else the CPU

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("classifier", self.classifier, CLASSIFIERS),
            ("impl", self.impl, IMPLS),
            ("dtype", self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")
        for name, number in (("C", self.C), ("tol", self.tol)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} is {number!r}; expected a number > 0")
        if not 0 < self.test_size < 1:
            raise ValueError(f"test_size is {self.test_size!r}; expected a share of the prompts between 0 and 1")
        for name, count, least in (("max_iter", self.max_iter, 1), ("seed", self.seed, 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"{name} is {count!r}; expected an integer >= {least}")


def resolve_device(device: str | torch.device | None, impl: str) -> str:
    """None = CUDA where there is one, else the CPU. scikit-learn runs on the CPU only."""
    if impl == "sklearn":
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"device is {str(device)!r} with impl 'sklearn', which runs on the CPU; use impl='torch'")
        return "cpu"
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(torch.device(device))
