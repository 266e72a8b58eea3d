"""Linear attention with one decay per head and token: S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

A decay fixed per head is Lightning Attention (Qin et al. 2024), one per token is Mamba-2 (Dao and Gu 2024).
"""

from jaxtyping import Float, Int
from torch import Tensor

from kernels.linear_decay.naive import linear_decay_naive
from kernels.linear_decay.torch_form import linear_decay_torch
from kernels.operands import Impl, RecurrentOutput, check_impl, check_rank, check_recurrent, check_shape

__all__ = ["RecurrentOutput", "linear_decay"]


def linear_decay(
    *,
    query: Float[Tensor, "B T H K"],
    key: Float[Tensor, "B T H K"],
    value: Float[Tensor, "B T H V"],
    log_decay: Float[Tensor, "H"] | Float[Tensor, "B T H"],
    initial_state: Float[Tensor, "B H K V"] | Float[Tensor, "N H K V"] | None = None,
    cu_seqlens: Int[Tensor, "N+1"] | None = None,
    window: int | None = None,
    scale: float = 1.0,
    impl: Impl = "torch",
    chunk_size: int = 64,
) -> RecurrentOutput:
    """Scalar-decay linear attention, exact window included; differentiable in every tensor.

    log_decay is in nats per token and <= 0 (not checked: that would read the data; positive values grow and may
    overflow). `window` counts visible tokens, self included; window >= T is the unrestricted operation, bit for bit,
    and the state returned is that of the last `window` tokens. Sums are float32 (float64 for float64 operands) whatever
    autocast says; out has value's dtype, state the working dtype. Cost O(T (C + K) (K + V)) for any window.
    `cu_seqlens` = 0, end of sequence 1, ..., T packs N sequences along time (B = 1; initial_state and state are then
    [N, H, K, V]); it is read by the host. "triton" chooses its own chunk size and takes bfloat16, float16 and float32.
    Raises ValueError for shapes that do not fit, window < 1, an initial_state together with a window, unknown impl, or
    operands that the impl cannot take.
    """
    op = "linear_decay"
    check_impl(op, impl)
    bounds = check_recurrent(op, query, key, value, initial_state, window, chunk_size, cu_seqlens)
    if log_decay.ndim == 1:
        check_shape(op, "log_decay", log_decay, (query.shape[2],), "H")
    else:
        check_rank(op, "log_decay", log_decay, 3, "B, T, H or one value per head, H")
        check_shape(op, "log_decay", log_decay, tuple(query.shape[:3]), "B, T, H")
    if impl == "triton":
        from kernels.linear_decay.triton_form import linear_decay_triton

        return linear_decay_triton(query, key, value, log_decay, initial_state, window, scale, cu_seqlens)
    if impl == "naive":
        return linear_decay_naive(query, key, value, log_decay, initial_state, window, scale, bounds)
    return linear_decay_torch(query, key, value, log_decay, initial_state, window, scale, chunk_size, bounds)
