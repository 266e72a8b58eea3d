"""Leaks, the split, reading features lazily, the shuffled-label control, degenerate input."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

from probes import layerwise

pytestmark = pytest.mark.filterwarnings("error")


def planted(n, classes, width=13, strength=1.0, seed=0):
    rng = np.random.default_rng(seed)
    label = np.arange(n) % classes
    return rng.normal(size=(n, width)) + strength * rng.normal(size=(classes, width))[label], label


# ----------------------------------------------------------------------------------------------------------- the split


def test_rows_without_groups_are_split_as_the_released_script_does():
    x, label = planted(203, 4)
    found = layerwise.fit({"x": x}, label, seed=42)
    expected = train_test_split(np.arange(203), test_size=0.2, random_state=42, stratify=label)[1]
    np.testing.assert_array_equal(found.row, np.sort(expected))
    assert layerwise.fit({"x": x}, label, seed=43).row.tolist() != found.row.tolist()


def test_two_rows_of_one_prompt_are_never_on_both_sides():
    """Features that say which prompt it is, labels at random: readable only through the prompt's other rows."""
    rng = np.random.default_rng(0)
    prompts, rows = 240, 3
    group = np.repeat(np.arange(prompts), rows)
    label = np.repeat(rng.integers(4, size=prompts), rows)
    x = np.repeat(rng.normal(size=(prompts, 400)), rows, axis=0)
    order = rng.permutation(len(group))
    group, label, x = group[order], label[order], x[order]
    found = layerwise.fit({"x": x}, label, groups=[f"prompt {g}" for g in group], C=10.0)
    held_out = set(group[found.row].tolist())
    assert len(held_out) == 48
    assert np.isin(group, list(held_out)).sum() == len(found.row) == 48 * rows
    low, high = found.accuracy_interval()[0]
    assert low < found.chance < high
    assert layerwise.fit({"x": x}, label, C=10.0).accuracy[0] > 0.9  # the leak that groups prevent


def test_prompts_are_stratified_and_classes_stay_in_proportion():
    x, _ = planted(600, 3)
    label = np.repeat([0, 1, 2], [150, 150, 300])
    found = layerwise.fit({"x": x}, label, groups=np.repeat(np.arange(300), 2))
    assert np.bincount(found.label).tolist() == [30, 30, 60]
    np.testing.assert_allclose(found.frequencies, [0.25, 0.25, 0.5])
    assert found.settings["stratified"]
    assert found.chance == 0.5
    assert found.chance_log_loss == pytest.approx(-(0.5 * np.log(0.25) + 0.5 * np.log(0.5)))


def test_prompts_with_several_labels_are_split_whole():
    x, label = planted(400, 2, strength=0.5)
    group = np.arange(400) // 4  # every prompt holds both labels
    found = layerwise.fit({"x": x}, label, groups=group)
    assert not found.settings["stratified"]
    assert sorted(np.bincount(group[found.row])[np.unique(group[found.row])]) == [4] * 20
    assert found.accuracy[0] > 0.7


@pytest.mark.parametrize("impl", ["torch", "sklearn"])
def test_held_out_rows_have_no_say_in_the_fit(impl):
    x, label = planted(300, 3)
    clean = layerwise.fit({"x": x}, label, impl=impl)
    spoilt = x.copy()
    spoilt[clean.row] = 1e7
    found = layerwise.fit({"x": spoilt}, label, impl=impl)
    for part in ("mean", "scale", "coef", "intercept"):
        np.testing.assert_array_equal(getattr(found.probes[0], part), getattr(clean.probes[0], part))
    assert found.accuracy[0] < clean.accuracy[0]


# ------------------------------------------------------------------------------------------------- the shuffled labels


def test_shuffled_labels_keep_split_prompts_and_frequencies():
    x, label = planted(480, 4)
    group = np.arange(480) // 8 * 4 + label  # two rows a prompt
    true, shuffled = (layerwise.fit({"x": x}, label, groups=group, shuffled=s) for s in (False, True))
    np.testing.assert_array_equal(true.row, shuffled.row)
    np.testing.assert_array_equal(true.frequencies, shuffled.frequencies)
    np.testing.assert_array_equal(np.bincount(true.label), np.bincount(shuffled.label))
    assert (true.label != shuffled.label).mean() > 0.5
    for prompt in np.unique(shuffled.prompt):
        assert len(set(shuffled.label[shuffled.prompt == prompt].tolist())) == 1
    assert shuffled.settings["shuffled"]


