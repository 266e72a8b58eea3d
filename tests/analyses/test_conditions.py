"""Conditions: labels, where they apply, when they change nothing by construction, and which ones a study has."""

import pytest
import torch

import hooks
from analyses.conditions import Condition, build

LABELS = {
    Condition("none"): "none",
    Condition("full", window=512): "full -> 512",
    Condition("efficient", window=1, sinks=4): "efficient -> 1 + 4 sinks",
    Condition("layer", window=16, layer=0): "layer 0 -> 16",
    Condition("full", reach=2048): "full reach 2048",
    Condition("floor", window=64): "last 64 only",
    Condition("efficient", ablated=True): "efficient -> mean",
}


@pytest.mark.parametrize(("condition", "label"), LABELS.items())
def test_labels(condition, label):
    assert condition.label == label


def test_a_group_without_paths_and_sinks_of_a_state_do_not_apply(tiny):
    full, gdn = tiny.model("full", "full").layers, tiny.model("gdn", "full").layers
    assert Condition("efficient", window=3).not_applicable(full) == "no efficient path"
    assert Condition("full", window=3).not_applicable(tiny.model("swa").layers) == "no full path"
    assert Condition("efficient", window=3, sinks=4).not_applicable(gdn) == "a recurrent state has no sinks"
    assert Condition("layer", window=3, sinks=4, layer=0).not_applicable(gdn)
    assert Condition("layer", window=3, layer=2).not_applicable(gdn)
    assert Condition("efficient", reach=3).not_applicable(gdn) == "its convolutions alone reach 4 tokens"
    for condition in (
        Condition("none"), Condition("floor", window=3), Condition("full", window=3, sinks=4),
        Condition("efficient", window=3), Condition("efficient", reach=4), Condition("efficient", ablated=True),
        Condition("layer", window=3, sinks=1, layer=1),
    ):  # fmt: skip
        assert condition.not_applicable(gdn) == "", condition


@pytest.mark.parametrize("efficient", ["swa", "lightning", "mamba2", "gdn"])
def test_heads_count_as_paths(tiny, efficient):
    layers = tiny.model("headwise", "headwise", efficient=efficient).layers
    assert not Condition("full", window=3).not_applicable(layers)
    assert not Condition("efficient", window=3).not_applicable(layers)
    assert bool(Condition("layer", window=3, sinks=1, layer=0).not_applicable(layers)) == (efficient != "swa")


CASES = [
    (("swa", "full"), {}, Condition("efficient", window=6), True),
    (("swa", "full"), {}, Condition("efficient", window=50, sinks=4), True),
    (("swa", "full"), {}, Condition("efficient", window=5), False),
    (("swa", "full"), {}, Condition("full", window=50), False),
    (("swa", "full"), {}, Condition("layer", window=6, layer=0), True),
    (("swa", "full"), {}, Condition("layer", window=6, layer=1), False),
    (("swa", "gdn"), {}, Condition("efficient", window=50), False),
    (("headwise",), {}, Condition("layer", window=6, layer=0), False),
    (("headwise",), {}, Condition("efficient", window=6), True),
    (("swa",), {"sinks": 3}, Condition("efficient", window=6), False),
    (("swa",), {"sinks": 3}, Condition("efficient", window=6, sinks=2), False),
    (("swa",), {"sinks": 3}, Condition("efficient", window=6, sinks=3), True),
]


@pytest.mark.parametrize(("kinds", "changes", "condition", "nothing"), CASES)
def test_changes_nothing_exactly_when_every_band_is_inside_already(tiny, kinds, changes, condition, nothing):
    model = tiny.model(*kinds, **changes)
    assert condition.changes_nothing(model.layers) == nothing
    ids = torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    free = model(ids)
    with condition.applied(model):
        moved = not torch.equal(model(ids), free)
    if nothing:
        assert not moved
    elif condition.window < 40:
        assert moved
    assert torch.equal(model(ids), free)


def test_what_does_not_apply_or_has_no_window_never_counts_as_no_change(tiny):
    full = tiny.model("full").layers
    for condition in (Condition("efficient", window=50), Condition("none"), Condition("floor", window=50),
                      Condition("full", reach=50), Condition("layer", window=50, layer=7)):  # fmt: skip
        assert not condition.changes_nothing(full), condition


def test_applied_is_hooks_restrict(tiny):
    model = tiny.model("gdn", "full", "swa")
    ids = torch.randint(90, (1, 30), generator=torch.Generator().manual_seed(1))
    for condition, arguments in (
        (Condition("full", window=3, sinks=2), {"layers": "full", "window": 3, "sinks": 2}),
        (Condition("efficient", reach=5), {"layers": "efficient", "reach": 5}),
        (Condition("layer", window=2, layer=2), {"layers": [2], "window": 2}),
    ):
        with condition.applied(model):
            found = model(ids)
        with hooks.restrict(model, **arguments):
            assert torch.equal(model(ids), found)
        assert not torch.equal(model(ids), found)
    for condition in (Condition("none"), Condition("floor", window=2)):
        with condition.applied(model):
            assert all(mixer.restrictions == () for layer in model.layers for mixer in layer.mixers)


def test_build_gives_each_condition_once():
    found = build((4, 16), (0, 4), (2, 16), 3, (8,), floors=True)
    assert found[0] == Condition("none")
    assert len(found) == len(set(found)) == 1 + 2 * (2 * 2 + 1) + 2 * 3 + 2
    assert [c.label for c in found[1:6]] == [
        "full -> 4", "full -> 4 + 4 sinks", "full -> 16", "full -> 16 + 4 sinks", "full reach 8",
    ]  # fmt: skip
    assert {c.layer for c in found if c.group == "layer"} == {0, 1, 2}
    assert build((4,), (0,), (), 3, (), floors=False) == [
        Condition("none"), Condition("full", window=4), Condition("efficient", window=4),
    ]  # fmt: skip
    assert build((4, 4), (0, 0), (2, 2), 1, (8, 8), floors=True) == build((4,), (0,), (2,), 1, (8,), floors=True)
