"""A result in memory: groups of arrays with named dimensions, coordinates, units and descriptions.

NaN means not applicable or not measured; integers, booleans and strings have no such value (use floats, or "" and say
so in the description).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from models.errors import InputError

if TYPE_CHECKING:
    import pandas
    import xarray

ROOT = ""  # name of the root group
NOT_A_UNIT = "since"  # CF decoding would read "tokens since x" as a date


@dataclass(frozen=True, eq=False)
class Variable:
    """An array with named dimensions. `units` is "1" for pure numbers, "" for strings; fp16 and bf16 become float32."""

    dims: tuple[str, ...]
    values: Any
    units: str
    description: str

    def __post_init__(self) -> None:
        dims = (self.dims,) if isinstance(self.dims, str) else tuple(self.dims)
        values = _as_array(self.values)
        if values.ndim != len(dims) or len(set(dims)) != len(dims):
            raise InputError(f"variable of shape {values.shape} has dims {dims}; give one distinct name per axis")
        if NOT_A_UNIT in self.units.split():
            raise InputError(f"units {self.units!r} would be read as a date; word them without 'since'")
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "values", values)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Variables that share dimensions. `coords` label dimensions: {dim: Variable((dim,), ...)}.

    A dimension without a coordinate is labelled by that of an enclosing group, else by its positions 0, 1, 2, ...
    """

    variables: Mapping[str, Variable]
    coords: Mapping[str, Variable] = field(default_factory=dict)
    description: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "variables", dict(self.variables))
        object.__setattr__(self, "coords", dict(self.coords))
        for name, coord in self.coords.items():
            if coord.dims != (name,):
                raise InputError(f"coordinate {name!r} has dims {coord.dims}, not its own; make it a variable")
        for name in {dim for variable in self.variables.values() for dim in variable.dims} & set(self.variables):
            raise InputError(f"{name!r} names both a variable and a dim; move it to coords or rename it")
        for name in (*self.variables, *self.coords):
            if not name or "/" in name or name.startswith("."):
                raise InputError(f"{name!r} cannot name a dataset; use letters, digits and _")
        self.sizes  # noqa: B018  lengths must agree

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each dimension, in order of first use."""
        sizes: dict[str, int] = {}
        for name, variable in (*self.coords.items(), *self.variables.items()):
            for dim, length in zip(variable.dims, variable.values.shape, strict=True):
                if sizes.setdefault(dim, length) != length:
                    raise InputError(f"{name}: dim {dim!r} has length {length}, elsewhere in its group {sizes[dim]}")
        return sizes

    def __getitem__(self, name: str) -> np.ndarray:
        """Values of a variable or coordinate."""
        for table in (self.variables, self.coords):
            if name in table:
                return table[name].values
        raise InputError(f"no variable {name!r}; the group has {', '.join((*self.variables, *self.coords))}")


@dataclass(frozen=True, eq=False)
class Result:
    """What an analysis found: groups {path: Dataset} ("" is the root) and root attributes (strings, numbers, lists)."""

    groups: Mapping[str, Dataset]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = {name.strip("/"): dataset for name, dataset in self.groups.items()}
        if len(groups) != len(self.groups):
            raise InputError(f"groups {list(self.groups)} name one group twice; names are compared without outer '/'")
        for name, dataset in groups.items():
            if name and any(part in ("", ".", "..") for part in name.split("/")):
                raise InputError(f"{name!r} cannot name a group; write parts separated by single '/'")
            if not dataset.variables and not dataset.coords:
                raise InputError(f"group {name or '/'!r} holds nothing; leave it out")
        for name in sorted(groups, key=lambda name: name.count("/") + bool(name)):  # parents first: children inherit
            groups[name] = _labelled(groups[name], name, groups)
        for name in groups:
            parent, _, leaf = name.rpartition("/")
            if name and parent in groups and leaf in {**groups[parent].variables, **groups[parent].coords}:
                raise InputError(f"{name!r} names both a group and a dataset; rename one")
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "attributes", dict(self.attributes))

    def __getitem__(self, path: str) -> np.ndarray:
        """Values of "group/variable" (or "variable" of the root)."""
        group, _, name = path.strip("/").rpartition("/")
        if group not in self.groups:
            raise InputError(f"no group {group or '/'!r}; the result has {', '.join(g or '/' for g in self.groups)}")
        return self.groups[group][name]

    def digest(self) -> str:
        """sha256 of all data (names, dims, units, descriptions, values), without the root attributes."""
        total = hashlib.sha256()
        for group, dataset in sorted(self.groups.items()):
            total.update(json.dumps([group, dataset.description]).encode())
            for table in (dataset.coords, dataset.variables):
                for name, var in sorted(table.items()):
                    text = var.values.dtype.kind == "U"
                    kind = "text" if text else var.values.dtype.str
                    head = [name, var.dims, kind, var.values.shape, var.units, var.description]
                    total.update(json.dumps(head).encode())
                    total.update(json.dumps(var.values.tolist()).encode() if text else var.values.tobytes())
        return total.hexdigest()

    def to_xarray(self, group: str | None = None) -> "xarray.DataTree | xarray.Dataset":
        """All groups as an xarray.DataTree (attributes at its root), or one group as an xarray.Dataset."""
        import xarray

        if group is None:
            sets = {f"/{name}": self.to_xarray(name) for name in self.groups}
            tree = xarray.DataTree.from_dict(sets)
            tree.attrs.update(self.attributes)
            return tree
        dataset = self.groups[_known(group, self.groups)]

        def convert(table: Mapping[str, Variable]) -> dict[str, Any]:
            return {name: (var.dims, var.values, _labels(var)) for name, var in table.items()}

        attrs = {"description": dataset.description} if dataset.description else {}
        return xarray.Dataset(convert(dataset.variables), convert(dataset.coords), attrs)

    def to_pandas(self, group: str | None = None, variables: Sequence[str] | None = None) -> "pandas.DataFrame":
        """A long table: one row per point of the largest variable's dims, smaller variables repeated along the others.

        All groups (None) are stacked under a first column `group` when there are several. Variables of one group whose
        dims do not nest need a choice in `variables`.
        """
        import pandas

        if group is not None:
            return _table(self.groups[_known(group, self.groups)], group, variables)
        tables = {name: _table(dataset, name, variables) for name, dataset in self.groups.items() if dataset.variables}
        if len(tables) == 1:
            return next(iter(tables.values()))
        for name, table in tables.items():
            table.insert(0, "group", name or "/")
        return pandas.concat(tables.values(), ignore_index=True)


def concatenate(datasets: Sequence[Dataset], dim: str) -> Dataset:
    """Join datasets along `dim`, in the given order; variables and coordinates without it must be equal in all."""
    if not datasets:
        raise InputError(f"nothing to join along {dim!r}; give at least one dataset")
    first = datasets[0]
    joined: list[dict[str, Variable]] = []
    for table_name in ("variables", "coords"):
        tables = [getattr(dataset, table_name) for dataset in datasets]
        joined.append({})
        for name, var in tables[0].items():
            parts = [table.get(name) for table in tables]
            if any(part is None or part.dims != var.dims or _labels(part) != _labels(var) for part in parts):
                raise InputError(
                    f"{name}: missing, or other dims, units or description, in some of the datasets to join"
                )
            if dim in var.dims:
                values = np.concatenate([part.values for part in parts], axis=var.dims.index(dim))
            elif all(_same(part.values, var.values) for part in parts):
                values = var.values
            else:
                raise InputError(f"{name} lacks dim {dim!r} and differs between the datasets to join; give it that dim")
            joined[-1][name] = Variable(var.dims, values, var.units, var.description)
        if any(set(table) != set(tables[0]) for table in tables):
            raise InputError(f"the datasets to join along {dim!r} have different {table_name}: give all the same")
    return Dataset(joined[0], joined[1], first.description)


def _as_array(values: Any) -> np.ndarray:
    """Numbers as little-endian arrays of a type that every HDF5 reader knows, text as str arrays."""
    if hasattr(values, "detach"):  # a torch tensor, recognised without importing torch; numpy knows no bf16
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    array = np.asarray(values)
    if array.dtype.kind in "OTU":
        flat = list(np.asarray(values, dtype=object).ravel())
        if not all(isinstance(item, str) for item in flat):
            found = sorted({type(item).__name__ for item in flat})
            raise InputError(f"values mix {', '.join(found)}; give numbers (NaN where not applicable) or only strings")
        for item in flat:
            if "\0" in item or any("\ud800" <= letter <= "\udfff" for letter in item):
                raise InputError(f"text {item!r} holds NUL or a lone surrogate, which HDF5 cannot store; remove it")
        return np.array(flat, dtype=str).reshape(array.shape)
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise InputError(f"values of type {array.dtype} cannot be stored; give floats, integers, booleans or strings")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(array.shape)


def _labels(variable: Variable) -> dict[str, str]:
    return {"units": variable.units, "description": variable.description}


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind == right.dtype.kind == "f")


def _known(group: str, groups: Mapping[str, Dataset]) -> str:
    name = group.strip("/")
    if name not in groups:
        raise InputError(f"no group {group!r}; the result has {', '.join(repr(g or '/') for g in groups)}")
    return name


def _labelled(dataset: Dataset, name: str, groups: Mapping[str, Dataset]) -> Dataset:
    """Give each dimension a coordinate; a label of an enclosing group may not be redefined (xarray would refuse it)."""
    parts = name.split("/") if name else []
    parents = [groups.get("/".join(parts[:depth])) for depth in range(len(parts) - 1, -1, -1)]
    coords: dict[str, Variable] = {}
    for dim, length in dataset.sizes.items():
        inherited = next((parent.coords[dim] for parent in parents if parent and dim in parent.coords), None)
        coord = dataset.coords.get(dim, inherited)
        if coord is None:
            coord = Variable((dim,), np.arange(length, dtype="<i8"), "1", f"position along {dim}, counted from 0")
        if len(coord.values) != length or (inherited and not _same(coord.values, inherited.values)):
            raise InputError(f"group {name!r}: dim {dim!r} differs from the enclosing group's {dim!r}; rename one")
        coords[dim] = coord
    return Dataset(dataset.variables, coords, dataset.description)


def _table(dataset: Dataset, group: str, names: Sequence[str] | None) -> "pandas.DataFrame":
    import pandas

    chosen = {name: dataset.variables[name] for name in dataset.variables if names is None or name in names}
    missing = [name for name in names or () if name not in chosen]
    if missing or not chosen:
        raise InputError(f"group {group or '/'!r} has no variable {missing}; it has {', '.join(dataset.variables)}")
    dims = max((variable.dims for variable in chosen.values()), key=len)
    shape = tuple(dataset.sizes[dim] for dim in dims)
    columns: dict[str, np.ndarray] = {}
    for axis, dim in enumerate(dims):
        along = [1] * len(dims)
        along[axis] = shape[axis]
        columns[dim] = np.broadcast_to(dataset.coords[dim].values.reshape(along), shape).ravel()
    for name, var in chosen.items():
        if not set(var.dims) <= set(dims):
            raise InputError(f"{name} has dims {var.dims}, outside {dims}; choose `variables` whose dims nest")
        kept = [dim for dim in dims if dim in var.dims]
        aligned = var.values.transpose([var.dims.index(dim) for dim in kept])
        aligned = aligned.reshape([dataset.sizes[dim] if dim in kept else 1 for dim in dims])
        columns[name] = np.broadcast_to(aligned, shape).ravel()
    return pandas.DataFrame(columns, index=pandas.RangeIndex(int(np.prod(shape))))