def test_shuffled_labels_are_at_chance_even_where_classes_are_far_apart():
    """With true test labels every cluster would be right or wrong as a whole, far outside a binomial interval."""
    x, label = planted(800, 8, strength=20.0)
    inside = []
    for seed in range(12):
        found = layerwise.fit({"x": x}, label, shuffled=True, seed=seed)
        low, high = found.accuracy_interval(0.99)[0]
        inside.append(low <= found.chance <= high)
    assert layerwise.fit({"x": x}, label).accuracy[0] == 1.0
    assert all(inside)


# ------------------------------------------------------------------------------------------------------------- reading


class Recorder:
    """Sliceable of three axes that records what is asked of it, and which parts are alive at once."""

    def __init__(self, values, axis):
        self.values, self.axis, self.shape, self.read = values, axis, values.shape, []

    def __getitem__(self, key):
        layer = key if self.axis == 0 else key[1]
        assert isinstance(layer, int)
        if self.axis == 1:
            assert key[0] == slice(None)
        self.read.append(layer)
        return self.values[key]

    def __array__(self, *args, **kwargs):
        raise AssertionError("the whole array was asked for")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("at_once", [1, 2, None])
def test_every_layer_is_read_once_and_alone(axis, at_once):
    x, label = planted(120, 3)
    stack = np.stack([x + i for i in range(5)], axis)
    source = Recorder(stack, axis)
    found = layerwise.fit(source, label, layer_axis=axis, layers_at_once=at_once)
    assert source.read == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(found.accuracy, layerwise.fit(stack, label, layer_axis=axis).accuracy)


def test_no_more_than_a_chunk_is_read_before_it_is_fitted(monkeypatch):
    x, label = planted(120, 3)
    source = Recorder(np.stack([x] * 6), 0)
    from probes.layerwise import batched

    seen = []
    solve = batched.minimise
    monkeypatch.setattr(batched, "minimise", lambda *a, **k: (seen.append(len(source.read)), solve(*a, **k))[1])
    layerwise.fit(source, label, layer_axis=0, layers_at_once=2)
    assert seen == [2, 4, 6]


def test_all_sources_give_the_same(tmp_path):
    x, label = planted(200, 4)
    x = torch.tensor(x).bfloat16().float().numpy()  # values that every type below holds exactly
    stack = np.stack([x, x[:, ::-1] * 2, x * 4], 1)
    frozen = stack.copy()
    frozen.flags.writeable = False
    np.save(tmp_path / "x.npy", stack)
    expected = layerwise.fit(stack, label, layer_axis=1, names=["a", "b", "c"])
    assert expected.names == ("a", "b", "c")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = stack
        sources = {
            "frozen": frozen,
            "reversed": stack[::-1][::-1],
            "memory map": np.load(tmp_path / "x.npy", mmap_mode="r"),
            "tensor": torch.tensor(stack, requires_grad=True),
            "bfloat16": torch.tensor(stack).bfloat16(),
            "hdf5": file["x"],
        }
        for what, source in sources.items():
            found = layerwise.fit(source, torch.tensor(label), layer_axis=1)
            np.testing.assert_array_equal(found.log_p_true, expected.log_p_true, err_msg=what)
        mapping = {f"blocks.{i}.hook_resid_post": file["x"][:, i] for i in range(3)}
        np.testing.assert_array_equal(layerwise.fit(mapping, label).log_p_true, expected.log_p_true)


def test_labels_may_be_any_hashables_and_widths_may_differ():
    x, label = planted(200, 4)
    by_number = layerwise.fit({"x": x, "y": x[:, :5]}, label)
    for values in (["p", "q", "r", "s"], [("t", 1), ("t", 2), ("t", 3), ("u", 0)], [False, "x", None, 2.5]):
        found = layerwise.fit({"x": x, "y": x[:, :5]}, [values[i] for i in label])
        assert set(found.classes) == set(values)
        np.testing.assert_array_equal(found.accuracy, by_number.accuracy)
    assert by_number.classes == (0, 1, 2, 3)


# ---------------------------------------------------------------------------------------------------------- degenerate


