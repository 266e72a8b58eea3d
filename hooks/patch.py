"""Activation patching: chosen points take other values than the model computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hooks.points import edited


@contextmanager
def patch(model: Any, edits: Mapping[str, Tensor | Callable[[Tensor], Tensor]]) -> Iterator[dict[str, int]]:
    """Inside, the named hook points give edit(tensor), or the tensor that stands in the place of a function.

    A tensor must have the point's shape (it is moved to its device and dtype); a function gets a copy of the computed
    tensor and may change it in place or return another. Yields how often each point has fired. Gradients flow through
    edits. Raises ValueError for an unknown name at once, for a wrong shape when it occurs, and at the end for a point
    that never fired, since an intervention that did not act must not be scored.
    """

    def function(edit: Tensor | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if isinstance(edit, Tensor):
            return lambda value: edit
        return lambda value: edit(value.clone())

    with edited(model, {name: function(edit) for name, edit in edits.items()}) as fired:
        yield fired
