"""Results on disk: what is written comes back, in h5py and in xarray; what is not a result is refused clearly."""

import errno
import os

import h5py
import numpy as np
import pytest
import torch
import xarray
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from analyses import atomic, store
from analyses.store import Dataset, Result, StoreError, Variable
from models.errors import InputError


def example() -> Result:
    """Two checkpoints under a root that labels the layers; every kind of value; all sizes different."""
    layer = Variable(("layer",), ["blocks.0", "blöcks.1 漢字 🙂", "blocks.2"], "", "layer names")
    window = Variable(("window",), [1.0, 2048.0, np.nan, np.inf], "tokens", "visible keys, NaN: unrestricted")

    def group(seed: int) -> Dataset:
        rng = np.random.default_rng(seed)
        loss = rng.normal(size=(5, 3, 4))
        loss[1, 2, 0] = np.nan
        return Dataset(
            {
                "zeta": Variable(
                    ("sample", "layer", "window"), loss, "nats per token", "declared first, not alphabetical"
                ),
                "answered": Variable(("sample",), [True, False, True, True, False], "1", "all digits right"),
                "document": Variable(("sample",), ["a", "", "é", "日本", "e"], "", "title"),
                "count": Variable((), 7, "tokens", "a scalar"),
                "seconds": Variable((), 3.5, "seconds", "a duration must stay a number"),
                "note": Variable((), "text", "", "a scalar text"),
                "none": Variable(("missing",), np.zeros(0, np.float32), "1", "empty"),
                "none_text": Variable(("missing",), np.zeros(0, dtype=str), "", "empty text"),
            },
            {"window": window},
            f"checkpoint {seed}",
        )

    root = Dataset({"kind": Variable(("layer",), ["swa", "full", "swa"], "", "mixer")}, {"layer": layer})
    attributes = {
        "analysis": "fake",
        "config": "{}",
        "seed": 3,
        "scale": 0.5,
        "names": ["x", "ÿ"],
        "big": "x" * 100_000,
    }
    return Result({"": root, "swa-32": group(1), "nested/full": group(2)}, attributes)


def assert_same(left: Result, right: Result) -> None:
    assert list(left.groups) == list(right.groups)
    for name, dataset in left.groups.items():
        other = right.groups[name]
        assert dataset.description == other.description
        for table in ("variables", "coords"):
            mine, theirs = getattr(dataset, table), getattr(other, table)
            assert set(mine) == set(theirs)
            for key, var in mine.items():
                assert (var.dims, var.units, var.description) == (
                    theirs[key].dims,
                    theirs[key].units,
                    theirs[key].description,
                )
                assert var.values.dtype == theirs[key].values.dtype
                np.testing.assert_array_equal(var.values, theirs[key].values)
    assert left.digest() == right.digest()


def test_round_trip_keeps_everything(tmp_path):
    result = example()
    store.write(tmp_path / "r.h5", result)
    back = store.read(tmp_path / "r.h5")
    assert_same(result, back)
    assert list(back.groups["swa-32"].variables)[:3] == ["zeta", "answered", "document"]
    assert back.attributes == dict(result.attributes)
    assert store.read_attributes(tmp_path / "r.h5")["data_sha256"] == result.digest()
    assert back["swa-32/count"] == 7
    assert back["kind"][1] == "full"


def test_same_result_same_bytes_and_another_differs(tmp_path):
    for name in ("a", "b"):
        store.write(tmp_path / name, example())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    changed = example()
    changed.groups["swa-32"].variables["answered"].values[0] = False
    store.write(tmp_path / "b", changed)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()
    assert changed.digest() != example().digest()


@pytest.mark.parametrize(
    "change", [{"units": "bits"}, {"description": "else"}, {"dims": ("t",)}, {"values": [1, 2]}, {"values": [1.0, 2.5]}]
)
def test_digest_sees_every_part(change):
    base = {"dims": ("s",), "values": [1.0, 2.0], "units": "nats", "description": "d"}
    digests = {Result({"": Dataset({"x": Variable(**fields)})}).digest() for fields in (base, base | change)}
    assert len(digests) == 2


