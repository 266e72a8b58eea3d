"""Times of short_conv beside torch's depthwise conv1d and the torch form, in one process.

    python benchmarks/kernels_short_conv.py [--quick] [--tune]

floor_ms: bytes of x and its results over the copy bandwidth measured here.
"""

import argparse
import itertools
from functools import partial

import torch
import torch.nn.functional as F
import triton

from kernels.short_conv import short_conv
from kernels.short_conv.triton_form import configs, short_conv_triton

#          B, T, C, W
SHAPES = [(1, 16384, 2816, 4), (8, 16384, 2816, 4), (1, 131072, 2816, 4), (1, 16384, 2816, 8)]


def milliseconds(call) -> float:
    return triton.testing.do_bench(call, return_mode="median")


def copy_bandwidth() -> float:
    """Bytes per millisecond read and written by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


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
    return short_conv_triton(x["x"], x["weight"], x["bias"], "silu", None, None, config)


def timed(call, tensors, direction: str) -> float | str:
    """Milliseconds of call(tensors), or of its backward pass alone on a kept graph; an error's text if it raises."""
    try:
        if direction == "forward":
            return milliseconds(lambda: call(tensors))
        leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        out = call(leaves)
        cotangent, inputs = torch.randn_like(out), list(leaves.values())
        return milliseconds(lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True))
    except Exception as error:  # a peer that fails is a result of the benchmark, whatever it raises
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def rows(quick: bool) -> list[dict]:
    bandwidth, result = copy_bandwidth(), []
    for shape, direction in itertools.product(SHAPES[:1] if quick else SHAPES, ("forward", "backward")):
        tensors = operands(shape)
        time = timed(ours, tensors, direction)
        for peer, call in PEERS.items():
            peer_time = timed(call, tensors, direction)
            both = isinstance(time, float) and isinstance(peer_time, float)
            result.append({
                "op": "short_conv, silu", "shape": shape, "dtype": "bfloat16", "direction": direction, "ours_ms": time,
                "peer": peer, "peer_ms": peer_time, "ratio": time / peer_time if both else None,
                "floor_ms": (2 if direction == "forward" else 3) * tensors["x"].numel() * 2 / bandwidth,
            })  # fmt: skip
    return result


def tune() -> None:
    """Every configuration: forward and backward, milliseconds."""
    for shape in SHAPES[:1] + SHAPES[3:]:
        tensors = operands(shape)
        print(shape)
        for config in configs():
            times = (timed(partial(ours, config=config), tensors, direction) for direction in ("forward", "backward"))
            shown = (f"{x:.3f}" if isinstance(x, float) else x for x in times)
            print(f"  {tuple(config)!s:40}", *shown, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true", help="time every configuration")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: no CUDA device found; this benchmark times GPU kernels.\n")
    if options.tune:
        tune()
        return
    for row in rows(options.quick):
        print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row.values()), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
