"""short_conv on a GPU: one pass over x forwards, one over x and d out backwards, for any number of taps.

The kernels are in triton_walk.py. Here: how many programs walk how far, the launches, and autograd. Both passes are
bound by memory (2 and 3 times the bytes of x), so a call costs as much as its launches if the host is slow: one launch
forwards, tail included; two backwards, the second adding up the programs' parts of d weight in a fixed order.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.short_conv.triton_walk import backward_kernel, forward_kernel, initial_kernel, sum_kernel, tail_kernel

OP = "short_conv"
INTERPRETED = triton.knobs.runtime.interpret  # as the kernels were when they were decorated
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORTEST = 16  # tokens of a run at least: at each of its ends W - 1 rows are read twice


class Walk(NamedTuple):
    """How one kernel walks."""

    channels: int  # of a tile
    runs: int  # of tokens, side by side in a tile
    batch: int  # tokens of a run loaded before any of them is used
    ahead: int  # 1: a batch is loaded, into registers, while the one before is used
    stages: int  # > 1: that many batches are under way in shared memory; only if batch >= W - 1
    warps: int
    registers: int  # of a thread at most; 0: as many as the compiler likes
    programs: int  # per multiprocessor


class Config(NamedTuple):
    forward: Walk
    backward: Walk


# Why these. Compiled for sm_90 at W = 4 with SiLU in bfloat16, an element costs 14.5 instructions forwards and 31
# backwards: issued without a pause that is about half and three quarters of the time its bytes need, so what is left to
# choose is how the loads are kept coming. A warp takes 32 threads x 4 channels of one token, 256 bytes in 8-byte loads;
# 4 tokens are under way per warp. Forwards that is 56 registers a thread: 9 programs of 4 warps per multiprocessor.
# Backwards taps, sums and windows of 4 channels are 64 registers; the compiler would take 152 and is held to 128, which
# costs no spills: 4 programs. `programs` is twice what fits, so that every round is a full one, and runs stay long (40
# and 88 tokens at T 16384, C 2816: 3 of them read twice forwards, 6 of x and 3 of d out backwards).
NARROW = (
    Config(Walk(128, 4, 4, 0, 1, 4, 0, 18), Walk(128, 4, 4, 0, 1, 4, 128, 8)),
    # 16-byte loads, 512 bytes a warp: fewest instructions (13.5 forwards), fewest warps
    Config(Walk(256, 4, 4, 0, 1, 4, 0, 8), Walk(256, 4, 2, 0, 1, 4, 0, 4)),
    # 4-byte loads, 128 bytes a warp: most warps
    Config(Walk(64, 4, 4, 0, 1, 4, 0, 24), Walk(64, 4, 4, 0, 1, 4, 0, 12)),
    # the next batch on its way in registers
    Config(Walk(128, 4, 4, 1, 1, 4, 0, 12), Walk(128, 4, 2, 1, 1, 4, 128, 8)),
    # two more batches on their way through shared memory
    Config(Walk(128, 4, 4, 0, 3, 4, 0, 16), Walk(128, 4, 4, 0, 3, 4, 128, 8)),
    # short runs, many programs: more rows read twice, most of them from the caches, and an even end
    Config(Walk(128, 4, 8, 0, 1, 4, 0, 48), Walk(128, 4, 4, 0, 1, 4, 128, 24)),
    # long runs, all programs at once
    Config(Walk(128, 8, 4, 0, 1, 8, 0, 4), Walk(128, 4, 4, 0, 1, 4, 128, 4)),
)
# Windows, taps and sums grow with W: fewer channels per thread (96 and 123 registers at W = 8; 96 and 119 at W = 16).
WIDE = (
    Config(Walk(128, 4, 4, 0, 1, 4, 0, 10), Walk(64, 4, 4, 0, 1, 4, 0, 8)),
    # batches on their way through shared memory; in registers
    Config(Walk(128, 4, 8, 0, 2, 4, 0, 10), Walk(64, 4, 2, 1, 1, 4, 0, 8)),
    # threads own 2 channels forwards, 4 backwards
    Config(Walk(64, 4, 4, 0, 1, 4, 0, 18), Walk(128, 4, 2, 0, 1, 4, 0, 4)),
)
WIDEST = (Config(Walk(64, 4, 2, 0, 1, 4, 0, 10), Walk(32, 4, 2, 0, 1, 4, 0, 8)),)


def configs(width: int) -> tuple[Config, ...]:
    """Configurations for `width` taps: first the one that is used, then those to be timed beside it."""
    return NARROW if width <= 4 else WIDE if width <= 8 else WIDEST


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The smallest power of two >= n; triton's own functions cost as much as a launch on the host."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Launch:
    """Sizes and flags of one call."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
        silu: bool, walk: Walk,
    ) -> None:  # fmt: skip
        self.rows, self.tokens, self.channels = rows, tokens, channels = x.shape
        self.width = width = weight.shape[1]
        self.walk, packed = walk, cu_seqlens is not None
        self.sequences = rows if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.c_tiles = _ceil(channels, walk.channels)
        # Programs over the tokens of one row, and tokens of each of their runs, a whole number of batches.
        parts = max(1, walk.programs * _multiprocessors(x.device) // (rows * self.c_tiles))
        length = max(SHORTEST, _ceil(tokens, parts * walk.runs))
        self.length = _ceil(length, walk.batch) * walk.batch
        self.parts = _ceil(tokens, self.length * walk.runs)
        self.grid = (rows * self.parts * self.c_tiles,)
        # Whatever is not there is not read, but something must be passed.
        self.operands = (
            x, weight, weight if bias is None else bias, x if initial is None else initial,
            weight if cu_seqlens is None else cu_seqlens,
        )  # fmt: skip
        self.flags: dict[str, Any] = {
            "W": width, "W_TILE": _power(width), "HAS_BIAS": bias is not None, "SILU": silu, "PACKED": packed,
        }  # fmt: skip

    def steps(self, initial: Tensor | None) -> dict[str, Any]:
        """Flags of the kernels that walk along all tokens."""
        walk, packed = self.walk, self.flags["PACKED"]
        flags = self.flags | {
            "HAS_INITIAL": initial is not None, "STEPS": self.sequences.bit_length() if packed else 0,
            "RUNS": walk.runs, "C_TILE": walk.channels, "BATCH": walk.batch, "AHEAD": walk.ahead,
            "STAGES": walk.stages, "num_warps": walk.warps,
        }  # fmt: skip
        # The cap is right for at most four taps and wide loads of two-byte values; elsewhere threads would spill.
        if walk.registers and self.width <= 4 and self.channels % 16 == 0 and self.operands[0].element_size() == 2:
            flags["maxnreg"] = walk.registers
        return flags


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    config: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and tail."""
    launch = Launch(x, weight, bias, initial, cu_seqlens, silu, Walk(*config[: len(Walk._fields)]))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tail = x.new_empty((launch.sequences, launch.width - 1, launch.channels))
    forward_kernel[launch.grid](
        *launch.operands, out, tail, x.stride(0), x.stride(1), launch.tokens, launch.sequences, launch.parts,
        launch.length, launch.channels, **launch.steps(initial),
    )  # fmt: skip
    return out, tail


_forward = torch.library.custom_op("hybridscope::short_conv_forward", forward, mutates_args=())


@_forward.register_fake
def _(x, weight, bias, initial, cu_seqlens, silu, config):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty((sequences, weight.shape[1] - 1, x.shape[2]))


def backward(
    d_out: Tensor | None, d_tail: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, silu: bool, needs: list[bool], config: list[int],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of x, weight, bias, initial; None for those not needed."""
    walk = Walk(*config[len(Walk._fields) :])
    if cu_seqlens is not None:  # to follow the boundaries takes registers
        walk = walk._replace(batch=max(1, walk.batch // 2))
    launch = Launch(x, weight, bias, initial, cu_seqlens, silu, walk)
    need_x, need_weight, need_bias, need_initial = needs
    need_initial, sums = need_initial and initial is not None, need_weight or need_bias
    if d_out is None:
        d_out = x.new_zeros(()).expand(x.shape)
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    strides = x.stride(0), x.stride(1), d_out.stride(0), d_out.stride(1)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else x
    d_weight = torch.empty_like(weight)
    d_bias = weight if bias is None else torch.empty_like(bias)
    d_initial = x if initial is None else torch.empty_like(initial)
    if need_x or sums:
        parts = launch.rows * launch.parts
        size = (parts if sums else 0, launch.width + 1, launch.channels)
        d_taps = torch.empty(size, dtype=torch.float32, device=x.device)
        backward_kernel[launch.grid](
            *launch.operands, d_out, d_x, d_taps, *strides, launch.tokens, launch.sequences, launch.parts,
            launch.length, launch.channels, D_X=need_x, SUMS=sums, **launch.steps(initial),
        )  # fmt: skip
        if sums:
            sum_kernel[((launch.width + 1) * _ceil(launch.channels, 32),)](
                d_taps, d_weight, d_bias, parts, launch.channels, W=launch.width, HAS_BIAS=bias is not None,
                P_TILE=64, C_TILE=32, num_warps=4,
            )  # fmt: skip
    if need_initial and launch.width > 1:
        initial_kernel[(launch.c_tiles * _ceil(launch.sequences, launch.walk.runs),)](
            *launch.operands, d_out, d_initial, *strides, launch.tokens, launch.sequences, launch.channels,
            RUNS=launch.walk.runs, C_TILE=launch.walk.channels, num_warps=launch.walk.warps, **launch.flags,
        )  # fmt: skip
    if d_tail is not None and launch.width > 1 and (need_x or need_initial):
        tail_kernel[(launch.sequences * _ceil(launch.channels, 128),)](
            launch.operands[-1], d_tail.contiguous(), d_x, d_initial, launch.tokens, launch.channels, W=launch.width,
            PACKED=cu_seqlens is not None, D_X=need_x, D_INITIAL=need_initial, C_TILE=128, num_warps=4,
        )  # fmt: skip
    return [y if needed else None for y, needed in zip((d_x, d_weight, d_bias, d_initial), needs, strict=True)]


@torch.library.custom_op("hybridscope::short_conv_backward", mutates_args=())
def _backward(
    d_out: Tensor | None, d_tail: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, silu: bool, needs: list[bool], config: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """backward, with an empty tensor for every None: registered operations return tensors only."""
    results = backward(d_out, d_tail, x, weight, bias, initial, cu_seqlens, silu, needs, config)
    d_x, d_weight, d_bias, d_initial = (x.new_empty(0) if y is None else y for y in results)
    return d_x, d_weight, d_bias, d_initial


@_backward.register_fake
def _(d_out, d_tail, x, weight, bias, initial, cu_seqlens, silu, needs, config):
    return tuple(
        x.new_empty(0) if y is None or not needed else torch.empty_like(y, memory_format=torch.contiguous_format)
        for y, needed in zip((x, weight, bias, initial), needs, strict=True)
    )


def _keep(ctx, inputs, output):
    *tensors, silu, config = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = silu, config
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_tail):
    silu, config = ctx.options
    x, weight, bias, initial, cu_seqlens = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    run = _backward if _traced(d_out if d_tail is None else d_tail) else backward
    results = run(d_out, d_tail, x, weight, bias, initial, cu_seqlens, silu, needs, config)
    return *(y if needed else None for y, needed in zip(results, needs, strict=True)), None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, whose Python part costs the host more than the launch.

    One forward with the context: a separate setup_context makes torch inspect forward's signature at every call.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return _gradients(ctx, *gradients)


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
        if not x.is_cuda and not INTERPRETED:
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
) -> tuple[Tensor, Tensor]:
    """Output and tail; `config` overrides the choice of tiles, for tests and tuning."""
    _refuse({"x": x, "weight": weight, "bias": bias, "initial": initial})
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    initial = None if initial is None else initial.to(x.dtype).contiguous()
    bias = None if bias is None else bias.contiguous()
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x.device).contiguous()
    walks = config or configs(weight.shape[1])[0]
    run = _forward if _traced(x) else _Eager.apply
    operands = x, weight.contiguous(), bias, initial, cu_seqlens
    return run(*operands, activation == "silu", [*walks.forward, *walks.backward])
