"""Cutting time into blocks and chunks, and the part of an exact window that reaches into the previous block.

The window of token t (index i of block b, blocks of w tokens) is the tail i+1..w-1 of block b-1 joined to the head 0..i
of block b. The head is the recurrence started at 0 in every block. The tail is linear attention without decay:

    o_t += sum over j > i of (q~_t . k~_j) v_j

q~_t is q_t pulled back through the transitions of its own block to the block's start, k~_j is the written key carried
through the rest of block b-1. Every factor is a contraction and no state is ever subtracted. It is the two-stack scheme
for sliding sums (van Herk 1992; Gil and Werman 1993) on the monoid of affine state maps.

Working layout: [B, H, blocks, chunks, chunk, D]. Without a window there is one block. A window below the chunk size
would give tiny blocks, so then several of them share one chunk ("runs") and masks keep them apart: the cost stays that
of the unrestricted operation for every w.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Cut(NamedTuple):
    """How T tokens are laid out: `blocks` blocks of `block` tokens, each padded to chunks * chunk places."""

    tokens: int
    blocks: int
    block: int
    chunks: int
    chunk: int
    run: int  # tokens after which the recurrence restarts inside a chunk; `chunk` if it never does

    @property
    def shift(self) -> int:
        """Places between a token and the same index one window block earlier."""
        return self.run if self.run < self.chunk or self.chunks == 1 else self.chunks * self.chunk


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def plan(tokens: int, window: int | None, chunk_size: int) -> Cut:
    """The layout for T tokens; chunks are made equal so that padding stays small (T = 65 is two chunks of 33)."""
    if window is None:
        chunks = _ceil(tokens, chunk_size)
        chunk = _ceil(tokens, chunks)
        return Cut(tokens, 1, tokens, chunks, chunk, chunk)
    if window <= chunk_size:
        runs = min(chunk_size // window, _ceil(tokens, window))
        tile = runs * window
        return Cut(tokens, _ceil(tokens, tile), tile, 1, tile, window)
    chunks = _ceil(window, chunk_size)
    chunk = _ceil(window, chunks)
    return Cut(tokens, _ceil(tokens, window), window, chunks, chunk, chunk)


def cut(x: Tensor, layout: Cut) -> Tensor:
    """[B, T, H, D] -> contiguous [B, H, blocks, chunks, chunk, D]; added places hold zeros (null tokens)."""
    if layout.blocks * layout.block != x.shape[1]:
        x = F.pad(x, (0, 0, 0, 0, 0, layout.blocks * layout.block - x.shape[1]))
    x = x.unflatten(1, (layout.blocks, layout.block))
    if layout.chunks * layout.chunk != layout.block:
        x = F.pad(x, (0, 0, 0, 0, 0, layout.chunks * layout.chunk - layout.block))
    return x.unflatten(2, (layout.chunks, layout.chunk)).permute(0, 4, 1, 2, 3, 5).contiguous()


def cut_scalar(x: Tensor, layout: Cut) -> Tensor:
    """[B, T, H] -> [B, H, blocks, chunks, chunk]."""
    return cut(x.unsqueeze(-1), layout).squeeze(-1)


def join(x: Tensor, layout: Cut) -> Tensor:
    """Inverse of `cut`: [B, H, blocks, chunks, chunk, D] -> [B, T, H, D]."""
    x = x.permute(0, 2, 3, 4, 1, 5).flatten(2, 3)[:, :, : layout.block]
    return x.flatten(1, 2)[:, : layout.tokens]


def run_cumsum(x: Tensor, layout: Cut) -> Tensor:
    """Inclusive cumulative sum over a chunk that restarts at every run."""
    if layout.run == layout.chunk:
        return x.cumsum(-1)
    return x.unflatten(-1, (-1, layout.run)).cumsum(-1).flatten(-2)


def run_rest(x: Tensor, layout: Cut) -> Tensor:
    """Sum of x over the places after each place in its run: summed from the end, not as a difference."""
    rest = x.unflatten(-1, (-1, layout.run)).flip(-1)
    return F.pad(rest.cumsum(-1)[..., :-1], (1, 0)).flip(-1).flatten(-2)


def same_run(layout: Cut, device: torch.device) -> Tensor:
    """[chunk, chunk] bool: both places belong to one run."""
    run = torch.arange(layout.chunk, device=device) // layout.run
    return run[:, None] == run[None, :]


def decays(log_decay: Tensor, layout: Cut) -> Tensor:
    """[..., chunk, chunk] exp(g_{j+1} + ... + g_i) where place i sees place j (j <= i, one run), else 0.

    Summed anew from every j on, never as a difference of two cumulative sums: their gradients would cancel only to
    rounding, so that decays before j would get some (beyond an exact window), and strong ones little else. Masked
    before exp: the other half would overflow, and inf * 0 is NaN.
    """
    place = torch.arange(layout.chunk, device=log_decay.device)
    one_run = same_run(layout, log_decay.device)
    sums = log_decay.unsqueeze(-1).masked_fill(~((place[:, None] > place[None, :]) & one_run), 0.0).cumsum(-2)
    return sums.masked_fill(~((place[:, None] >= place[None, :]) & one_run), float("-inf")).exp()


def earlier(x: Tensor, dim: int) -> Tensor:
    """Exclusive cumulative sum along dim."""
    total = x.cumsum(dim)
    return torch.cat([torch.zeros_like(total.narrow(dim, 0, 1)), total.narrow(dim, 0, x.shape[dim] - 1)], dim)


def later(x: Tensor, dim: int) -> Tensor:
    """Exclusive cumulative sum along dim from its end; summed, never the difference of two sums."""
    return earlier(x.flip(dim), dim).flip(dim)


def previous(x: Tensor, layout: Cut) -> Tensor:
    """The same index one window block earlier, zeros in the first block."""
    flat = x.flatten(2, 4)
    return F.pad(flat, (0, 0, layout.shift, 0))[:, :, : flat.shape[2]].unflatten(2, x.shape[2:5])


def tail(pulled_back: Tensor, carried: Tensor, value: Tensor, layout: Cut) -> Tensor:
    """Sum over j > i of (q~ . k~_j) v_j with k~, v of the previous block; operands and result in working layout."""
    key, value = previous(carried, layout), previous(value, layout)
    place = torch.arange(layout.chunk, device=value.device)
    after = (place[:, None] < place[None, :]) & same_run(layout, value.device)
    scores = pulled_back @ key.mT
    out = scores.masked_fill(~after, 0.0) @ value
    if layout.chunks > 1:
        out = out + pulled_back @ later(key.mT @ value, 3)
    return out
