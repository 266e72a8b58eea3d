"""The gradient-influence figure: what is drawn is what is stored, told apart in grey, and its words fit."""

import itertools

import numpy as np
import pytest

from analyses import store
from analyses.figures import __main__ as figures
from analyses.figures import gradient_influence as drawer
from analyses.figures import style
from analyses.result import Dataset, Result, Variable

BINS = np.array([0, 1, 2, 4, 8, 16, 32])
DISTANCES, WINDOWS = 48, np.array([4, 8, 16, 32])


def synthetic(names=("gdn",), score="log_prob", baseline=0.5, met=16.0, interval=True, n_texts=8) -> Result:
    groups = {}
    for index, name in enumerate(names):
        curve = baseline + (index + 1) * 4.0 / (BINS + 1) ** 2 if baseline else np.where(BINS < 8, 1.0 + index, 0.0)
        change = np.array([np.nan, 1.0, 0.4, 0.1]) * (index + 1)
        spread = np.array([-0.1, 0.1]) if interval else np.array([np.nan, np.nan])
        fields = {
            "binned": (("bin",), curve), "binned_interval": (("bin", "bound"), curve[:, None] * (1 + spread)),
            "truncation_loss_change": (("window",), change),
            "truncation_loss_change_interval": (("window", "bound"), change[:, None] + spread),
            "marked": (("window",), WINDOWS == 8), "baseline": ((), baseline), "baseline_spread": ((), 0.02),
            "baseline_first": ((), 36), "meeting_distance": ((), met), "length": ((), DISTANCES + 1),
            "n_texts": ((), n_texts), "influence": (("distance",), np.zeros(DISTANCES)),
        }  # fmt: skip
        variables = {key: Variable(dims, values, "1", key) for key, (dims, values) in fields.items()}
        coords = {"bin": BINS, "window": WINDOWS, "distance": np.arange(DISTANCES)}
        groups[name] = Dataset(variables, {key: Variable((key,), v, "token", key) for key, v in coords.items()})
        groups[f"{name}/texts"] = Dataset({"score": Variable(("text",), np.zeros(n_texts), "nat", "score")})
    return Result(groups, {"analysis": "gradient_influence", "score": score, "n_targets": 20})


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


def curve(axis, label):
    return next(line for line in axis.lines if line.get_label() == label)


def test_curves_baseline_meeting_and_windows_are_those_stored(draw):
    result = synthetic(("gdn", "swa"))
    left, right = draw(result).axes
    assert (left.get_xscale(), left.get_yscale(), right.get_xscale()) == ("log", "log", "log")
    for name in ("gdn", "swa"):
        group, line = result.groups[name], curve(left, name)
        np.testing.assert_allclose(line.get_ydata(), group["binned"])
        assert line.get_xdata()[0] == 1, "distance 0 has a place"
        assert ((line.get_xdata() >= BINS + 1) & (line.get_xdata() <= np.append(BINS[1:], DISTANCES))).all()
        shown = curve(right, name)
        assert len(shown.get_xdata()) == 3, "a window that does not hold the targets has no loss"
        np.testing.assert_allclose(shown.get_xdata(), [8, 16, 32], rtol=0.05)
        np.testing.assert_allclose(shown.get_ydata(), group["truncation_loss_change"][1:])
    levels = [list(line.get_ydata()) for line in left.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == 37]
    assert levels == [[0.5, 0.5]] * 2
    assert [list(line.get_xdata()) for line in left.lines if line.get_marker() == "|"] == [[17.0], [17.0]]
    for axis in (left, right):
        assert [text.get_text() for text in axis.texts] == ["8"]


def test_noise_floor_of_half_precision_is_drawn_where_it_was_measured(draw):
    result, floor = synthetic(("gdn", "swa")), np.linspace(0.02, 0.01, len(BINS))
    bins = {"bin": Variable(("bin",), BINS, "token", "bin")}
    noise = Dataset({"noise_floor": Variable(("bin",), floor, "1", "noise floor")}, bins)
    left = draw(Result({**result.groups, "swa/noise": noise}, result.attributes)).axes[0]
    np.testing.assert_allclose(curve(left, "swa: noise floor").get_ydata(), floor)
    assert "gdn: noise floor" not in [line.get_label() for line in left.lines]


def test_series_differ_by_more_than_colour(draw):
    left = draw(synthetic(("a", "b", "c", "d"))).axes[0]
    looks = [(curve(left, n).get_marker(), curve(left, n).get_linestyle()) for n in "abcd"]
    assert all(one != other for one, other in itertools.combinations(looks, 2))


def test_a_curve_of_exact_zeros_ends_and_has_no_baseline(draw):
    left = draw(synthetic(baseline=0.0, met=np.nan)).axes[0]
    assert np.isnan(curve(left, "gdn").get_ydata()[BINS >= 8]).all()
    assert not [line for line in left.lines if line.get_marker() == "|"]


def test_different_scores_are_drawn_relative_to_their_baselines(draw):
    big, small = synthetic(score="logit_sum", baseline=50.0), synthetic()
    figure = draw(big, small)
    left = figure.axes[0]
    assert left.get_ylabel() == "G(d), relative to the baseline"
    np.testing.assert_allclose(curve(left, "gdn, logit_sum").get_ydata(), big["gdn/binned"] / 50)
    np.testing.assert_allclose(curve(left, "gdn, log_prob").get_ydata(), small["gdn/binned"] / 0.5)
    same = draw(small, small).axes[0]
    assert {"gdn, log_prob (1)", "gdn, log_prob (2)"} <= {line.get_label() for line in same.lines}


def test_one_text_is_drawn_without_interval(draw):
    left, right = draw(synthetic(interval=False, n_texts=1)).axes
    assert np.isfinite(curve(left, "gdn").get_ydata()).all()
    assert np.isfinite(curve(right, "gdn").get_ydata()).all()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_title_and_legend_fit_into_the_figure(draw, count):
    figure = draw(synthetic(tuple(f"mini-architecture-{i}" for i in range(count))))
    for artist in (figure._suptitle, figure.legends[0]):
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    assert figure._suptitle.get_window_extent().y0 >= max(a.title.get_window_extent().y1 for a in figure.axes) - 1
    assert "mean over 8 texts of 49 tokens, last 20 positions" in figure._suptitle.get_text().replace("\n", " ")


def test_the_command_draws_a_stored_result(tmp_path):
    store.write(tmp_path / "r.h5", synthetic(("gdn", "swa")))
    with pytest.raises(SystemExit) as stop:
        figures.cli([str(tmp_path / "r.h5"), "--out", str(tmp_path / "f.svg")])
    assert not stop.value.code
    drawn = (tmp_path / "f.svg").read_text()
    for words in ("gdn", "swa", "influence of a token", "last w tokens only", "w, tokens given"):
        assert words in drawn, words
