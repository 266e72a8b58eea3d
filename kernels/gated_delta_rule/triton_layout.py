"""How the Triton form lays out time: chunks, segments of chunks, sequences, window blocks; and the sizes of its tiles.

Chunks of C tokens are counted from the start of each sequence and never aligned to a window: a chunk may hold the end
of one window block and the start of the next, and masks keep them apart. So no window pads anything. A segment is a run
of chunks that one program walks through; segments are what makes few heads fill a GPU. Segments are linked by a pass
that finds the states between them, unless every one of them begins with a window block (w a multiple or a divisor of
C): no state passes from one block to the next.

With `spanned` tiles windows are cut otherwise: every block, or as many blocks as a chunk holds, is a span with its own
chunks (triton_spans.py).
"""

import functools
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

MAX_DIM = 256
PRECISIONS = ("ieee", "tf32x3", "tf32", "bf16x3")


class Tiles(NamedTuple):
    """Sizes of tiles, warps and pipeline stages of every kernel; integers only, so that an operator can take them."""

    chunk: int = 64
    columns: int = 64  # columns of the state one program holds
    tile: int = 64  # keys and values in one product of the factors and of a window's tail
    precision: int = 0  # index in PRECISIONS of float32 products of operands
    solve_precision: int = 0  # of the products that join inverses and segment maps
    solve_warps: int = 4
    scan_warps: int = 4
    scan_stages: int = 2
    link_warps: int = 8
    reverse_warps: int = 4
    reverse_stages: int = 2
    gradient_columns: int = 64
    gradient_keys: int = 64
    gradient_warps: int = 4
    gradient_stages: int = 1
    tail_warps: int = 4
    linked_key: int = 128  # one segment a sequence above this K: a segment's map [K, K] no longer fits a program
    segment: int = 0  # chunks in a segment, 0: chosen by `segment_chunks`
    spanned: int = 0  # 1: windows are walked span by span
    gradient_parts: int = 0  # 1: gradients of queries and of keys in two launches, fewer registers each
    carry_rows: int = 64  # of the carried transition one program holds
    carry_warps: int = 4
    keys_warps: int = 4
    keys_stages: int = 2


LONG_SPAN = 4096  # tokens of a span above which few programs are left, so that each takes fewer columns


