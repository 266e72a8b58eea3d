"""Token embeddings times a constant (muP): e = scale * E[id]."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """`weight` is E itself; what is called gives the residual stream's first value, factor included."""

    def __init__(self, vocabulary: int, width: int, scale: float):
        super().__init__(vocabulary, width)
        self.scale = scale

    def forward(self, input: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch D"]:
        embedded = super().forward(input)
        return embedded if self.scale == 1 else self.scale * embedded
