"""python -m analyses.figures: dispatch on the analysis, clear refusals, atomic and repeatable output."""

import subprocess
import sys
import types
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from analyses import store
from analyses.figures import __main__ as figures
from analyses.figures import style
from analyses.store import Dataset, Result, Variable
from models.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[3]


def result_file(path: Path, analysis: str, values: tuple[float, ...] = (1.0, 3.0, 2.0)) -> Path:
    store.write(path, Result({"": Dataset({"x": Variable(("t",), values, "nats", "d")})}, {"analysis": analysis}))
    return path


@pytest.fixture
def drawn(monkeypatch):
    """A figure module `planted`; gives the results that it was asked to draw."""
    seen: list[list[Result]] = []

    def draw(results: list[Result]) -> matplotlib.figure.Figure:
        import matplotlib.pyplot as plt

        seen.append(results)
        assert plt.rcParams["font.size"] == style.SETTINGS["font.size"]
        figure, axes = plt.subplots()
        for name, look in style.looks(["a", "b"]).items():
            axes.plot(results[0]["x"], label=name, **look.line)
            axes.bar([0], [1], **look.bar)
        return figure

    module = types.ModuleType("analyses.figures.planted")
    module.draw = draw
    monkeypatch.setitem(sys.modules, "analyses.figures.planted", module)
    return seen


def call(*arguments: str | Path) -> object:
    with pytest.raises(SystemExit) as stop:
        figures.cli([str(argument) for argument in arguments])
    return stop.value.code


@pytest.mark.parametrize(
    ("suffix", "starts"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml"), ("SVG", b"<?xml")]
)
def test_figure_is_drawn_from_all_files_and_repeats_byte_for_byte(tmp_path, drawn, suffix, starts):
    a, b = result_file(tmp_path / "a.h5", "planted"), result_file(tmp_path / "b.h5", "planted", (5.0,))
    contents = []
    for _ in range(2):
        assert call(a, b, "--out", tmp_path / f"new folder/f.{suffix}") == 0
        contents.append((tmp_path / f"new folder/f.{suffix}").read_bytes())
    assert contents[0].startswith(starts)
    assert contents[0] == contents[1]
    assert [result["x"].tolist() for result in drawn[0]] == [[1.0, 3.0, 2.0], [5.0]]
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == [f"f.{suffix}"]
    assert matplotlib.pyplot.get_fignums() == []


def test_refusals_are_one_line_and_write_nothing(tmp_path, drawn, capsys):
    good, other = result_file(tmp_path / "a.h5", "planted"), result_file(tmp_path / "o.h5", "unheard_of")
    odd, helper = result_file(tmp_path / "odd.h5", "../style"), result_file(tmp_path / "style.h5", "style")
    (tmp_path / "web.h5").write_text("<html>")
    for arguments, says in (
        ([other, "--out", tmp_path / "f.png"], "analysis 'unheard_of' has no figure"),
        ([odd, "--out", tmp_path / "f.png"], "analysis '../style' has no figure"),
        ([helper, "--out", tmp_path / "f.png"], "analysis 'style' has no figure"),
        ([good, other, "--out", tmp_path / "f.png"], "come from 2 analyses"),
        ([good, "--out", tmp_path / "f.jpg"], "suffix '.jpg'"),
        ([good, "--out", tmp_path / "f"], "suffix ''"),
        ([tmp_path / "absent.h5", "--out", tmp_path / "f.png"], "no such file"),
        ([tmp_path / "web.h5", "--out", tmp_path / "f.png"], "a web page"),
        (["--out", tmp_path / "f.png"], "no result given"),
        ([good], "--out"),
    ):
        assert call(*arguments) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert says in said
    assert not list(tmp_path.glob("*f.*"))
    assert drawn == []


def test_a_failing_drawing_leaves_the_old_figure(tmp_path, drawn, monkeypatch):
    good = result_file(tmp_path / "a.h5", "planted")
    (tmp_path / "f.png").write_bytes(b"old")

    def broken(figure, *args, **kwargs):
        Path(args[0]).write_bytes(b"half")
        raise RuntimeError("no font")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", broken)
    with pytest.raises(RuntimeError, match="no font"):
        figures.cli([str(good), "--out", str(tmp_path / "f.png")])
    assert (tmp_path / "f.png").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "f.png"]


def test_a_broken_figure_module_is_not_taken_for_an_absent_one(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'seaborn'", name="seaborn")

    monkeypatch.setattr(figures.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="seaborn"):
        figures.drawer_of({Path("a.h5"): "planted"})


def test_help_needs_neither_matplotlib_nor_torch():
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from analyses.figures import __main__ as m\n"
        "try:\n    m.cli(['--help'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'matplotlib', 'h5py'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FILE.h5 [FILE.h5 ...]" in done.stdout


def seen_by(colour: str, kind: str) -> np.ndarray:
    """Linear RGB of a colour as seen with a missing cone (Machado, Oliveira, Fernandes 2009)."""
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    matrices = {
        "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    }
    return np.array(matrices[kind]) @ linear


@pytest.mark.parametrize("kind", ["protanopia", "deuteranopia"])
def test_colours_stay_apart_for_colour_blind_readers(kind):
    for one, two in combinations(style.COLOURS, 2):
        assert np.linalg.norm(seen_by(one, kind) - seen_by(two, kind)) > 0.1
    assert (
        np.linalg.norm(seen_by("#FF0000", kind) - seen_by("#6E7000", kind)) < 0.5
    )  # the measure tells red-green pairs


def test_looks_can_be_told_apart_without_colour_and_refuse_too_many():
    names = [f"m{i}" for i in range(28)]
    found = style.looks(names)
    assert len({(look.marker, look.linestyle) for look in found.values()}) == 28
    assert len({(look.color, look.linestyle) for look in found.values()}) == 28
    assert len({look.hatch for look in list(found.values())[:8]}) == 8
    assert style.looks(["a", "b", "a"]).keys() == {"a", "b"}
    with pytest.raises(InputError, match="29 series"):
        style.looks([*names, "one more"])


def test_style_leaves_the_callers_settings_alone():
    before = matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]
    with style.styled():
        assert matplotlib.rcParams["axes.grid"]
    assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["axes.grid"]) == before
    assert min(style.SETTINGS[name] for name in style.SETTINGS if name.endswith("size") and "marker" not in name) >= 9
    assert matplotlib.get_backend().lower() == "agg"
