"""Cases of benchmarks/kernels.py: short_conv beside torch's depthwise conv1d and the torch form."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernel_timing import Row, copy_bandwidth, ratio, timed
from kernels.short_conv import short_conv
from kernels.short_conv.triton_form import configs, short_conv_triton

#          B, T, C, W
SHAPES = [(1, 16384, 2816, 4), (8, 16384, 2816, 4), (1, 131072, 2816, 4), (1, 16384, 2816, 8)]


def operands(shape):
    b, t, c, w = shape
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    return {"x": torch.randn(b, t, c, **make), "weight": torch.randn(c, w, **make), "bias": torch.randn(c, **make)}


def conv1d(x):
    width = x["weight"].shape[1]
    inputs = F.pad(x["x"].transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(inputs, x["weight"].unsqueeze(1), x["bias"], groups=inputs.shape[1])).transpose(1, 2)


def torch_form(x):
    return short_conv(**x, activation="silu").out


PEERS = {"torch conv1d": conv1d, "torch form": torch_form, "torch form compiled": torch.compile(torch_form)}


def ours(x, config=None):
    if config is None:
        return short_conv(**x, activation="silu", impl="triton").out
    return short_conv_triton(x["x"], x["weight"], x["bias"], "silu", None, None, config)[0]


def measured(call, tensors, direction: str) -> float | str:
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    return timed(lambda: call(leaves), list(leaves.values()), direction)


def rows(quick: bool) -> Iterator[Row]:
    for shape, direction in itertools.product(SHAPES[:1] if quick else SHAPES, ("forward", "backward")):
        tensors = operands(shape)
        time = measured(ours, tensors, direction)
        floor = (2 if direction == "forward" else 3) * tensors["x"].numel() * 2 / copy_bandwidth()
        for peer, call in PEERS.items():
            peer_time = measured(call, tensors, direction)
            yield {
                "op": "short_conv, silu", "shape": shape, "direction": direction, "ours_ms": time, "peer": peer,
                "peer_ms": peer_time, "ratio": ratio(time, peer_time), "floor_ms": floor,
            }  # fmt: skip


def tune() -> None:
    """Every configuration for the shape's number of taps, the one in use first: forward and backward, milliseconds."""
    for shape in SHAPES[:1] + SHAPES[3:]:
        tensors = operands(shape)
        print(shape)
        for config in configs(shape[3]):
            times = (
                measured(partial(ours, config=config), tensors, direction) for direction in ("forward", "backward")
            )
            shown = (f"{x:.4f}" if isinstance(x, float) else x for x in times)
            print(f"  {tuple(config.forward)!s:32}{tuple(config.backward)!s:34}", *shown, flush=True)
