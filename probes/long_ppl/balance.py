"""How alike key tokens and their matched partners are: the covariates of the matching, and standardised differences.

d = (mean_key - mean_other) / sqrt((var_key + var_candidates) / 2), the same scale before and after matching; |d| < 0.1
is the usual mark of balance (Stuart 2010, arXiv:1010.5586, section 4.1).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from probes.long_ppl.io import KeyTokens
from probes.long_ppl.transfer import evaluator_view, log_counts

COVARIATES = ("evaluator log p", "log count", "position")


class Covariates(NamedTuple):
    """`values`: of every token, in the order of COVARIATES (nats, log, share of the text before it)."""

    values: Float[np.ndarray, "T 3"]
    candidates: Bool[np.ndarray, " T"]
    """Tokens that may be a partner: beyond the short context, touching no key interval."""


def covariates(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    key_tokens: KeyTokens,
    text: str,
    counts: Mapping[int, int] | None = None,
) -> Covariates:
    """The covariates of one text, in the evaluated model's tokens; arguments as in matched_tokens."""
    log_p, candidates = evaluator_view(offsets, key_tokens, text)
    position = np.arange(len(ids)) / max(len(ids), 1)
    return Covariates(np.stack([log_p, log_counts(ids, counts), position], axis=1), candidates)


def standardised_differences(
    key: Float[np.ndarray, "N C"], other: Float[np.ndarray, "M C"], candidates: Float[np.ndarray, "P C"]
) -> Float[np.ndarray, " C"]:
    """One a covariate, in pooled standard deviations of key tokens and candidates; NaN where one of them is empty.

    0 where neither varies and the means agree.
    """
    if not len(key) or not len(other) or not len(candidates):
        return np.full(key.shape[1], np.nan)
    scale = np.sqrt((key.var(axis=0) + candidates.var(axis=0)) / 2)
    apart = key.mean(axis=0) - other.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(apart == 0, 0.0, apart / scale)
