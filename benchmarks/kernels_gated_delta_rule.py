"""Cases of benchmarks/kernels.py: gated_delta_rule beside flash-linear-attention."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_timing import Row, copy_bandwidth, matmul_rate, print_kernel_times, ratio, timed
from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton
from kernels.gated_delta_rule.triton_layout import Tiles, candidates

# B, T, H, K, V, windows
SHAPES = [
    (1, 16384, 20, 64, 64, (1, 64, 65, 512, 2048, 8192)),
    (1, 8192, 16, 128, 128, (128, 2048)),
    (1, 8192, 32, 128, 128, (2048,)),
    (1, 32768, 16, 128, 128, (2048,)),
    (1, 131072, 16, 128, 128, ()),
    (1, 131072, 20, 64, 64, (2048,)),
]


def operands(size: tuple[int, int, int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    b, t, h, k, v = size
    torch.manual_seed(0)
    return {
        "query": torch.randn(b, t, h, k, device="cuda", dtype=dtype),
        "key": F.normalize(torch.randn(b, t, h, k, device="cuda"), dim=-1).to(dtype),
        "value": torch.randn(b, t, h, v, device="cuda", dtype=dtype),
        "log_decay": -0.1 * torch.rand(b, t, h, device="cuda"),
        "beta": torch.rand(b, t, h, device="cuda"),
    }


def floor_ms(size: tuple[int, int, int, int, int], element: int, direction: str) -> float:
    """Operands read and results written once; products of the chunked form at C = 64, twice for the backward."""
    b, t, h, k, v = size
    backward = direction != "forward"
    moved = b * t * h * element * ((4 * k + 4 * v) if backward else (2 * k + 2 * v))
    flops = 2 * b * t * h * (64 * (2 * k + 2 * v) + 3 * k * v) * (3 if backward else 1)
    return max(moved / copy_bandwidth(), flops / matmul_rate())


def leaves_of(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors.values()]


def ours(tensors: dict[str, Tensor], window: int | None, direction: str, sizes: Tiles | None = None) -> float | str:
    leaves, scale = leaves_of(tensors), tensors["key"].shape[-1] ** -0.5
    return timed(lambda: gated_delta_rule_triton(*leaves, None, window, scale, sizes=sizes).out, leaves, direction)


def flash_linear_attention(tensors: dict[str, Tensor], direction: str) -> float | str:
    """chunk_gated_delta_rule takes [B, T, H, D] operands, g as log decay, beta, and normalised keys."""
    leaves = leaves_of(tensors)
    q, k, v, g, beta = leaves

    def run() -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta.to(v.dtype), scale=k.shape[-1] ** -0.5, output_final_state=True
        )[0]

    return timed(run, leaves, direction)


def rows(quick: bool) -> Iterator[Row]:
    """One row per shape, window and direction; quick: the first two shapes, their last two windows."""
    for *size, windows in SHAPES[: 2 if quick else None]:
        shape, free = tuple(size), {}
        tensors = operands(shape, torch.bfloat16)  # type: ignore[arg-type]
        for window in (None, *(windows[-2:] if quick else windows)):
            for direction in ("forward", "backward"):
                time = ours(tensors, window, direction)
                if window is None:
                    free[direction] = time
                    peers = {"flash-linear-attention": flash_linear_attention(tensors, direction)}
                    if direction == "backward":
                        peers["ours, forward"] = free["forward"]
                else:
                    peers = {"ours without window": free[direction]}
                for peer, peer_time in peers.items():
                    yield {
                        "op": "gated_delta_rule" if window is None else f"gated_delta_rule window {window}",
                        "shape": shape, "direction": direction, "ours_ms": time, "peer": peer, "peer_ms": peer_time,
                        "ratio": ratio(time, peer_time),
                        "floor_ms": floor_ms(shape, 2, direction),  # type: ignore[arg-type]
                    }  # fmt: skip
        torch.cuda.empty_cache()


def tune() -> None:
    """Every configuration: forward and backward, and for the first one the time of each kernel."""
    for *size, _ in (SHAPES[0], SHAPES[1]):
        shape = tuple(size)
        tensors = operands(shape, torch.bfloat16)  # type: ignore[arg-type]
        for window in (None, 2048):
            used = candidates(torch.bfloat16, shape[3], shape[4], window or 0)
            for sizes in [*used, *(used[0]._replace(segment=n) for n in (8, 12, 16, 20, 24, 32, 64))]:
                changed = {n: x for n, x in sizes._asdict().items() if x != getattr(used[0], n)}
                times = (ours(tensors, window, direction, sizes) for direction in ("forward", "backward"))
                shown = (f"{x:.3f}" if isinstance(x, float) else x for x in times)
                print(shape, window, changed or "in use", *shown, flush=True)
            leaves = leaves_of(tensors)
            print_kernel_times(partial(both_ways, leaves, window))


def both_ways(leaves: list[Tensor], window: int | None) -> object:
    out = gated_delta_rule_triton(*leaves, None, window, 0.1).out
    return torch.autograd.grad(out, leaves, out.detach())
