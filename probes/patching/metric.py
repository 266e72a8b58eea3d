"""The logit difference, and how much of it a patch brings back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SEPARATION = 1.0
"""Nats of logit difference between clean and corrupted run from which a pair says anything about recovery."""


def logit_difference(
    model: Any, hidden: Float[Tensor, "B D"], right: Int[Tensor, " B"], wrong: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """logit(right) - logit(wrong) in nats, float32 or wider, from the stream after the final norm."""
    logits = model.unembed(hidden)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide.gather(1, right[:, None]) - wide.gather(1, wrong[:, None])).squeeze(1)


def separated(
    clean: Float[np.ndarray, " N"], corrupt: Float[np.ndarray, " N"], least: float = SEPARATION
) -> Bool[np.ndarray, " N"]:
    """Pairs whose clean run prefers its own value by at least `least` nats more than the corrupted run does.

    Of the others there is nothing to recover: dividing by their difference would only blow up noise.
    """
    if not least > 0:
        raise ValueError(f"least is {least}; expected a separation above 0 nats.")
    return np.asarray(clean) - np.asarray(corrupt) >= least


def recovered(
    patched: Float[np.ndarray, "N *C"], clean: Float[np.ndarray, " N"], corrupt: Float[np.ndarray, " N"],
    least: float = SEPARATION,
) -> Float[np.ndarray, "N *C"]:  # fmt: skip
    """(LD_patched - LD_corrupt) / (LD_clean - LD_corrupt) of every pair; NaN for those that are not `separated`."""
    known = separated(clean, corrupt, least)
    shape = (-1, *[1] * (np.ndim(patched) - 1))
    difference = np.where(known, np.asarray(clean) - np.asarray(corrupt), np.nan).reshape(shape)
    shares: np.ndarray = (np.asarray(patched) - np.asarray(corrupt).reshape(shape)) / difference
    return shares
