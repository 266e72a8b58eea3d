"""linear_decay on a GPU: plans, launches, autograd of the kernels in triton_sweep, triton_gradients, triton_window.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

Each segment of chunks is one program. First every segment's own contribution to the state is made (keys and values are
read once), then a short scan turns these into states at segment starts, then all segments make their outputs at the
same time. The number of segments follows from the number of multiprocessors; one segment needs no first two steps.
For the backward pass the operands and the states at segment starts are kept, everything else is made again.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.linear_decay import triton_sweep as kernel
from kernels.linear_decay import triton_window as banded
from kernels.linear_decay.triton_gradients import sweep_together
from kernels.operands import RecurrentOutput

OP = "linear_decay"
INTERPRETED = triton.knobs.runtime.interpret  # as the kernels were when they were decorated
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEGMENT_MOST = 64  # chunks of a segment under a window: their decays are summed at once
FORGET = -1e4  # nats; exp of it is 0


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power(n: int) -> int:
    """The smallest power of two >= n; triton's own functions cost as much as a launch on the host."""
    return 1 << max(n - 1, 0).bit_length()


class Sizes(NamedTuple):
    """Of one pass: tokens per chunk, tile of X and of Y, warps, pipeline stages."""

    chunk: int
    tile_x: int
    tile_y: int
    warps: int
    stages: int


class Config(NamedTuple):
    """Sizes of all passes; `back_` backwards, `gate_` if the decay's gradient is wanted too; 0: as the one before.

    A sweep keeps tiles of an [X, Y] state (triton_sweep.py says which of them is key and which value); a tile that
    holds all of X leaves nothing to be summed afterwards.
    """

    chunk: int
    tile_x: int
    tile_y: int
    warps: int
    stages: int
    back_x: int
    back_y: int
    back_warps: int
    back_stages: int
    fill: int = 2  # programs that run on a multiprocessor at a time
    segment: int = 0  # chunks per segment, the longer ones; 0: from the number of multiprocessors
    together: int = 0  # 1: one program makes d key and d value, if neither a window nor the decay's gradient is wanted
    back_chunk: int = 0
    gate_chunk: int = 0
    gate_stages: int = 0

    @property
    def longest(self) -> int:
        """The longest of the chunks, which the others divide."""
        return max(self.chunk, self.back_chunk, self.gate_chunk)

    def sizes(self, backward: bool, gate: bool) -> Sizes:
        if not backward:
            return Sizes(self.chunk, self.tile_x, self.tile_y, self.warps, self.stages)
        chunk = (gate and self.gate_chunk) or self.back_chunk or self.chunk
        stages = (gate and self.gate_stages) or self.back_stages
        return Sizes(chunk, self.back_x, self.back_y, self.back_warps, stages)


FULL = Config(32, 32, 32, 8, 1, 32, 32, 8, 1)  # float32: larger tiles of scalar products do not fit into registers
HEADS = 4  # whose decays one program sums, or whose pairs one collects
BAND_CHUNKS = 3  # windows of at most so many chunks are a band of the attention matrix


def configs(dtype: torch.dtype) -> list[Config]:
    """Every configuration that may be chosen for keys and values up to 128, and those that were tried beside them."""
    if dtype == torch.float32:
        return [FULL, Config(16, 32, 32, 4, 1, 32, 32, 4, 1)]
    chosen = {choose(dtype, k, v) for k in (32, 64, 128) for v in (32, 64, 128)}
    return [
        *sorted(chosen),
        Config(64, 64, 64, 4, 3, 64, 64, 8, 2, 4),
        Config(64, 64, 64, 8, 3, 64, 64, 4, 2, 2),
        Config(64, 128, 128, 8, 2, 128, 64, 8, 2, 2),
    ]


