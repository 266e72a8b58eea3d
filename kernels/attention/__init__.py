"""Causal softmax attention with grouped kv heads and bands of visible keys.

o_t = sum over visible s of softmax_s(scale * q_t . k_s) v_s; query head h reads kv head h // (H // G).
"""

from jaxtyping import Float
from torch import Tensor

from kernels.attention.bands import Band, attention_plan
from kernels.attention.naive import attention_naive
from kernels.attention.torch_form import attention_torch, pattern_torch
from kernels.operands import Impl, check_impl, check_rank, check_shape

__all__ = ["Band", "attention", "attention_pattern", "attention_plan"]


def attention(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"],
    bands: tuple[Band, ...] = (),
    scale: float | None = None,
    impl: Impl = "torch",
) -> Float[Tensor, "B T H V"]:
    """Causal attention; the T queries are the last T of the S positions, and every band must allow a key.

    scale None is K ** -0.5. out has value's dtype; under autocast the products run in autocast's dtype. A band whose
    window or sinks reach over all S keys hides nothing and changes no bit. Memory O(S) for forward and backward. On
    CUDA a compiled caller's bands need a block mask: call `attention_plan` beforehand to keep its making out of the
    graph.
    Raises ValueError for shapes that do not fit, H no multiple of G, T > S, window < 1, sinks < 0, or unknown impl.
    """
    check_impl("attention", impl)
    bands = _checked("attention", query, key, value, bands)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    form = attention_naive if impl == "naive" else attention_torch
    return form(query, key, value, bands, scale)


def attention_pattern(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B S G K"],
    value: Float[Tensor, "B S G V"] | None = None,
    bands: tuple[Band, ...] = (),
    scale: float | None = None,
    impl: Impl = "torch",
) -> Float[Tensor, "B H T S"]:
    """The attention probabilities themselves, for listeners only: O(T S) memory, 1 GB a head in float32 at 16,384.

    float32 (float64 for float64 operands), rows sum to 1, hidden keys hold exactly 0. value is accepted so that callers
    can pass the operands of `attention`; it and impl change nothing. Raises ValueError as `attention` does.
    """
    check_impl("attention_pattern", impl)
    bands = _checked("attention_pattern", query, key, key if value is None else value, bands)
    return pattern_torch(query, key, bands, query.shape[-1] ** -0.5 if scale is None else scale)


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