@pytest.mark.parametrize("impl", ["torch", "sklearn"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_bad_layer_gets_nan_and_the_reason_alone(impl, at_once):
    x, label = planted(200, 4)
    bad, worse = x.copy(), x.copy()
    bad[17, 3], bad[60, 0] = np.nan, np.nan
    worse[5] = np.inf
    found = layerwise.fit({"a": x, "b": bad, "c": worse, "d": x}, label, impl=impl, layers_at_once=at_once)
    assert [bool(r) for r in found.reason] == [False, True, True, False]
    assert "2 of 200 rows hold NaN or inf (first: row 17)" in found.reason[1]
    assert np.isnan(found.accuracy).tolist() == [False, True, True, False]
    assert np.isnan(found.accuracy_interval()[1:3]).all()
    assert np.isnan(found.log_loss[1:3]).all()
    assert (found.predicted[1:3] == -1).all()
    assert not found.converged[1:3].any()
    assert found.probes[1] is None
    np.testing.assert_array_equal(found.log_p_true[0], found.log_p_true[3])
    gains = layerwise.layer_gains(found).total
    assert np.isnan(gains.value).tolist() == [False, True, True, True]
    assert np.isnan(gains.interval[1:]).all()
    assert found.records()[1]["reason"] == found.reason[1]


@pytest.mark.parametrize("impl", ["torch", "sklearn"])
def test_constant_features_are_read_as_what_they_are_chance(impl):
    """The last token's embedding is the same in every prompt: a baseline at chance, not an unknown one."""
    _, label = planted(200, 4)
    found = layerwise.fit({"embedding": np.full((200, 6), 0.1)}, label, impl=impl)
    assert found.reason == ("",)
    assert found.converged.all()
    assert found.n_constant.tolist() == [6]
    assert found.accuracy[0] == found.chance == 0.25
    assert found.log_loss[0] == pytest.approx(found.chance_log_loss, abs=1e-3)
    assert (found.probes[0].coef == 0).all()


def test_a_column_that_varies_in_the_held_out_part_alone_has_no_say():
    x, label = planted(200, 4)
    x[:, 2] = 5.0
    clean = layerwise.fit({"x": x}, label)
    x[clean.row, 2] = np.arange(len(clean.row)) * 1e3
    np.testing.assert_array_equal(layerwise.fit({"x": x}, label).log_p_true, clean.log_p_true)


X, Y = planted(60, 3)
REFUSED = {
    "one class": (lambda: layerwise.fit({"x": X}, [1] * 60), r"1 class\(es\): \[1\]; expected at least 2"),
    "nothing left": (lambda: layerwise.fit({"x": X * np.nan}, Y), "no feature can be fitted; 'x': 60 of 60 rows"),
    "lonely class": (lambda: layerwise.fit({"x": X}, [*Y[:-1], 9]), "class 9 has 1 prompt; expected at least 2"),
    "few prompts": (lambda: layerwise.fit({"x": X[:6]}, Y[:6]), "test part has 2 prompts for 3 classes"),
    "one prompt": (lambda: layerwise.fit({"x": X}, Y, groups=[0] * 60), "1 prompts at test_size 0.2 leave one side"),
    "lost class": (
        lambda: layerwise.fit({"x": X}, [*[0, 1] * 29, 2, 2], groups=np.arange(60) // 2, seed=3, test_size=0.9),
        "training part holds no row of class",
    ),
    "labels": (lambda: layerwise.fit({"x": X}, Y[:50]), "labels have 50 entries, the features 60 rows"),
    "groups": (lambda: layerwise.fit({"x": X}, Y, groups=[1, 2]), "groups have 2 entries"),
    "NaN label": (lambda: layerwise.fit({"x": X}, [float("nan"), *Y[1:]]), "labels hold NaN"),
    "unhashable": (lambda: layerwise.fit({"x": X}, [[1]] * 60), "not hashable"),
    "axis": (lambda: layerwise.fit(np.zeros((2, 60, 4)), Y), "layer_axis is None; expected 0 for"),
    "mapping and axis": (lambda: layerwise.fit({"x": X}, Y, layer_axis=0), "pass neither names nor layer_axis"),
    "two axes": (lambda: layerwise.fit(X, Y), r"of shape \(60, 13\); expected \{name"),
    "a list": (lambda: layerwise.fit({"x": X.tolist()}, Y), "of type list; expected"),
    "rows differ": (lambda: layerwise.fit({"x": X, "y": X[:50]}, Y), r"'y' has shape \[50, 13\]"),
    "no layer": (lambda: layerwise.fit({}, Y), "features hold no layer"),
    "names": (lambda: layerwise.fit(np.zeros((2, 60, 4)), Y, layer_axis=0, names=["a"]), "expected 2 different ones"),
    "strings": (lambda: layerwise.fit({"x": X.astype(str)}, Y), "expected real numbers"),
    "classifier": (lambda: layerwise.fit({"x": X}, Y, classifier="svm"), "expected one of multinomial, one-vs-rest"),
    "C": (lambda: layerwise.fit({"x": X}, Y, C=0), "C is 0; expected a number > 0"),
    "test_size": (lambda: layerwise.fit({"x": X}, Y, test_size=1.0), "test_size is 1.0"),
    "device": (lambda: layerwise.fit({"x": X}, Y, impl="sklearn", device="cuda"), "runs on the CPU"),
    "chunk": (lambda: layerwise.fit({"x": X}, Y, layers_at_once=0), "layers_at_once is 0"),
    "seed": (lambda: layerwise.fit({"x": X}, Y, seed=-1), "seed is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
