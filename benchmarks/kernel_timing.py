"""How the kernel benchmarks time: medians of device events, the machine's own ceilings, rows printed as they come."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
CYCLES = 2e9  # of the device's clock in a second, about
CALLS, ROUNDS = 10, 6  # timed calls in a round
LONGEST = 1500.0  # milliseconds that the timed calls of one function may take together


@functools.cache
def _l2_flush() -> Tensor:
    return torch.empty(2**28, dtype=torch.uint8, device="cuda")


def milliseconds(run: Callable[[], Any]) -> float:
    """Median device time of run() from a cold L2 cache, without the time that the host needs to launch it.

    The device sleeps while the host queues a round of calls, so that no event waits for Python; an operation of many
    small kernels would otherwise be timed by its launches.
    """
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    once = time.perf_counter() - begin
    rounds = max(1, min(ROUNDS, int(LONGEST / 1e3 / (CALLS * once))))
    found: list[float] = []
    for _ in range(rounds):
        torch.cuda._sleep(int(1.5 * CALLS * (queued + 5e-5) * CYCLES))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
        for start, end in events:
            _l2_flush().zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        found += [start.elapsed_time(end) for start, end in events]
    return statistics.median(found)


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source))


@functools.cache
def matmul_rate() -> float:
    """bf16 operations per millisecond of an 8192^3 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b)


def timed(form: Callable[[], Tensor | tuple[Tensor, ...]], leaves: Sequence[Tensor], direction: str) -> float | str:
    """Milliseconds of form(), or of its backward alone on a kept graph; what it said if it raised.

    `leaves` are the tensors whose gradients are taken; forward runs without a graph.
    """
    try:
        if direction == "forward":
            with torch.no_grad():
                return milliseconds(form)
        out = form()
        outs = [out] if isinstance(out, Tensor) else list(out)
        cotangents = [torch.randn_like(x) for x in outs]
        return milliseconds(lambda: torch.autograd.grad(outs, leaves, cotangents, retain_graph=True, allow_unused=True))
    except Exception as error:  # a peer may raise anything; its text is a result of the benchmark
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:110]}"


def ratio(ours: float | str, peer: float | str | None) -> float | None:
    """ours / peer: below 1 where ours is faster."""
    return ours / peer if isinstance(ours, float) and isinstance(peer, float) else None


def show(row: Row) -> None:
    print(" | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()), flush=True)


def print_kernel_times(run: Callable[[], object]) -> None:
    """Microseconds by kernel, mean of ten runs, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.device_time_total / 10 for event in record.key_averages()}
    for name, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        if microseconds:
            print(f"    {microseconds:8.1f} us  {name}", flush=True)