def choose(dtype: torch.dtype, width_k: int, width_v: int) -> Config:
    if dtype == torch.float32:
        return FULL
    k, v = (min(128, max(32, _power(width))) for width in (width_k, width_v))
    if max(k, v) <= 64:
        return Config(64, k, v, 4, 3, k, v, 4, 2, together=1, gate_stages=3)
    # small enough that two programs share a multiprocessor; what is kept for the decay's gradient grows with chunks
    return Config(
        32 if k > 64 else 64, k, min(v, 64), 4, 3, 128, 64, 4, 3, back_chunk=32, gate_chunk=64, gate_stages=2
    )  # fmt: skip


class Cut(NamedTuple):
    """How T tokens of each of several sequences are laid out."""

    window: int  # tokens of a block; 0: a block is a sequence
    chunk: int
    chunks: int  # of a segment
    per_block: int  # segments of a block (windows only)
    per_sequence: int  # segments of a sequence (if not packed)
    segments: int  # programs' segments in all; an upper bound if packed
    blocks: int  # of all sequences; an upper bound if packed

    @property
    def single(self) -> bool:
        """No segment needs another one's state."""
        return (self.per_block if self.window else self.per_sequence) == 1


@functools.lru_cache(maxsize=1024)
def segments_of_block(block_chunks: int, programs: int, slots: int) -> int:
    """Segments of a window block, `programs` of one segment each in all: what fills waves of `slots` programs best.

    One segment needs no state of another, which is worth a device two thirds idle.
    """
    least = _ceil(block_chunks, SEGMENT_MOST)
    if least == 1 and 3 * programs >= slots:
        return 1
    most = max(least, block_chunks // 4)

    def chunk_times(n: int) -> int:
        return _ceil(n * programs, slots) * (_ceil(block_chunks, n) + 1)  # a start costs about as much as a chunk

    return min(range(least, most + 1), key=chunk_times)


def plan(
    config: Config, size: int, rows: int, tokens: int, heads: int, tiles: int, window: int, packed: int,
    processors: int,
) -> Cut:  # fmt: skip
    """`size`: tokens of the pass's chunks; `packed`: number of sequences in the row, 0 if every row is one.

    Without a window segments are the same in all passes, whatever their chunks: states at segment starts are handed on.
    """
    block, unit = window or tokens, size if window else config.longest
    block_chunks = _ceil(block, unit)
    chunk, shares = (_ceil(block, block_chunks), 1) if window else (size, unit // size)
    blocks = rows * _ceil(tokens, block)
    slots, programs = config.fill * processors, heads * tiles * blocks
    if window:
        parallel = segments_of_block(int(block_chunks), int(programs), slots)  # compilers bring symbols
    elif programs >= 4 * slots:
        parallel = 1
    elif programs > slots // 2:
        parallel = -(-4 * slots // programs)  # several waves: the last one may be short
    else:
        parallel = max(1, slots // programs)
    chunks = config.segment or max(min(4, block_chunks), _ceil(block_chunks, parallel))
    if window:
        chunks = min(chunks, SEGMENT_MOST)
    per_block = _ceil(block_chunks, chunks)
    chunks = _ceil(block_chunks, per_block) * shares
    if not packed:
        per_sequence = per_block * _ceil(tokens, block)
        return Cut(window, chunk, chunks, per_block, per_sequence, rows * per_sequence, blocks)
    if window:
        blocks = tokens // window + packed
        return Cut(window, chunk, chunks, per_block, blocks * per_block, blocks * per_block, blocks)
    return Cut(0, chunk, chunks, 1, per_block, tokens // (chunk * chunks) + packed if per_block > 1 else packed, packed)


def segment_ends(cu_seqlens: Tensor, cut: Cut) -> Tensor:
    """Running sum of the sequences' numbers of segments."""
    lengths = cu_seqlens.diff()
    size = cut.window or cut.chunk * cut.chunks
    return (((lengths + size - 1) // size).cumsum(0) * (cut.per_block if cut.window else 1)).to(torch.int32)


def plan_band(chunk: int, rows: int, tokens: int, packed: int) -> Cut:
    """One program for every chunk."""
    per_sequence = _ceil(tokens, chunk)
    segments = tokens // chunk + packed if packed else rows * per_sequence
    return Cut(0, chunk, 1, 1, per_sequence, segments, packed or rows)


class Pairs(NamedTuple):
    """What a sweep leaves of the decay's gradient, a part for each tile of the state; see triton_sweep.py."""

    near: Tensor  # [tiles, 1, B, T, H] the own block's earlier tokens; backwards 2: the chunk's later ones, the rest
    far: Tensor  # [tiles, B, T, H] with tokens of the neighbouring block (windows only)
    kept: Tensor  # what the sweep forwards leaves for the one backwards; see Launch.kept_between
    around: Tensor  # [chunks, H, tiles, rows] backwards: pairs around a chunk, summed over columns of the state


class Launch:
    """One layout of one operation's operands; its methods run the kernels."""

    def __init__(
        self, like: Tensor, width_v: int, gates: Tensor, cu_seqlens: Tensor | None, window: int, scale: float,
        config: list[int], backward: bool = False, gate: bool = False,
    ):  # fmt: skip
        self.rows, self.tokens, self.heads, self.k = like.shape
        self.v, self.scale, self.gates = width_v, scale, gates
        self.config = Config(*config) if config else choose(like.dtype, self.k, width_v)
        packed = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.backward = backward
        self.size, self.tile_x, self.tile_y, warps, stages = self.config.sizes(backward, gate)
        self.window, self.is_band = window, 0 < window <= BAND_CHUNKS * self.size
        tiles = _ceil(self.k, self.config.tile_x) * _ceil(width_v, self.config.tile_y)
        if self.is_band:
            self.cut = plan_band(self.size, self.rows, self.tokens, packed)
        else:
            self.cut = plan(
                self.config, self.size, self.rows, self.tokens, self.heads, tiles, window, packed,
                _processors(like.device),
            )  # fmt: skip
        self.single = self.is_band or self.cut.single
        self.sequences = packed or self.rows
        self.cu_seqlens = gates if cu_seqlens is None else cu_seqlens
        self.ends = gates if cu_seqlens is None else segment_ends(cu_seqlens, self.cut)
        self.per_token = gates.ndim == 3
        self.shared: dict[str, Any] = {
            "C": self.size,
            "N_TILE": _power(packed) if packed else 0,
            "PER_TOKEN": self.per_token,
            "PRECISION": "ieee" if like.dtype == torch.float32 else "tf32",
            "num_warps": warps,
            "num_stages": stages,
        }

    @property
    def chunks(self) -> int:
        return self.cut.segments * self.cut.chunks

    @functools.cached_property
    def decays(self) -> Tensor:
        """What kernels take for `gates`: as given, or, per token under a window, [chunks, H, 2, C] sums inside chunks.

        Windows read a chunk's decays in two places and several passes; without one a pass more costs what it saves.
        """
        if not self.window or not self.per_token:
            return self.gates
        sums = _float32((self.chunks, self.heads, 2, self.size), self.gates)
        kernel.chunk_decays[(self.chunks * _ceil(self.heads, HEADS),)](
            self.gates, sums, self.cu_seqlens, self.ends, *self.gates.stride(), *self._layout(), self.heads,
            C=self.size, H_TILE=HEADS, N_TILE=self.shared["N_TILE"], WINDOW=self.cut.window > 0, num_warps=2,
        )  # fmt: skip
        return sums

    def _gate_strides(self) -> tuple[int, ...]:
        """Strides of `decays` in [B, T, H], if it is still one."""
        if not self.per_token:
            return 0, 0, self.gates.stride(0)
        return (0, 0, 0) if self.window else tuple(self.gates.stride())

    def _layout(self) -> tuple[int, ...]:
        cut = self.cut
        return (
            self.tokens, self.sequences, cut.per_sequence, cut.window, cut.per_block, cut.chunk, cut.chunks
        )  # fmt: skip

    def states(self, left: Tensor, right: Tensor, initial: Tensor | None, reverse: bool) -> dict[str, Tensor]:
        """States at segment starts in the direction of the sweep; with a window also what neighbours need."""
        cut, heads = self.cut, self.heads
        local = _float32((cut.segments, heads, self.k, self.v), left)
        totals = _float32((cut.segments, heads), left)
        grid = (cut.segments * heads * self._tiles(self.k, self.v),)
        kernel.segment_states[grid](
            left, right, self.decays, local, totals, self.cu_seqlens, self.ends,
            *left.stride()[:3], *right.stride()[:3], *self._gate_strides(), *self._layout(), self.scale,
            heads, self.k, self.v, K_TILE=self._tile_x(self.k), V_TILE=self.tile_y, WINDOW=cut.window > 0,
            REVERSE=reverse, **self.shared,
        )  # fmt: skip
        starts, size = torch.empty_like(local), self.k * self.v
        if cut.window:
            tile = min(1024, max(16, _power(size)))
            beyond, near, far = torch.empty_like(local), *(torch.empty_like(totals) for _ in range(2))
            kernel.scan_block[(cut.blocks * heads * _ceil(size, tile),)](
                local, totals, starts, beyond, near, far, cut.per_block, heads, size, E_TILE=tile, REVERSE=reverse,
                num_warps=4,
            )  # fmt: skip
            return {"starts": starts, "beyond": beyond, "near": near, "far": far}
        tile = min(256, max(16, _power(size)))
        final = _float32((self.sequences, heads, self.k, self.v), left)
        kernel.scan_segments[(self.sequences * heads * _ceil(size, tile),)](
            local, totals, local if initial is None else initial, starts, final, self.ends, cut.per_sequence, heads,
            size, GROUP=16, E_TILE=tile, PACKED=self.shared["N_TILE"] > 0, HAS_INITIAL=initial is not None,
            REVERSE=reverse, num_warps=4,
        )  # fmt: skip
        return {"starts": starts, "final": final}

    def _tiles(self, x: int, y: int) -> int:
        return _ceil(x, self.tile_x) * _ceil(y, self.tile_y)

    def _tile_x(self, x: int) -> int:
        """Keys and values of different widths take turns as X."""
        return min(self.tile_x, max(32, _power(x)))

    def _rest(self, made: dict[str, Tensor], pairs: Pairs | None, ends: Tensor | None) -> list[Tensor]:
        """Operands that all sweeps have in common; what a sweep does not use is some pointer."""
        idle = self.gates
        states = [made.get(name, idle) for name in ("beyond", "near", "far")]
        return [
            self.decays, *(pairs or [idle] * 4), made.get("starts", idle), idle if ends is None else ends, *states,
            self.cu_seqlens, self.ends,
        ]  # fmt: skip

    def _flags(self, made: dict[str, Tensor], pairs: Pairs | None, ends: Tensor | None) -> dict:
        return self.shared | {
            "Y_TILE": self.tile_y,
            "WINDOW": self.cut.window > 0,
            "L_TILE": _power(self.cut.chunks) if self.cut.window else 1,
            "GATE": pairs is not None,
            "HAS_START": "starts" in made,
            "STORE_END": ends is not None,
        }

    def _pairs(self, kept: Tensor | None, reverse: bool) -> Pairs | None:
        """What a sweep leaves of the decay's gradient, if the sweeps have `kept` states for it."""
        if kept is None:
            return None
        tiles = self._tiles(self.v, self.k)
        halves = 2 if reverse and not self.is_band else 1
        near = _float32((tiles, halves, self.rows, self.tokens, self.heads), self.gates)
        far = torch.zeros_like(near[:, 0]) if self.cut.window else near
        around = near
        if halves == 2:
            around = _float32((self.chunks, self.heads, tiles, self._tile_x(self.v)), self.gates)
        return Pairs(near, far, kept, around)

    def decay_gradient(self, ending: Pairs, starting: Pairs) -> Tensor:
        """[B, T, H] from what the sweep forwards and the sweep backwards left."""
        if self.is_band:
            return ending.near.sum((0, 1)) + starting.near.sum((0, 1))
        cut, tiles, rows = self.cut, *starting.around.shape[2:]
        gate = _float32(tuple(ending.near.shape[2:]), self.gates)
        windowed = cut.window > 0
        far_sums = _float32((2, self.chunks, self.heads) if windowed else (0,), self.gates)
        grid = (self.chunks * _ceil(self.heads, HEADS),)
        numbers = (self.cu_seqlens, self.ends, *self._layout(), self._places(), tiles, self.chunks, self.heads)
        sizes = {"C": self.shared["C"], "H_TILE": HEADS, "N_TILE": self.shared["N_TILE"], "num_warps": 4}
        if windowed:
            kernel.sum_far_pairs[grid](ending.far, starting.far, far_sums, *numbers, **sizes)
        kernel.collect_pairs[grid](
            ending.near, starting.near, starting.around, ending.far, starting.far, far_sums, gate, *numbers,
            ROWS=rows, WINDOW=windowed, **sizes,
        )  # fmt: skip
        return gate

    def read(
        self, x: Tensor, y: Tensor, u: Tensor, r: Tensor, made: dict[str, Tensor], ends: Tensor | None,
        kept: Tensor | None,
    ) -> tuple[Tensor, Pairs | None]:  # fmt: skip
        """A pass forwards: out, or d query (then x = value, y = key), and pairs for the decay's gradient."""
        size_x, size_y = x.shape[-1], y.shape[-1]
        parts, pairs = _ceil(size_x, self.tile_x), self._pairs(kept, reverse=False)
        out = _parts(y, parts, (self.rows, self.tokens, self.heads, size_y))
        grid = (self.cut.segments * self.heads * self._tiles(size_x, size_y),)
        steps = (*x.stride()[:3], *y.stride()[:3], *u.stride()[:3], *r.stride()[:3])
        strides = (*steps, *self._gate_strides())
        if self.is_band:
            banded.band[grid](
                x, y, u, r, out, *self._band_rest(pairs), *steps, strides[-1], *self._band_layout(), self.heads,
                size_x, size_y, X_TILE=self._tile_x(size_x), **self._band_flags(pairs),
            )  # fmt: skip
        else:
            kernel.sweep[grid](
                x, y, u, r, out, *self._rest(made, pairs, ends), *strides,
                *((1, size_x) if self.backward else (size_y, 1)), *self._layout(), self.scale, self._places(),
                self.heads, size_x, size_y, X_TILE=self._tile_x(size_x), REVERSE=False,
                **self._flags(made, pairs, ends),
            )  # fmt: skip
        return _joined(out, y), pairs

    def write_gradients(
        self, query: Tensor, d_out: Tensor, key: Tensor, value: Tensor, made: dict[str, Tensor], ends: Tensor | None,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor, Pairs | None]:  # fmt: skip
        """The pass backwards: d key, d value and pairs for the decay's gradient."""
        pairs, shape = self._pairs(kept, reverse=True), (self.rows, self.tokens, self.heads)
        d_key = _parts(key, _ceil(self.v, self.tile_x), (*shape, self.k))
        d_value = _parts(value, _ceil(self.k, self.tile_x), (*shape, self.v))
        tiles = max(self._tiles(self.v, self.k), self._tiles(self.k, self.v))
        grid = (2 * self.cut.segments * self.heads * tiles,)
        operands = query, d_out, key, value
        steps = tuple(step for x in operands for step in x.stride()[:3])
        both = {"K_TILE": self._tile_x(self.k), "V_TILE": self._tile_x(self.v)}
        strides = (*steps, *self._gate_strides())
        if self.is_band:
            banded.band_key_value[grid](
                *operands, d_key, d_value, *self._band_rest(pairs), *steps, strides[-1], *self._band_layout(),
                self.heads, self.k, self.v, **both, **self._band_flags(pairs),
            )  # fmt: skip
        elif self.config.together and tiles == 1 and not self.cut.window and pairs is None:
            idle = self.gates
            sweep_together[(self.cut.segments * self.heads,)](
                *operands, d_key, d_value, self.gates, made.get("starts", idle), idle if ends is None else ends,
                self.cu_seqlens, self.ends, *strides, *self._layout(), self.scale, self.heads, self.k, self.v,
                **both, HAS_START="starts" in made, STORE_END=ends is not None, **self.shared,
            )  # fmt: skip
        else:
            kernel.sweep_key_value[grid](
                *operands, d_key, d_value, *self._rest(made, pairs, ends), *strides, *self._layout(), self.scale,
                self._places(), self.heads, self.k, self.v, **both, **self._flags(made, pairs, ends),
            )  # fmt: skip
        return _joined(d_key, key), _joined(d_value, value), pairs

    def _band_rest(self, pairs: Pairs | None) -> list[Tensor]:
        near, around = (pairs.near, pairs.kept) if pairs else (self.gates, self.gates)
        return [self.decays, near, around, self.cu_seqlens, self.ends]

    def _band_layout(self) -> tuple[float, ...]:
        return self.tokens, self.sequences, self.cut.per_sequence, self.window, self.scale, self._places()

    def _band_flags(self, pairs: Pairs | None) -> dict:
        return self.shared | {
            "Y_TILE": self.tile_y,
            "DEPTH": self._depth(),
            "GATE": pairs is not None,
        }

    def _depth(self) -> int:
        """Chunks that a window reaches into beside the own one."""
        return _ceil(self.window - 1, self.size)

    def _places(self) -> int:
        return self.rows * self.tokens * self.heads

    def kept_between(self, like: Tensor) -> Tensor:
        """What the pass forwards leaves for the pass backwards: states before chunks, or sums of pairs of chunks."""
        if self.is_band:
            shape = (self.cut.segments, self.heads, self._tiles(self.v, self.k), self._depth() + 1)
            return torch.empty(shape, dtype=torch.float32, device=like.device)
        return like.new_empty(self.chunks, self.heads, self.k, self.v)


def _parts(like: Tensor, parts: int, shape: tuple[int, ...]) -> Tensor:
    """Output buffer [parts, ...]: several parts are summed in float32."""
    return torch.empty(parts, *shape, dtype=like.dtype if parts == 1 else torch.float32, device=like.device)


def _joined(parts: Tensor, like: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(like.dtype)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _float32(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _started(state: Tensor | None) -> dict[str, Tensor]:
    """What a sweep of one segment starts from."""
    return {} if state is None else {"starts": state.float().contiguous()}


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, window: int, scale: float, state_only: bool, config: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out, final state (without a window), states at segment starts (if there are several segments)."""
    launch = Launch(key, value.shape[-1], log_decay, cu_seqlens, window, scale, config)
    made, nothing = _started(initial_state), _float32((0,), value)
    state, ends = nothing, None
    if not launch.single or state_only:
        made = launch.states(key, value, made.get("starts"), reverse=False)
        state = made.get("final", nothing)
    elif not window:
        state = ends = _float32((launch.sequences, *key.shape[2:], value.shape[-1]), value)
    starts = _float32((0,), value) if launch.single else made["starts"]
    if state_only:
        return value.new_empty(0), state, starts
    out, _ = launch.read(key, value, query, value, made, ends, None)
    return out, state, starts


_forward = torch.library.custom_op("hybridscope::linear_decay_forward", forward, mutates_args=())


@_forward.register_fake
def _(query, key, value, log_decay, initial_state, cu_seqlens, window, scale, state_only, config):
    launch = Launch(key, value.shape[-1], log_decay, cu_seqlens, window, scale, config)
    shape = (key.shape[2], key.shape[3], value.shape[3])
    out = torch.empty(0 if state_only else value.shape, dtype=value.dtype, device=value.device)
    state = _float32((0,) if window else (launch.sequences, *shape), key)
    starts = _float32((0,) if launch.single else (launch.cut.segments, *shape), key)
    return out, state, starts


def backward(
    d_out: Tensor | None, d_state: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, starts: Tensor, window: int, scale: float,
    needs: list[bool], config: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, log_decay, initial_state; an empty tensor for those not needed."""
    if needs[3] and log_decay.ndim == 1 and value.dtype != torch.float32:
        *wide, of_decay, of_initial = _backward_in_float32(
            d_out, d_state, query, key, value, log_decay, initial_state, cu_seqlens, window, scale, needs
        )
        of_query, of_key, of_value = (x.to(value.dtype) for x in wide)
        return of_query, of_key, of_value, of_decay, of_initial
    need_query, need_key, need_value, need_gate, need_initial = needs
    launch = Launch(
        key, value.shape[-1], log_decay, cu_seqlens, window, scale, config, backward=True, gate=need_gate
    )  # fmt: skip
    d_out = torch.zeros_like(value) if d_out is None else _unit_stride(d_out.to(value.dtype))
    d_query = d_key = d_value = d_gate = d_initial = None
    kept = launch.kept_between(key) if need_gate else None
    ending = starting = None
    if need_query or need_gate:
        made = {"starts": starts}
        if launch.single:
            made = _started(initial_state)
        elif window:
            made = launch.states(key, value, None, reverse=False)
        d_query, ending = launch.read(value, key, d_out, query, made, None, kept)
    sweeps = need_key or need_value or need_gate
    made, ends = _started(d_state), None
    if not launch.single or (need_initial and not sweeps):
        made = launch.states(query, d_out, made.get("starts"), reverse=True)
        d_initial = made.get("final")
    elif need_initial:
        d_initial = ends = _float32((launch.sequences, *key.shape[2:], value.shape[-1]), value)
    if sweeps:
        d_key, d_value, starting = launch.write_gradients(query, d_out, key, value, made, ends, kept)
    if ending is not None and starting is not None:
        d_gate = launch.decay_gradient(ending, starting)
        d_gate = (d_gate if launch.per_token else d_gate.sum((0, 1), dtype=torch.float64)).to(log_decay.dtype)
    if initial_state is not None and d_initial is not None:
        d_initial = d_initial.to(initial_state.dtype)
    results = (
        value.new_empty(0) if x is None or not needed else x
        for x, needed in zip((d_query, d_key, d_value, d_gate, d_initial), needs, strict=True)
    )
    query_, key_, value_, gate_, initial_ = results
    return query_, key_, value_, gate_, initial_


def _backward_in_float32(
    d_out: Tensor | None, d_state: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, window: int, scale: float, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of a decay fixed per head is one number, the sum of all pairs of tokens: where these cancel, states
    rounded to 16 bits would leave an error of percents."""
    query, key, value = query.float(), key.float(), value.float()
    starts = forward(query, key, value, log_decay, initial_state, cu_seqlens, window, scale, True, [])[2]
    return backward(
        None if d_out is None else d_out.float(), d_state, query, key, value, log_decay, initial_state, cu_seqlens,
        starts, window, scale, needs, [],
    )  # fmt: skip


def _unit_stride(x: Tensor) -> Tensor:
    """As it is if its rows are dense and near enough for 32-bit offsets inside a chunk, else a copy."""
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and x.stride(1) < 2**23 else x.contiguous()


_backward = torch.library.custom_op("hybridscope::linear_decay_backward", backward, mutates_args=())


@_backward.register_fake
def _(
    d_out, d_state, query, key, value, log_decay, initial_state, cu_seqlens, starts, window, scale, needs, config
):  # fmt: skip
    return tuple(
        torch.empty(x.shape if needed else 0, dtype=x.dtype if needed else value.dtype, device=value.device)
        for x, needed in zip((query, key, value, log_decay, initial_state), needs, strict=True)
    )


def _keep(ctx, inputs, output):
    query, key, value, log_decay, initial_state, cu_seqlens, window, scale, _, config = inputs
    ctx.save_for_backward(query, key, value, log_decay, initial_state, cu_seqlens, output[2])
    ctx.options = window, scale, config
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_state, _):
    window, scale, config = ctx.options
    if d_out is not None and d_out.numel() == 0:
        d_out = None
    if window:
        d_state = None
    needs = list(ctx.needs_input_grad[:5])
    run = _backward if _traced(d_out if d_out is not None else d_state) else backward
    results = run(d_out, d_state, *ctx.saved_tensors, window, scale, needs, config)
    return *(x if needed else None for x, needed in zip(results, needs, strict=True)), *(None,) * 5


_forward.register_autograd(_gradients, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, whose Python part costs the host more than all launches."""

    forward = staticmethod(forward)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)


def _traced(x: Tensor | None) -> bool:
    """A compiler or a mode with tensors of its own is looking: only registered operations may run."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter)


def _call(*operands) -> tuple[Tensor, Tensor, Tensor]:
    return (_forward if _traced(operands[0]) else _Eager.apply)(*operands)


def _refuse(tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{OP}: {name} is {x.dtype} with impl 'triton'; expected bfloat16, float16 or float32. "
                "Cast it, or use impl='torch'."
            )
        if x.device.type != "cuda" and not INTERPRETED:
            raise ValueError(
                f"{OP}: {name} is on {x.device} with impl 'triton'; expected a CUDA device. "
                "Move it there, or use impl='torch'."
            )


def linear_decay_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    window: int | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    config: Config | None = None,
) -> RecurrentOutput:
    """`config` overrides the choice of tiles, for tests and tuning."""
    named = {"query": query, "key": key, "value": value, "log_decay": log_decay}
    _refuse(named if initial_state is None else named | {"initial_state": initial_state})
    dtype, tokens = value.dtype, query.shape[1]
    common = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = (_unit_stride(x.to(common)) for x in (query, key, value))
    log_decay = log_decay if log_decay.ndim == 1 or log_decay.stride(1) < 2**23 else log_decay.contiguous()
    options = list(config or ())
    limit = 0 if window is None or window >= tokens else window
    out, state, _ = _call(query, key, value, log_decay, initial_state, cu_seqlens, limit, scale, False, options)
    if limit:
        state = _last_state(key, value, log_decay, cu_seqlens, limit, options)
    return RecurrentOutput(out.to(dtype), state)


def _last_state(
    key: Tensor, value: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, window: int, options: list[int]
) -> Tensor:
    """The state made of each sequence's last `window` tokens."""
    if cu_seqlens is None:
        key, value = key[:, -window:], value[:, -window:]
        log_decay = log_decay if log_decay.ndim == 1 else log_decay[:, -window:]
    else:  # forget everything at the first token inside the window
        first = torch.maximum(cu_seqlens[1:] - window, cu_seqlens[:-1])
        forget = torch.zeros(key.shape[1], dtype=torch.bool, device=key.device)
        forget = forget.index_fill(0, first.long(), True)
        log_decay = log_decay.expand(key.shape[:3]).masked_fill(forget[None, :, None], FORGET)
    _, state, _ = _call(key.detach(), key, value, log_decay, None, cu_seqlens, 0, 1.0, True, options)
    return state