@pytest.mark.parametrize("group", ["", "swa-32", "nested/full"])
def test_xarray_opens_every_group_with_labels(tmp_path, group):
    result = example()
    store.write(tmp_path / "r.h5", result)
    with xarray.open_dataset(tmp_path / "r.h5", group=group or None, engine="h5netcdf") as opened:
        opened.load()
    assert list(opened.coords["layer"].values) == ["blocks.0", "blöcks.1 漢字 🙂", "blocks.2"]
    if group:
        assert opened["zeta"].dims == ("sample", "layer", "window")
        assert np.isnan(opened["zeta"].sel(layer="blocks.2").values[1, 0])
        assert opened["answered"].dtype == bool
        assert opened["seconds"].dtype == float
        assert opened["document"].values.tolist() == ["a", "", "é", "日本", "e"]
        assert opened["zeta"].attrs["units"] == "nats per token"
        assert opened.attrs["description"].startswith("checkpoint")
    assert opened.drop_attrs().identical(result.to_xarray(group).drop_attrs())


def test_xarray_tree_equals_ours(tmp_path):
    store.write(tmp_path / "r.h5", example())
    tree = example().to_xarray()
    assert tree.attrs["seed"] == 3
    with xarray.open_datatree(tmp_path / "r.h5", engine="h5netcdf") as opened:
        assert tree["swa-32"].to_dataset().equals(opened["swa-32"].to_dataset().load())
        assert tree["nested/full/zeta"].equals(opened["nested/full/zeta"].load())


def test_h5py_sees_scales_labels_and_meaning(tmp_path):
    store.write(tmp_path / "r.h5", example())
    with h5py.File(tmp_path / "r.h5") as file:
        for group in (file["swa-32"], file["nested/full"]):
            zeta = group["zeta"]
            assert [axis.label for axis in zeta.dims] == ["sample", "layer", "window"]
            assert zeta.dims[1][0].asstr()[1] == "blöcks.1 漢字 🙂"
            assert zeta.dims[1][0].parent == group  # its own scales, not those of the root
            assert zeta.attrs["not_applicable"] == "NaN"
        seen = []
        file.visititems(lambda name, item: seen.append(item) if isinstance(item, h5py.Dataset) else None)
        assert len(seen) > 20
        assert all("units" in item.attrs and "description" in item.attrs for item in seen)


def test_large_arrays_are_compressed_and_come_back(tmp_path):
    values = np.arange(200_000, dtype=np.int32).reshape(400, 500)
    store.write(tmp_path / "r.h5", Result({"": Dataset({"x": Variable(("a", "b"), values, "1", "d")})}))
    assert (tmp_path / "r.h5").stat().st_size < values.nbytes / 4
    np.testing.assert_array_equal(store.read(tmp_path / "r.h5")["x"], values)


@settings(max_examples=40, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["<f4", "<f8", "<i2", "<i8", "<u4", "|b1", ">f8", ">i4", "<f2"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), max_size=4),
)
def test_any_array_and_text_round_trips(tmp_path_factory, values, texts):
    path = tmp_path_factory.mktemp("h") / "r.h5"
    dims = tuple("abc"[: values.ndim])
    variables = {
        "x": Variable(dims, values, "1", "any"),
        "text": Variable(("text_id",), np.array(texts, str), "", "any"),
    }
    store.write(path, Result({"g": Dataset(variables)}))
    back = store.read(path)
    np.testing.assert_array_equal(back["g/x"], values.astype(back["g/x"].dtype))
    assert np.dtype(values.dtype) == np.float16 or back["g/x"].dtype == values.dtype.newbyteorder("=")
    assert back["g/text"].tolist() == [text.rstrip("\0") for text in texts]


def test_low_precision_becomes_float32_exactly():
    x = torch.tensor([1.0, 1 / 3, -7.25], dtype=torch.bfloat16, requires_grad=True)
    stored = Variable(("t",), x, "1", "d").values
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, x.detach().float().numpy())
    assert Variable(("t",), np.float16([0.1]), "1", "d").values.dtype == np.float32
    assert Variable(("t",), torch.arange(3), "1", "d").values.dtype == np.int64


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1 + 2j], "complex128"),
        ([b"bytes"], "floats, integers, booleans or strings"),
        ([None, 1.0], "NaN where not applicable"),
        (["a", 1], "mix int, str"),
        (["a\0b"], "NUL"),
        (["\ud800"], "surrogate"),
        (np.array(["2026-01-01"], "datetime64[D]"), "datetime64"),
        (np.zeros(1, np.longdouble), "cannot be stored"),
        (np.zeros(1, np.dtype([("a", "f4")])), "cannot be stored"),
    ],
)
def test_values_that_cannot_be_kept_are_refused(values, says):
    with pytest.raises(InputError, match=says):
        Variable(("t",), values, "1", "d")


