"""Cases of benchmarks/kernels.py: linear_decay beside flash-linear-attention.

Peers: fla.ops.simple_gla.chunk_simple_gla (decay per token as g, per head as g_gamma) and
fla.ops.lightning_attn.chunk_lightning_attn, layout [B, T, H, D].
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernel_timing import Row, copy_bandwidth, print_kernel_times, ratio, timed
from kernels.linear_decay import linear_decay
from kernels.linear_decay.triton_form import configs, linear_decay_triton

#          B, T, H, K, V
SHAPES = [
    (1, 16384, 20, 64, 64),
    (1, 131072, 20, 64, 64),
    (1, 16384, 16, 128, 128),
    (1, 131072, 16, 128, 128),
    (8, 16384, 20, 64, 64),  # S5, lightning
    (4, 16384, 40, 128, 64),  # S5, Mamba-2
]
WINDOWS = (1, 64, 128, 256, 257, 1024, 8192)


def operands(shape, fixed=False, dtype=torch.bfloat16):
    b, t, h, k, v = shape
    torch.manual_seed(0)
    query, key = (torch.randn(b, t, h, k, device="cuda", dtype=dtype) for _ in range(2))
    value = torch.randn(b, t, h, v, device="cuda", dtype=dtype)
    decay = -torch.rand(h if fixed else (b, t, h), device="cuda") * 0.1
    return {"query": query, "key": torch.nn.functional.normalize(key, dim=-1), "value": value, "log_decay": decay}


def measured(call, tensors, direction: str, constant=()) -> float | str:
    leaves = {n: x.detach().requires_grad_(n not in constant) for n, x in tensors.items()}
    return timed(lambda: call(leaves), [x for x in leaves.values() if x.requires_grad], direction)


def simple_gla(x, fixed):
    from fla.ops.simple_gla import chunk_simple_gla

    decay = {"g_gamma" if fixed else "g": x["log_decay"]}
    return chunk_simple_gla(x["query"], x["key"], x["value"], scale=1.0, output_final_state=True, **decay)[0]


def lightning(x, fixed):
    from fla.ops.lightning_attn import chunk_lightning_attn

    if not fixed:
        raise ValueError("only a decay per head")
    return chunk_lightning_attn(
        x["query"], x["key"], x["value"], layer_idx=1, num_layers=24, scale=1.0, output_final_state=True
    )[0]


PEERS = {"fla simple_gla": simple_gla, "fla lightning": lightning}


def moved(shape, fixed, direction) -> int:
    """Bytes that any implementation reads and writes."""
    b, t, h, k, v = shape
    keys, values, decay = 2 * b * t * h * k, 2 * b * t * h * v, 0 if fixed else 4 * b * t * h
    if direction == "forward":
        return 2 * keys + 2 * values + decay
    return 4 * keys + 3 * values + 2 * decay


def ours(x, window=None, config=None):
    if config is None:
        return linear_decay(**x, window=window, impl="triton").out
    named = (x[n] for n in ("query", "key", "value", "log_decay"))
    return linear_decay_triton(*named, None, window, 1.0, None, config).out


def rows(quick: bool) -> Iterator[Row]:
    """A decay per head is a constant of Lightning: no gradient for it; one per token gets its gradient."""
    for shape, fixed in itertools.product(SHAPES[:3:2] if quick else SHAPES, (False, True)):
        tensors, free = operands(shape, fixed), {}
        constant = ("log_decay",) if fixed else ()
        windows = (None, *(w for w in (WINDOWS[1::2] if quick else WINDOWS) if w < shape[1]))
        for window, direction in itertools.product(windows, ("forward", "backward")):
            time = measured(partial(ours, window=window), tensors, direction, constant)
            name = f"linear_decay, decay per {'head' if fixed else 'token'}"
            row = {
                "op": name if window is None else f"{name}, window {window}",
                "shape": shape,
                "direction": direction,
                "ours_ms": time,
            }
            if window is None:
                free[direction] = time
                own = {"ours, forward": free["forward"]} if direction == "backward" else {}
                peers = {n: measured(partial(f, fixed=fixed), tensors, direction, constant) for n, f in PEERS.items()}
                peers |= own
            else:
                peers = {"ours without window": free[direction]}
            floor = moved(shape, fixed, direction) / copy_bandwidth()
            for peer, peer_time in peers.items():
                yield row | {"peer": peer, "peer_ms": peer_time, "ratio": ratio(time, peer_time), "floor_ms": floor}


def tune() -> None:
    """Every configuration: forward, backward without and with the decay's gradient, milliseconds."""
    for shape, window in itertools.product((SHAPES[0], SHAPES[2], SHAPES[5]), (None, 128, 1024)):
        tensors = operands(shape)
        print(shape, "window", window)
        print_kernel_times(partial(both_ways, tensors, window))
        for config, fill in itertools.product(configs(torch.bfloat16), (2,) if window else (2, 3, 4)):
            call = partial(ours, window=window, config=config._replace(fill=fill))
            times = (
                measured(call, tensors, "forward"),
                measured(call, tensors, "backward", ("log_decay",)),
                measured(call, tensors, "backward"),
            )
            shown = (f"{x:.3f}" if isinstance(x, float) else x for x in times)
            print(f"  {tuple(config._replace(fill=fill))!s:60}", *shown, flush=True)


def both_ways(tensors, window) -> object:
    leaves = {n: x.detach().requires_grad_() for n, x in tensors.items()}
    out = ours(leaves, window)
    return torch.autograd.grad(out, list(leaves.values()), out.detach())
