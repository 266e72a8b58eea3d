"""One optimisation step recorded as a CUDA graph and replayed: small models otherwise wait for Python's launches.

A step of a miniature is many kernels of a few microseconds each. What a graph holds are the addresses of the step's
tensors, so the batch is copied into the recorded one and learning rates are tensors, changed in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PLAIN_STEPS = 3  # of training, before recording: they compile, and make the optimizer's state and the kernels' tables


class GraphedStep:
    """`step`, which turns rows [B, T] on the device into a loss [] and updates the parameters.

    The first calls run it as it is, on the stream that will record; every later call replays the record. `step` must
    leave no gradients behind and must not wait for the device.
    """

    def __init__(self, step: Callable[[Tensor], Tensor]):
        self.step = step
        self.stream = torch.cuda.Stream()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= PLAIN_STEPS:
            return self._plainly(rows)
        if self.graph is None:
            self._record(rows)
        assert self.graph is not None
        self.rows.copy_(rows)
        self.graph.replay()
        return self.loss.clone()  # the next replay writes into the same loss

    def _plainly(self, rows: Tensor) -> Tensor:
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            loss = self.step(rows)
        before.wait_stream(self.stream)
        return loss

    def _record(self, rows: Tensor) -> None:
        self.rows, self.graph = rows.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.loss = self.step(self.rows)
