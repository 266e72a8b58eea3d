"""The figure of single checkpoints has no training axis: masses and ablations at the layers of their heads."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from analyses.figures import retrieval_tracing as drawer
from analyses.figures import style
from analyses.result import Dataset, Result, Variable

KINDS = np.array([["gdn", "gdn"], ["full", "full"], ["swa", "swa"]])
PROMPTS = np.array([0.0, 0.1, 0.2, 0.3, 1.0])
MASS = np.array([[[np.nan, np.nan], [0.7, 0.2], [0.1, 0.0]]])
RECURRENT = np.array([[[0.4, 0.3], [np.nan, np.nan], [np.nan, np.nan]]])


def dataset(fields, coords=()):
    made = {
        name: Variable(dims, values, "" if np.asarray(values).dtype.kind == "U" else "1", name)
        for name, (dims, values) in fields.items()
    }
    return Dataset({k: v for k, v in made.items() if k not in coords}, {k: made[k] for k in coords})


def result(name="one"):
    per_prompt = np.full((1, len(PROMPTS), 3, 2), 0.5)
    per_prompt[0, :, 1, 0] = PROMPTS
    head = ("layer", "head")
    groups = {
        name: dataset({
            "tokens": (("checkpoint",), [np.nan]), "curve": (("series", "checkpoint"), [[0.25], [0.5]]),
            "series": (("series",), np.array(["digits", "accuracy"])), "status": ((), np.array("")),
            "n_tracing": ((), 5), "length": ((), 512), "uniform_mass": ((), 0.014),
        }, ["series"]),
        f"{name}/heads": dataset({
            "mass": (("checkpoint", *head), MASS), "recurrent_mass": (("checkpoint", *head), RECURRENT),
            "kind": (head, KINDS), "rank": (head, [[0, 0], [1, 0], [0, 0]]),
        }),
        f"{name}/prompts": dataset({"mass": (("checkpoint", "prompt", *head), per_prompt)}),
        f"{name}/ablation": dataset({
            "kind": (("ablation",), np.array(["none", "single", "single"])),
            "heads": (("ablation", "member", "place"), [[[-1, -1]], [[1, 0]], [[0, 1]]]),
            "accuracy": (("ablation",), [0.5, 0.1, 0.4]),
            "accuracy_change_interval": (("ablation", "bound"), [[0.0, 0.0], [-0.5, -0.3], [-0.2, 0.0]]),
        }),
    }  # fmt: skip
    return Result(groups, {"analysis": "retrieval_tracing"})


@pytest.fixture
def draw():
    def drawn(*results):
        with style.styled():
            figure = drawer.draw(results)
            figure.canvas.draw()
        return figure

    yield drawn
    plt.close("all")


def points(axis, markers):
    return {
        (round(float(line.get_xdata()[0]), 3), line.get_marker()): float(line.get_ydata()[0])
        for line in axis.lines
        if line.get_marker() in markers
    }


def test_masses_and_ablations_stand_at_the_heads_of_their_layers(draw):
    figure = draw(result())
    assert not [axis for axis in figure.axes if "training" in axis.get_xlabel()], "one checkpoint is no curve"
    left, right = figure.axes
    assert points(left, "sDo") == {
        (-0.2, "D"): 0.4, (0.2, "D"): 0.3, (0.8, "s"): 0.7, (1.2, "s"): 0.2, (1.8, "o"): 0.1, (2.2, "o"): 0.0,
    }  # fmt: skip
    assert list(points(left, "v")) == [(0.8, "v")], "head 0 of layer 1 is followed"
    bars = {round(float(line.get_xdata()[0]), 3): list(line.get_ydata()) for line in left.lines
            if line.get_marker() == "None" and len(line.get_xdata()) == 2 and line.get_linestyle() == "-"}  # fmt: skip
    np.testing.assert_allclose(bars[0.8], np.percentile(PROMPTS, [10, 90]))
    assert "one: 0.50 found" in left.get_title()
    assert points(right, "sDo") == {(0.8, "s"): 0.1, (0.2, "D"): 0.4}
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["full-attention head", "sliding-window head", "recurrent head"]


def test_every_checkpoint_of_all_files_has_a_row(draw):
    figure = draw(result(), result(), result("two"))
    titles = [axis.get_title().split(":")[0] for axis in figure.axes[::2]]
    assert titles == ["one", "one (2)", "two"]
