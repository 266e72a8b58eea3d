"""gated_delta_rule in Triton beside flash-linear-attention: `python benchmarks/kernels_gated_delta_rule.py`.

Medians of triton.testing.do_bench in one process, same inputs, milliseconds. floor_ms is the larger of bytes that must
move over the measured copy bandwidth and products over the measured bfloat16 matmul rate. `--tune` times every
configuration of triton_layout.candidates instead. Needs a CUDA device.
"""

import argparse
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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


def median_ms(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


@functools.cache
def rates() -> tuple[float, float]:
    """Measured copy bandwidth (bytes read and written per ms) and bfloat16 matmul rate (flop per ms)."""
    x = torch.empty(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / median_ms(lambda: y.copy_(x))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return copy, 2 * 8192**3 / median_ms(lambda: a @ a)


def floor_ms(size: tuple[int, int, int, int, int], element: int, direction: str) -> float:
    """Operands read and results written once; products of the chunked form at C = 64, twice for the backward."""
    b, t, h, k, v = size
    backward = direction != "forward"
    moved = b * t * h * element * ((4 * k + 4 * v) if backward else (2 * k + 2 * v))
    flops = 2 * b * t * h * (64 * (2 * k + 2 * v) + 3 * k * v) * (3 if backward else 1)
    copy, matmul = rates()
    return max(moved / copy, flops / matmul)


def ours(tensors: dict[str, Tensor], window: int | None, direction: str, sizes: object = None) -> float:
    """Forward, backward alone on a kept graph, or both."""
    from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton
    from kernels.gated_delta_rule.triton_layout import Tiles

    assert sizes is None or isinstance(sizes, Tiles)
    grad = direction != "forward"
    leaves = [x.detach().clone().requires_grad_(grad) for x in tensors.values()]
    scale = tensors["key"].shape[-1] ** -0.5

    def run() -> Tensor:
        return gated_delta_rule_triton(*leaves, None, window, scale, sizes=sizes).out

    return time_direction(run, leaves, direction)


def time_direction(run: Callable[[], Tensor], leaves: list[Tensor], direction: str) -> float:
    if direction == "forward":
        with torch.no_grad():
            return median_ms(run)
    out = run()
    cotangent = torch.randn_like(out)
    if direction == "backward":
        return median_ms(lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph=True))
    return median_ms(lambda: torch.autograd.grad(run(), leaves, cotangent))


def flash_linear_attention(tensors: dict[str, Tensor], direction: str) -> float:
    """chunk_gated_delta_rule takes [B, T, H, D] operands, g as log decay, beta, and normalised keys."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    leaves = [x.detach().clone().requires_grad_(direction != "forward") for x in tensors.values()]
    q, k, v, g, beta = leaves

    def run() -> Tensor:
        return chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta.to(v.dtype), scale=k.shape[-1] ** -0.5, output_final_state=True
        )[0]

    return time_direction(run, leaves, direction)


def row(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, direction: str, window: int | None
) -> dict[str, object]:
    tensors = operands(size, dtype)
    time = ours(tensors, window, direction)
    peer_name, peer_ms = "", None
    if window is None:
        peer_name = "flash-linear-attention"
        try:
            peer_ms = flash_linear_attention(tensors, direction)
        except Exception as error:  # a peer that fails is a result
            peer_name += f": {type(error).__name__}: {str(error)[:120]}"
    else:
        peer_name, peer_ms = "ours without window", ours(tensors, None, direction)
    return {
        "op": "gated_delta_rule" if window is None else f"gated_delta_rule window {window}",
        "shape": "x".join(map(str, size)),
        "dtype": str(dtype).removeprefix("torch."),
        "direction": direction,
        "ours_ms": time,
        "peer": peer_name,
        "peer_ms": peer_ms,
        "ratio": None if peer_ms is None else time / peer_ms,
        "floor_ms": floor_ms(size, dtype.itemsize, direction),
    }


def rows(quick: bool = False) -> list[dict[str, object]]:
    """One row per shape, direction and window; quick: the first shape only, forward and backward."""
    result = []
    for *size, windows in SHAPES[: 1 if quick else None]:
        shape = tuple(size)
        for window in (None, *(windows[-2:] if quick else windows)):
            for direction in ("forward", "backward") if quick else ("forward", "backward", "forward+backward"):
                try:
                    result.append(row(shape, torch.bfloat16, direction, window))  # type: ignore[arg-type]
                except torch.cuda.OutOfMemoryError as error:
                    result.append(
                        {"op": f"window {window}", "shape": str(shape), "direction": direction, "peer": str(error)[:80]}
                    )
                torch.cuda.empty_cache()
    return result


def kernel_times(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds by kernel name, mean of ten runs."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    return {event.key[:60]: event.device_time_total / 10 for event in record.key_averages() if event.device_time_total}


def tune() -> None:
    """Every configuration: forward and backward, and for the first one the time of each kernel."""
    from kernels.gated_delta_rule.triton_form import gated_delta_rule_triton
    from kernels.gated_delta_rule.triton_layout import candidates

    for *size, _ in (SHAPES[0], SHAPES[1]):
        shape = tuple(size)
        tensors = operands(shape, torch.bfloat16)  # type: ignore[arg-type]
        for window in (None, 2048):
            used = candidates(torch.bfloat16, shape[3], shape[4], window is not None)
            for sizes in [*used, *(used[0]._replace(segment=n) for n in (8, 12, 16, 20, 24, 32, 64))]:
                changed = {n: x for n, x in sizes._asdict().items() if x != getattr(used[0], n)}
                try:
                    times = [ours(tensors, window, direction, sizes) for direction in ("forward", "backward")]
                    print(shape, window, changed or "in use", " ".join(f"{x:.3f}" for x in times), flush=True)
                except Exception as error:  # one configuration that cannot run must not end the table
                    print(shape, window, changed, f"{type(error).__name__}: {str(error)[:100]}", flush=True)
            leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]

            def both(leaves: list[Tensor] = leaves, window: int | None = window) -> object:
                out = gated_delta_rule_triton(*leaves, None, window, 0.1).out
                return torch.autograd.grad(out, leaves, out.detach())

            for name, time in sorted(kernel_times(both).items(), key=lambda item: -item[1]):
                print(f"    {time:8.1f} us  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="first shape only")
    parser.add_argument("--tune", action="store_true", help="time every configuration")
    chosen = parser.parse_args()
    if chosen.tune:
        tune()
    else:
        for line in rows(chosen.quick):
            print(line, flush=True)
