"""The layer-wise probing figure shows the stored numbers, and kinds of layers without colours."""

import numpy as np
import pytest

from analyses.figures import layerwise_probing as drawing
from analyses.layerwise_probing import Config, layerwise_probing
from analyses.result import Result

LAYERS, LENGTH = ("swa", "full", "full"), 330


@pytest.fixture(scope="module")
def result(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure")
    tiny.save(tiny.model(*LAYERS), folder / "c" / "tiny")
    return layerwise_probing(Config(paths=(folder / "c",), out=folder / "r.h5", samples=24, length=LENGTH))


def drawn(axis):
    """Bars without the shaded columns of full layers."""
    return [patch for patch in axis.patches if patch.get_facecolor() != (0, 0, 0, 0.05)]


def test_bars_and_curves_are_the_stored_values(result):
    figure = drawing.draw([result])
    assert len(figure.axes) == 2 * 2, "accuracy and gain of two haystacks; null is a curve in both"
    accuracy, gain = figure.axes[0], figure.axes[2]
    group = result.groups["tiny/repeat"]
    assert accuracy.get_title() == "tiny, repeat"
    heights = [bar.get_height() for bar in drawn(gain)]
    np.testing.assert_array_equal(heights[:3], group["gain"][0, 0])
    np.testing.assert_array_equal(heights[3:], group["gain"][2, 0])
    labels = [line.get_label() for line in accuracy.lines]
    posts = [list(group["feature"]).index(f"blocks.{layer}.hook_resid_post") for layer in range(3)]
    for row, control in enumerate(group["control"]):
        curve = accuracy.lines[labels.index(control)].get_ydata()
        np.testing.assert_array_equal(curve, group["accuracy"][row, [0, *posts]])
    null = result.groups["tiny/null"]["accuracy"][0, [0, *posts]]
    np.testing.assert_array_equal(accuracy.lines[labels.index("noise without its needle")].get_ydata(), null)


def test_kinds_are_told_apart_without_colours(result):
    figure = drawing.draw([result])
    assert [bool(bar.get_hatch()) for bar in drawn(figure.axes[2])[:3]] == [True, False, False]
    marks = {line.get_marker(): line.get_xdata().tolist() for line in figure.axes[0].lines if line.get_marker() in "so"}
    assert marks == {"s": [1, 2], "o": [0]}
    assert len(figure.axes[2].patches) - len(drawn(figure.axes[2])) == 2, "two shaded columns"


def test_an_absent_haystack_is_named_and_controls_may_lack(result):
    alone = Result({k: v for k, v in result.groups.items() if k in ("tiny", "tiny/noise")}, result.attributes)
    figure = drawing.draw([result, alone])
    assert [text.get_text() for axis in figure.axes for text in axis.texts] == ["repeat: n/a"]
    labels = [line.get_label() for line in figure.axes[5].lines]
    assert "noise without its needle" not in labels