def test_descriptions_that_contradict_themselves_are_refused():
    x = Variable(("t",), [1, 2], "1", "d")
    y = Variable(("t",), [1, 2, 3], "1", "d")
    with pytest.raises(InputError, match="shape"):
        Variable(("t", "u"), [1, 2], "1", "d")
    with pytest.raises(InputError, match="distinct"):
        Variable(("t", "t"), np.eye(2), "1", "d")
    with pytest.raises(InputError, match="read as a date"):
        Variable((), 1, "tokens since start", "d")
    with pytest.raises(InputError, match="length 3"):
        Dataset({"x": x, "y": y})
    with pytest.raises(InputError, match="not its own"):
        Dataset({"x": x}, {"u": x})
    with pytest.raises(InputError, match="both a variable and a dim"):
        Dataset({"t": x})
    with pytest.raises(InputError, match="cannot name a dataset"):
        Dataset({"a/b": x})
    with pytest.raises(InputError, match="cannot name a group"):
        Result({"a/../b": Dataset({"x": x})})
    with pytest.raises(InputError, match="holds nothing"):
        Result({"a": Dataset({})})
    with pytest.raises(InputError, match="twice"):
        Result({"a": Dataset({"x": x}), "a/": Dataset({"x": x})})
    with pytest.raises(InputError, match="both a group and a dataset"):
        Result({"a": Dataset({"x": x}), "a/x": Dataset({"x": x})})
    with pytest.raises(InputError, match="enclosing group's 't'"):
        Result({"": Dataset({"x": x}), "a": Dataset({"x": y})})
    assert Result({"a": Dataset({"x": x}), "b": Dataset({"x": y})}).groups["b"].sizes == {"t": 3}  # siblings may differ


@pytest.mark.parametrize("value", [None, True, {"a": 1}, [], [1, "a"], "a\0b"])
def test_root_attributes_that_cannot_be_kept_are_refused(tmp_path, value):
    x = Dataset({"x": Variable((), 1, "1", "d")})
    with pytest.raises(InputError, match="root attribute 'odd'"):
        store.write(tmp_path / "r.h5", Result({"": x}, {"odd": value}))
    with pytest.raises(InputError, match="written by the store itself"):
        store.write(tmp_path / "r.h5", Result({"": x}, {"format": "mine"}))
    assert os.listdir(tmp_path) == []


def bad_file(kind: str, good: bytes) -> bytes:
    half = len(good) // 2
    return {
        "empty": b"",
        "five bytes": good[:5],
        "web page": b"  <!DOCTYPE html><html>not found</html>",
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "text": b"step,loss\n1,2\n",
        "truncated": good[:half],
        "one byte short": good[:-1],
        "without seal": good[:-105],
        "signature only": good[:8],
        "a flipped bit": good[:200] + bytes([good[200] ^ 4]) + good[201:],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("empty", "empty"),
        ("five bytes", "not HDF5"),
        ("web page", "a web page"),
        ("lfs", "Git LFS pointer"),
        ("text", "not HDF5, it starts with"),
        ("truncated", "truncated"),
        ("one byte short", "truncated, damaged or altered"),
        ("without seal", "truncated, damaged or altered"),
        ("signature only", "truncated"),
        ("a flipped bit", "truncated, damaged or altered"),
    ],
)
def test_bad_files_give_one_clear_error(tmp_path, kind, says):
    store.write(tmp_path / "good.h5", example())
    bad = tmp_path / "bad.h5"
    bad.write_bytes(bad_file(kind, (tmp_path / "good.h5").read_bytes()))
    for reader in (store.read, store.read_attributes):
        with pytest.raises(StoreError, match=says) as caught:
            reader(bad)
        assert str(bad) in str(caught.value)
        assert "again" in str(caught.value) or "rerun" in str(caught.value) or "whole" in str(caught.value)


def test_every_kind_of_single_bit_damage_is_noticed_before_hdf5_sees_it(tmp_path):
    store.write(tmp_path / "good.h5", example())
    good = bytearray((tmp_path / "good.h5").read_bytes())
    for place in np.random.default_rng(3).integers(0, len(good), 200):
        bad = bytearray(good)
        bad[place] ^= 1 << int(place % 8)
        (tmp_path / "bad.h5").write_bytes(bad)
        with pytest.raises(StoreError, match=r"bad\.h5"):
            store.read(tmp_path / "bad.h5")


def test_missing_folder_and_foreign_hdf5_are_refused(tmp_path):
    with pytest.raises(StoreError, match="no such file"):
        store.read(tmp_path / "absent.h5")
    with pytest.raises(StoreError, match="a folder"):
        store.read(tmp_path)
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(StoreError, match="of another program"):
        store.read(tmp_path / "foreign.h5")
    with pytest.raises(StoreError, match="not 'hybridscope-result-1'"):
        store.read(tmp_path / "foreign.h5", verify=False)


