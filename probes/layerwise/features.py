"""Features by name, read one at a time from anything sliceable: numpy arrays, memory maps, torch tensors, h5py.

Either a mapping of names to arrays [N, D] (widths may differ), or one array of three axes whose layer axis is stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_EXPECTED = "expected {name: array [N, D]}, or one array [L, N, D] with layer_axis=0 or [N, L, D] with layer_axis=1"


class Features:
    """`names`, `widths` and the number of rows `n`, from shapes alone; `read(i)` reads one feature and nothing else."""

    def __init__(self, source: Any, names: Sequence[str] | None, layer_axis: int | None) -> None:
        if isinstance(source, Mapping):
            if layer_axis is not None or names is not None:
                raise ValueError("features are a mapping, which names its layers; pass neither names nor layer_axis")
            given = {str(name): value for name, value in source.items()}
            if len(given) != len(source):
                raise ValueError(f"features have names that are equal as strings: {list(source)}; rename one")
            shapes = [_shape(f"features[{name!r}]", value, 2) for name, value in given.items()]
            self.names, self._parts, self._source = tuple(given), list(given.values()), None
        else:
            shape = _shape("features", source, 3)
            if layer_axis not in (0, 1):
                raise ValueError(
                    f"features have shape {shape} and layer_axis is {layer_axis!r}; expected 0 for [L, N, D] or 1 for "
                    "[N, L, D]: the axes are not guessed"
                )
            count, rows = shape[layer_axis], shape[1 - layer_axis]
            shapes = [(rows, shape[2])] * count
            self.names, self._parts, self._source = _names(names, count), [], source
        self._layer_axis = layer_axis
        self.widths = [width for _, width in shapes]
        self.n = _rows(self.names, shapes)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Float[Tensor, "N D"]:
        """A copy of one feature as float32, or float64 where the source holds float64 or integers."""
        if self._source is None:
            value = self._parts[index][:]
        else:
            value = self._source[index] if self._layer_axis == 0 else self._source[:, index]
        if isinstance(value, Tensor):
            exact = value.dtype == torch.float64 or not value.dtype.is_floating_point
            return value.detach().to(torch.float64 if exact else torch.float32, copy=True)
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise ValueError(
                f"feature {self.names[index]!r} has dtype {array.dtype}; expected real numbers; convert it (torch "
                "tensors may be bfloat16)"
            )
        exact = array.dtype == np.float64 or array.dtype.kind != "f"
        return torch.from_numpy(np.array(array, dtype=np.float64 if exact else np.float32, order="C"))


def _shape(what: str, value: Any, axes: int) -> tuple[int, ...]:
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) != axes:
        found = f"of type {type(value).__name__}" if shape is None else f"of shape {tuple(shape)}"
        raise ValueError(f"{what} is {found}; {_EXPECTED}")
    return tuple(int(size) for size in shape)


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    found = tuple(map(str, range(count) if names is None else names))
    if len(found) != count or len(set(found)) != count:
        raise ValueError(f"names are {found}; expected {count} different ones, one for each layer of the features")
    return found


def _rows(names: tuple[str, ...], shapes: Sequence[tuple[int, ...]]) -> int:
    if not shapes:
        raise ValueError(f"features hold no layer; {_EXPECTED}")
    rows = shapes[0][0]
    for name, (found, width) in zip(names, shapes, strict=True):
        if found != rows or width == 0:
            raise ValueError(
                f"feature {name!r} has shape [{found}, {width}], feature {names[0]!r} has {rows} rows; expected the "
                "same rows in every feature and at least one column"
            )
    return rows


def fault(values: Float[Tensor, "N D"]) -> str:
    """Why a feature cannot be fitted, "" if it can."""
    bad = (~torch.isfinite(values)).any(1)
    if not bad.any():
        return ""
    return (
        f"{int(bad.sum())} of {len(bad)} rows hold NaN or inf (first: row {int(bad.nonzero()[0])}); check the dtype "
        "and the weights that the features come from"
    )
