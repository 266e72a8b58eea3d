"""attention and its statistics by Triton kernels: launches, and their places in autograd and torch.compile.

Two custom operations, forward and backward, so that a compiled caller keeps one graph. Saved for backward: the
operands, out, and one float32 number per query and statistic; probabilities are made again.
"""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention.backward import PADDING, key_value_kernel, query_kernel, row_kernel
from kernels.attention.bands import Band, binding, staircase
from kernels.attention.configurations import (
    FEW_ROWS,
    WIDEST,
    Tiles,
    choose,
    forward_tiles,
    key_value_tiles,
    mass_tiles,
    query_tiles,
)
from kernels.attention.forward import forward_kernel
from kernels.attention.precision import common_dtype
from kernels.attention.span_mass import mass_kernel
from kernels.attention.statistics import AttentionStatistics

INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
FUSED_SPANS = 8  # masses of so many spans are kept by the forward kernel; more take a pass over their keys
L2_BUDGET = 24 * 2**20  # bytes of operands that the heads of one section may stream; an H200 has 50 MB of L2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BEST = (0, 0, 0)  # places in the lists of configurations: forward, key_value, query


def attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None = None,
    configurations: tuple[int, int, int] = BEST,
) -> Tensor:
    work = _supported("attention", query, key, value)
    dtype = value.dtype
    query, key, value = query.to(work), key.to(work), value.to(work)
    with torch.autocast(query.device.type, enabled=False):
        query, scale = _positive(query, scale)
        flat = _flat(bands, key.shape[1])
        out = attention_forward(
            query, key, value, None, sink_logits, None, flat, scale, False, False, list(configurations)
        )[0]
    return out.to(dtype)


def statistics_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bands: tuple[Band, ...],
    scale: float,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    rows: Tensor | None,
    argmax: bool = True,
    configurations: tuple[int, int, int] = BEST,
) -> AttentionStatistics:
    work = _supported("attention_statistics", query, key, value)
    offset, dtype = key.shape[1] - query.shape[1], None if value is None else value.dtype
    query, key = query.to(work), key.to(work)
    value = None if value is None or rows is not None else value.to(work)
    if rows is None:
        positions = None
    else:
        query, positions = query.index_select(1, rows), (rows + offset).to(torch.int32)
    with torch.autocast(query.device.type, enabled=False):
        query, scale = _positive(query, scale)
        flat = _flat(bands, key.shape[1])
        spans = None if spans is None else spans.to(torch.int64).contiguous()
        out, lse, entropy, largest, place, mass, visible = attention_forward(
            query, key, value, positions, sink_logits, spans, flat, scale, True, argmax, list(configurations)
        )
        sink_mass = None
        if sink_logits is not None:
            sink_mass = (sink_logits.float()[None, :, None] - lse).exp()
    return AttentionStatistics(
        None if value is None else out.to(dtype),
        lse,
        entropy,
        largest,
        place if argmax else None,
        sink_mass,
        None if spans is None else mass,
        visible,
    )


def _supported(op: str, query: Tensor, key: Tensor, value: Tensor | None) -> torch.dtype:
    work = common_dtype(query, key, value)
    remedy = "Use impl='torch'."
    if work not in DTYPES:
        raise ValueError(f"{op}: operands are {work}; impl 'triton' has bfloat16, float16 and float32. {remedy}")
    if not INTERPRETED and query.device.type != "cuda":
        raise ValueError(f"{op}: query is on {query.device}; impl 'triton' needs CUDA. {remedy}")
    if INTERPRETED and work == torch.bfloat16:
        raise ValueError(f"{op}: operands are bfloat16; Triton's interpreter is wrong there. Use float32 or a GPU.")
    width = max(query.shape[-1], 0 if value is None else value.shape[-1])
    if width > WIDEST:
        raise ValueError(f"{op}: head width is {width}; impl 'triton' has K and V up to {WIDEST}. {remedy}")
    return work


