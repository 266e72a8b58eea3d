"""Launches of the Triton kernels: the order of kernels that makes an output and its gradients, and their buffers.

Unrestricted forward: factors of chunks, maps of segments, starts of segments, outputs. Backward: states and written
rows again, cotangents of states by the same two passes in reverse, gradients of chunks. A window adds columns: q~ is
the scan's output with v = 0 started at I in every block; k~ the reverse scan's dy from I at every block's end. Their
gradients are more columns of the same backward: d q~ is a cotangent of outputs with v = 0; and since

    sum over j of d k~_j . k~_j = trace of the block's last state for values d k~

k~'s gradient is that of a forward pass with values d k~, no outputs read, and I as the last state's cotangent.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gated_delta_rule import triton_layout
from kernels.gated_delta_rule.triton_backward import reverse_kernel
from kernels.gated_delta_rule.triton_factors import factors_kernel
from kernels.gated_delta_rule.triton_forward import link_kernel, scan_kernel
from kernels.gated_delta_rule.triton_gradient import gradient_kernel
from kernels.gated_delta_rule.triton_layout import PRECISIONS, Layout, Tiles, power_of_two
from kernels.gated_delta_rule.triton_window import (
    last_sum_kernel,
    tail_kernel,
    tail_key_gradient_kernel,
    tail_query_gradient_kernel,
    tail_states_kernel,
)

INTERPRETED = type(scan_kernel).__name__ == "InterpretedFunction"


class Saved(NamedTuple):
    """What the forward leaves for the backward beside its operands; small against them but for `inverse`."""

    inverse: Tensor  # [chunks, H, C, C] (I + L diag(beta))^-1
    since: Tensor  # [B, T, H] log decay summed from the chunk's or block's first token, later one
    rest: Tensor  # [B, T, H] the same after the token, to the chunk's or block's end
    maps: Tensor  # [segments, H, K, V + K], empty if segments are not linked
    starts: Tensor  # [segments, H, K, V (+ K)], empty if every segment starts at 0
    starts_back: Tensor  # [segments, H, K, K] of the scan that makes k~, empty if segments are not linked
    pulled_last: Tensor  # [sequences, H, K, K] transition of the last window block
    last_sum: Tensor  # [sequences, H, K, V] what the last state takes from the block before
    carried: Tensor  # [B, T, H, K] k~ of windows walked span by span, else empty
    sums: Tensor  # [chunks, H, K, V] of k~_j v_j^T from the chunk to the block's end, likewise


class Problem(NamedTuple):
    """Operands and everything derived from their shapes."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    table: Layout
    window: int
    scale: float
    sizes: Tiles

    @property
    def heads(self) -> int:
        return self.key.shape[2]

    @property
    def widths(self) -> tuple[int, int]:
        return self.key.shape[3], self.value.shape[3]

    @property
    def n_chunks(self) -> int:
        return self.table.chunks.shape[0]

    @property
    def n_segments(self) -> int:
        return self.table.segments.shape[0]

    @property
    def n_sequences(self) -> int:
        return self.table.sequences.shape[0]

    @property
    def ahead(self) -> int:
        return triton_layout.ceil(self.window - 1, self.sizes.chunk)

    @property
    def has_sums(self) -> bool:
        return self.table.blocks.shape[0] > 0

    @property
    def spanned(self) -> bool:
        """The window is walked span by span."""
        return self.window > 0 and bool(self.sizes.spanned)

    @property
    def masked(self) -> bool:
        """Window blocks begin or end inside chunks."""
        return self.window > 0 and (not self.spanned or 2 * self.window <= self.sizes.chunk)

    def precision(self) -> str:
        return PRECISIONS[self.sizes.precision]

    def solve_precision(self) -> str:
        name = PRECISIONS[self.sizes.solve_precision]
        # the interpreter computes in float32 whatever it is told, and does not know bf16x3
        return "ieee" if INTERPRETED else name

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.key.device)

    def like_key(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.key.dtype, device=self.key.device)


