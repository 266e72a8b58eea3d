"""The receptive-field figure: one window and grids, what is n/a, several files, labels that fit; the command itself."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analyses import store
from analyses.conditions import Condition
from analyses.figures import receptive_field as drawer
from analyses.figures import style
from analyses.result import Dataset, Result, Variable

REPOSITORY = Path(__file__).resolve().parents[3]
KINDS = {"swa-8": ("swa", "full", "swa", "full"), "full": ("full",) * 3, "gdn": ("gdn", "full")}
ONE = [Condition("none"), Condition("full", window=16), Condition("efficient", window=16)]
GRID = [
    Condition("none"), *(Condition(group, window=w, sinks=s) for group in ("full", "efficient")
                         for w in (4, 256, 1024) for s in (0, 4)), Condition("full", reach=64),
    Condition("layer", window=16, layer=0), *(Condition("floor", window=w) for w in (4, 256, 1024)),
]  # fmt: skip


def value(condition):
    """Made up, different for every condition that is drawn."""
    base = {"none": 2.0, "full": 5.0, "efficient": 2.5, "layer": 3.0, "floor": 4.0}[condition.group]
    return base - 1e-4 * condition.window - 0.01 * condition.sinks


def synthetic(names=("swa-8",), conditions=ONE, attributes=None, narrow=True) -> Result:
    groups = {}
    for name in names:
        kinds = KINDS[name]
        absent = np.array([c.group == "efficient" and name == "full" for c in conditions])
        level = np.where(absent, np.nan, [value(c) for c in conditions])
        share = np.where(absent, np.nan, np.linspace(1, 0, len(conditions)))
        spread = np.array([-0.1, 0.2]) if narrow else np.array([np.nan, np.nan])
        fields = {"log_long_ppl": (level, 1.0), "niah": (share, 0.1)}
        variables = {key: Variable(("condition",), values, "1", key) for key, (values, _) in fields.items()}
        for key, (values, scale) in fields.items():
            bounds = values[:, None] + scale * spread
            variables[f"{key}_interval"] = Variable(("condition", "bound"), bounds, "1", key)
        for key in ("group", "window", "sinks", "layer", "reach"):
            values = [getattr(c, key) for c in conditions]
            variables[f"restricted_{key}"] = Variable(("condition",), values, "1", key)
        status = ["n/a: no efficient path" if gone else "" for gone in absent]
        variables["status"] = Variable(("condition",), status, "", "status")
        labels = Variable(("condition",), [c.label for c in conditions], "", "condition")
        groups[name] = Dataset(variables, {"condition": labels})
        groups[f"{name}/layers"] = layers_of(kinds, sorted({c.window for c in conditions if c.window}))
    return Result(groups, {"analysis": "receptive_field", "n_documents": 4, "n_prompts": 24, **(attributes or {})})


def layers_of(kinds, windows):
    effect = np.full((len(windows), 2, len(kinds), 3), np.nan)
    for layer, kind in enumerate(kinds):
        effect[:, int(kind != "full"), layer] = [0.1 * (layer + 1), 0.2, 0.3] if kind != "swa" else 0.0
    own = [8.0 if kind == "swa" else np.nan for kind in kinds]
    return Dataset(
        {
            "effect": Variable(("window", "group", "layer", "document"), effect, "1", "effect"),
            "kind": Variable(("layer",), list(kinds), "", "kind"),
            "own_window": Variable(("layer",), own, "token", "window"),
        },
        {"window": Variable(("window",), windows, "token", "w")},
    )


GAPS, CONTEXTS = [16, 32, 64, 128], [100, 200, 400]


def with_controls(result: Result, conditions=ONE, lengths=True) -> Result:
    """The same result with repeats (no tokens in the last bin) and lengths (extrapolation from the second on)."""
    groups = dict(result.groups)
    rows = np.arange(len(conditions))[:, None]
    for name in [name for name in result.groups if "/" not in name]:
        loss = 1.0 + rows + 0.1 * np.arange(4)
        loss[:, 3] = np.nan
        bounds = loss[..., None] + np.array([-0.1, 0.1])
        groups[f"{name}/repeats"] = Dataset(
            {
                "repeat_loss": Variable(("condition", "gap"), loss, "nat", "second"),
                "repeat_loss_interval": Variable(("condition", "gap", "bound"), bounds, "nat", "second"),
                "repeat_first_loss": Variable(("condition", "gap"), loss + 4, "nat", "first"),
                "n_repeats": Variable(("gap",), [9, 8, 7, 0], "1", "n"),
            },
            {"gap": Variable(("gap",), GAPS, "token", "gap")},
        )
        if lengths:
            level = (2.0 + rows + np.arange(3)).T
            variables = {"extrapolation": Variable(("context",), [0, 1, 1], "1", "e")}
            for key, values in (("log_long_ppl", level), ("niah", level / 10)):
                bounds = values[..., None] + np.array([-0.1, 0.1])
                variables[key] = Variable(("context", "condition"), values, "nat", key)
                variables[f"{key}_interval"] = Variable(("context", "condition", "bound"), bounds, "nat", key)
            coords = {"context": Variable(("context",), CONTEXTS, "token", "t")}
            groups[f"{name}/lengths"] = Dataset(variables, coords)
    return Result(groups, result.attributes)


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


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_one_window_shows_three_bars_with_their_values(draw):
    axes = draw(synthetic()).axes
    assert len(axes) == 3
    assert [bar.get_height() for bar in axes[0].patches] == [2.0, 5.0 - 1e-4 * 16, 2.5 - 1e-4 * 16]
    assert texts(axes[0]) == ["2.00", "5.00", "2.50"]
    shown = [label.get_text() for label in axes[0].get_xticklabels()]
    assert shown == ["unrestricted", "full\n→ 16", "efficient\n→ 16"]
    for axis in axes[:2]:
        assert axis.get_xlim() == (-0.5, 2.5)
        assert axis.get_ylabel()
    assert "log(LongPPL)" in axes[0].get_ylabel()
    assert axes[1].get_ylim()[0] <= 0
    assert axes[1].get_ylim()[1] >= 1
    (bar,) = axes[0].containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose(bar, [[0, 1.9], [0, 2.2]])


def test_what_does_not_apply_is_said_where_its_bar_would_be(draw):
    axes = draw(synthetic(names=("swa-8", "full"))).axes
    swa, full = axes[0], axes[1]
    assert len(swa.patches) == 3
    assert len(full.patches) == 2
    assert "n/a" in texts(full)
    assert "n/a" not in texts(swa)
    assert full.get_xlim() == (-0.5, 2.5)
    (note,) = [text for text in full.texts if text.get_text() == "n/a"]
    assert note.get_position()[0] == 2


def test_a_grid_shows_curves_without_sinks_and_the_floor(draw):
    figure = draw(synthetic(names=("gdn", "full"), conditions=GRID))
    gdn, full = figure.axes[:2]
    lines = {line.get_label(): line for line in gdn.lines}
    assert list(lines) == ["unrestricted", "full attention → w", "efficient layers → w", "last w tokens only"]
    for group, name in (("full", "full attention → w"), ("efficient", "efficient layers → w"), ("floor", drawer.FLOOR)):
        assert lines[name].get_xdata().tolist() == [4, 256, 1024]
        expected = [value(Condition(group, window=w)) for w in (4, 256, 1024)]
        np.testing.assert_allclose(lines[name].get_ydata(), expected)
    assert lines["unrestricted"].get_ydata() == [2.0, 2.0]
    assert "efficient layers → w" not in {line.get_label() for line in full.lines}
    assert gdn.get_xscale() == "log"
    assert figure.axes[4].get_xlabel() == "layer (w = 256)", "the window nearest 512"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["unrestricted", "full attention → w", "efficient layers → w", "last w tokens only"]


def test_effects_are_at_the_layers_of_their_group(draw):
    axis = draw(synthetic()).axes[2]
    shown = {container.get_label(): container.lines[0] for container in axis.containers}
    full, efficient = shown["full attention → w"], shown["efficient layers → w"]
    assert full.get_xdata().tolist() == [1, 3]
    np.testing.assert_allclose(full.get_ydata(), [np.mean([0.2, 0.2, 0.3]), np.mean([0.4, 0.2, 0.3])])
    assert efficient.get_xdata().tolist() == [0, 2]
    assert texts(axis) == ["no effect", "no effect"]


def test_results_with_sinks_only_are_drawn_and_say_so(draw):
    conditions = [Condition("none"), *(Condition(g, window=16, sinks=4) for g in ("full", "efficient"))]
    axes = draw(synthetic(conditions=conditions)).axes
    assert [round(bar.get_height(), 4) for bar in axes[0].patches] == [2.0, 4.9584, 2.4584]
    assert axes[0].get_title() == "swa-8\nswa 8 + full\nwith 4 sinks"


def test_repeats_are_curves_over_the_gap_with_the_window_and_the_control(draw):
    axes = draw(with_controls(synthetic(), lengths=False)).axes
    assert len(axes) == 4
    lines = {line.get_label(): line for line in axes[3].lines}
    assert list(lines)[:4] == ["unrestricted", "full attention → w", "efficient layers → w", "first occurrences"]
    np.testing.assert_allclose(lines["full attention → w"].get_xdata(), np.array([16, 32, 64]) * np.sqrt(2))
    np.testing.assert_allclose(lines["full attention → w"].get_ydata(), [2.0, 2.1, 2.2])
    np.testing.assert_allclose(lines["first occurrences"].get_ydata(), [5.0, 5.1, 5.2])
    assert axes[3].lines[-1].get_xdata() == [16, 16], "the window"


def test_lengths_are_hollow_where_the_model_extrapolates(draw):
    axis, needles = draw(with_controls(synthetic())).axes[4:]
    found = next(line for line in needles.lines if line.get_label() == "unrestricted")
    np.testing.assert_allclose(found.get_ydata(), [0.2, 0.3, 0.4])
    assert "needles" in needles.get_ylabel()
    lines = [line for line in axis.lines if line.get_label() == "full attention → w"]
    np.testing.assert_allclose(lines[0].get_ydata(), [3.0, 4.0, 5.0])
    marks = [line for line in axis.lines if line.get_linestyle() == "None"]
    assert [line.get_xdata().tolist() for line in marks[:2]] == [[100], [200, 400]]
    assert [line.get_markerfacecolor() == "white" for line in marks[:2]] == [False, True]
    assert "extrapolation" in axis.get_xlabel()


def test_a_file_with_controls_beside_one_without(draw):
    axes = draw(with_controls(synthetic()), synthetic(names=("gdn",))).axes
    assert len(axes) == 12
    assert [texts(axes[row * 2 + 1]) for row in (3, 4, 5)] == [["not measured"]] * 3


def test_one_document_is_drawn_without_interval(draw):
    axes = draw(synthetic(narrow=False)).axes
    assert texts(axes[0]) == ["2.00", "5.00", "2.50"]
    assert all(container.__class__.__name__ == "BarContainer" for container in axes[0].containers)


def test_several_files_stand_side_by_side(draw):
    figure = draw(synthetic(), synthetic(names=("full", "gdn"), attributes={"n_documents": 12}))
    titles = [axis.get_title() for axis in figure.axes[:3]]
    assert titles == ["swa-8\nswa 8 + full", "full\nfull", "gdn\ngdn + full"]
    assert "over 4 to 12 documents (top) and 24 needle prompts" in figure._suptitle.get_text().replace("\n", " ")


@pytest.mark.parametrize("names", [("gdn",), ("gdn", "full"), ("gdn", "full", "swa-8")])
@pytest.mark.parametrize("conditions", [ONE, GRID])
@pytest.mark.parametrize("controls", [False, True])
def test_title_and_legend_fit_into_the_figure(draw, names, conditions, controls):
    result = synthetic(names=names, conditions=conditions)
    figure = draw(with_controls(result, conditions) if controls else result)
    for artist in (figure._suptitle, figure.legends[0]):
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width, names
    top = max(axis.title.get_window_extent().y1 for axis in figure.axes[: len(names)])
    assert figure._suptitle.get_window_extent().y0 >= top - 1
    assert figure.legends[0].get_window_extent().y1 <= min(axis.get_tightbbox().y0 for axis in figure.axes) + 1


def test_the_command_draws_stored_results_without_a_display(tmp_path):
    for name, conditions in (("one", ONE), ("grid", GRID)):
        store.write(tmp_path / f"{name}.h5", synthetic(names=("swa-8", "full"), conditions=conditions))
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")}
    command = [sys.executable, "-m", "analyses.figures", "one.h5", "grid.h5", "--out", "f.svg"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(REPOSITORY)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "f.svg"
    drawn = (tmp_path / "f.svg").read_text()
    for words in ("swa-8", "log(LongPPL), nats", "needles found", "n/a", "last w tokens only", "w, visible tokens"):
        assert words in drawn, words
