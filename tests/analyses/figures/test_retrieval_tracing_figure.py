"""The tracing figure shows what is stored: curves with marks, masses with n/a hatched, accuracy that remains."""

import numpy as np
import pytest

from analyses.figures import retrieval_tracing as drawer
from analyses.figures import style
from analyses.result import Dataset, Result, Variable

TOKENS = np.array([1e6, 1e7, 1e8])
SERIES = (
    "accuracy", "digits", "mass, followed", "mass, best of each", "mass, others", "entropy, followed",
    "entropy, others", "distance, followed", "distance, others",
)  # fmt: skip
KINDS = np.array([["gdn", "gdn"], ["full", "full"], ["swa", "swa"]])


def dataset(fields, coords=None):
    variables = {name: Variable(dims, values, "" if isinstance(np.asarray(values).flat[0], str) else "1", name)
                 for name, (dims, values) in fields.items()}  # fmt: skip
    return Dataset(variables, coords or {})


def synthetic(names=("one",), tokens=TOKENS, ablation=True):
    groups = {}
    count = len(tokens)
    for shift, name in enumerate(names):
        curve = np.linspace(0.1, 0.9, len(SERIES) * count).reshape(len(SERIES), count) - 0.02 * shift
        mass = np.full((count, 3, 2), np.nan)
        mass[:, 1:] = np.arange(count * 4).reshape(count, 2, 2) / (count * 4)
        groups[name] = dataset(
            {
                "tokens": (("checkpoint",), tokens), "curve": (("series", "checkpoint"), curve),
                "curve_interval": (("series", "checkpoint", "bound"), np.stack([curve - 0.05, curve + 0.05], -1)),
                "crossing_series": (("crossing",), ["accuracy", "mass, followed"]),
                "crossing_mark": (("crossing",), [0.5, 0.3]),
                "n_tracing": ((), 12), "length": ((), 512), "status": ((), ""),
            },
            {"series": Variable(("series",), list(SERIES), "", "curve")},
        )  # fmt: skip
        groups[f"{name}/heads"] = dataset({
            "mass": (("checkpoint", "layer", "head"), mass), "kind": (("layer", "head"), KINDS),
            "rank": (("layer", "head"), np.array([[0, 0], [0, 1], [0, 0]])),
        })  # fmt: skip
        if ablation:
            heads = [[(-1, -1)] * 2, *[[(layer, head), (-1, -1)] for layer in (1, 2) for head in (0, 1)],
                     [(1, 1), (1, 0)], [(1, 0), (1, 0)]]  # fmt: skip
            accuracy = np.array([0.9, 0.9, 0.1, 0.8, 0.9, 0.0, 0.7])
            change = np.stack([accuracy - 1.0, accuracy - 0.8], -1)
            groups[f"{name}/ablation"] = dataset({
                "kind": (("ablation",), ["none", *["single"] * 4, "top", "random"]),
                "heads": (("ablation", "member", "place"), np.array(heads)),
                "accuracy": (("ablation",), accuracy),
                "accuracy_change_interval": (("ablation", "bound"), change),
            })  # fmt: skip
    return Result(groups, {"analysis": "retrieval_tracing"})


@pytest.fixture
def draw():
    """Draws, lays out, and closes afterwards."""
    import matplotlib.pyplot as plt

    def drawn(*results):
        with style.styled():
            figure = drawer.draw(results)
            figure.canvas.draw()
        return figure

    yield drawn
    plt.close("all")


def titled(figure, words):
    return next(axis for axis in figure.axes if words in axis.get_title())


def test_curves_are_those_stored_and_marks_are_drawn(draw):
    result = synthetic(("one", "two"))
    figure = draw(result)
    for title, curve in (("needle accuracy", "accuracy"), ("attention mass", "mass, followed")):
        axis = titled(figure, title)
        assert axis.get_xscale() == "log"
        for name in ("one", "two"):
            line = next(line for line in axis.lines if line.get_label() == f"{name}: {curve}")
            np.testing.assert_array_equal(line.get_xdata(), TOKENS)
            np.testing.assert_array_equal(line.get_ydata(), result.groups[name]["curve"][SERIES.index(curve)])
    marks = [list(line.get_ydata()) for line in titled(figure, "needle accuracy").lines]
    assert [0.5, 0.5] in marks
    assert [0.3, 0.3] not in marks


def test_the_heat_map_has_every_head_and_hatches_what_has_no_softmax(draw):
    result = synthetic()
    axis = titled(draw(result), "one: mass")
    shown = axis.collections[0].get_array()
    np.testing.assert_array_equal(shown.mask, [[True] * 3] * 2 + [[False] * 3] * 4)
    np.testing.assert_array_equal(shown[2:], result["one/heads/mass"][:, 1:].reshape(3, 4).T)
    hatched = [patch.get_y() for patch in axis.patches if patch.get_hatch()]
    assert hatched == [0, 1]
    assert axis.collections[0].get_clim() == (0, 1)
    marked = [line.get_ydata()[0] for line in axis.lines if line.get_marker() == "<"]
    assert marked == [3.5], "head 1 of layer 1 is followed"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1M", "10M", "100M"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0 gdn", "1 full", "2 swa"]


def test_what_remains_after_ablation_is_drawn_at_its_layer(draw):
    axis = titled(draw(synthetic()), "mean-ablated")
    points = {round(float(line.get_xdata()[0]), 3): float(line.get_ydata()[0]) for line in axis.lines
              if line.get_marker() in ("s", "o")}  # fmt: skip
    assert points == {0.8: 0.9, 1.2: 0.1, 1.8: 0.8, 2.2: 0.9}
    assert {line.get_marker() for line in axis.lines} >= {"s", "o", "*", "x", "v"}


@pytest.mark.parametrize("tokens", [np.array([np.nan, np.nan]), np.array([0.0, 1e6, 1e7])])
def test_unknown_and_zero_tokens_have_no_place_on_the_axis(draw, tokens):
    axis = titled(draw(synthetic(tokens=tokens)), "needle accuracy")
    curve = [line for line in axis.lines if line.get_label() == "one: accuracy"]
    assert [list(line.get_xdata()) for line in curve] == ([[1e6, 1e7]] if len(tokens) > 2 else [])


def test_without_ablation_the_panel_says_so_and_runs_of_one_name_are_told_apart(draw):
    figure = draw(synthetic(ablation=False), synthetic())
    assert any(text.get_text() == "no ablation" for axis in figure.axes for text in axis.texts)
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {"one", "one (2)"}
    assert titled(figure, "one (2): mass")


@pytest.mark.parametrize("count", [1, 3])
def test_title_and_legend_fit_into_the_figure(draw, count):
    figure = draw(synthetic(tuple(f"mini-swa-512-nope-{i}" for i in range(count))))
    titles = [axis.title for axis in figure.axes if axis.get_title()]
    for artist in (figure._suptitle, figure.legends[0], *titles):
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
