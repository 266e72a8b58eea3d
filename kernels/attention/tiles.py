"""Which key tiles a tile of queries visits, and the reverse; loads of tiles. Device functions of the Triton kernels.

Bands arrive sorted, w_1 < w_2 < ... and n_1 > n_2 > ... (`bands.staircase`). Query t then sees the keys

    [0, n_m)    [t - w_m + 1, n_(m-1))    ...    [t - w_2 + 1, n_1)    [t - w_1 + 1, t]

of which any may be empty and neighbours may overlap; key s is seen by the queries s .. s + min{w_i : n_i <= s} - 1.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sectioned(tiles, heads, section):
    """Program -> (tile rank, head). Heads are taken `section` at a time, so that their keys and values stay in L2.

    In a section all heads of rank 0 come first: rank 0 is the longest tile.
    """
    program = tl.program_id(0)
    first = program // (tiles * section) * section
    width = tl.minimum(section, heads - first)
    inside = program - first * tiles
    return inside // width, first + inside % width


@triton.jit
def seen_keys(query_at, key_at, bands):
    seen = key_at <= query_at
    for i in tl.static_range(len(bands)):
        seen = seen & ((query_at - key_at < bands[i][0]) | (key_at < bands[i][1]))
    return seen


@triton.jit
def visible_keys(query_at, bands):
    """Number of keys that each query sees: the lengths of its intervals, as bands.visible_count."""
    count = tl.zeros_like(query_at)
    done = tl.zeros_like(query_at)
    first = tl.zeros_like(query_at)
    for j in tl.static_range(len(bands)):
        band = bands[len(bands) - 1 - j]
        stop = tl.minimum(band[1], query_at + 1)
        count += tl.maximum(stop - tl.maximum(first, done), 0)
        done = tl.maximum(done, stop)
        first = query_at + 1 - band[0]
    return count + tl.maximum(query_at + 1 - tl.maximum(first, done), 0)


@triton.jit
def low_segment(j: tl.constexpr, start, end, first, stop, bands, BLOCK: tl.constexpr):
    """Tiles [start, end) of the j-th interval below the window, counted from position 0, after tile `first`."""
    low = 0
    if j > 0:
        low = tl.maximum(start - bands[len(bands) - j][0] + 1, 0) // BLOCK
    low = tl.minimum(tl.maximum(low, first), stop)
    high = tl.minimum(tl.maximum(tl.cdiv(bands[len(bands) - 1 - j][1], BLOCK), low), stop)
    return low, high


@triton.jit
def key_tiles(start, end, bands, BLOCK: tl.constexpr):
    """For queries at positions start..end: the tiles [low, high) without a hidden key, and the number of tiles that
    need the mask."""
    stop = tl.cdiv(end + 1, BLOCK)
    if len(bands) == 0:
        low = 0
        high = (start + 1) // BLOCK
        masked = stop - high
    else:
        masked = 0
        done = 0
        for j in tl.static_range(len(bands)):
            first, done = low_segment(j, start, end, done, stop, bands, BLOCK)
            masked += done - first
        window = bands[0][0]
        edge = tl.minimum(tl.maximum(tl.maximum(start - window + 1, 0) // BLOCK, done), stop)
        high = tl.maximum((start + 1) // BLOCK, edge)
        low = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(end - window + 1, 0), BLOCK), edge), high)
        masked += low - edge + stop - high
    return low, high, masked


@triton.jit
def masked_key_tile(i, start, end, low, high, bands, BLOCK: tl.constexpr):
    """The i-th tile that needs the mask: the intervals below the window, the window's far edge, the diagonal."""
    if len(bands) == 0:
        tile = high + i
    else:
        stop = tl.cdiv(end + 1, BLOCK)
        tile = i
        passed = 0
        done = 0
        for j in tl.static_range(len(bands)):
            before = done
            first, done = low_segment(j, start, end, done, stop, bands, BLOCK)
            tile += tl.where(i >= passed, first - before, 0)
            passed += done - first
        edge = tl.minimum(tl.maximum(tl.maximum(start - bands[0][0] + 1, 0) // BLOCK, done), stop)
        tile += tl.where(i >= passed, edge - done, 0)
        tile += tl.where(i >= passed + low - edge, high - low, 0)
    return tile


@triton.jit
def query_tiles(start, end, offset, T, bands, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """For keys start..end: the tiles of queries [first, stop) that see any, of which [low, high) see all.

    Places past the last query count as seeing all: their probabilities are made 0 by an infinite lse.
    """
    stop = tl.cdiv(T, BLOCK)
    if ROWS:
        first = 0
        low = stop
        high = stop
    else:
        first = tl.maximum(start - offset, 0) // BLOCK
        low = tl.cdiv(tl.maximum(end - offset, 0), BLOCK)
        high = stop
        for i in tl.static_range(len(bands)):
            window = bands[i][0]
            sinks = bands[i][1]
            last = tl.cdiv(tl.maximum(end + window - offset, 0), BLOCK)
            stop = tl.where(sinks <= start, tl.minimum(stop, last), stop)
            inside = start + window - offset  # rows below it see key `start`
            whole = tl.where(inside >= T, high, tl.maximum(inside, 0) // BLOCK)
            high = tl.where(sinks <= end, tl.minimum(high, whole), high)
        first = tl.minimum(first, stop)
        low = tl.minimum(tl.maximum(low, first), stop)
        high = tl.minimum(tl.maximum(high, low), stop)
    return first, low, high, stop


@triton.jit
def head_of(x, b, head, stride, ALIGN: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Where head `head` of batch row b begins; strides are counted in ALIGN elements, so that loads are vectorised."""
    at = x if DESCRIPTOR else x + (tl.cast(b, tl.int64) * stride[0] + tl.cast(head, tl.int64) * stride[2]) * ALIGN
    return at


@triton.jit
def load_tile(
    x,
    b,
    start,
    head,
    stride,
    length,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):
    """Rows start .. start + ROWS - 1 of one head as [ROWS, BLOCK_D]; zeros past `length` (if CHECK) and past D."""
    if DESCRIPTOR:
        tile = x.load([tl.cast(b, tl.int32), tl.cast(head, tl.int32), tl.cast(start, tl.int32), 0])
        tile = tile.reshape(ROWS, BLOCK_D)
    else:
        step = tl.cast(stride[1], tl.int64) * ALIGN
        row = tl.arange(0, ROWS)
        col = tl.arange(0, BLOCK_D)
        at = (x + tl.cast(start, tl.int64) * step) + (row[:, None] * step + col[None, :])
        if CHECK:
            mask = (row < length - start)[:, None]
            if D < BLOCK_D:
                mask = mask & (col < D)[None, :]
            tile = tl.load(at, mask=mask, other=0.0)
        elif D < BLOCK_D:
            tile = tl.load(at, mask=(col < D)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def store_tile(x, tile, start, step, length, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The reverse of load_tile for one contiguous head, row stride `step`."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_D)
    at = (x + tl.cast(start, tl.int64) * step) + (row[:, None] * tl.cast(step, tl.int64) + col[None, :])
    tl.store(at, tile.to(x.dtype.element_ty), mask=(row < length - start)[:, None] & (col < D)[None, :])
