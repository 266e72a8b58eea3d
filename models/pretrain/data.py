"""Training batches as a pure function of (seed, step), so that a resumed run continues the data order exactly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probes.niah import insert

NEEDLE_STREAM, ORDER_STREAM = 1, 2  # so that needles and order draw from unrelated generators
WHOLE_SHARE = 0.5  # of needle prompts fill their sequence; the others follow ordinary text
MINIMUM = 200  # tokens that any needle prompt fits into under a small vocabulary
SHORTEST = 1 / 8  # of the sequence, for a prompt that does not fill it


class TokenStream:
    """Blocks of `length` consecutive ids of a uint16 file, every block once an epoch, in a new order each epoch.

    With probability `niah_share` a sequence ends in a needle prompt (probes.niah.insert): its announcement, needle,
    question and answer. Only a share `whole` of the prompts fills the sequence. Were it all of them, a model could take
    the announcement's distance, always the same, for the sign to retrieve, and would retrieve at that length alone.
    """

    def __init__(
        self, path: Path, length: int, seed: int, niah_share: float, tokenizer: Any, whole: float = WHOLE_SHARE
    ):
        if not path.is_file():
            raise ValueError(f"{path}: no such corpus file; build it with 'make corpus'.")
        self.ids = np.memmap(path, dtype=np.uint16, mode="r")
        self.length = length
        self.seed = seed
        self.niah_share = niah_share
        self.whole = whole
        self.tokenizer = tokenizer
        self.blocks = (len(self.ids) - length) // length  # one block less: every epoch starts at its own offset
        if self.blocks < 1:
            raise ValueError(f"{path} has {len(self.ids)} tokens; sequences of {length} need at least {2 * length}.")
        self._epoch, self._order, self._offset = -1, np.empty(0, np.int64), 0

    def sequence(self, index: int) -> tuple[np.ndarray, tuple[int, int] | None]:
        """Sequence `index` of the endless stream [length], and the answer's token span if it carries a needle."""
        epoch, rank = divmod(index, self.blocks)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, ORDER_STREAM, epoch))
            self._epoch, self._order = epoch, rng.permutation(self.blocks)
            self._offset = int(rng.integers(self.length))
        start = self._offset + int(self._order[rank]) * self.length
        block = np.asarray(self.ids[start : start + self.length])
        rng = np.random.default_rng((self.seed, NEEDLE_STREAM, index))
        if rng.random() >= self.niah_share:
            return block, None
        size = self.length if rng.random() < self.whole else int(rng.integers(self._shortest, self.length + 1))
        before = self.length - size
        needle = insert(block[before:], self.tokenizer, rng, size)
        start, end = needle.answer_span
        return np.concatenate((block[:before], needle.input_ids)), (before + start, before + end)

    @property
    def _shortest(self) -> int:
        return min(self.length, max(MINIMUM, round(self.length * SHORTEST)))

    def batch(self, step: int, batch_size: int) -> tuple[Tensor, int]:
        """The batch [B, length] int64 of `step` (from 0), and how many of its sequences carry a needle."""
        drawn = [self.sequence(step * batch_size + row) for row in range(batch_size)]
        stacked = np.stack([ids for ids, _ in drawn]).astype(np.int64)
        return torch.from_numpy(stacked), sum(answer is not None for _, answer in drawn)


def prefetched(
    stream: TokenStream, first: int, last: int, batch_size: int, depth: int = 8
) -> Iterator[tuple[Tensor, int]]:
    """The batches of steps first .. last-1, made ahead by one thread; its exception is raised here."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for step in range(first, last):
                if not put(stream.batch(step, batch_size)):
                    return
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=produce, daemon=True, name="batches")
    thread.start()
    try:
        for _ in range(first, last):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