def test_altered_data_is_noticed_unless_asked_not_to(tmp_path):
    store.write(tmp_path / "r.h5", example())
    with h5py.File(tmp_path / "r.h5", "r+") as file:
        file["swa-32/count"][()] = 8
    with pytest.raises(StoreError, match="altered since"):
        store.read(tmp_path / "r.h5")
    assert store.read(tmp_path / "r.h5", verify=False)["swa-32/count"] == 8


def test_full_disk_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch):
    store.write(tmp_path / "r.h5", example())
    before = (tmp_path / "r.h5").read_bytes()
    real = os.write
    calls = []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:100])  # a short write first, as on a disk that fills

    monkeypatch.setattr(atomic.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        store.write(tmp_path / "r.h5", Result({"": Dataset({"x": Variable((), 1, "1", "d")})}))
    monkeypatch.undo()
    assert len(calls) == 2
    assert os.listdir(tmp_path) == ["r.h5"]
    assert (tmp_path / "r.h5").read_bytes() == before


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(atomic.os, "write", lambda descriptor, data: real(descriptor, data[:1000]))
    store.write(tmp_path / "deep" / "r.h5", example())
    assert_same(store.read(tmp_path / "deep" / "r.h5"), example())


def test_mode_follows_the_umask_and_partials_can_be_cleared(tmp_path):
    old = os.umask(0o027)
    try:
        atomic.write_bytes(tmp_path / "r", b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o640
    for name in (".r.1-ab.partial", ".other.1-ab.partial", "r.partial"):
        (tmp_path / name).write_bytes(b"")
    atomic.remove_partials(tmp_path / "r")
    assert sorted(os.listdir(tmp_path)) == [".other.1-ab.partial", "r", "r.partial"]


def test_pandas_tables():
    table = example().to_pandas("swa-32", ["zeta", "answered", "count"])
    assert list(table) == ["sample", "layer", "window", "zeta", "answered", "count"]
    assert len(table) == 5 * 3 * 4
    row = table[(table["sample"] == 3) & (table["layer"] == "blocks.2") & (table["window"] == 2048.0)]
    assert row["zeta"].item() == example()["swa-32/zeta"][3, 2, 1]
    assert row["answered"].item()
    assert row["count"].item() == 7
    with pytest.raises(InputError, match="dims nest"):
        example().to_pandas("swa-32")
    with pytest.raises(InputError, match="no group 'nope'"):
        example().to_pandas("nope")
    with pytest.raises(InputError, match="nope"):
        example().to_pandas("swa-32", ["nope"])


def test_pandas_aligns_variables_with_other_axis_order_and_stacks_groups():
    values = np.arange(6).reshape(2, 3)

    def group(shift: int) -> Dataset:
        x = Variable(("a", "b"), values + shift, "1", "d")
        return Dataset({"x": x, "transposed": Variable(("b", "a"), (values + shift).T, "1", "d")})

    table = Result({"one": group(0), "two": group(10)}).to_pandas()
    assert list(table["group"]) == ["one"] * 6 + ["two"] * 6
    assert (table["x"] == table["transposed"]).all()
    assert table["x"].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]


def test_concatenate_joins_samples_in_order_and_refuses_what_differs():
    def part(start: int, units: str = "nats", layers: tuple[str, ...] = ("l0", "l1"), scale: float = np.nan) -> Dataset:
        loss = Variable(("layer", "sample"), np.arange(6.0).reshape(2, 3) + start, units, "d")
        sample = Variable(("sample",), np.arange(start, start + 3), "1", "index")
        return Dataset(
            {"loss": loss, "scale": Variable((), scale, "1", "d")},
            {"sample": sample, "layer": Variable(("layer",), list(layers), "", "name")},
        )

    joined = store.concatenate([part(0), part(3)], "sample")
    assert joined["sample"].tolist() == [0, 1, 2, 3, 4, 5]
    assert joined["loss"].tolist() == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
    for other in (part(3, units="bits"), part(3, layers=("l0", "lX")), part(3, scale=2.0)):
        with pytest.raises(InputError, match=r"loss|layer|scale"):
            store.concatenate([part(0), other], "sample")
    with pytest.raises(InputError, match="nothing to join"):
        store.concatenate([], "sample")


def test_unknown_names_list_what_there_is():
    with pytest.raises(InputError, match="no group 'absent'; the result has /, swa-32, nested/full"):
        example()["absent/x"]
    with pytest.raises(InputError, match="no variable 'absent'; the group has kind, layer"):
        example()["absent"]
