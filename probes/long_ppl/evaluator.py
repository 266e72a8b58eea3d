"""Key tokens of a text under an evaluator model.

i is key iff log p(x_i | long) - log p(x_i | short) > alpha and log p(x_i | long) > beta   (Fang et al., ICLR 2025)
"""

import hashlib
import json
from typing import Literal

import numpy as np
import torch

from probes.long_ppl.io import DIGITS, KeyTokens, text_sha256
from probes.long_ppl.score import ScoringModel, token_losses


def key_tokens(
    evaluator: ScoringModel,
    text: str,
    *,
    context: int,
    stride: int,
    length: int | None = None,
    alpha: float = 2.0,
    beta: float = -2.0,
    bos: Literal["window", "none"] = "window",
    name: str | None = None,
    batch_size: int = 8,
) -> KeyTokens:
    """Runs the evaluator once over the long context and once per window of context + stride tokens.

    long: everything before i. short: windows start every `stride` tokens, token i in [start + context, start +
    context + stride) sees x_start..x_{i-1}, so context..context+stride-1 tokens; only i >= context can be key, none
    if context >= the text's tokens. `length`: use the first so many evaluator tokens, ValueError if there are fewer;
    None uses all. bos="window" puts the evaluator's BOS, if its tokenizer gives one, before the long context and
    before every window (it is not counted in `context`); "none" gives none. Cost: length * (1 + (context + stride) /
    stride) tokens of forward passes; `batch_size` windows at once.
    """
    _check_settings(context=context, stride=stride, batch_size=batch_size, length=length, bos=bos)
    ids, offsets = _tokens(evaluator, text, length)
    front = [evaluator.tokenizer.bos_id] if bos == "window" and evaluator.tokenizer.bos_id is not None else []
    n_characters = max((end for _, end in offsets), default=0)
    return KeyTokens(
        evaluator=name if name is not None else type(evaluator).__name__,
        context=context,
        stride=stride,
        alpha=float(alpha),
        beta=float(beta),
        bos=bool(front),
        token_ids_sha256=hashlib.sha256(json.dumps([int(token) for token in ids]).encode()).hexdigest(),
        text_sha256=text_sha256(text[:n_characters]),
        n_characters=n_characters,
        offsets=np.asarray(offsets, dtype=np.int64).reshape(-1, 2),
        log_p_long=np.round(_long_log_p(evaluator, ids, front), DIGITS) + 0.0,
        log_p_short=np.round(_short_log_p(evaluator, ids, front, context, stride, batch_size), DIGITS) + 0.0,
    )


def _tokens(evaluator: ScoringModel, text: str, length: int | None) -> tuple[list[int], list[tuple[int, int]]]:
    if getattr(evaluator, "tokenizer", None) is None:
        raise ValueError("key_tokens: the evaluator has no tokenizer; its directory needs the tokenizer files")
    ids, offsets = evaluator.tokenizer.encode_with_offsets(text)
    if length is not None and len(ids) < length:
        raise ValueError(
            f"key_tokens: the text has {len(ids)} evaluator tokens, fewer than length = {length}; "
            "pass length=None or more text"
        )
    return list(ids)[:length], list(offsets)[:length]


def _check_settings(*, context: int, stride: int, batch_size: int, length: int | None, bos: str) -> None:
    for name, value in (("context", context), ("stride", stride), ("batch_size", batch_size), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"key_tokens: {name} is {value}; expected at least 1")
    if bos not in ("window", "none"):
        raise ValueError(f"key_tokens: bos is {bos!r}; expected 'window' or 'none'")


def _long_log_p(evaluator: ScoringModel, ids: list[int], front: list[int]) -> np.ndarray:
    log_p = np.full(len(ids), np.nan)
    first = 0 if front else 1
    if len(ids) > first:
        row = torch.tensor([front + ids], dtype=torch.long, device=evaluator.device)
        log_p[first:] = -token_losses(evaluator, row, list(range(1, row.shape[1])))[0].double().cpu().numpy()
    _check_finite(log_p[first:], "long", first)
    return log_p


def _short_log_p(
    evaluator: ScoringModel, ids: list[int], front: list[int], context: int, stride: int, batch_size: int
) -> np.ndarray:
    log_p = np.full(len(ids), np.nan)
    starts = list(range(0, len(ids) - context, stride))
    whole = [start for start in starts if start + context + stride <= len(ids)]
    groups = [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
    groups += [[start] for start in starts if start not in whole]  # the last window may be shorter
    for group in groups:
        rows = [front + ids[start : start + context + stride] for start in group]
        batch = torch.tensor(rows, dtype=torch.long, device=evaluator.device)
        predicted = range(len(front) + context, batch.shape[1])
        losses = token_losses(evaluator, batch, list(predicted)).double().cpu().numpy()
        for start, row in zip(group, losses, strict=True):
            log_p[start + context : start + context + len(row)] = -row
    _check_finite(log_p[context:], "short", context)
    return log_p


def _check_finite(log_p: np.ndarray, which: str, first: int) -> None:
    if not np.isfinite(log_p).all():
        index = int(np.flatnonzero(~np.isfinite(log_p))[0])
        raise ValueError(
            f"key_tokens: the evaluator's {which}-context log p of token {first + index} is {log_p[index]}; "
            "expected a finite number: check the dtype (float32 or bfloat16) and the weights"
        )
