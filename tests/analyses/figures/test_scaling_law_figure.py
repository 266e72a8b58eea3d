"""The scaling-law figure: curves of the stored laws, hollow held-out points, profiles, tests; the command itself."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from analyses import scaling_law, store
from analyses.figures import __main__ as command
from analyses.figures import scaling_law as drawer
from analyses.figures import style


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A study of one architecture with the released fits, and one of two architectures."""
    folder, rng = tmp_path_factory.mktemp("figure"), np.random.default_rng(0)
    for name, architectures in (("one", ["swa"]), ("two", ["swa", "full"])):
        lines = ["arch,n,d,loss"]
        for index, architecture in enumerate(architectures):
            for n in (1.5e7, 3.2e7, 6.5e7, 1.04e8):
                for ratio in (60, 130, 300, 700):
                    loss = (90 * n**-0.24 + (3500 - 900 * index) * (n * ratio) ** -0.36) * np.exp(0.01 * rng.normal())
                    lines.append(f"{architecture},{n},{n * ratio},{loss}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
        config = scaling_law.Config(
            (folder / f"{name}.csv",),
            out=folder / f"{name}.h5",
            resamples=12,
            joint_resamples=8,
            released=name == "one",
        )
        scaling_law.scaling_law(config)
    return folder


@pytest.fixture
def draw(stored):
    def drawn(*names):
        with style.styled():
            figure = drawer.draw([store.read(stored / f"{name}.h5") for name in names])
            figure.canvas.draw()
        return figure

    yield drawn
    plt.close("all")


def test_one_architecture_is_a_row_of_four_panels(draw, stored):
    axes = draw("one").axes
    assert len(axes) == 4
    group = store.read(stored / "one.h5").groups["swa"]
    points, (alpha, beta) = axes[0], axes[1:3]
    assert points.get_title() == "swa"
    assert points.get_legend().get_texts()[-1].get_text() == "1.04e+08 (held out)"
    markers = [line for line in points.lines if line.get_linestyle() == "None"]
    assert [line.get_markerfacecolor() for line in markers].count("none") == 1
    curves = {line.get_linestyle() for line in points.lines} - {"None"}
    assert curves == {"-", "--"}
    row = list(group["fit"]).index("no constant, all points")
    solid = next(line for line in points.lines if line.get_linestyle() == "-")
    a, b, x, y, _ = group["parameters"][row]
    np.testing.assert_allclose(solid.get_ydata(), a * 1.5e7**-x + b * np.array(solid.get_xdata()) ** -y, rtol=1e-9)
    for axis, column in ((alpha, 2), (beta, 3)):
        labels = [line.get_label() for line in axis.lines]
        assert {"no constant, all points", "released fit, largest N held out"} <= set(labels)
        drawn = next(line for line in axis.lines if line.get_label() == "no constant, all points")
        np.testing.assert_array_equal(drawn.get_ydata(), group["profile_statistic"][row, column])


def test_several_architectures_add_the_tests(draw, stored):
    axes = draw("two").axes
    assert len(axes) == 12
    joint = store.read(stored / "two.h5").groups["joint/no constant"]
    for axis, law in zip(axes[8:11], ("shared N", "shared D", "one"), strict=True):
        index = list(joint["law"]).index(law)
        assert axis.get_title() == f"{law}: p = {joint['p_value'][index]:.3f}"
        assert axis.lines[0].get_xdata()[0] == pytest.approx(joint["statistic"][index])
        assert sum(bar.get_height() for bar in axis.patches) == 8
    assert axes[11].texts[0].get_text().replace("\n", " ") == str(joint["verdict"])


@pytest.mark.parametrize("names", [("one",), ("two",), ("one", "two")])
def test_title_and_legend_fit_into_the_figure(draw, names):
    figure = draw(*names)
    for artist in (figure._suptitle, figure.legends[0]):
        box = artist.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) == len(set(legend))


def test_the_command_draws_it(stored, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.cli([str(stored / "one.h5"), "--out", str(tmp_path / "f.svg")])
    assert not stop.value.code
    drawn = (tmp_path / "f.svg").read_text()
    for words in ("Scaling laws", "D, training tokens", "profile of α", "released fit, largest N held out"):
        assert words in drawn, words
