"""The exact past of a sequence, so that a prompt can be continued, or a shared prefix computed once.

Attention keeps keys and values, a recurrent mixer its state and the inputs its convolution still needs; under a
restriction to w tokens a recurrent mixer keeps its last w - 1 tokens instead, because a state does not say which of its
tokens are still inside the window. Prefill and decoding together equal one forward over the whole, restricted or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Past:
    """What one mixer remembers, by name; the batch is the first dimension of every tensor, time, if any, the second."""

    def __init__(self, length: int = 0) -> None:
        self.length = length
        """Tokens seen before this forward; no more than that are kept."""
        self.kept: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._forgets = False

    def append(self, name: str, new: Tensor, keep: int | None = None) -> Tensor:
        """The kept tokens with `new` [B, T, ...] behind them; remembers the last `keep` of both, None: all.

        All are kept in a buffer that doubles when it is full, so that appending a token does not copy the past.
        """
        old = self.kept.get(name)
        if self._forgets:
            return new if old is None else torch.cat([old.expand(len(new), *old.shape[1:]), new], 1)
        if keep is not None:
            whole = new if old is None else torch.cat([old, new], 1)
            self.kept[name] = whole[:, max(0, whole.shape[1] - keep) :].clone()
            return whole
        if old is None:
            self.kept[name] = self._buffers[name] = new
            return new
        used, total = old.shape[1], old.shape[1] + new.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[1] < total:
            buffer = old.new_empty(old.shape[0], max(total, 2 * used), *old.shape[2:])
            buffer[:, :used] = old
            self._buffers[name] = buffer
        buffer[:, used:total] = new
        self.kept[name] = buffer[:, :total]
        return self.kept[name]

    def repeated(self, n: int) -> Past:
        other = Past(self.length)
        other.kept = {name: tensor.repeat_interleave(n, 0) for name, tensor in self.kept.items()}
        return other

    def branched(self, n: int) -> Past:
        """For one forward of n sequences: tokens are shared, not copied, and what is appended is not kept."""
        other = Past(self.length)
        other.kept = {
            name: tensor if name in self._buffers else tensor.repeat_interleave(n, 0)
            for name, tensor in self.kept.items()
        }
        other._forgets = True
        return other


class Cache:
    """The past of B sequences of equal length, filled by `model(input_ids, cache=cache)`; for inference only.

    It belongs to one model under one set of restrictions: what it holds was made under those, so continuing under
    others raises ValueError. Memory is that of the kept keys and values: O(T) for a full-attention layer, O(w) for a
    window, O(1) for a state. A forward that fails leaves the cache unusable, and it says so.
    """

    def __init__(self) -> None:
        self.length = 0
        """Tokens seen so far."""
        self._pasts: dict[int, Past] = {}
        self._foreign: dict[str, Any] = {}  # what a Hugging Face model keeps
        self._made_under: tuple[Any, ...] | None = None
        self._interrupted = False
        self._branches: int | None = None
        self._spent = False

    @property
    def batch(self) -> int | None:
        """B, or None before the first token."""
        if self._branches is not None:
            return self._branches
        return next((tensor.shape[0] for past in self._pasts.values() for tensor in past.kept.values()), None)

    def repeat(self, n: int) -> Cache:
        """An independent copy in which every sequence stands n times in a row: [B, ...] -> [B n, ...]."""
        return self._derived({index: past.repeated(n) for index, past in self._pasts.items()})

    def branch(self, n: int) -> Cache:
        """n continuations of its one sequence, for one forward, of which nothing is kept: O(T) memory of one layer.

        Raises ValueError unless it holds one sequence.
        """
        if self.batch not in (None, 1):
            raise ValueError(f"the cache holds {self.batch} sequences; expected one. Cache.repeat copies several.")
        other = self._derived({index: past.branched(n) for index, past in self._pasts.items()})
        other._branches = n
        return other

    def _derived(self, pasts: dict[int, Past]) -> Cache:
        if self._foreign:
            raise ValueError("the cache of a Hugging Face model cannot be repeated; pass every sequence whole.")
        other = Cache()
        other.length, other._made_under, other._interrupted = self.length, self._made_under, self._interrupted
        other._pasts = pasts
        return other

    @contextmanager
    def extended(self, model: Any, x: Tensor) -> Iterator[list[list[Past]]]:
        """The pasts of every path of every layer, to read and to write; on leaving the cache is x.shape[1] longer."""
        layers = model.layers
        self._check(model, layers, x)
        self._interrupted = True
        yield [[self._pasts.setdefault(id(mixer), Past()) for mixer in layer.mixers] for layer in layers]
        self._interrupted, self._spent = False, self._branches is not None
        self.length += x.shape[1]
        for past in self._pasts.values():
            past.length = self.length

    @contextmanager
    def foreign(self, model: Any, x: Tensor) -> Iterator[dict[str, Any]]:
        """The same for a model that keeps its past in one object of its own; it cannot be repeated."""
        self._check(model, model.layers, x)
        self._interrupted = True
        yield self._foreign
        self._interrupted = False
        self.length += x.shape[1]

    def _check(self, model: Any, layers: Any, x: Tensor) -> None:
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in model.parameters())):
            raise ValueError(
                "a cache was given while gradients are recorded; expected inference, because no gradient reaches the "
                "cached tokens. Use torch.no_grad(), or pass the whole sequence without a cache."
            )
        if self._interrupted:
            raise ValueError(
                "the cache was left half-written by a forward that failed; expected a whole one. "
                "Make a new models.Cache()."
            )
        if self._spent:
            raise ValueError(
                "the cache is a branch and has had its forward; expected one, because nothing of it is kept. "
                "Take another branch, or Cache.repeat to go on."
            )
        mixers = (mixer for layer in layers for mixer in layer.mixers)
        under = (id(model), *(getattr(mixer, "restrictions", ()) for mixer in mixers))
        if self._made_under not in (None, under):
            raise ValueError(
                "the cache was filled by another model or under other restrictions; expected the same, because what it "
                "holds was made under those. Make a new models.Cache() and pass the whole sequence."
            )
        if self.batch not in (None, x.shape[0]):
            raise ValueError(
                f"the cache holds {self.batch} sequences and the input {x.shape[0]}; expected as many. "
                "Cache.repeat continues one prefix several times."
            )
        self._made_under = under
