"""Causal softmax attention with grouped kv heads and bands of visible keys.

o_t = sum over visible s of softmax_s(scale * q_t . k_s) v_s; query head h reads kv head h // (H // G). A learned sink
logit z_h is one more column of the softmax, dropped afterwards: the weights of the keys then sum to 1 - pi.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels.attention.bands import Band, attention_plan
from kernels.attention.naive import attention_naive, statistics_naive
from kernels.attention.statistics import AttentionStatistics, normalised_entropy, renormalised_entropy
from kernels.attention.torch_form import attention_torch, pattern_torch
from kernels.attention.torch_statistics import statistics_torch
from kernels.operands import Impl, check_impl, check_rank, check_shape

__all__ = [
    "AttentionStatistics",
    "Band",
    "attention",
    "attention_pattern",
    "attention_plan",
    "attention_statistics",
    "normalised_entropy",
    "renormalised_entropy",
]


def attention(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"],
    bands: tuple[Band, ...] = (),
    scale: float | None = None,
    sink_logits: Float[Tensor, "H"] | None = None,
    impl: Impl = "torch",
) -> Float[Tensor, "B T H V"]:
    """Causal attention; the T queries are the last T of the S positions, and every band must allow a key.

    scale None is K ** -0.5. sink_logits are learned sinks (GPT-OSS): not scaled, compared with the scaled scores. out
    has value's dtype; under autocast the products run in autocast's dtype. A band whose window or sinks reach over all
    S keys hides nothing and changes no bit. Memory O(S) for forward and backward; with impl triton a window of w keys
    costs O(T w). With impl torch on CUDA a compiled caller's bands need a block mask: call `attention_plan` beforehand
    to keep its making out of the graph.
    Raises ValueError for shapes that do not fit, H no multiple of G, T > S, window < 1, sinks < 0, or unknown impl;
    with impl triton for float64, for K or V above 256, and for a device Triton cannot use.
    """
    check_impl("attention", impl)
    bands = _checked("attention", query, key, value, bands)
    if sink_logits is not None:
        check_shape("attention", "sink_logits", sink_logits, (query.shape[2],), "H")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if impl == "triton":
        from kernels.attention.triton_form import attention_triton

        return attention_triton(query, key, value, bands, scale, sink_logits)
    form = attention_naive if impl == "naive" else attention_torch
    return form(query, key, value, bands, scale, sink_logits)


def attention_statistics(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"] | None = None,
    bands: tuple[Band, ...] = (),
    scale: float | None = None,
    sink_logits: Float[Tensor, "H"] | None = None,
    spans: Int[Tensor, "B N 2"] | Int[Tensor, "N 2"] | None = None,
    rows: Int[Tensor, "R"] | None = None,
    argmax: bool = True,
    impl: Impl = "torch",
) -> AttentionStatistics:
    """Per-query lse, entropy, largest score and its place, mass on spans of keys; without a T x S matrix.

    spans are half-open ranges [first, stop) of the S positions and may overlap. rows chooses queries (0 .. T - 1) and
    costs O(R S); without it all T queries are reported, and with value `out` comes from the same pass over the keys.
    All but argmax and visible can be differentiated, with respect to query, key, value and sink_logits. argmax=False
    leaves the place of the largest score out, which impl triton pays for key by key.
    Raises ValueError as `attention` does, for spans or rows of another shape or dtype, and for rows outside 0 .. T - 1
    where they lie on the CPU; on CUDA, where looking would stall, indexing fails on the device.
    """
    op = "attention_statistics"
    check_impl(op, impl)
    bands = _checked(op, query, key, key if value is None else value, bands)
    if sink_logits is not None:
        check_shape(op, "sink_logits", sink_logits, (query.shape[2],), "H")
    spans, rows = _spans(op, spans, query), _rows(op, rows, query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if impl == "triton":
        from kernels.attention.triton_form import statistics_triton

        return statistics_triton(query, key, value, bands, scale, sink_logits, spans, rows, argmax)
    form = statistics_naive if impl == "naive" else statistics_torch
    result = form(query, key, value, bands, scale, sink_logits, spans, rows)
    return result if argmax else result._replace(argmax=None)


def attention_pattern(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"] | None = None,
    bands: tuple[Band, ...] = (),
    scale: float | None = None,
    sink_logits: Float[Tensor, "H"] | None = None,
    impl: Impl = "torch",
) -> Float[Tensor, "B H T S"]:
    """The attention probabilities themselves, for listeners only: O(T S) memory, 1 GB a head in float32 at 16,384.

    float32 (float64 for float64 operands), rows sum to 1 (less with learned sinks), hidden keys hold exactly 0. value
    is accepted so that callers can pass the operands of `attention`; it and impl change nothing. Raises ValueError as
    `attention` does.
    """
    check_impl("attention_pattern", impl)
    bands = _checked("attention_pattern", query, key, key if value is None else value, bands)
    if sink_logits is not None:
        check_shape("attention_pattern", "sink_logits", sink_logits, (query.shape[2],), "H")
    return pattern_torch(query, key, bands, query.shape[-1] ** -0.5 if scale is None else scale, sink_logits)


def _spans(op: str, spans: Tensor | None, query: Tensor) -> Tensor | None:
    """[B, N, 2] on query's device."""
    if spans is None:
        return None
    if spans.is_floating_point() or spans.dtype == torch.bool:
        raise ValueError(f"{op}: spans are {spans.dtype}; expected integers. Pass token positions as int32 or int64.")
    b = query.shape[0]
    if spans.shape[-1:] != (2,) or spans.ndim not in (2, 3) or (spans.ndim == 3 and spans.shape[0] != b):
        raise ValueError(
            f"{op}: spans have shape {tuple(spans.shape)}; expected [N, 2] or [B, N, 2] with B = {b}. "
            "Give each span's first position and the one after its last."
        )
    return spans.to(query.device).expand(b, -1, 2)