def problem(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, bounds: list[int], window: int,
    scale: float, sizes: Tiles,
) -> Problem:  # fmt: skip
    b, t, h, k = key.shape
    if window and sizes.spanned:
        table = triton_layout.span_layout(b, t, tuple(bounds), window, sizes.chunk, key.device)
    else:
        each = triton_layout.counts(b, t, bounds, window, (h, k, value.shape[-1], sizes)).each
        table = triton_layout.layout(b, t, tuple(bounds), window, sizes.chunk, each, key.device)
    return Problem(query, key, value, log_decay, beta, table, window, scale, sizes)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, time and heads."""
    return x.stride()[:3]  # type: ignore[return-value]


def factors(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    c, (width, _) = p.sizes.chunk, p.widths
    inverse = p.like_key(p.n_chunks, p.heads, c, c)
    since, rest = (p.floats(*p.beta.shape) for _ in range(2))
    factors_kernel[(p.n_chunks * p.heads,)](
        p.key, p.log_decay, p.beta, inverse, since, rest, p.table.chunks,
        *strides(p.key), *strides(p.log_decay), *strides(p.beta), *strides(since)[:2], p.heads, width, p.window,
        C=c, BK=min(p.sizes.tile, power_of_two(width)), WINDOW=p.masked, PRECISION=p.precision(),
        SOLVE=p.solve_precision(), num_warps=p.sizes.solve_warps, num_stages=2,
    )  # fmt: skip
    return inverse, since, rest


def scan(
    p: Problem, saved: Saved | tuple[Tensor, Tensor, Tensor], value: Tensor | None, *, transition: bool,
    starts: Tensor | None = None, ends: tuple[int, Tensor] | None = None, out: Tensor | None = None,
    pulled: Tensor | None = None, states: Tensor | None = None, written: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of the forward scan over value's columns, transition columns, or both."""
    (width, _), columns = p.widths, p.sizes.columns
    value_width = 0 if value is None else value.shape[-1]
    value_tiles = triton_layout.ceil(value_width, columns)
    n_tiles = value_tiles + (triton_layout.ceil(width, columns) if transition else 0)
    inverse, since, rest = saved[:3]
    none = (0, 0, 0)
    output = 0 if out is None and pulled is None else 1 if out is not None else 2
    scan_kernel[(p.n_segments * p.heads * n_tiles,)](
        p.query, p.key, value, p.beta, since, rest, inverse, p.table.chunks, p.table.segments, starts,
        ends[1] if ends else None, out, pulled, states, written,
        *strides(p.query), *strides(p.key), *(none if value is None else strides(value)), *strides(p.beta),
        *strides(since)[:2], *(none if out is None else strides(out)), *(none if pulled is None else strides(pulled)),
        p.heads, p.window, p.scale,
        K=width, V=value_width, C=p.sizes.chunk, BK=power_of_two(width), BV=columns, VALUE_TILES=value_tiles,
        TILES=n_tiles, WINDOW=p.masked, LINKED=starts is not None, OUTPUT=output, SAVE=states is not None,
        ENDS=ends[0] if ends else 0, SPANS=p.spanned, PRECISION=p.precision(), num_warps=p.sizes.scan_warps,
        num_stages=p.sizes.scan_stages,
    )  # fmt: skip


def link(
    p: Problem, maps: Tensor, ends: Tensor, *, value_width: int, transition: bool, initial: Tensor | None,
    reverse: bool, seed: bool,
) -> Tensor:  # fmt: skip
    """Starts of all segments, [segments, H, K, columns]; in reverse the cotangents after every segment."""
    width, columns = p.widths[0], p.sizes.columns
    value_tiles = triton_layout.ceil(value_width, columns)
    n_tiles = value_tiles + (triton_layout.ceil(width, columns) if transition else 0)
    starts = p.floats(p.n_segments, p.heads, width, value_width + (width if transition else 0))
    link_kernel[(p.n_sequences * p.heads * n_tiles,)](
        initial, maps, ends, starts, p.table.segments, p.table.sequences, p.heads,
        K=width, V=value_width, BK=power_of_two(width), BV=columns, VALUE_TILES=value_tiles, TILES=n_tiles,
        INITIAL=initial is not None, REVERSE=reverse, SEED=seed, STRIDE=maps.shape[-1], MAP_AT=maps.shape[-1] - width,
        END_STRIDE=ends.shape[-1],
        PRECISION=p.solve_precision(), num_warps=p.sizes.link_warps, num_stages=1 if width > 64 else 2,
    )  # fmt: skip
    return starts


