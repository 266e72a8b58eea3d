"""The causal-tracing figure shows what is stored: shares as shades, knockouts as bars, probes as curves."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from analyses.figures import causal_tracing as drawer
from analyses.figures import style
from analyses.result import Dataset, Result, Variable

LAYERS, HEADS = 3, 2
COMPONENTS, POSITIONS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"), ("needle", "between", "last")
SETS = ["none", "full, answer", "efficient, answer", "all, answer", "0", "1", "2"]
KINDS = ["none", "group", "group", "group", "layer", "layer", "layer"]
CONTROLS = ["trained", "shuffled labels", "random weights"]
FEATURES = ["blocks.0 state, 0", "blocks.0 state, 8", "blocks.0 state, last",
            *(f"blocks.{i}.hook_resid_post" for i in range(LAYERS))]  # fmt: skip


def dataset(fields, **coords):
    def variable(dims, values):
        text = isinstance(np.asarray(values).flat[0], str)
        return Variable(dims, values, "" if text else "1", "x")

    labelled = {name: variable((name,), list(values)) for name, values in coords.items()}
    return Dataset({name: variable(*field) for name, field in fields.items()}, labelled)


def synthetic(probes=True, states=True, known=True):
    layers = np.zeros((2, LAYERS, len(COMPONENTS), len(POSITIONS)))
    layers[0, 1:, 4, 2] = 1
    layers[0, 0, 4, 0] = 0.5
    layers[0, :, 3, 1] = np.nan
    heads = np.full((2, LAYERS, HEADS, 3), 0.0 if known else np.nan)
    heads[0, 1, 1, 2] = 0.8 if known else np.nan
    change = np.array([[0.0, 0], [-4, -0.1], [np.nan, np.nan], [-4.5, 0], [0, 0], [-4, 0], [0, 0]])
    groups = {
        "one": dataset({
            "length": ((), 256), "n_pairs": ((), 8), "n_separated": ((), 8 if known else 0), "log_p": ((), -0.1),
            "accuracy": ((), 0.9), "kind": (("layer",), ["gdn", "full", "gdn"]),
        }),
        "one/patching": dataset(
            {"recovered": (("direction", "layer", "component", "position"), layers),
             "head_recovered": (("direction", "layer", "head", "position"), heads)},
            component=COMPONENTS, position=POSITIONS,
        ),
        "one/knockout": dataset(
            {"set_kind": (("knockout",), KINDS), "log_p_change": (("knockout", "span"), change),
             "log_p_change_interval": (("knockout", "span", "bound"), np.stack([change - 0.5, change + 0.5], -1))},
            knockout=SETS,
        ),
    }  # fmt: skip
    if probes:
        accuracy = np.linspace(0.1, 0.9, len(CONTROLS) * len(FEATURES)).reshape(len(CONTROLS), -1)
        groups["one/probes"] = dataset(
            {
                "accuracy": (("control", "feature"), accuracy),
                "accuracy_interval": (("control", "feature", "bound"), accuracy[..., None] + [-0.05, 0.05]),
                "chance": (("control",), np.full(3, 0.125)),
                "is_state": (("feature",), np.array([states] * 3 + [False] * 3)),
                "feature_layer": (("feature",), np.array([0, 0, 0, 0, 1, 2])),
                "distance": (("feature",), np.array([0, 8, 200, np.nan, np.nan, np.nan])),
            },
            control=CONTROLS, feature=FEATURES,
        )  # fmt: skip
    return Result(groups, {"analysis": "causal_tracing"})


@pytest.fixture
def draw():
    with style.styled():
        yield lambda *results: drawer.draw(results)
    plt.close("all")


def test_shades_are_the_shares_and_nan_is_hatched(draw):
    figure = draw(synthetic())
    patches, heads = figure.axes[:2]
    shades = patches.collections[0].get_array()
    expected = [[0.5, 0, 0], [0, 0, 1], [0, 0, 1]]
    np.testing.assert_array_equal(shades[:, :3], expected)
    assert np.ma.getmaskarray(shades)[:, 7].all()
    assert sum(patch.get_hatch() == "////" for patch in patches.patches) == LAYERS
    assert heads.collections[0].get_array()[1, 1] == 0.8
    assert patches.collections[0].get_clim() == (0, 1)
    assert [tick.get_text() for tick in patches.get_yticklabels()] == ["0 gdn", "1 full", "2 gdn"]


def test_bars_are_the_changes_with_their_control(draw):
    axis = draw(synthetic()).axes[2]
    assert [bar.get_height() for bar in axis.patches] == [0, -4, 0, -4, -4.5]
    controls = [line.get_ydata()[0] for line in axis.lines if line.get_marker() == "D"]
    np.testing.assert_allclose(controls, [0, 0, 0, -0.1, 0])
    assert [text.get_text() for text in axis.texts] == ["n/a"]
    labels = [tick.get_text() for tick in axis.get_xticklabels()]
    assert labels == ["0", "1", "2", "full", "efficient", "all"]


def test_curves_are_the_probes_of_each_control(draw):
    result = synthetic()
    states, last = draw(result).axes[3:5]
    accuracy = result["one/probes/accuracy"]
    drawn = [line.get_ydata() for line in states.lines if len(line.get_ydata()) == 3]
    for row, values in zip((0, 2, 1), drawn, strict=True):
        np.testing.assert_allclose(values, accuracy[row, :3])
    np.testing.assert_allclose(states.lines[0].get_xdata(), [drawer.SMALLEST, 8, 200])
    np.testing.assert_allclose(last.lines[0].get_ydata(), accuracy[0, 3:])
    assert states.get_xscale() == "log"


@pytest.mark.parametrize(("settings", "texts"), [
    ({"probes": False}, ["no probes", "no probes"]), ({"states": False}, ["no recurrent layer"]),
    ({"known": False}, ["no pair separates"]),
])  # fmt: skip
def test_what_does_not_exist_is_said(draw, settings, texts):
    figure = draw(synthetic(**settings))
    said = [text.get_text() for axis in figure.axes[:5] for text in axis.texts]
    for text in texts:
        assert said.count(text) == texts.count(text)


def test_two_files_make_two_rows(draw):
    figure = draw(synthetic(), synthetic(probes=False))
    assert len([axis for axis in figure.axes if axis.get_title().startswith("one")]) == 2