def _rows(op: str, rows: Tensor | None, query: Tensor) -> Tensor | None:
    if rows is None:
        return None
    check_rank(op, "rows", rows, 1, "R")
    if rows.is_floating_point() or rows.dtype == torch.bool or rows.shape[0] < 1:
        raise ValueError(
            f"{op}: rows are {rows.dtype} of shape {tuple(rows.shape)}; expected at least one integer. "
            "Pass query indices, or None for all."
        )
    t = query.shape[1]
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= t:
            raise ValueError(f"{op}: rows reach from {low} to {high}; expected 0 .. T - 1 = {t - 1}. Count from 0.")
    return rows.to(query.device, torch.int64)


def _checked(op: str, query: Tensor, key: Tensor, value: Tensor, bands: tuple[Band, ...]) -> tuple[Band, ...]:
    check_rank(op, "query", query, 4, "B, T, H, K")
    check_rank(op, "key", key, 4, "B, S, G, K")
    check_rank(op, "value", value, 4, "B, S, G, V")
    b, t, h, k = query.shape
    s, g = key.shape[1:3]
    check_shape(op, "key", key, (b, s, g, k), "B, S, G, K")
    check_shape(op, "value", value, (b, s, g, value.shape[-1]), "B, S, G, V")
    if min(t, h, g) < 1 or h % g:
        raise ValueError(
            f"{op}: query has {h} heads for G = {g} kv heads, T = {t}; expected H a multiple of G, and T at least 1. "
            "Repeat or drop heads."
        )
    if t > s:
        raise ValueError(f"{op}: T is {t} queries for S = {s} keys; expected T <= S. Pass the keys of every query.")
    bands = tuple(Band(*band) for band in bands)
    for band in bands:
        if (band.window is not None and band.window < 1) or band.sinks < 0:
            raise ValueError(
                f"{op}: {band}; expected window >= 1 (a token sees itself) or None, and sinks >= 0. "
                "Leave the band out for full attention."
            )
    return bands
