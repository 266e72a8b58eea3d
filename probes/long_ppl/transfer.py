"""Key tokens between tokenizers by character intervals, and matched non-key tokens as the control of selection."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from probes.long_ppl.io import KeyTokens


class MatchedTokens(NamedTuple):
    """Pairs (key, non-key) of tokens of the evaluated model, as indices; key tokens without a partner are counted."""

    key: np.ndarray  # [pairs]
    matched: np.ndarray  # [pairs]
    n_unmatched: int


def key_positions(offsets: Sequence[tuple[int, int]], key_tokens: KeyTokens, text: str) -> np.ndarray:
    """Indices of the tokens that lie inside one key interval, in increasing order.

    `offsets` are a tokenizer's (start, end) in characters of `text`. Whitespace at the ends of a token is not asked
    to lie inside: tokenizers disagree on whether the offsets of " word" include its space. A token of whitespace
    alone is taken as it is, a token of no characters (offsets (s, s)) is never a key token.
    """
    return _inside(offsets, key_tokens, text)[0]


def first_positions(offsets: Sequence[tuple[int, int]], key_tokens: KeyTokens, text: str) -> np.ndarray:
    """Of the tokens of key_positions, the first inside each key interval.

    The later tokens of an interval can often be told from its first (the rest of a name): only the first has to come
    from far back. Their number is that of the intervals which hold a token of the evaluated model.
    """
    positions, which = _inside(offsets, key_tokens, text)
    return positions[np.unique(which, return_index=True)[1]]


def _inside(offsets: Sequence[tuple[int, int]], key_tokens: KeyTokens, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the tokens inside key intervals, and which interval each lies in."""
    starts, ends = _trimmed(offsets, text)
    intervals = np.asarray(key_tokens.intervals, dtype=np.int64).reshape(-1, 2)
    if not len(intervals) or not len(starts):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    which = np.searchsorted(intervals[:, 0], starts, side="right") - 1
    inside = np.flatnonzero((which >= 0) & (ends > starts) & (ends <= intervals[which, 1]))
    return inside, which[inside]


def matched_tokens(
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    key_tokens: KeyTokens,
    text: str,
    *,
    counts: Mapping[int, int] | None = None,
    caliper_log_p: float = 0.5,
    caliper_log_count: float = 1.5,
    position_scale: float | None = None,
) -> MatchedTokens:
    """One non-key token for every key token of the evaluated model, without replacement, deterministic.

    Key tokens are chosen as predicted well with a long context and badly with a short one, so harm at windows near
    the short context is partly selection. The partner has the same evaluator log p given the long context (within
    `caliper_log_p` nats) and a similar frequency (ratio of counts within e^caliper_log_count; `counts` per token id,
    default: within this text), lies beyond the short context too, and touches no key interval. The evaluator's log p
    of a token is that of the evaluator token which holds its first character that is no space. The assignment pairs
    as many key tokens as possible at the least summed squared distance in calipers; ties go to the nearest pair.

    Key tokens lie late in a text, and a window takes more from late tokens: `position_scale` tokens between partners
    cost as much as a whole caliper (no bound, so nobody loses the only partner); None leaves position alone.
    """
    _check_calipers(caliper_log_p, caliper_log_count, position_scale)
    log_p, free = evaluator_view(offsets, key_tokens, text)
    keys = key_positions(offsets, key_tokens, text)
    keys = keys[np.isfinite(log_p[keys])]
    free[keys] = False
    candidates = np.flatnonzero(free)
    if not len(keys) or not len(candidates):
        return MatchedTokens(np.zeros(0, np.int64), np.zeros(0, np.int64), len(keys))
    log_count = log_counts(ids, counts)
    far_log_p = np.abs(log_p[keys][:, None] - log_p[candidates]) / caliper_log_p
    far_count = np.abs(log_count[keys][:, None] - log_count[candidates]) / caliper_log_count
    apart = np.abs(keys[:, None] - candidates)
    far = 0.0 if position_scale is None else (apart / position_scale) ** 2
    cost = far_log_p**2 + far_count**2 + far + apart * (1e-6 / len(ids))
    rows, columns = _cheapest(cost, allowed=(far_log_p <= 1) & (far_count <= 1))
    return MatchedTokens(keys[rows], candidates[columns], len(keys) - len(rows))


def _check_calipers(log_p: float, log_count: float, position_scale: float | None) -> None:
    if log_p <= 0 or log_count <= 0 or (position_scale is not None and position_scale <= 0):
        raise ValueError(
            f"matched_tokens: calipers are {log_p} and {log_count}, position_scale is {position_scale}; expected "
            "positive ones"
        )


def _cheapest(cost: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As many allowed pairs (row, column) as possible, each row and column once, at the least summed cost."""
    forbidden = (1.0 + cost[allowed].max(initial=0.0)) * (len(cost) + 1)  # more than all allowed ones could save
    rows, columns = linear_sum_assignment(np.where(allowed, cost, forbidden))
    kept = allowed[rows, columns]
    return rows[kept], columns[kept]


def _trimmed(offsets: Sequence[tuple[int, int]], text: str) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends without the whitespace at both ends of each token, unless it is nothing but whitespace."""
    starts, ends = [], []
    for start, end in offsets:
        piece = text[start:end]
        if piece.strip():
            start, end = end - len(piece.lstrip()), start + len(piece.rstrip())
        starts.append(start)
        ends.append(end)
    return np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)


def evaluator_view(
    offsets: Sequence[tuple[int, int]], key_tokens: KeyTokens, text: str
) -> tuple[np.ndarray, np.ndarray]:
    """Per token: the evaluator's long-context log p of its first character, and whether it may be a partner."""
    starts, ends = _trimmed(offsets, text)
    first = np.searchsorted(
        key_tokens.offsets[:, 1], starts, side="right"
    )  # first evaluator token that ends after the start
    last = np.searchsorted(key_tokens.offsets[:, 1], np.maximum(ends - 1, starts), side="right")
    inside = (ends > starts) & (last < key_tokens.n_tokens)
    host = np.minimum(first, key_tokens.n_tokens - 1)
    log_p = np.where(inside, key_tokens.log_p_long[host], np.nan)
    free = inside & np.isfinite(log_p) & (host >= key_tokens.context)
    key_before = np.concatenate([[0], np.cumsum(key_tokens.is_key)])
    free &= key_before[np.minimum(last, key_tokens.n_tokens - 1) + 1] == key_before[host]
    free[:1] = False  # the first token has no prediction without a BOS
    return log_p, free


def log_counts(ids: Sequence[int], counts: Mapping[int, int] | None) -> np.ndarray:
    """Per token the log of its count: within these ids, or, with `counts` per token id, of 1 + its count there."""
    if counts is None:
        _, inverse, number = np.unique(np.asarray(ids), return_inverse=True, return_counts=True)
        return np.log(number[inverse])
    return np.log([1 + counts.get(int(token), 0) for token in ids])
