"""Results as HDF5 that explains itself: written whole or not at all, read by h5py and by xarray (engine h5netcdf).

Every group holds its own dimension scales, every dataset `units` and `description`; NaN means not applicable or not
measured. The root attribute `data_sha256` covers all data: equal data have equal values there, on every machine. The
whole file is the same byte for byte when the root attributes (among them `time`) and the HDF5 library are the same.
A line with the sha256 of the file follows the HDF5 part (HDF5 readers ignore it): it is checked before HDF5 sees the
file, because one flipped bit in HDF5's own structures can crash the process (measured with HDF5 2.0).
"""

import hashlib
import io
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from analyses.atomic import write_bytes
from analyses.result import ROOT, Dataset, Result, Variable, concatenate
from models.errors import InputError

__all__ = ["ROOT", "Dataset", "Result", "StoreError", "Variable", "concatenate", "read", "read_attributes", "write"]

FORMAT = "hybridscope-result-1"
OWN_ATTRIBUTES = ("format", "data_sha256")
COMPRESS_FROM = 4 * 1024  # bytes; a chunk's own bookkeeping is as large as smaller arrays
SIGNATURE = b"\x89HDF\r\n\x1a\n"
SEAL = b"\nsha256 of all bytes before this line: "
SEAL_LENGTH = len(SEAL) + 64 + 1
TEXT = h5py.string_dtype("utf-8")


class StoreError(InputError):
    """A file that cannot be read as a result: missing, foreign, truncated or altered."""