def _positive(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The kernels scale a row's maximum instead of every score, which needs scale > 0."""
    if scale > 0:
        return query, float(scale)
    return (-query, -float(scale)) if scale < 0 else (query * 0, 1.0)


def _flat(bands: tuple[Band, ...], s: int) -> list[int]:
    return [number for band in staircase(binding(bands, s)) for number in (band.window or 0, band.sinks)]


def _pairs(flat: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple((flat[i], flat[i + 1]) for i in range(0, len(flat), 2))


def _unit(x: Tensor) -> Tensor:
    """x itself unless its last dimension is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of batch, time and heads; a dimension of size 1 is never stepped over and counts as 0."""
    return tuple(0 if x.shape[i] == 1 else x.stride(i) for i in range(3))


def _steps(x: Tensor | None, align: int) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(step // align for step in _strides(x))


def _align(*tensors: Tensor | None) -> int:
    """Largest power of two, up to 16 bytes, of elements that divides every stride: loads become that wide."""
    given = [x for x in tensors if x is not None]
    most = 16 // given[0].element_size()
    return math.gcd(most, *(step for x in given for step in _strides(x)))


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _describable(align: int, *tensors: Tensor | None) -> bool:
    """Whether the tensor memory accelerator can read them: 16-byte strides and addresses, nothing expanded."""
    return all(
        x is None
        or (
            align * x.element_size() == 16
            and x.data_ptr() % 16 == 0
            and all(step > 0 for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)
        )
        for x in tensors
    )


def _descriptor(x: Tensor | None, rows: int) -> TensorDescriptor | None:
    """[B, heads, time, D], blocks of `rows` of one head; time goes last so that the leading 1s of a block vanish."""
    if x is None:
        return None
    whole = 16 // x.element_size()
    shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
    # a dimension of size 1 may have any stride, but the hardware wants multiples of 16 bytes above 0
    steps = [step if size > 1 else whole for step, size in zip(x.transpose(1, 2).stride(), shape, strict=True)]
    return TensorDescriptor(x, shape, [*steps[:3], 1], [1, 1, rows, _padded(x.shape[-1])])


def _section(heads: int, share: int, bytes_of_one: int) -> int:
    """Heads whose streamed operands fit the L2 budget together; `share` heads stream the same operands."""
    return max(1, min(heads, L2_BUDGET // max(bytes_of_one, 1) * share))


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    positions: Tensor | None,
    sink_logits: Tensor | None,
    flat: list[int],
    scale: float,
    statistics: bool,
    argmax: bool,
    configuration: int,
    spans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, t, h, k = query.shape
    s, g = key.shape[1:3]
    v = 0 if value is None else value.shape[-1]
    q_, k_, v_ = _unit(query), _unit(key), None if value is None else _unit(value)
    out = query.new_empty((b, t, h, v))
    lse = query.new_empty((b, h, t), dtype=torch.float32)
    entropy, largest = (lse.new_empty((b, h, t) if statistics else (0,)) for _ in range(2))
    place = lse.new_empty((b, h, t) if argmax else (0,), dtype=torch.int64)
    n = 0 if spans is None else spans.shape[1]
    mass = lse.new_empty((b, h, t, n) if n else (0,))
    visible = lse.new_empty((t,) if statistics else (0,), dtype=torch.int64)
    align = _align(q_, k_, v_)
    describable = positions is None and _describable(align, q_, k_, v_)
    tiles = choose(forward_tiles(query.dtype, _padded(max(k, v))), configuration, describable)
    if positions is not None:
        tiles = tiles._replace(rows=FEW_ROWS, keys=min(tiles.keys, 64), warps=min(tiles.warps, 4), registers=None)
    forward_kernel[(triton.cdiv(t, tiles.rows) * b * h,)](
        _descriptor(q_, tiles.rows) if tiles.descriptors else q_,
        _descriptor(k_, tiles.keys) if tiles.descriptors else k_,
        _descriptor(v_, tiles.keys) if tiles.descriptors else v_,
        positions,
        None if sink_logits is None else sink_logits.contiguous(),
        out,
        lse,
        entropy,
        largest,
        place,
        spans,
        mass,
        visible,
        _steps(q_, align),
        _steps(k_, align),
        _steps(v_, align),
        _pairs(flat),
        scale,
        t,
        s,
        h,
        h // g,
        _section(b * h, h // g, s * (k + v) * query.element_size()),
        b * h,
        K=k,
        V=v,
        BLOCK_K=_padded(k),
        BLOCK_V=_padded(v),
        BLOCK_T=tiles.rows,
        BLOCK_S=tiles.keys,
        ALIGN=align,
        PRECISION=_precision(query.dtype),
        HAS_OUT=value is not None,
        HAS_SINK=sink_logits is not None,
        ROWS=positions is not None,
        ENTROPY=statistics,
        LARGEST=statistics,
        ARGMAX=argmax,
        SPANS=n,
        DESCRIPTOR=tiles.descriptors,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )
    return out, lse, entropy, largest, place, mass, visible


def _launch_mass(
    query: Tensor,
    key: Tensor,
    positions: Tensor | None,
    spans: Tensor,
    lse: Tensor,
    flat: list[int],
    scale: float,
) -> Tensor:
    b, t, h, k = query.shape
    s, g = key.shape[1:3]
    q_, k_ = _unit(query), _unit(key)
    tiles = mass_tiles(query.dtype, _padded(k))[0]
    mass = lse.new_empty((b, h, t, spans.shape[1]))
    if positions is not None:
        tiles = tiles._replace(rows=FEW_ROWS, warps=min(tiles.warps, 4))
    align = _align(q_, k_)
    mass_kernel[(triton.cdiv(t, tiles.rows) * b * h,)](
        q_,
        k_,
        positions,
        lse,
        spans,
        mass,
        _steps(q_, align),
        _steps(k_, align),
        _pairs(flat),
        scale,
        t,
        s,
        h,
        h // g,
        _section(b * h, h // g, s * k * query.element_size()),
        b * h,
        spans.shape[1],
        K=k,
        BLOCK_K=_padded(k),
        BLOCK_T=tiles.rows,
        BLOCK_S=tiles.keys,
        ALIGN=align,
        PRECISION=_precision(query.dtype),
        ROWS=positions is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return mass


@torch.library.custom_op("hybridscope::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    positions: Tensor | None,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    bands: list[int],
    scale: float,
    statistics: bool,
    argmax: bool,
    configurations: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, lse, entropy, largest, argmax, mass, visible; what is not asked for is empty. positions [T] are those of the
    queries, None for the last T; bands are window, sinks, window, sinks, ... of a staircase."""
    with torch.cuda.device_of(query):
        fused = spans is not None and 0 < spans.shape[1] <= FUSED_SPANS
        out, lse, entropy, largest, place, mass, visible = _launch_forward(
            query, key, value, positions, sink_logits, bands, scale, statistics, argmax, configurations[0],
            spans if fused else None,
        )  # fmt: skip
        if spans is not None and not fused:
            mass = _launch_mass(query, key, positions, spans, lse, bands, scale)
    return out, lse, entropy, largest, place, mass, visible


@attention_forward.register_fake
def _(query, key, value, positions, sink_logits, spans, bands, scale, statistics, argmax, configurations):  # type: ignore[no-untyped-def]
    b, t, h, _ = query.shape
    lse = query.new_empty((b, h, t), dtype=torch.float32)
    return (
        query.new_empty((b, t, h, 0 if value is None else value.shape[-1])),
        lse,
        lse.new_empty((b, h, t) if statistics else (0,)),
        lse.new_empty((b, h, t) if statistics else (0,)),
        lse.new_empty((b, h, t) if argmax else (0,), dtype=torch.int64),
        lse.new_empty((0,) if spans is None else (b, h, t, spans.shape[1])),
        lse.new_empty((t,) if statistics else (0,), dtype=torch.int64),
    )


def _row_terms(out: Tensor | None, d_out: Tensor | None, lse: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse in base 2, and do . o + extra (r of the backward kernels), [B, H, T padded]."""
    b, h, t = lse.shape
    padding = PADDING.value
    line = triton.cdiv(t, padding) * padding
    row_lse, row_term = (lse.new_empty((b, h, line)) for _ in range(2))
    has_out = out is not None and d_out is not None
    align = _align(out, d_out) if has_out else 1
    v = 0 if out is None or not has_out else out.shape[-1]
    rows = 64
    row_kernel[(line // rows * b * h,)](
        out,
        d_out,
        lse,
        extra,
        row_lse,
        row_term,
        *(_steps(x, align) for x in (out, d_out)),
        t,
        h,
        V=v,
        BLOCK_V=_padded(v),
        BLOCK_T=rows,
        ALIGN=align,
        HAS_OUT=has_out,
        HAS_EXTRA=extra is not None,
        num_warps=4,
    )
    return row_lse, row_term


def _extra(
    lse: Tensor,
    entropy: Tensor,
    mass: Tensor,
    pi: Tensor | None,
    d_lse: Tensor | None,
    d_entropy: Tensor | None,
    d_mass: Tensor | None,
) -> Tensor | None:
    """The part of r that does not come from out, [B, H, T]; None if there is none."""
    terms = []
    if d_lse is not None:
        terms.append(-d_lse)
    if d_entropy is not None:
        terms.append(d_entropy * (entropy if pi is None else entropy + pi))
    if d_mass is not None:
        terms.append((d_mass * mass).sum(-1))
    return torch.stack(terms).sum(0) if terms else None


@torch.library.custom_op("hybridscope::attention_backward", mutates_args=())
def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    positions: Tensor | None,
    sink_logits: Tensor | None,
    spans: Tensor | None,
    out: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    place: Tensor,
    mass: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    d_entropy: Tensor | None,
    d_largest: Tensor | None,
    d_mass: Tensor | None,
    bands: list[int],
    scale: float,
    query_wanted: bool,
    key_value_wanted: bool,
    configurations: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, sink_logits; those not wanted, or without a cotangent, are empty."""
    b, t, h, k = query.shape
    s, g = key.shape[1:3]
    has_out = d_out is not None and value is not None
    v = value.shape[-1] if has_out and value is not None else 0
    q_, k_ = _unit(query), _unit(key)
    v_, do_ = (None if x is None or not has_out else _unit(x) for x in (value, d_out))
    statistics = d_entropy is not None or d_largest is not None or d_mass is not None
    pi = None if sink_logits is None else (sink_logits.float()[None, :, None] - lse).exp()
    dq, dk, dv, dz = (query.new_empty((0,)) for _ in range(4))
    width = max(k, v)
    with torch.cuda.device_of(query):
        extra = _extra(lse, entropy, mass, pi, d_lse, d_entropy, d_mass)
        row_lse, row_term = _row_terms(out if has_out else None, do_, lse, extra)
        if pi is not None and sink_logits is not None:
            r = row_term[..., :t]
            slope = -r if d_entropy is None else d_entropy - r
            dz = (pi * slope).sum((0, 2)).to(sink_logits.dtype)
        if d_largest is not None and place.numel() == 0:
            place = _launch_forward(query, key, None, positions, None, bands, scale, False, True, configurations[0])[4]
        if statistics:
            d_entropy, d_largest = (
                torch.zeros_like(lse) if x is None else x.contiguous() for x in (d_entropy, d_largest)
            )
            place = lse.new_full(lse.shape, -1, dtype=torch.int64) if place.numel() == 0 else place
        spans_used = spans if d_mass is not None else None
        align = _align(q_, k_, v_, do_)
        strides = [_steps(x, align) for x in (q_, k_, v_, do_)]
        constants = {
            "K": k,
            "V": v,
            "BLOCK_K": _padded(k),
            "BLOCK_V": _padded(v),
            "ALIGN": align,
            "PRECISION": _precision(query.dtype),
            "HAS_OUT": has_out,
            "ROWS": positions is not None,
            "STATISTICS": statistics,
            "MASS": spans_used is not None,
        }
        rest = (
            d_entropy,
            d_largest,
            place,
            None if d_mass is None else d_mass.transpose(2, 3).contiguous(),
            spans_used,
        )
        n = 0 if spans_used is None else spans_used.shape[1]
        streamed = t * (k + v) * query.element_size()

        describable = _describable(align, q_, k_, v_, do_)

        def loaded(tiles: Tiles) -> tuple[Tensor | TensorDescriptor | None, ...]:
            """q, k, v, do, positions, row_lse, row_term as a kernel of these tiles loads them."""
            if not tiles.descriptors:
                return q_, k_, v_, do_, positions, row_lse, row_term
            lines = [
                TensorDescriptor(x, [b * h, x.shape[-1]], [x.shape[-1], 1], [1, tiles.rows])
                for x in (row_lse.flatten(0, 1), row_term.flatten(0, 1))
            ]
            lengths = (tiles.rows, tiles.keys, tiles.keys, tiles.rows)
            tensors = [_descriptor(x, length) for x, length in zip((q_, k_, v_, do_), lengths, strict=True)]
            return *tensors, positions, *lines

        if key_value_wanted:
            tiles = choose(key_value_tiles(query.dtype, _padded(width), statistics), configurations[1], describable)
            dk = key.new_empty((b, s, g, k))
            dv = key.new_empty((b, s, g, v))
            key_value_kernel[(triton.cdiv(s, tiles.keys) * b * g,)](
                *loaded(tiles),
                *rest,
                dk,
                dv,
                *strides,
                _pairs(bands),
                scale,
                t,
                s,
                h,
                h // g,
                _section(b * g, 1, streamed * (h // g)),
                b * g,
                n,
                BLOCK_T=tiles.rows,
                BLOCK_S=tiles.keys,
                DESCRIPTOR=tiles.descriptors,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
                maxnreg=tiles.registers,
                **constants,
            )
        if query_wanted:
            tiles = choose(query_tiles(query.dtype, _padded(width), statistics), configurations[2], describable)
            dq = query.new_empty((b, t, h, k))
            query_kernel[(triton.cdiv(t, tiles.rows) * b * h,)](
                *loaded(tiles),
                *rest,
                dq,
                *strides,
                _pairs(bands),
                scale,
                t,
                s,
                h,
                h // g,
                _section(b * h, h // g, s * (k + v) * query.element_size()),
                b * h,
                n,
                BLOCK_T=tiles.rows,
                BLOCK_S=tiles.keys,
                DESCRIPTOR=tiles.descriptors,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
                maxnreg=tiles.registers,
                **constants,
            )
    return dq, dk, dv, dz


@attention_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    positions,
    sink_logits,
    spans,
    out,
    lse,
    entropy,
    place,
    mass,
    d_out,
    d_lse,
    d_entropy,
    d_largest,
    d_mass,
    bands,
    scale,
    query_wanted,
    key_value_wanted,
    configurations,
):
    b, s, g, k = key.shape
    v = 0 if d_out is None or value is None else value.shape[-1]
    return (
        query.new_empty(query.shape if query_wanted else (0,)),
        query.new_empty((b, s, g, k) if key_value_wanted else (0,)),
        query.new_empty((b, s, g, v) if key_value_wanted else (0,)),
        query.new_empty((0,)) if sink_logits is None else torch.empty_like(sink_logits),
    )


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, positions, sink_logits, spans, bands, scale, statistics, _, configurations = inputs
    out, lse, entropy, _, place, mass, _ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        query, key, value, positions, sink_logits, spans, None if value is None else out, lse, entropy, place, mass
    )
    ctx.bands, ctx.scale, ctx.configurations = bands, scale, configurations
    ctx.statistics, ctx.spanned = statistics, spans is not None


def _backward(ctx, d_out, d_lse, d_entropy, d_largest, d_place, d_mass, d_visible):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    value = saved[2]
    wanted = ctx.needs_input_grad
    if value is None:
        d_out = None
    if not ctx.statistics:
        d_entropy = d_largest = None
    if not ctx.spanned:
        d_mass = None
    if d_out is None and d_lse is None and d_entropy is None and d_largest is None and d_mass is None:
        return (None,) * 11
    key_value_wanted = wanted[1] or (wanted[2] and d_out is not None)
    dq, dk, dv, dz = attention_backward(
        *saved,
        d_out,
        d_lse,
        d_entropy,
        d_largest,
        d_mass,
        ctx.bands,
        ctx.scale,
        wanted[0],
        key_value_wanted,
        ctx.configurations,
    )
    return (
        dq if wanted[0] else None,
        dk if wanted[1] else None,
        dv if wanted[2] and d_out is not None else None,
        None,
        dz if wanted[4] else None,
        *(None,) * 6,
    )


attention_forward.register_autograd(_backward, setup_context=_setup)
