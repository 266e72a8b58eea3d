"""Cases of benchmarks/kernels.py: attention beside torch's SDPA and FlexAttention.

The floor counts the visible pairs' multiplications, 2 products forward and 5 backward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.kernel_timing import Row, matmul_rate, milliseconds, ratio, timed
from kernels.attention import Band, attention, attention_statistics, triton_form
from kernels.attention.bands import visible_count
from kernels.attention.configurations import Tiles, forward_tiles, key_value_tiles, query_tiles
from kernels.attention.flex_form import build_plan

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5

# B, T, H, G, D, bands
SHAPES = [
    (1, 16384, 16, 16, 128, ()),
    (1, 16384, 32, 8, 128, ()),
    (1, 16384, 20, 20, 64, ()),
    (4, 4096, 16, 16, 128, ()),
    (1, 16384, 8, 4, 256, ()),
    (1, 16384, 16, 16, 128, (Band(128, 0),)),
    (1, 16384, 16, 16, 128, (Band(1024, 4),)),
    (1, 16384, 16, 16, 128, (Band(4096, 0),)),
    (1, 131072, 8, 2, 128, (Band(1024, 4),)),
    (1, 65536, 8, 2, 128, ()),
]


def operands(b: int, t: int, h: int, g: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(b, t, heads, d, device="cuda", dtype=dtype).requires_grad_() for heads in (h, g, g)]


def peer_forms(x: list[Tensor], bands: tuple[Band, ...]) -> dict[str, Callable[[], Tensor]]:
    q, k, v = (y.transpose(1, 2) for y in x)
    grouped = q.shape[1] != k.shape[1]
    if bands:
        plan = build_plan(q.shape[2], q.shape[2], bands, q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        return {"flex_attention": lambda: compiled(q, k, v, block_mask=plan, enable_gqa=grouped)}

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return {"sdpa flash": flash, "sdpa cudnn": cudnn}


def statistic_rows(x: list[Tensor], base: Row, plain: dict[str, float | str], floor: float) -> Iterator[Row]:
    """The same pass with statistics, beside the one without: bar 1.15."""
    q, k, v = x
    t, z = q.shape[1], torch.zeros(q.shape[2], device="cuda")
    span = torch.tensor([[t // 4, t // 4 + 64]], device="cuda")
    half = torch.tensor([[0, t // 2]], device="cuda")
    picked = torch.arange(t - 8, t, device="cuda")
    statistics = partial(attention_statistics, query=q, key=k, impl="triton")
    forms: dict[str, Callable[[], Any]] = {
        "lse, entropy, max, mass of 64 keys": lambda: statistics(value=v, spans=span, argmax=False),
        "the same and argmax": lambda: statistics(value=v, spans=span),
        "lse, entropy, max, mass of half the keys": lambda: statistics(value=v, spans=half, argmax=False),
        "the same without value": lambda: statistics(spans=span, argmax=False),
        "8 rows": lambda: statistics(spans=span, rows=picked),
        "learned sinks, no statistics": lambda: attention(query=q, key=k, value=v, sink_logits=z, impl="triton"),
    }

    def row(name: str, direction: str, ours: float | str) -> Row:
        peer = plain[direction]
        return base | {"op": f"attention, {name}", "direction": direction, "ours_ms": ours, "peer": "ours, out alone",
                       "peer_ms": peer, "ratio": ratio(ours, peer), "floor_ms": floor}  # fmt: skip

    for name, form in forms.items():
        yield row(name, "forward", timed(form, x, "forward"))

    def differentiable() -> tuple[Tensor, ...]:
        result = statistics(value=v, spans=span, argmax=False)
        return result.out, result.entropy, result.mass

    yield row("out, entropy, mass", "backward", timed(differentiable, x, "backward"))


def rows(quick: bool) -> Iterator[Row]:
    """One row per shape, direction and peer."""
    for b, t, h, g, d, bands in SHAPES[:3:2] + SHAPES[6:7] if quick else SHAPES:
        x = operands(b, t, h, g, d, torch.bfloat16)
        pairs = b * h * int(visible_count(torch.arange(t), bands).sum())
        base: Row = {"op": "attention", "shape": f"B{b} T{t} H{h} G{g} D{d} {list(map(tuple, bands))}"}
        floor = 2 * d * pairs / matmul_rate()
        peers, plain = peer_forms(x, bands), {}
        for direction, products in (("forward", FORWARD_PRODUCTS), ("backward", BACKWARD_PRODUCTS)):

            def form(x: list[Tensor] = x, bands: tuple[Band, ...] = bands) -> Tensor:
                return attention(query=x[0], key=x[1], value=x[2], bands=bands, impl="triton")

            plain[direction] = timed(form, x, direction)
            for name, peer in peers.items():
                peer_ms = timed(peer, x, direction)
                yield base | {
                    "direction": direction, "ours_ms": plain[direction], "peer": name, "peer_ms": peer_ms,
                    "ratio": ratio(plain[direction], peer_ms), "floor_ms": floor * products,
                }  # fmt: skip
        if not bands and d <= 128 and t <= 16384:
            yield from statistic_rows(x, base, plain, floor * FORWARD_PRODUCTS)
        del x


def show_tiles(shape: str, kernel: str, tiles: Tiles, run: Callable[[], Any], operations: float) -> None:
    try:
        ms = milliseconds(run)
        print(shape, kernel, tuple(tiles), f"{ms:.3f} ms {1e-9 * operations / ms:.0f} TFLOP/s", flush=True)
    except Exception as error:  # one configuration that cannot run must not end the table
        print(shape, kernel, tuple(tiles), f"{type(error).__name__}: {str(error)[:100]}", flush=True)


def tune() -> None:
    """Every configuration of each kernel; key_value and query kernels alone, with and without statistics."""
    for b, t, h, g, d, bands in SHAPES[:3:2] + SHAPES[6:7]:
        q, k, v = (y.detach() for y in operands(b, t, h, g, d, torch.bfloat16))
        flat = [number for band in bands for number in (band.window or 0, band.sinks)]
        product = 2.0 * d * b * h * int(visible_count(torch.arange(t), bands).sum())
        shape = f"B{b} T{t} H{h} G{g} D{d} {list(map(tuple, bands))}"
        given = (q, k, v, None, None, None)
        for statistics, argmax in ((False, False), (True, False), (True, True)):
            name = "forward" + " statistics" * statistics + " argmax" * argmax
            for i, tiles in enumerate(forward_tiles(q.dtype, d)):
                run = partial(triton_form.attention_forward, *given, flat, d**-0.5, statistics, argmax, [i, 0, 0])
                show_tiles(shape, name, tiles, run, 2 * product)
        every = triton_form.attention_forward(*given, flat, d**-0.5, True, True, [0, 0, 0])
        out, lse, entropy, _, place, mass, _ = every
        d_out = torch.randn_like(out)
        for statistics in (False, True):
            d_entropy = torch.randn_like(lse) if statistics else None
            known = (*given, out, lse, entropy, place, mass, d_out, None, d_entropy, None, None, flat, d**-0.5)
            suffix = " statistics" * statistics
            for i, tiles in enumerate(key_value_tiles(q.dtype, d, statistics)):
                run = partial(triton_form.attention_backward, *known, False, True, [0, i, 0])
                show_tiles(shape, "key_value" + suffix, tiles, run, 4 * product)
            for i, tiles in enumerate(query_tiles(q.dtype, d, statistics)):
                run = partial(triton_form.attention_backward, *known, True, False, [0, 0, i])
                show_tiles(shape, "query" + suffix, tiles, run, 3 * product)