def write(path: Path | str, result: Result, compress: bool = True) -> None:
    """Write `result` to `path` atomically, replacing a file that is there.

    The file is built in memory first (cost: its size once more): HDF5 on a full disk cannot close a file cleanly.
    `compress` packs arrays of 4 KB and more, at about 30 MB/s: not worth it for files that soon go.
    """
    image = io.BytesIO()
    # in order of declaration; the format of HDF5 1.10 (2016) takes half the room of 1.0's around small arrays
    with h5py.File(image, "w", track_order=True, libver=("v110", "v110")) as file:
        attributes = {"format": FORMAT, "data_sha256": result.digest(), **result.attributes}
        for name, value in attributes.items():
            if name in OWN_ATTRIBUTES and name in result.attributes:
                raise InputError(f"root attribute {name!r} is written by the store itself; leave it out")
            file.attrs[name] = _attribute(name, value)
        for name, dataset in result.groups.items():
            group = file
            for part in name.split("/") if name else ():
                group = group[part] if part in group else group.create_group(part, track_order=True)
            _write_group(group, dataset, compress)
    content = image.getbuffer()
    write_bytes(path, content, SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n")


def read(path: Path | str, verify: bool = True) -> Result:
    """The whole result; StoreError (path, cause and remedy) for anything else.

    verify=False opens a file that another program has changed or copied piecewise; if it is damaged HDF5 may crash.
    """
    with _opened(path, verify) as file:
        try:
            attributes = _attributes(file)
            groups = {name: dataset for name, group in _walk(file) if (dataset := _read_group(group))}
            return Result(groups, {name: value for name, value in attributes.items() if name not in OWN_ATTRIBUTES})
        except (OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
            raise StoreError(f"{path}: damaged ({error}); copy it again or rerun its analysis") from error


def read_attributes(path: Path | str) -> dict[str, Any]:
    """Root attributes only (analysis, config, data_sha256, ...), without reading any array."""
    with _opened(path) as file:
        return _attributes(file)


def _write_group(group: h5py.Group, dataset: Dataset, compress: bool) -> None:
    if dataset.description:
        group.attrs["description"] = dataset.description
    for name, coord in dataset.coords.items():
        _write_variable(group, name, coord, compress).make_scale(name)
    for name, variable in dataset.variables.items():
        stored = _write_variable(group, name, variable, compress)
        for axis, dim in enumerate(variable.dims):
            stored.dims[axis].label = dim
            stored.dims[axis].attach_scale(group[dim])


def _write_variable(group: h5py.Group, name: str, variable: Variable, compress: bool) -> h5py.Dataset:
    values, options = variable.values, {}
    if values.dtype.kind == "U":
        stored = group.create_dataset(name, shape=values.shape, dtype=TEXT, track_times=False)
        if values.size:
            stored[...] = values.astype(object)
    else:
        boolean = values.dtype.kind == "b"  # netCDF has no booleans: xarray's own convention, int8 with an attribute
        if compress and values.nbytes >= COMPRESS_FROM:
            options = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
        data = values.astype("i1") if boolean else values
        stored = group.create_dataset(name, data=data, track_times=False, **options)
        if boolean:
            stored.attrs["dtype"] = "bool"
        elif values.dtype.kind == "f":
            stored.attrs["not_applicable"] = "NaN"
    stored.attrs["units"] = variable.units
    stored.attrs["description"] = variable.description
    return stored


def _attribute(name: str, value: Any) -> Any:
    if isinstance(value, str | int | float | np.number) and not isinstance(value, bool):  # netCDF has no booleans
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"root attribute {name!r} holds NUL, which HDF5 cannot store; remove it")
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return np.array(value, dtype=TEXT)
    if isinstance(value, list | tuple | np.ndarray) and (array := np.asarray(value)).size and array.dtype.kind in "iuf":
        return array
    raise InputError(f"root attribute {name!r} is {value!r}; give a string, a number, a list of either, or JSON text")


def _opened(path: Path | str, verify: bool = True) -> h5py.File:
    path = Path(path)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise StoreError(f"{path}: {found}; give the .h5 file that an analysis wrote with --out")
    with open(path, "rb") as raw:
        start = raw.read(64)
    if not start.startswith(SIGNATURE):
        cause = "empty" if not start else f"not HDF5, it starts with {start[:24]!r}"
        if start.lstrip().startswith(b"<"):
            cause = "a web page, not HDF5"
        elif start.startswith(b"version https://git-lfs"):
            cause = "a Git LFS pointer, not the file itself"
        raise StoreError(f"{path}: {cause}; download the file again or rerun its analysis")
    if verify:
        _check_seal(path)
    try:
        file = h5py.File(path, "r", locking=False)  # files appear whole, so locks (often broken on NFS) add nothing
    except (OSError, RuntimeError, ValueError) as error:
        raise StoreError(f"{path}: truncated or damaged HDF5 ({error}); copy it again or rerun its analysis") from error
    if _safe_format(file) != FORMAT:
        file.close()
        raise StoreError(f"{path}: HDF5, but its attribute 'format' is not {FORMAT!r}; give a result of this project")
    return file


def _check_seal(path: Path) -> None:
    with open(path, "rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as content:
        with memoryview(content) as view:
            body, seal = view[:-SEAL_LENGTH], bytes(view[-SEAL_LENGTH:])
            intact = seal == SEAL + hashlib.sha256(body).hexdigest().encode() + b"\n"
            body.release()
        if not intact and not seal.startswith(SEAL) and content.find(FORMAT.encode()) < 0:
            raise StoreError(f"{path}: HDF5 of another program or truncated; give a result of this project, whole")
    if not intact:
        raise StoreError(
            f"{path}: truncated, damaged or altered since it was written; copy it again, rerun its analysis, "
            "or, if you altered it yourself, use store.read(path, verify=False)"
        )


def _safe_format(file: h5py.File) -> Any:
    try:
        return file.attrs.get("format")
    except (OSError, KeyError, ValueError, RuntimeError):
        return None


def _attributes(file: h5py.File) -> dict[str, Any]:
    items = file.attrs.items()
    return {name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for name, value in items}


def _walk(group: h5py.Group, name: str = ROOT) -> Iterator[tuple[str, h5py.Group]]:
    yield name, group
    for key, item in group.items():
        if isinstance(item, h5py.Group):
            yield from _walk(item, f"{name}/{key}".strip("/"))


def _read_group(group: h5py.Group) -> Dataset | None:
    variables: dict[str, Variable] = {}
    coords: dict[str, Variable] = {}
    for name, stored in group.items():
        if not isinstance(stored, h5py.Dataset):
            continue
        dims = (name,) if stored.is_scale else tuple(axis.label for axis in stored.dims)
        (coords if stored.is_scale else variables)[name] = _read_variable(stored, dims)
    if not variables and not coords:
        return None
    return Dataset(variables, coords, group.attrs.get("description", ""))


def _read_variable(stored: h5py.Dataset, dims: tuple[str, ...]) -> Variable:
    values: Any = stored.asstr()[...] if h5py.check_string_dtype(stored.dtype) else stored[...]
    if h5py.check_string_dtype(stored.dtype):
        values = np.array(values, dtype=object).reshape(stored.shape)
        values = values.astype(str) if not values.size else values
    elif stored.attrs.get("dtype") == "bool":
        values = values.astype(bool)
    return Variable(dims, values, stored.attrs["units"], stored.attrs["description"])
