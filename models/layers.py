"""What a layer says of itself: its paths (kind, heads, window), for analyses that select paths rather than layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

PATH_KINDS = ("full", "swa", "lightning", "mamba2", "gdn", "mamba1", "kda", "conv", "rglru")


class Path(NamedTuple):
    """One route of a layer along time. `heads` counts query heads (value heads of a delta rule); window in tokens."""

    kind: str
    heads: int
    window: int | None


@dataclass(frozen=True)
class Layer:
    """Layer `index` (absolute, from 0). `mixers` say and take everything about `paths`, in the same order.

    `sites` are the modules whose forward runs along time: one for all mixers of a native layer, one for each of a
    Hugging Face layer (those that can be reached).
    """

    index: int
    kind: str
    paths: tuple[Path, ...]
    mixers: tuple[Any, ...]
    block: nn.Module
    sites: tuple[nn.Module, ...] = ()
    in_series: bool = False
    """One path reads what another wrote (Zamba2), so their reaches add."""

    @property
    def window(self) -> int | None:
        """The window of the layer's sliding path; None if it has none."""
        return next((path.window for path in self.paths if path.window is not None), None)

    @property
    def n_heads(self) -> int:
        return sum(path.heads for path in self.paths)

    @property
    def n_kv_heads(self) -> int:
        return sum(mixer.n_kv_heads for mixer in self.mixers)