def reverse(
    p: Problem, saved: Saved | tuple[Tensor, Tensor, Tensor], dout: Tensor | None, dy: Tensor | None, width: int, *,
    starts: Tensor | None = None, ends: tuple[int, Tensor] | None = None, cotangents: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of the reverse scan over `width` columns; without dout the scan that makes k~."""
    inverse, since, rest = saved[:3]
    none = (0, 0, 0)
    n_tiles = triton_layout.ceil(width, p.sizes.columns)
    linked = 0 if starts is None else 1 if p.table.linked else 2
    reverse_kernel[(p.n_segments * p.heads * n_tiles,)](
        p.query, p.key, dout, p.beta, since, rest, inverse, scores, p.table.chunks, p.table.segments, starts,
        ends[1] if ends else None, cotangents, dy,
        *strides(p.query), *strides(p.key), *(none if dout is None else strides(dout)), *strides(p.beta),
        *strides(since)[:2], *(none if dy is None else strides(dy)), p.heads, p.window, p.scale,
        K=p.widths[0], V=width, C=p.sizes.chunk, BK=power_of_two(p.widths[0]), BV=p.sizes.columns, TILES=n_tiles,
        OWN=dout is None, WINDOW=p.masked, LINKED=linked, READ=dout is not None, SAVE=dy is not None,
        STATES=cotangents is not None, ENDS=ends[0] if ends else 0, SPANS=p.spanned, PRECISION=p.precision(),
        num_warps=p.sizes.reverse_warps, num_stages=p.sizes.reverse_stages,
    )  # fmt: skip


def reversed_starts(
    p: Problem, saved: Saved | tuple[Tensor, Tensor, Tensor], maps: Tensor, dout: Tensor | None, width: int,
    last: Tensor | None, scores: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Cotangents after every segment, given those after every sequence; the latter where no state passes segments."""
    if not p.table.linked:
        return last
    ends = p.floats(p.n_segments, p.heads, p.widths[0], width)
    reverse(p, saved, dout, None, width, ends=(1, ends), scores=scores)
    own = dout is None
    return link(p, maps, ends, value_width=0 if own else width, transition=own, initial=last, reverse=True, seed=own)


def forward(p: Problem, initial: Tensor | None) -> tuple[Tensor, Tensor, Saved]:
    """Output, final state [sequences, H, K, V] and what the backward needs."""
    (k, v), h = p.widths, p.heads
    windowed = p.window > 0
    made = factors(p)
    maps = starts = empty = p.floats(0)
    if p.table.linked:
        maps = p.floats(p.n_segments, h, k, v + k)
        scan(p, made, p.value, transition=True, ends=(1, maps))
        starts = link(p, maps, maps, value_width=v, transition=windowed, initial=initial, reverse=False, seed=windowed)
    elif initial is not None:
        starts = initial
    given = starts if starts.numel() else None
    b, t = p.key.shape[:2]
    out = p.like_key(b, t, h, v)
    last = p.floats(p.n_sequences, h, k, v + (k if windowed else 0))
    unused = p.like_key(0)
    if not windowed:
        scan(p, made, p.value, transition=False, starts=given, ends=(2, last), out=out)
        return out, last, Saved(*made, maps, starts, empty, empty, empty, unused, unused)
    pulled, carried = (p.like_key(b, t, h, k) for _ in range(2))
    scan(p, made, p.value, transition=True, starts=given, ends=(2, last), out=out, pulled=pulled)
    starts_back = reversed_starts(p, made, maps, None, k, None)
    reverse(p, made, None, carried, k, starts=starts_back)
    sums = tail_sums(p, carried, p.value, False) if p.has_sums else None
    tail(p, pulled, carried, sums, out)
    last_sum = sum_of_last(p, carried, sums)
    state, pulled_last = last[..., :v], last[..., v:].contiguous()
    state = state + pulled_last @ last_sum
    back = empty if starts_back is None else starts_back
    return out, state, Saved(*made, maps, starts, back, pulled_last, last_sum, unused, unused)


def tail_sums(p: Problem, left: Tensor, right: Tensor, cotangent: bool) -> Tensor:
    """[chunks, H, K, V]: what lies behind a query chunk's edge, or its cotangent for a key chunk."""
    k, v = p.widths
    bk, bv = (min(p.sizes.tile, power_of_two(x)) for x in (k, v))
    key_tiles, value_tiles = triton_layout.ceil(k, bk), triton_layout.ceil(v, bv)
    sums = p.like_key(p.n_chunks, p.heads, k, v)
    tail_states_kernel[(p.table.blocks.shape[0] * p.heads * key_tiles * value_tiles,)](
        left, right, sums, p.table.chunks, p.table.blocks, p.table.sequences, *strides(left), *strides(right),
        p.heads, p.window, p.ahead, K=k, V=v, C=p.sizes.chunk, BK=bk, BV=bv, KEY_TILES=key_tiles,
        VALUE_TILES=value_tiles, COTANGENT=cotangent, PRECISION=p.precision(), num_warps=p.sizes.tail_warps,
        num_stages=2,
    )  # fmt: skip
    return sums


def tail(p: Problem, pulled: Tensor, carried: Tensor, sums: Tensor | None, out: Tensor) -> None:
    k, v = p.widths
    bk, bv = (min(p.sizes.tile, power_of_two(x)) for x in (k, v))
    n_tiles = triton_layout.ceil(v, bv)
    tail_kernel[(p.n_chunks * p.heads * n_tiles,)](
        pulled, carried, p.value, sums, out, p.table.chunks, p.table.sequences, *strides(pulled), *strides(p.value),
        *strides(out), p.heads, p.window, p.ahead, K=k, V=v, C=p.sizes.chunk, BK=bk, BV=bv, TILES=n_tiles,
        SUMS=sums is not None, PRECISION=p.precision(), num_warps=p.sizes.tail_warps, num_stages=2,
    )  # fmt: skip


def sum_of_last(p: Problem, carried: Tensor, sums: Tensor | None) -> Tensor:
    k, v = p.widths
    bk, bv = (min(p.sizes.tile, power_of_two(x)) for x in (k, v))
    key_tiles, value_tiles = triton_layout.ceil(k, bk), triton_layout.ceil(v, bv)
    out = p.floats(p.n_sequences, p.heads, k, v)
    last_sum_kernel[(p.n_sequences * p.heads * key_tiles * value_tiles,)](
        carried, p.value, sums, out, p.table.chunks, p.table.sequences, *strides(carried), *strides(p.value), p.heads,
        p.window, K=k, V=v, C=p.sizes.chunk, BK=bk, BV=bv, KEY_TILES=key_tiles, VALUE_TILES=value_tiles,
        SUMS=sums is not None, PRECISION=p.precision(), num_warps=p.sizes.tail_warps, num_stages=2,
    )  # fmt: skip
    return out


class TailGradients(NamedTuple):
    pulled: Tensor  # [B, T, H, K] of q~
    carried: Tensor  # [B, T, H, K] of k~
    value: Tensor  # [B, T, H, V]


def tail_backward(p: Problem, pulled: Tensor, carried: Tensor, dout: Tensor, d_last: Tensor) -> TailGradients:
    k, v = p.widths
    bk, bv = (min(p.sizes.tile, power_of_two(x)) for x in (k, v))
    sums = d_sums = None
    if p.has_sums:
        sums = tail_sums(p, carried, p.value, False)
        d_sums = tail_sums(p, pulled, dout, True)
    d_pulled, d_carried = torch.empty_like(pulled), torch.empty_like(carried)
    dv = p.like_key(*p.value.shape)
    n_tiles = triton_layout.ceil(k, bk)
    shapes = {"K": k, "V": v, "C": p.sizes.chunk, "BK": bk, "BV": bv, "PRECISION": p.precision()}
    tail_query_gradient_kernel[(p.n_chunks * p.heads * n_tiles,)](
        carried, p.value, dout, sums, d_pulled, p.table.chunks, *strides(carried), *strides(p.value), *strides(dout),
        p.heads, p.window, p.ahead, TILES=n_tiles, SUMS=sums is not None, num_warps=p.sizes.tail_warps, num_stages=2,
        **shapes,
    )  # fmt: skip
    tail_key_gradient_kernel[(p.n_chunks * p.heads,)](
        pulled, carried, p.value, dout, d_sums, d_last, d_carried, dv, p.table.chunks, *strides(pulled),
        *strides(p.value), *strides(dout), *strides(dv), p.heads, p.window, p.ahead, p.table.sequence_of,
        SUMS=sums is not None, num_warps=p.sizes.tail_warps, num_stages=2, **shapes,
    )  # fmt: skip
    return TailGradients(d_pulled, d_carried, dv)


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    initial: Tensor | None


def backward(p: Problem, saved: Saved, has_initial: bool, dout: Tensor, dstate: Tensor) -> Gradients:
    (k, v), h, c = p.widths, p.heads, p.sizes.chunk
    windowed = p.window > 0
    b, t = p.key.shape[:2]
    columns = v + (k if windowed else 0)
    given = saved.starts if saved.starts.numel() else None
    states, written = p.like_key(p.n_chunks, h, k, columns), p.like_key(p.n_chunks, h, c, columns)
    pulled = p.like_key(b, t, h, k) if windowed else None
    scan(p, saved, p.value, transition=windowed, starts=given, pulled=pulled, states=states, written=written)
    dv, cotangents = p.like_key(b, t, h, v), p.like_key(p.n_chunks, h, k, v)
    parts, left = Parts(p, saved, dout, dv), (written, states, cotangents)
    scores = None if windowed else parts.launch_queries(left)
    initial = p.floats(p.n_sequences, h, k, v) if has_initial else None
    ends = reversed_starts(p, saved, saved.maps, dout, v, dstate, scores)
    first = (2, initial) if initial is not None else None
    reverse(p, saved, dout, dv, v, starts=ends, cotangents=cotangents, ends=first, scores=scores)
    if pulled is None:
        parts.launch_rest(left)
    else:
        more, tail_dv = window_columns(p, saved, pulled, dout, dstate)
        parts.launch_queries(left, more)
        parts.launch_rest(left, more)
        dv += tail_dv
    return parts.gradients(dv)._replace(initial=initial)


class Parts:
    """Gradients of every chunk from what the scans left: written, states, cotangents, and a window's columns."""

    def __init__(self, p: Problem, saved: Saved, dout: Tensor, dy: Tensor) -> None:
        self.p, self.saved, self.dout, self.dy = p, saved, dout, dy
        self.query, self.key = (p.like_key(*p.key.shape) for _ in range(2))
        self.log_decay, self.beta = (p.floats(*p.beta.shape) for _ in range(2))
        # what queries' launch leaves for keys': dq's pairs
        square = (p.n_chunks, p.heads, p.sizes.chunk, p.sizes.chunk) if p.sizes.gradient_parts else (0,)
        self.pairs = p.like_key(*square)

    def launch_queries(
        self, left: tuple[Tensor, Tensor, Tensor], more: list[Tensor | None] | None = None
    ) -> Tensor | None:
        """What needs no cotangents of states, if it has a launch of its own; returns P [chunks, H, C, C], which is made
        on the way and is half of a reverse scan's work."""
        p, c = self.p, self.p.sizes.chunk
        if not p.sizes.gradient_parts:
            return None
        scores = p.like_key(p.n_chunks, p.heads, c, c)
        self.launch(left, more, queries=True, keys=False, scores=scores)
        return scores

    def launch_rest(
        self, left: tuple[Tensor, Tensor, Tensor], more: list[Tensor | None] | None = None,
        tail_dv: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`more`: a window's columns in the order of the kernel; `tail_dv`, if given, gets dy added."""
        self.launch(left, more, queries=not self.p.sizes.gradient_parts, keys=True, tail_dv=tail_dv)

    def launch(
        self, left: tuple[Tensor, Tensor, Tensor], more: list[Tensor | None] | None, *, queries: bool, keys: bool,
        scores: Tensor | None = None, tail_dv: Tensor | None = None,
    ) -> None:  # fmt: skip
        p, saved, (k, v), h, c = self.p, self.saved, self.p.widths, self.p.heads, self.p.sizes.chunk
        # Products with ones pay from 64 rows on (measured). With eight warps Triton 3.6 gets them wrong (tests on a
        # GPU), and the interpreter has no bfloat16 of its own.
        scan_pairs = INTERPRETED or p.key.dtype == torch.float32 or c < 64 or p.sizes.gradient_warps > 4
        gradient_kernel[(p.n_chunks * h,)](
            p.query, p.key, self.dout, p.beta, saved.since, saved.rest,
            p.table.chunks if p.table.of_spans is None else p.table.of_spans, self.dy, *left, *(more or [None] * 7),
            scores, self.pairs, self.query, self.key, self.log_decay, self.beta, tail_dv, *strides(p.query),
            *strides(p.key), *strides(self.dout), *strides(p.beta), *strides(self.beta)[:2], *strides(self.dy),
            *strides(self.query), h, p.window, p.scale, K=k, V=v, C=c, BK=min(p.sizes.gradient_keys, power_of_two(k)),
            BV=min(p.sizes.gradient_columns, power_of_two(v)), GROUPS=p.window > 0, WINDOW=p.masked, SPANS=p.spanned,
            QUERIES=queries, KEYS=keys, SCAN=scan_pairs, PRECISION=p.precision(), num_warps=p.sizes.gradient_warps,
            num_stages=p.sizes.gradient_stages,
        )  # fmt: skip

    def gradients(self, value: Tensor) -> Gradients:
        return Gradients(self.query, self.key, value, self.log_decay, self.beta, None)


def window_columns(
    p: Problem, saved: Saved, pulled: Tensor, dout: Tensor, dstate: Tensor
) -> tuple[list[Tensor | None], Tensor]:
    """The backward's columns for q~ and k~, in the order gradient_kernel takes them, and the tail's dv."""
    (k, _), h, c = p.widths, p.heads, p.sizes.chunk
    carried, cotangents_3 = torch.empty_like(pulled), p.like_key(p.n_chunks, h, k, k)
    back = saved.starts_back if saved.starts_back.numel() else None
    reverse(p, saved, None, carried, k, starts=back, cotangents=cotangents_3)
    # the last state is its block's own plus transition @ sum
    d_last = saved.pulled_last.mT @ dstate
    d_transition = dstate @ saved.last_sum.mT
    d = tail_backward(p, pulled, carried, dout, d_last)
    dy_2, cotangents_2 = torch.empty_like(pulled), p.like_key(p.n_chunks, h, k, k)
    ends = reversed_starts(p, saved, saved.maps, d.pulled, k, d_transition)
    reverse(p, saved, d.pulled, dy_2, k, starts=ends, cotangents=cotangents_2)
    states_3, written_3 = p.like_key(p.n_chunks, h, k, k), p.like_key(p.n_chunks, h, c, k)
    starts = None
    if p.table.linked:
        added = p.floats(p.n_segments, h, k, k)
        scan(p, saved, d.carried, transition=False, ends=(1, added))
        starts = link(p, saved.maps, added, value_width=k, transition=False, initial=None, reverse=False, seed=False)
    scan(p, saved, d.carried, transition=False, starts=starts, states=states_3, written=written_3)
    return [d.pulled, dy_2, cotangents_2, carried, written_3, states_3, cotangents_3], d.value
