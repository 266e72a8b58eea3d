"""short_conv on a GPU: one pass over x forwards, one over x and d out backwards, for any number of taps.

    y_t = bias + sum over i of weight[:, i] * x_{t - W + 1 + i}        out_t = y_t or y_t * sigmoid(y_t)

    d y_t = d out_t * (1 or sigma(y_t) (1 + y_t (1 - sigma(y_t))))     y is computed again
    d x_s = sum over i of weight[:, i] * d y_{s + W - 1 - i}
    d weight[:, i] = sum over t of d y_t * x_{t - W + 1 + i}           d bias = sum over t of d y_t

Tokens before a sequence are `initial`, or zeros. Programs own tiles of tokens by channels; sums over tokens go through
one partial sum per program, added up in a fixed order. A tile of the backward pass also computes d y of the W - 1
tokens behind it, so that nothing is written twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

OP = "short_conv"
INTERPRETED = triton.knobs.runtime.interpret  # as the kernels were when they were decorated
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPEAT = 16  # tiles of a program of the backward pass
FEW = 4096  # tokens below which one tile per program is better
PLAIN = ["tokens", "sequences", "tiles"]


class Config(NamedTuple):
    """Tokens and channels of a tile, warps."""

    tokens: int
    channels: int
    warps: int
    back_tokens: int
    back_channels: int
    back_warps: int


DEFAULT = Config(32, 128, 4, 8, 128, 4)


def configs() -> list[Config]:
    """Every configuration that may be chosen, and those that were tried beside it."""
    return [DEFAULT, Config(16, 128, 4, 16, 128, 4), Config(64, 128, 8, 32, 64, 4), Config(16, 256, 4, 16, 256, 8)]


@triton.jit
def bounds(cu_seqlens, at, sequences, tokens, PACKED: tl.constexpr, STEPS: tl.constexpr):
    """Sequence of each token, its first token and its end."""
    low = at * 0
    if PACKED:
        high = low + sequences
        for _ in tl.static_range(STEPS):  # bisection: the last sequence that starts at or before the token
            middle = (low + high) // 2
            starts = tl.load(cu_seqlens + middle, mask=middle < sequences, other=0).to(tl.int64)
            later = (starts > at) | (middle >= sequences)
            high = tl.where(later, middle, high)
            low = tl.where(later | (high - low <= 1), low, middle)
        first = tl.load(cu_seqlens + low).to(tl.int64)
        end = tl.load(cu_seqlens + low + 1).to(tl.int64)
    else:
        first = low
        end = low + tokens
    return low, first, end


@triton.jit
def inputs(
    x, initial, at, sequence, first, end, inside, channel, exists, x_t, C,
    SHIFT: tl.constexpr, W: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """x SHIFT tokens behind tokens `at` of a sequence; before its first token the rows of `initial`, or zeros.

    The mask depends on the place alone: loads of one place for several taps are then one load to the compiler.
    """
    source = at + SHIFT
    real = inside & (source >= first) & (source < end)
    values = tl.load(x + source[:, None] * x_t + channel[None, :], mask=real[:, None] & exists[None, :], other=0.0)
    values = values.to(tl.float32)
    if HAS_INITIAL:
        row = source - first + (W - 1)
        early = inside & (source < first) & (row >= 0)
        place = initial + (sequence * (W - 1) + row)[:, None] * C + channel[None, :]
        values += tl.load(place, mask=early[:, None] & exists[None, :], other=0.0).to(tl.float32)
    return values


@triton.jit
def convolved(
    x, weight, bias, initial, at, sequence, first, end, inside, channel, exists, x_t, C,
    AHEAD: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, T_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):  # fmt: skip
    """y AHEAD tokens behind tokens `at`."""
    y = tl.zeros([T_TILE, C_TILE], tl.float32)
    for i in tl.static_range(W):
        tap = tl.load(weight + channel * W + i, mask=exists, other=0.0).to(tl.float32)
        y += tap[None, :] * inputs(
            x, initial, at, sequence, first, end, inside, channel, exists, x_t, C, AHEAD + i - (W - 1), W, HAS_INITIAL
        )
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=PLAIN)
def forward_kernel(
    x, weight, bias, initial, cu_seqlens, out, x_b, x_t, tokens, sequences, tiles, C,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    STEPS: tl.constexpr, T_TILE: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    c_tiles = tl.cdiv(C, C_TILE)
    program = tl.program_id(0)
    channel = (program % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    exists = channel < C
    row = (program // (c_tiles * tiles)).to(tl.int64)
    at = ((program // c_tiles) % tiles).to(tl.int64) * T_TILE + tl.arange(0, T_TILE)
    inside = at < tokens
    sequence, first, end = bounds(cu_seqlens, at, sequences, tokens, PACKED, STEPS)
    sequence = sequence if PACKED else sequence + row
    y = convolved(
        x + row * x_b, weight, bias, initial, at, sequence, first, end, inside, channel, exists, x_t, C, 0, W, HAS_BIAS,
        HAS_INITIAL, T_TILE, C_TILE,
    )  # fmt: skip
    if SILU:
        y *= tl.sigmoid(y)
    place = out + (row * tokens + at)[:, None] * C + channel[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=inside[:, None] & exists[None, :])


@triton.jit
def d_convolved(
    x, weight, bias, initial, d_out, at, sequence, first, end, inside, channel, exists, x_t, d_t, C,
    AHEAD: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr,
    T_TILE: tl.constexpr, C_TILE: tl.constexpr,
):  # fmt: skip
    """d y AHEAD tokens behind tokens `at`, zeros outside the sequence."""
    reader = at + AHEAD
    real = inside & (reader >= first) & (reader < end)
    place = d_out + reader[:, None] * d_t + channel[None, :]
    d_y = tl.load(place, mask=real[:, None] & exists[None, :], other=0.0).to(tl.float32)
    if SILU:
        y = convolved(
            x, weight, bias, initial, at, sequence, first, end, inside, channel, exists, x_t, C, AHEAD, W, HAS_BIAS,
            HAS_INITIAL, T_TILE, C_TILE,
        )  # fmt: skip
        gate = tl.sigmoid(y)
        d_y *= gate * (1.0 + y * (1.0 - gate))
    return d_y


@triton.jit(do_not_specialize=[*PLAIN, "repeat"])
def backward_kernel(
    x, weight, bias, initial, cu_seqlens, d_out, d_x, d_taps, x_b, x_t, d_b, d_t,
    tokens, sequences, tiles, repeat, C,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_INITIAL: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
    STEPS: tl.constexpr, T_TILE: tl.constexpr, C_TILE: tl.constexpr, W_TILE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """d x of `repeat` tiles, and their part of d weight and d bias: d_taps [programs over tokens, W + 1, C]."""
    c_tiles = tl.cdiv(C, C_TILE)
    program = tl.program_id(0)
    channel = (program % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    exists = channel < C
    over_tokens = (program // c_tiles).to(tl.int64)
    row = over_tokens // tiles
    x += row * x_b
    d_out += row * d_b
    taps = tl.arange(0, W_TILE)[:, None]
    sums = tl.zeros([W_TILE, C_TILE], tl.float32)
    for step in range(0, repeat):
        at = ((over_tokens % tiles) * repeat + step) * T_TILE + tl.arange(0, T_TILE)
        inside = at < tokens
        sequence, first, end = bounds(cu_seqlens, at, sequences, tokens, PACKED, STEPS)
        sequence = sequence if PACKED else sequence + row
        gradient = tl.zeros([T_TILE, C_TILE], tl.float32)
        for i in tl.static_range(W):
            tap = tl.load(weight + channel * W + i, mask=exists, other=0.0).to(tl.float32)
            d_y = d_convolved(
                x, weight, bias, initial, d_out, at, sequence, first, end, inside, channel, exists, x_t, d_t, C,
                W - 1 - i, W, HAS_BIAS, HAS_INITIAL, SILU, T_TILE, C_TILE,
            )  # fmt: skip
            gradient += tap[None, :] * d_y
        if SUMS:
            d_here = d_convolved(
                x, weight, bias, initial, d_out, at, sequence, first, end, inside, channel, exists, x_t, d_t, C, 0, W,
                HAS_BIAS, HAS_INITIAL, SILU, T_TILE, C_TILE,
            )  # fmt: skip
            for i in tl.static_range(W):
                seen = inputs(
                    x, initial, at, sequence, first, end, inside, channel, exists, x_t, C, i - (W - 1), W, HAS_INITIAL
                )
                sums += tl.where(taps == i, tl.sum(d_here * seen, axis=0)[None, :], 0.0)
            sums += tl.where(taps == W, tl.sum(d_here, axis=0)[None, :], 0.0)
        place = d_x + (row * tokens + at)[:, None] * C + channel[None, :]
        tl.store(place, gradient.to(d_x.dtype.element_ty), mask=inside[:, None] & exists[None, :])
    if SUMS:
        place = d_taps + (over_tokens * (W + 1) + taps) * C + channel[None, :]
        tl.store(place, sums, mask=(taps <= W) & exists[None, :])


@triton.jit(do_not_specialize=PLAIN)
def initial_kernel(
    x, weight, bias, initial, cu_seqlens, d_out, d_initial, x_b, x_t, d_b, d_t, tokens, sequences, C,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr, R_TILE: tl.constexpr,
    C_TILE: tl.constexpr,
):  # fmt: skip
    """d initial [sequences, W - 1, C]: row j is the token W - 1 - j places before the sequence."""
    c_tiles = tl.cdiv(C, C_TILE)
    channel = (tl.program_id(0) % c_tiles) * C_TILE + tl.arange(0, C_TILE)
    exists = channel < C
    number = (tl.program_id(0) // c_tiles).to(tl.int64)
    first = number * 0
    end = first + tokens
    if PACKED:
        first = tl.load(cu_seqlens + number).to(tl.int64)
        end = tl.load(cu_seqlens + number + 1).to(tl.int64)
    else:
        x += number * x_b
        d_out += number * d_b
    j = tl.arange(0, R_TILE)
    at = first + j - (W - 1)
    gradient = tl.zeros([R_TILE, C_TILE], tl.float32)
    for i in tl.static_range(W):
        tap = tl.load(weight + channel * W + i, mask=exists, other=0.0).to(tl.float32)
        d_y = d_convolved(
            x, weight, bias, initial, d_out, at, number, first, end, j < W - 1, channel, exists, x_t, d_t, C,
            W - 1 - i, W, HAS_BIAS, True, SILU, R_TILE, C_TILE,
        )  # fmt: skip
        gradient += tap[None, :] * d_y
    place = d_initial + (number * (W - 1) + j)[:, None] * C + channel[None, :]
    tl.store(place, gradient.to(d_initial.dtype.element_ty), mask=(j < W - 1)[:, None] & exists[None, :])


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The smallest power of two >= n; triton's own functions cost as much as a launch on the host."""
    return 1 << max(n - 1, 0).bit_length()


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


