"""gated_delta_rule in Triton, as two custom operators that torch.compile and autograd see as one step each.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

The mathematics of a chunk is in triton_factors.py (the WY inverse) and triton_forward.py, of its gradients in
triton_backward.py, of a window's tail in triton_window.py; triton_launch.py puts the kernels in order.
Precision: products take operands in their own dtype and add in float32; log decays, betas, sums over time and states
are float32; 16-bit operands round the state, the written rows and cotangents to their dtype where a product reads them.
Saved for the backward: the operands, one [C, C] inverse a chunk and one state and map a segment.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gated_delta_rule import triton_launch, triton_layout, triton_spans_launch
from kernels.gated_delta_rule.triton_layout import MAX_DIM, Tiles
from kernels.operands import RecurrentOutput

OP = "gated_delta_rule"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check(query: Tensor, value: Tensor, dtypes: dict[str, torch.dtype], chunk_size: int) -> None:
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(
                f"{OP}: {name} is {dtype} with impl 'triton'; expected float32, bfloat16 or float16. "
                "Use impl='torch' or cast the operands."
            )
    if value.device.type != "cuda" and not triton_launch.INTERPRETED:
        raise ValueError(
            f"{OP}: value is on {value.device} with impl 'triton'; expected a CUDA device. Use impl='torch'."
        )
    for name, width in (("K", query.shape[-1]), ("V", value.shape[-1])):
        if width > MAX_DIM:
            raise ValueError(
                f"{OP}: {name} is {width} with impl 'triton'; expected at most {MAX_DIM}. Use impl='torch'."
            )
    if chunk_size not in (16, 32, 64):
        raise ValueError(
            f"{OP}: chunk_size is {chunk_size} with impl 'triton'; expected 16, 32 or 64. Use impl='torch'."
        )


def _readable(x: Tensor) -> Tensor:
    """`x`, or a copy of it that the kernels can read.

    16-bit rows have to begin at multiples of 16 elements, where Triton sees it: a tile that it loads element by element
    and multiplies on Hopper's tensor cores is stored to the wrong places of shared memory by Triton 3.6 (K = 33, 100 or
    104 gave wrong gradients or an illegal address; 48, 112 and 128 did not).
    """
    whole = 16 if x.element_size() == 2 else 1
    unit = x.stride(-1) == 1 or x.shape[-1] == 1
    if unit and not any(step % whole for step in x.stride()[:-1]) and x.data_ptr() % 16 == 0:
        return x
    return x.new_empty(x.shape).copy_(x)


def _widened(x: Tensor, dims: int = 1) -> Tensor:
    """Zeros after the last `dims` dimensions up to multiples of 16: they add nothing to any product."""
    missing = [-x.shape[-1 - i] % 16 for i in range(dims)]
    return F.pad(x, [n for count in missing for n in (0, count)]) if any(missing) else x


@torch.library.custom_op("hybridscope::gated_delta_rule_forward", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor | None,
    bounds: list[int], window: int, scale: float, sizes: list[int],
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    query, key, value = (_readable(x) for x in (query, key, value))
    p = triton_launch.problem(query, key, value, log_decay, beta, bounds, window, scale, Tiles(*sizes))
    with _device(value):
        if p.spanned:
            out, state, saved = triton_spans_launch.forward(p)
        else:
            out, state, saved = triton_launch.forward(p, None if initial is None else initial.contiguous())
    # an operator's outputs must not be its inputs, nor one another
    own = (x.clone() if x is initial or not x.numel() else x for x in saved)
    return out, state, *own  # type: ignore[return-value]


def _device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the operands'."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@_forward.register_fake
def _(query, key, value, log_decay, beta, initial, bounds, window, scale, sizes):  # type: ignore[no-untyped-def]
    tiles = Tiles(*sizes)
    (b, t, h, k), v = key.shape, value.shape[-1]
    chunks, segments, _, linked = triton_layout.counts(b, t, bounds, window, (h, k, v, tiles))
    sequences = len(bounds) - 1 if bounds else b
    floats = query.new_empty if query.dtype == torch.float32 else beta.new_empty
    columns = v + (k if window else 0)
    wide = (sequences, h, k)
    starts = (segments, h, k, columns) if linked else (sequences, h, k, v) if initial is not None else (0,)
    spanned = window > 0 and bool(tiles.spanned)
    return (
        value.new_empty(b, t, h, v),
        floats(*wide, v),
        key.new_empty(chunks, h, tiles.chunk, tiles.chunk),
        floats(b, t, h),
        floats(b, t, h),
        floats((segments, h, k, v + k) if linked else (0,)),
        floats(starts),
        floats((segments, h, k, k) if linked and window else (0,)),
        floats((*wide, k) if window else (0,)),
        floats((*wide, v) if window else (0,)),
        key.new_empty((b, t, h, k) if spanned else (0,)),
        key.new_empty((chunks, h, k, v) if spanned and window > tiles.chunk else (0,)),
    )


@torch.library.custom_op("hybridscope::gated_delta_rule_backward", mutates_args=())
def _backward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, saved: list[Tensor],
    has_initial: bool, dout: Tensor, dstate: Tensor, bounds: list[int], window: int, scale: float, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    query, key, value, dout = (_readable(x) for x in (query, key, value, dout))
    p = triton_launch.problem(query, key, value, log_decay, beta, bounds, window, scale, Tiles(*sizes))
    with _device(value):
        if p.spanned:
            d = triton_spans_launch.backward(p, triton_launch.Saved(*saved), dout, dstate.contiguous())
        else:
            d = triton_launch.backward(p, triton_launch.Saved(*saved), has_initial, dout, dstate.contiguous())
    initial = beta.new_empty(0) if d.initial is None else d.initial
    return d.query, d.key, d.value, d.log_decay, d.beta, initial


@_backward.register_fake
def _(query, key, value, log_decay, beta, saved, has_initial, dout, dstate, bounds, window, scale, sizes):  # type: ignore[no-untyped-def]
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        beta.new_empty(beta.shape),
        beta.new_empty(beta.shape),
        beta.new_empty(dstate.shape if has_initial else (0,)),
    )


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, log_decay, beta, initial, *ctx.rest = inputs
    ctx.has_initial = initial is not None
    ctx.save_for_backward(query, key, value, log_decay, beta, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.state_shape = output[1].shape
    ctx.set_materialize_grads(False)  # or zeros would be written for everything saved


def _gradients(ctx, dout, dstate, *_):  # type: ignore[no-untyped-def]
    query, key, value, log_decay, beta, *saved = ctx.saved_tensors
    dout = torch.zeros_like(value) if dout is None else dout
    dstate = beta.new_zeros(ctx.state_shape) if dstate is None else dstate
    gradients = _backward(query, key, value, log_decay, beta, saved, ctx.has_initial, dout, dstate, *ctx.rest)
    needed = (gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad[:6], strict=True))
    return *needed, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def gated_delta_rule_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    chunk_size: int = 64,
    bounds: list[int] | None = None,
    sizes: Tiles | None = None,
) -> RecurrentOutput:
    """`sizes` overrides the configuration chosen by shape and dtype, for tests and tuning."""
    named = {"query": query, "key": key, "value": value, "log_decay": log_decay, "beta": beta}
    named |= {} if initial_state is None else {"initial_state": initial_state}
    _check(query, value, {name: x.dtype for name, x in named.items()}, chunk_size)
    longest = query.shape[1] if bounds is None else max(b - a for a, b in pairwise(bounds))
    window = 0 if window is None or window >= longest else window
    # mixed operands meet in the widest of their dtypes; out still comes back in value's
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    key_width, value_width = query.shape[-1], value.shape[-1]
    inputs = [x.to(dtype) for x in (query, key, value)]
    initial = None if initial_state is None else initial_state.float()
    if dtype != torch.float32:
        inputs = [_widened(x) for x in inputs]
        initial = None if initial is None else _widened(initial, 2)
    sizes = sizes or triton_layout.tiles(dtype, inputs[0].shape[-1], inputs[2].shape[-1], window, chunk_size)
    out, state, *_ = _forward(
        *inputs,
        log_decay.float(),
        beta.float(),
        initial,
        bounds or [],
        window,
        float(scale),
        list(sizes),
    )
    return RecurrentOutput(out[..., :value_width].to(value.dtype), state[..., :key_width, :value_width])
