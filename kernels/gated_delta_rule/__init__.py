"""Gated delta rule: S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = scale * S_t^T q_t.

Yang, Kautz and Hatamizadeh 2025, Gated delta networks; log_decay = 0 is the delta rule (Schlag et al. 2021).
"""

from jaxtyping import Float, Int
from torch import Tensor

from kernels.gated_delta_rule.naive import gated_delta_rule_naive
from kernels.gated_delta_rule.torch_form import gated_delta_rule_torch
from kernels.operands import Impl, RecurrentOutput, check_impl, check_recurrent, check_shape

__all__ = ["RecurrentOutput", "gated_delta_rule"]


def gated_delta_rule(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "B T H"],
    beta: Float[Tensor, "B T H"],
    initial_state: Float[Tensor, "B H K V"] | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    window: int | None = None,
    scale: float = 1.0,
    impl: Impl = "torch",
    chunk_size: int = 64,
) -> RecurrentOutput:
    """Gated delta rule, exact window included; differentiable in every tensor.

    key must be normalised by the caller (unit length, beta in [0, 2] makes every transition a contraction; longer keys
    may overflow). log_decay is in nats per token and <= 0; neither is checked, that would read the data. `window`
    counts visible tokens, self included; window >= T is the unrestricted operation, bit for bit, and the state returned
    is that of the last `window` tokens. Sums are float32 (float64 for float64 operands) whatever autocast says; out has
    value's dtype, state the working dtype. Cost O(T (C + K) (K + V)) for any window.
    cu_seqlens packs N sequences along time, B = 1: sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1, none
    sees another, initial_state and state are [N, H, K, V]. Its values are read, which waits for the device.
    impl "triton" needs a CUDA device, chunk_size 16, 32 or 64 (an upper bound on its tiles) and K, V <= 256; it takes
    float32, bfloat16 and float16, no float64, and 16-bit operands are multiplied in their own dtype.
    Raises ValueError for shapes that do not fit, window < 1, an initial_state together with a window, unknown impl, or
    operands that impl "triton" cannot take.
    """
    op = "gated_delta_rule"
    check_impl(op, impl)
    bounds = check_recurrent(op, query, key, value, initial_state, window, chunk_size, cu_seqlens)
    check_shape(op, "log_decay", log_decay, tuple(query.shape[:3]), "B, T, H")
    check_shape(op, "beta", beta, tuple(query.shape[:3]), "B, T, H")
    if impl == "naive":
        return gated_delta_rule_naive(query, key, value, log_decay, beta, initial_state, window, scale, bounds)
    if impl == "triton":
        from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton  # imports the compiler

        return gated_delta_rule_triton(
            query, key, value, log_decay, beta, initial_state, window, scale, chunk_size, bounds
        )
    return gated_delta_rule_torch(query, key, value, log_decay, beta, initial_state, window, scale, chunk_size, bounds)