class Launch:
    """Sizes and flags of one call."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, config: list[int]):
        self.rows, self.tokens, self.channels = x.shape
        self.width = weight.shape[1]
        self.packed = cu_seqlens is not None
        self.sequences = self.rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.config = Config(*config) if config else DEFAULT
        self.cu_seqlens = weight if cu_seqlens is None else cu_seqlens
        self.flags = {"W": self.width, "HAS_BIAS": bias is not None, "PACKED": self.packed}
        self.steps = self.sequences.bit_length() if self.packed else 0


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    config: list[int],
) -> Tensor:  # fmt: skip
    launch = Launch(x, weight, bias, cu_seqlens, config)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles = _ceil(launch.tokens, launch.config.tokens)
    grid = (launch.rows * tiles * _ceil(launch.channels, launch.config.channels),)
    forward_kernel[grid](
        x, weight, weight if bias is None else bias, x if initial is None else initial, launch.cu_seqlens, out,
        *_strides(x), launch.tokens, launch.sequences, tiles, launch.channels, HAS_INITIAL=initial is not None,
        SILU=silu, STEPS=launch.steps, T_TILE=launch.config.tokens, C_TILE=launch.config.channels,
        num_warps=launch.config.warps, **launch.flags,
    )  # fmt: skip
    return out


_forward = torch.library.custom_op("hybridscope::short_conv_forward", forward, mutates_args=())


@_forward.register_fake
def _(x, weight, bias, initial, cu_seqlens, silu, config):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def backward(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
    silu: bool, needs: list[bool], config: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias, initial; an empty tensor for those not needed."""
    launch = Launch(x, weight, bias, cu_seqlens, config)
    need_x, need_weight, need_bias, need_initial = needs
    size, sums = launch.config, need_weight or need_bias
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    # Tiles of more taps hold more of x at once. Several tiles per program keep the partial sums a few per cent of x.
    tokens = max(1, size.back_tokens * 4 // max(4, _power(launch.width)))
    repeat = REPEAT if launch.rows * launch.tokens >= FEW else 1
    tiles, c_tiles = _ceil(launch.tokens, tokens * repeat), _ceil(launch.channels, size.back_channels)
    operands = (
        x,
        weight,
        weight if bias is None else bias,
        x if initial is None else initial,
        launch.cu_seqlens,
        d_out,
    )
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = launch.rows * tiles if sums else 1
    d_taps = torch.empty(parts, launch.width + 1, launch.channels, dtype=torch.float32, device=x.device)
    if need_x or sums:
        backward_kernel[(launch.rows * tiles * c_tiles,)](
            *operands, d_x, d_taps, *_strides(x), *_strides(d_out), launch.tokens, launch.sequences, tiles,
            repeat, launch.channels, HAS_INITIAL=initial is not None, SILU=silu, STEPS=launch.steps, T_TILE=tokens,
            C_TILE=size.back_channels, W_TILE=_power(launch.width + 1), SUMS=sums,
            num_warps=size.back_warps, **launch.flags,
        )  # fmt: skip
    d_initial = None
    if need_initial and initial is not None:
        d_initial = torch.empty_like(initial)
        if launch.width > 1:
            initial_kernel[(launch.sequences * c_tiles,)](
                *operands, d_initial, *_strides(x), *_strides(d_out), launch.tokens, launch.sequences, launch.channels,
                SILU=silu, R_TILE=_power(launch.width - 1), C_TILE=size.back_channels, num_warps=4,
                **launch.flags,
            )  # fmt: skip
    d_weight = d_bias = None
    if sums:
        total = d_taps.sum(0)
        d_weight = torch.empty_like(weight).copy_(total[:-1].T)
        d_bias = None if bias is None else torch.empty_like(bias).copy_(total[-1])
    x_, weight_, bias_, initial_ = (
        x.new_empty(0) if y is None or not needed else y
        for y, needed in zip((d_x, d_weight, d_bias, d_initial), needs, strict=True)
    )
    return x_, weight_, bias_, initial_


_backward = torch.library.custom_op("hybridscope::short_conv_backward", backward, mutates_args=())


@_backward.register_fake
def _(d_out, x, weight, bias, initial, cu_seqlens, silu, needs, config):
    return tuple(
        torch.empty(y.shape if needed else 0, dtype=y.dtype if needed else x.dtype, device=x.device)
        for y, needed in zip((x, weight, bias, initial), needs, strict=True)
    )


def _keep(ctx, inputs, output):
    *tensors, silu, config = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = silu, config


def _gradients(ctx, d_out):
    silu, config = ctx.options
    needs = list(ctx.needs_input_grad[:4])
    results = (_backward if _traced(d_out) else backward)(d_out, *ctx.saved_tensors, silu, needs, config)
    return *(y if needed else None for y, needed in zip(results, needs, strict=True)), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, whose Python part costs the host more than the launch."""

    forward = staticmethod(forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)


def _traced(x: Tensor) -> bool:
    """A compiler or a mode with tensors of its own is looking: only registered operations may run."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


def _refuse(tensors: dict[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{OP}: {name} is {x.dtype} with impl 'triton'; expected bfloat16, float16 or float32. "
                "Cast it, or use impl='torch'."
            )
        if x.device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                f"{OP}: {name} is on {x.device} with impl 'triton'; expected a CUDA device. "
                "Move it there, or use impl='torch'."
            )


def short_conv_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """The output alone; `config` overrides the choice of tiles, for tests and tuning."""
    _refuse({"x": x, "weight": weight, "bias": bias, "initial": initial})
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    initial = None if initial is None else initial.to(x.dtype).contiguous()
    bias = None if bias is None else bias.contiguous()
    run = _forward if _traced(x) else _Eager.apply
    return run(x, weight.contiguous(), bias, initial, cu_seqlens, activation == "silu", list(config or ()))