def tiles(dtype: torch.dtype, key_width: int, value_width: int, window: int = 0, chunk_size: int = 64) -> Tiles:
    """The configuration for these operands, window 0 meaning none; measured on an H200.

    Products of float32 are exact to float32; 16-bit ones join in bf16x3.
    """
    if dtype == torch.float32:
        # products on the scalar units keep whole rows of both operands: small tiles, or they spill
        return Tiles(
            chunk=min(chunk_size, 32 if key_width <= 64 else 16),
            columns=16,
            tile=16,
            scan_warps=8,
            scan_stages=1,
            reverse_warps=8,
            reverse_stages=1,
            gradient_columns=16,
            gradient_keys=16,
            tail_warps=8,
            linked_key=64,
        )
    wide, narrow, usual = key_width > 128, max(key_width, value_width) <= 64, max(key_width, value_width) <= 128
    used = Tiles(
        chunk=chunk_size,
        columns=min(16 if wide else 64 if usual else 32, power_of_two(value_width)),
        solve_precision=3,
        solve_warps=2,
        # Never 8 warps and never a single stage in the scans: Triton 3.6 then lets keys of 128 read beyond shared
        # memory. Both ways it stores a tile from registers where asynchronous copies would have filled it.
        gradient_columns=32,
        gradient_keys=32,
        gradient_warps=8,
        tail_warps=8 if key_width > 64 else 4,
    )
    if not usual:
        return used
    used = used._replace(gradient_columns=64, gradient_keys=64, gradient_warps=4)
    if not window and narrow:
        return used
    used = used._replace(gradient_parts=1)
    if not window:
        return used._replace(gradient_stages=2)
    if window > LONG_SPAN:
        return used._replace(spanned=1, columns=16, carry_rows=16) if narrow else used._replace(columns=32)
    if chunk_size < window <= 3 * chunk_size // 2:  # three half chunks hold a block with less left over than two
        used = used._replace(chunk=max(16, chunk_size // 2))
    # Wide keys with four warps: d k~'s walk through several chunks spills, outputs do not and are faster.
    keys_warps = 8 if key_width > 64 and window > used.chunk else 4
    gradient_stages = 2 if not narrow and used.chunk <= window and used.chunk == chunk_size else 1
    return used._replace(spanned=1, tail_warps=4, keys_warps=keys_warps, gradient_stages=gradient_stages)


def candidates(dtype: torch.dtype, key_width: int, value_width: int, window: int = 0) -> list[Tiles]:
    """Configurations worth timing, the one in use first; a test runs each of them."""
    used = tiles(dtype, key_width, value_width, window)
    if dtype == torch.float32:
        changes: list[dict[str, int]] = [{}, {"chunk": 16}, {"gradient_warps": 8, "solve_warps": 8}]
    else:
        changes = [
            {},
            {"columns": 16},
            {"columns": 32},
            {"columns": 64},
            {"gradient_stages": 1},
            {"gradient_parts": 1, "gradient_stages": 2},
            {"scan_stages": 3, "reverse_stages": 3, "tail_warps": 8},
            {"gradient_warps": 4, "solve_warps": 4},
            {"gradient_columns": 64, "gradient_keys": 64, "solve_warps": 8, "link_warps": 4},
            # one launch with tiles of 64, four warps and two stages gives wrong gradients of queries at K = 128
            {
                "gradient_parts": 0,
                "gradient_columns": 32,
                "gradient_keys": 32,
                "gradient_warps": 8,
                "gradient_stages": 1,
            },
            {"gradient_warps": 8, "gradient_stages": 1},
            {"chunk": 32},
            {"solve_precision": 1},
        ]
        if used.spanned:
            changes += [{"spanned": 0, "columns": 32}, {"carry_rows": 32, "columns": 32}]
    found = [used._replace(**change) for change in changes]
    return list(dict.fromkeys(found))


def power_of_two(n: int) -> int:
    """The next power of two, at least 16, the smallest side of a matrix product."""
    return max(16, 1 << (n - 1).bit_length())


def ceil(a: int, b: int) -> int:
    return -(-a // b)


# Programs of the output scan that an H200 holds at once: 132 multiprocessors, two each.
PROGRAMS = 264


# Above this many chunks in a window block too few programs walk through whole blocks to fill a device.
WHOLE_BLOCKS = 64


def block_chunks(window: int, chunk: int) -> int:
    """Chunks after which a window block begins together with a chunk, every time; 0 if segments have to be linked."""
    if not window or (window % chunk and chunk % window) or window > WHOLE_BLOCKS * chunk:
        return 0
    return max(1, window // chunk)


def segment_chunks(
    chunks: int, longest: int, heads: int, key_width: int, value_width: int, sizes: Tiles, window: int
) -> int:
    """Chunks in a segment: enough segments to fill the device, none shorter than 8 chunks."""
    if whole := block_chunks(window, sizes.chunk):
        return min(ceil(sizes.segment or 8, whole) * whole, longest)
    if key_width > sizes.linked_key:
        return longest
    if sizes.segment:
        return min(sizes.segment, longest)
    segments = max(1, PROGRAMS // (heads * ceil(value_width, sizes.columns)))
    return min(max(8, ceil(chunks, segments)), longest)


def span_tokens(window: int, chunk: int) -> int:
    """Tokens of a span: one window block, or as many whole blocks as a chunk holds."""
    return max(1, chunk // window) * window


class Layout(NamedTuple):
    """Tables on the device; every row is four int32."""

    chunks: Tensor  # [chunks, 4] batch row, first token, start and end of its sequence
    segments: Tensor  # [segments, 4] first chunk, end chunk, sequence, 1 if a window block begins inside
    sequences: Tensor  # [sequences, 4] first segment, end segment, first chunk, end chunk
    blocks: Tensor  # [blocks, 4] first and end of the chunks that start in a window block, its number, its sequence
    sequence_of: Tensor  # [chunks] the sequence of every chunk
    linked: bool  # states pass between segments of a sequence
    of_spans: Tensor | None = None  # [chunks, 5] as chunks, and 1 if a span lies before the chunk's, 2 more if behind


def spans(batch: int, tokens: int, bounds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(batch row, start, end) of every sequence."""
    if bounds:
        return [(0, a, b) for a, b in pairwise(bounds)]
    return [(row, 0, tokens) for row in range(batch)]


class Counts(NamedTuple):
    chunks: int
    segments: int
    each: int  # chunks in a segment
    linked: bool


def counts(batch: int, tokens: int, bounds: list[int], window: int, segment_of: tuple[int, int, int, Tiles]) -> Counts:
    """The sizes of a layout, without making tables (shapes of buffers)."""
    sizes = segment_of[-1]
    lengths = [b - a for a, b in pairwise(bounds)] or [tokens] * batch
    if window and sizes.spanned:
        span = span_tokens(window, sizes.chunk)
        chunks = sum(n // span * ceil(span, sizes.chunk) + ceil(n % span, sizes.chunk) for n in lengths)
        return Counts(chunks, sum(ceil(n, span) for n in lengths), ceil(span, sizes.chunk), False)
    per = [ceil(length, sizes.chunk) for length in lengths]
    each = segment_chunks(sum(per), max(per), *segment_of, window)
    segments = sum(ceil(n, each) for n in per)
    return Counts(sum(per), segments, each, segments > len(per) and not block_chunks(window, sizes.chunk))


@functools.lru_cache(maxsize=32)
def span_layout(
    batch: int, tokens: int, bounds: tuple[int, ...], window: int, chunk: int, device: torch.device
) -> Layout:
    """Tables for spans: chunks name their span's start and end as their sequence's; segments are the spans.

    A segment's last entry adds 1 if a span lies before it in its sequence, 2 if one lies behind, 4 if the last token's
    window may reach tokens of it that are not of the last token's block.
    """
    span = span_tokens(window, chunk)
    chunks, segments, sequences = [], [], []
    n_chunks = n_segments = 0
    for number, (row, start, end) in enumerate(spans(batch, tokens, bounds)):
        first = torch.arange(start, end, span)
        last = (first + span).clamp(max=end)
        own = (last - first + chunk - 1) // chunk
        high = own.cumsum(0) + n_chunks
        behind = torch.arange(len(first) - 1, -1, -1)
        reached = (behind == 1) | ((behind == 0) & (window <= chunk // 2))
        flags = (first > start).long() + 2 * (behind > 0) + 4 * reached
        segments.append(torch.stack([high - own, high, torch.full_like(first, number), flags], 1))
        of_span = torch.repeat_interleave(torch.arange(len(first)), own)
        within = torch.arange(n_chunks, n_chunks + int(own.sum())) - (high - own)[of_span]
        at = first[of_span] + within * chunk
        chunks.append(torch.stack([torch.full_like(at, row), at, first[of_span], last[of_span]], 1))
        sequences.append((n_segments, n_segments + len(first), n_chunks, n_chunks + int(own.sum())))
        n_chunks, n_segments = n_chunks + int(own.sum()), n_segments + len(first)

    def table(rows: list[Tensor]) -> Tensor:
        return torch.cat(rows).to(torch.int32).to(device)

    none = torch.zeros(0, 4, dtype=torch.int32, device=device)
    rows = torch.tensor(sequences, dtype=torch.int32).to(device)
    around = [(x[:, 2:3] > x[0, 1]).long() + 2 * (x[:, 3:4] < x[-1, 3]).long() for x in chunks]
    flagged = torch.cat([torch.cat(pair, 1) for pair in zip(chunks, around, strict=True)]).to(torch.int32).to(device)
    return Layout(table(chunks), table(segments), rows, none, none[:, 0], False, flagged)


@functools.lru_cache(maxsize=32)
def layout(
    batch: int, tokens: int, bounds: tuple[int, ...], window: int, chunk: int, each: int, device: torch.device
) -> Layout:
    """Tables for sequences cut into chunks, and chunks into segments of `each`; window 0 means none."""
    chunks, segments, sequences, blocks, numbers = [], [], [], [], []
    n_chunks = n_segments = 0
    for number, (row, start, end) in enumerate(spans(batch, tokens, bounds)):
        own = ceil(end - start, chunk)
        first = torch.arange(start, end, chunk)
        chunks.append(torch.stack([torch.full_like(first, x) for x in (row, 0, start, end)], 1))
        chunks[-1][:, 1] = first
        numbers.append(torch.full_like(first, number))
        low = torch.arange(0, own, each)
        high = (low + each).clamp(max=own)
        resets = torch.zeros_like(low)
        if window:
            before = (low * chunk - 1).clamp(min=0) // window
            last = ((high * chunk).clamp(max=end - start) - 1) // window
            resets = (before != last).long()
        segments.append(torch.stack([low + n_chunks, high + n_chunks, torch.full_like(low, number), resets], 1))
        sequences.append((n_segments, n_segments + len(low), n_chunks, n_chunks + own))
        if window > chunk + 1:
            block = torch.arange(ceil(end - start, window))
            edges = torch.stack([block * window, (block + 1) * window]).clamp(max=end - start)
            edges = (edges + chunk - 1) // chunk + n_chunks
            blocks.append(torch.stack([edges[0], edges[1], block, torch.full_like(block, number)], 1))
        n_chunks, n_segments = n_chunks + own, n_segments + len(low)

    def table(rows: list[Tensor]) -> Tensor:
        return torch.cat(rows).to(torch.int32).to(device)

    return Layout(
        table(chunks),
        table(segments),
        torch.tensor(sequences, dtype=torch.int32).to(device),
        table(blocks) if blocks else torch.zeros(0, 4, dtype=torch.int32, device=device),
        table(numbers),
        any(b - a > 1 for a, b, _, _ in sequences) and not block_chunks(window, chunk),
    )
