"""Times of kernels.attention on a GPU, beside torch's SDPA and FlexAttention on the same operands.

    python benchmarks/kernels_attention.py [--quick] [--tune] [--json FILE]

floor_ms: the visible pairs' multiplications (2 products forward, 5 backward) at the matmul rate measured in this
process. ratio: peer_ms / ours_ms, above 1 where ours is faster. --tune times every configuration of every kernel.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

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


def milliseconds(run: Callable[[], Any], warmup: int = 50, rep: int = 200) -> float:
    return float(triton.testing.do_bench(run, warmup=warmup, rep=rep, return_mode="median"))


def matmul_rate() -> float:
    """bf16 operations a millisecond."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b)


def operands(b: int, t: int, h: int, g: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(b, t, heads, d, device="cuda", dtype=dtype).requires_grad_() for heads in (h, g, g)]


def backward_of(out: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> Callable[[], Any]:
    outs = [out] if isinstance(out, Tensor) else list(out)
    cotangents = [torch.randn_like(x) for x in outs]
    return lambda: torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)


def timed(run: Callable[[], Any]) -> float | str:
    """Milliseconds, or what the peer said when it could not."""
    try:
        return milliseconds(run)
    except Exception as error:  # a peer may raise anything; its text is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


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


def statistic_rows(x: list[Tensor], base: dict[str, Any], forward_ms: float, floor_ms: float) -> list[dict[str, Any]]:
    """The same pass with statistics, beside the one without: bar 1.15."""
    q, k, v = x
    t, z = q.shape[1], torch.zeros(q.shape[2], device="cuda")
    span = torch.tensor([[t // 4, t // 4 + 64]], device="cuda")
    half = torch.tensor([[0, t // 2]], device="cuda")
    picked = torch.arange(t - 8, t, device="cuda")
    forms: dict[str, Callable[[], Any]] = {
        "lse, entropy, max, mass of 64 keys": lambda: attention_statistics(
            query=q, key=k, value=v, spans=span, argmax=False, impl="triton"
        ),
        "the same and argmax": lambda: attention_statistics(query=q, key=k, value=v, spans=span, impl="triton"),
        "lse, entropy, max, mass of half the keys": lambda: attention_statistics(
            query=q, key=k, value=v, spans=half, argmax=False, impl="triton"
        ),
        "without value": lambda: attention_statistics(query=q, key=k, spans=span, argmax=False, impl="triton"),
        "8 rows": lambda: attention_statistics(query=q, key=k, spans=span, rows=picked, impl="triton"),
        "learned sinks, no statistics": lambda: attention(query=q, key=k, value=v, sink_logits=z, impl="triton"),
    }
    rows = []
    with torch.no_grad():
        for name, form in forms.items():
            ours = milliseconds(form)
            rows.append(
                base
                | {"direction": f"forward: {name}", "ours_ms": ours, "peer": "ours, out alone"}
                | {"peer_ms": forward_ms, "ratio": forward_ms / ours, "floor_ms": floor_ms}
            )
    result = attention_statistics(query=q, key=k, value=v, spans=span, argmax=False, impl="triton")
    assert result.out is not None
    assert result.mass is not None
    slow = milliseconds(backward_of((result.out, result.entropy, result.mass), x))
    rows.append(base | {"direction": "backward of out, entropy, mass", "ours_ms": slow, "floor_ms": 2.5 * floor_ms})
    return rows


def rows(quick: bool) -> list[dict[str, Any]]:
    """One row per shape, direction and peer."""
    rate, found = matmul_rate(), []
    for b, t, h, g, d, bands in SHAPES[:3] + SHAPES[6:7] if quick else SHAPES:
        x = operands(b, t, h, g, d, torch.bfloat16)
        pairs = b * h * int(visible_count(torch.arange(t), bands).sum())
        base = {"op": "attention", "shape": f"B{b} T{t} H{h} G{g} D{d} {list(map(tuple, bands))}", "dtype": "bfloat16"}
        floor = FORWARD_PRODUCTS * 2 * d * pairs / rate

        def ours(x: list[Tensor] = x, bands: tuple[Band, ...] = bands) -> Tensor:
            return attention(query=x[0], key=x[1], value=x[2], bands=bands, impl="triton")

        with torch.no_grad():
            forward = milliseconds(ours)
        backward = milliseconds(backward_of(ours(), x))
        for name, form in peer_forms(x, bands).items():
            with torch.no_grad():
                peer_forward = timed(form)
            try:
                peer_backward = timed(backward_of(form(), x))
            except Exception as error:
                peer_backward = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            both = (
                peer_forward + peer_backward
                if isinstance(peer_forward, float) and isinstance(peer_backward, float)
                else "see above"
            )
            for direction, mine, peer, least in (
                ("forward", forward, peer_forward, floor),
                ("backward", backward, peer_backward, floor * BACKWARD_PRODUCTS / FORWARD_PRODUCTS),
                ("forward + backward", forward + backward, both, floor * (1 + BACKWARD_PRODUCTS / FORWARD_PRODUCTS)),
            ):
                row: dict[str, Any] = base | {"direction": direction, "ours_ms": mine, "peer": name, "peer_ms": peer}
                ratio = peer / mine if isinstance(peer, float) else None
                found.append(row | {"ratio": ratio, "floor_ms": least, "tflops": 1e-9 * rate * least / mine})
        if not bands:
            found += statistic_rows(x, base, forward, floor)
        del x
    return found


def timed_row(shape: str, kernel: str, tiles: Tiles, run: Callable[[], Any], operations: float) -> dict[str, Any]:
    ms = timed(run)
    rate = 1e-9 * operations / ms if isinstance(ms, float) else None
    row = {"shape": shape, "kernel": kernel, "tiles": str(tuple(tiles)), "ms": ms, "tflops": rate}
    print(row, flush=True)
    return row


def tune() -> list[dict[str, Any]]:
    """Every configuration of each kernel; key_value and query kernels alone, with and without statistics."""
    found = []
    for b, t, h, g, d, bands in SHAPES[:3] + SHAPES[4:5] + SHAPES[6:7]:
        q, k, v = (y.detach() for y in operands(b, t, h, g, d, torch.bfloat16))
        flat = [number for band in bands for number in (band.window or 0, band.sinks)]
        product = 2.0 * d * b * h * int(visible_count(torch.arange(t), bands).sum())
        shape = f"B{b} T{t} H{h} G{g} D{d} {list(map(tuple, bands))}"
        given = (q, k, v, None, None, None)
        for statistics, argmax in ((False, False), (True, False), (True, True)):
            name = "forward" + " statistics" * statistics + " argmax" * argmax
            for i, tiles in enumerate(forward_tiles(q.dtype, d)):
                run = partial(triton_form.attention_forward, *given, flat, d**-0.5, statistics, argmax, [i, 0, 0])
                found.append(timed_row(shape, name, tiles, run, 2 * product))
        out, lse, entropy, _, place, mass = triton_form.attention_forward(*given, flat, d**-0.5, True, True, [0, 0, 0])
        d_out = torch.randn_like(out)
        for statistics in (False, True):
            d_entropy = torch.randn_like(lse) if statistics else None
            known = (*given, out, lse, entropy, place, mass, d_out, None, d_entropy, None, None, flat, d**-0.5)
            suffix = " statistics" * statistics
            for i, tiles in enumerate(key_value_tiles(q.dtype, d, statistics)):
                run = partial(triton_form.attention_backward, *known, False, True, [0, i, 0])
                found.append(timed_row(shape, "key_value" + suffix, tiles, run, 4 * product))
            for i, tiles in enumerate(query_tiles(q.dtype, d, statistics)):
                run = partial(triton_form.attention_backward, *known, True, False, [0, 0, i])
                found.append(timed_row(shape, "query" + suffix, tiles, run, 3 * product))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four shapes")
    parser.add_argument("--tune", action="store_true", help="time every configuration instead")
    parser.add_argument("--json", help="write the rows to this file too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device found; these are GPU timings")
    found = tune() if arguments.tune else rows(arguments.quick)
    for row in [] if arguments.tune else found:
        print({name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()})
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
