"""Launches of an exact window's walks over spans (triton_spans.py, triton_spans_backward.py) and their buffers.

Forward: factors, carried keys with their sums, states, outputs with tails. Backward: states again, cotangents of q~, of
states and of transitions, d k~ with its own walk, the values' tail, gradients of chunks.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.gated_delta_rule import triton_layout
from kernels.gated_delta_rule.triton_launch import (
    Gradients,
    Parts,
    Problem,
    Saved,
    factors,
    reverse,
    scan,
    strides,
)
from kernels.gated_delta_rule.triton_layout import power_of_two
from kernels.gated_delta_rule.triton_spans import carry_kernel, span_sum_kernel
from kernels.gated_delta_rule.triton_spans_backward import tail_values_kernel, walk_keys_kernel
from kernels.gated_delta_rule.triton_spans_outputs import outputs_kernel, pulled_gradient_kernel

Made = Saved | tuple[Tensor, Tensor, Tensor]


def shapes(p: Problem) -> dict[str, Any]:
    """Constants that every kernel of spans takes."""
    k, v = p.widths
    return {
        "K": k, "V": v, "C": p.sizes.chunk, "BK": power_of_two(k), "BV": power_of_two(v),
        "SINGLE": p.window <= p.sizes.chunk, "PRECISION": p.precision(),
    }  # fmt: skip


def span(p: Problem) -> int:
    return triton_layout.span_tokens(p.window, p.sizes.chunk)


def stages(p: Problem, wanted: int) -> int:
    """A span of one chunk has nothing to fetch ahead."""
    return 1 if p.window <= p.sizes.chunk else wanted


def carry(p: Problem, made: Made, carried: Tensor | None, sums: Tensor | None, transitions: Tensor | None) -> None:
    """Writes k~ and its sums, or the transitions from chunks to the ends of spans."""
    rows = min(p.sizes.carry_rows, power_of_two(p.widths[0]))
    n_tiles = triton_layout.ceil(p.widths[0], rows)
    carry_kernel[(p.n_segments * p.heads * n_tiles,)](
        p.key, p.value, p.beta, *made[1:3], made[0], p.table.chunks, p.table.segments, carried, sums, transitions,
        *strides(p.key), *strides(p.value), *strides(p.beta), *strides(made[1])[:2],
        *((0, 0, 0) if carried is None else strides(carried)), p.heads, p.window, BR=rows, TILES=n_tiles,
        CARRY=carried is not None, SAVE=transitions is not None, num_warps=p.sizes.carry_warps, num_stages=2,
        **shapes(p),
    )  # fmt: skip


def outputs(
    p: Problem, made: Made, carried: Tensor, sums: Tensor, states: Tensor, written: Tensor, out: Tensor | None,
    pulled: Tensor | None,
) -> None:  # fmt: skip
    outputs_kernel[(p.n_chunks * p.heads,)](
        p.query, p.key, p.value, p.beta, made[1], carried, sums, states, written, p.table.of_spans, out, pulled,
        *strides(p.query), *strides(p.key), *strides(p.value), *strides(p.beta), *strides(made[1])[:2],
        *((0, 0, 0) if out is None else strides(out)), *strides(carried), p.heads, p.window, span(p), p.scale,
        MANY=p.masked, OUTPUT=out is not None, SAVE=pulled is not None, num_warps=p.sizes.tail_warps, num_stages=1,
        **shapes(p),
    )  # fmt: skip


def forward(p: Problem) -> tuple[Tensor, Tensor, Saved]:
    """Output, final state [sequences, H, K, V] and what the backward needs."""
    (k, v), h, (b, t) = p.widths, p.heads, p.key.shape[:2]
    made = factors(p)
    carried, sums, out = p.like_key(b, t, h, k), inner_states(p, v), p.like_key(b, t, h, v)
    carry(p, made, carried, sums, None)
    states, written = scan_buffers(p)
    last = p.floats(p.n_sequences, h, k, v + k)
    scan(p, made, p.value, transition=True, ends=(2, last), states=states, written=written)
    outputs(p, made, carried, sums, states, written, out, None)
    last_sum = p.floats(p.n_sequences, h, k, v)
    span_sum_kernel[(p.n_segments * h,)](
        carried, p.value, sums, last_sum, p.table.chunks, p.table.segments, *strides(carried), *strides(p.value), h,
        p.window, span(p), MANY=p.masked, num_warps=p.sizes.tail_warps, num_stages=1, **shapes(p),
    )  # fmt: skip
    state, pulled_last = last[..., :v], last[..., v:].contiguous()
    state = state + pulled_last @ last_sum
    empty = p.floats(0)
    return out, state, Saved(*made, empty, empty, empty, pulled_last, last_sum, carried, sums)


def scan_buffers(p: Problem) -> tuple[Tensor, Tensor]:
    """states, written"""
    k, v = p.widths
    return inner_states(p, v + k), p.like_key(p.n_chunks, p.heads, p.sizes.chunk, v + k)


def inner_states(p: Problem, columns: int) -> Tensor:
    """A state per chunk; nothing where spans are single chunks, whose states are known."""
    single, k = p.window <= p.sizes.chunk, p.widths[0]
    return p.like_key(0) if single else p.like_key(p.n_chunks, p.heads, k, columns)


def backward(p: Problem, saved: Saved, dout: Tensor, dstate: Tensor) -> Gradients:
    (k, v), h, c = p.widths, p.heads, p.sizes.chunk
    b, t = p.key.shape[:2]
    # states again: kept from the forward they would save a tenth of the time and take three times the memory
    states, written = scan_buffers(p)
    pulled, transitions = p.like_key(b, t, h, k), inner_states(p, k)
    if transitions.numel():
        carry(p, saved, None, None, transitions)
    scan(p, saved, p.value, transition=True, states=states, written=written)
    outputs(p, saved, saved.carried, saved.sums, states, written, None, pulled)
    # the last state is its block's own plus transition @ sum
    d_last = (saved.pulled_last.mT @ dstate).contiguous()
    d_transition = (dstate @ saved.last_sum.mT).contiguous()
    more, tables = shapes(p) | {"MANY": p.masked}, (p.table.chunks, p.table.segments)
    dv, tail_dv, cotangents = p.like_key(b, t, h, v), p.like_key(b, t, h, v), p.like_key(p.n_chunks, h, k, v)
    d_pulled, dy_2 = torch.empty_like(saved.carried), torch.empty_like(saved.carried)
    cotangents_2, states_3 = p.like_key(p.n_chunks, h, k, k), inner_states(p, k)
    written_3 = p.like_key(p.n_chunks, h, c, k)
    pulled_gradient_kernel[(p.n_chunks * h,)](
        p.value, dout, saved.carried, saved.sums, p.table.of_spans, d_pulled, *strides(p.value), *strides(dout),
        *strides(d_pulled), h, p.window, span(p), num_warps=p.sizes.tail_warps, num_stages=1, **more,
    )  # fmt: skip
    parts, left = Parts(p, saved, dout, dv), (written, states, cotangents)
    groups: list[Tensor | None] = [d_pulled, dy_2, cotangents_2, saved.carried, written_3, states_3, transitions]
    scores = parts.launch_queries(left, groups)
    reverse(p, saved, dout, dv, v, starts=dstate, cotangents=cotangents, scores=scores)
    reverse(p, saved, d_pulled, dy_2, k, starts=d_transition, cotangents=cotangents_2, scores=scores)
    walk_keys_kernel[(p.n_segments * h,)](
        p.key, p.value, dout, p.beta, saved.since, saved.rest, saved.inverse, pulled, d_last, *tables, states_3,
        written_3, *strides(p.key), *strides(p.value), *strides(dout), *strides(p.beta), *strides(saved.since)[:2],
        *strides(pulled), h, p.window, span(p), num_warps=p.sizes.keys_warps,
        num_stages=stages(p, p.sizes.keys_stages), **more,
    )  # fmt: skip
    tail_values_kernel[(p.n_segments * h,)](
        saved.carried, pulled, dout, d_last, *tables, tail_dv, *strides(dout), *strides(tail_dv),
        *strides(pulled), h, p.window, span(p), num_warps=p.sizes.keys_warps,
        num_stages=stages(p, p.sizes.keys_stages), **more,
    )  # fmt: skip
    parts.launch_rest(left, groups, tail_dv)
    return parts.gradients(tail_dv)
