"""The analysis and its command: what the file holds, what is printed, what is refused."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analyses import scaling_law, store
from analyses.scaling_law_plan import Plan
from models import command_line
from probes import scaling

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "analyses" / "data" / "scaling_swa128.tsv"
FEW = ["--resamples", "20", "--joint-resamples", "9"]


def call(*arguments):
    """Exit code of the command line in this process."""
    with pytest.raises(SystemExit) as stop:
        command_line.run(scaling_law.main, scaling_law.Config, arguments=list(map(str, arguments)))
    return stop.value.code


def made(path, architectures=("swa-128", "full"), sizes=(1.5e7, 3.2e7, 6.5e7, 1.04e8), noise=0.01, runs=False):
    """A table of planted laws with a common N term."""
    rng, lines = np.random.default_rng(0), ["arch,n,d,loss,run"]
    for index, name in enumerate(architectures):
        for n in sizes:
            for ratio in (60, 130, 300, 700):
                loss = (90 * n**-0.24 + (3500 - 1500 * index) * (n * ratio) ** -0.36) * np.exp(noise * rng.normal())
                lines.append(f"{name},{n},{n * ratio},{loss},{f'{name} {n:.3g}' if runs else ''}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    out = tmp_path_factory.mktemp("scaling") / "r.h5"
    config = scaling_law.Config((RELEASED,), out=out, released=True, resamples=20)
    return scaling_law.scaling_law(config)


def test_the_released_points_give_the_known_fits(released):
    group = released.groups["swa-128"]
    fits, names = list(group["fit"]), list(group["parameter"])
    assert fits == [
        "no constant, largest N held out", "with constant, largest N held out",
        "no constant, all points", "with constant, all points",
        "released fit, largest N held out", "released bounds, largest N held out",
    ]  # fmt: skip
    known = {
        "no constant, largest N held out": (17, 0.474, 0.175, 0.988, 0.979),
        "released fit, largest N held out": (17, 0.2475, 0.3551, 0.984, 0.963),
        "released bounds, largest N held out": (17, 0.300, 0.267, 0.987, 0.955),
    }
    for label, (count, alpha, beta, r2, r2_held_out) in known.items():
        row = fits.index(label)
        assert group["n_points"][row] == count
        assert group["parameters"][row, names.index("alpha")] == pytest.approx(alpha, abs=1e-3)
        assert group["parameters"][row, names.index("beta")] == pytest.approx(beta, abs=1e-3)
        assert group["r2"][row] == pytest.approx(r2, abs=5e-4)
        assert group["r2_held_out"][row] == pytest.approx(r2_held_out, abs=5e-4)
    assert np.isnan(group["r2_held_out"][fits.index("no constant, all points")])


def test_the_file_holds_points_residuals_profiles_and_samples(released):
    group = released.groups["swa-128"]
    assert len(group["n"]) == 23
    assert group["scale"].tolist().count("S4") == 6
    np.testing.assert_array_equal(group["fitted"][0], group["scale"] != "S4")
    np.testing.assert_allclose(group["residual"], np.log(group["loss"]) - np.log(group["predicted"]))
    assert group["bootstrap"].shape == (6, 20, 5)
    assert np.isnan(group["parameters"][0, 4])
    assert np.isnan(group["bootstrap"][4]).all(), "the early stop has no interval"
    names = list(group["parameter"])
    low, high = group["profile_interval"][0, names.index("alpha")]
    assert low < 0.2 < 0.84 < high, "wide: the points hardly determine alpha"
    curve = group["profile_statistic"][0, names.index("alpha")]
    assert np.nanmin(curve) == pytest.approx(0, abs=1e-6)
    assert np.nanmax(curve) > group["profile_threshold"][0]
    assert "its bound" in str(group["warnings"][5])
    assert "weakly determined" in str(group["warnings"][0])


def test_it_opens_as_labelled_arrays_and_as_a_table(released):
    dataset = released.to_xarray("swa-128")
    label = "no constant, largest N held out"
    assert float(dataset.parameters.sel(fit=label, parameter="alpha")) == pytest.approx(0.474, abs=1e-3)
    assert dataset.d.attrs["units"] == "token"
    table = released.to_pandas("swa-128", variables=["parameters", "r2"])
    assert len(table) == 6 * 5
    for name in ("analysis", "config", "points_sha256", "scipy", "git_commit", "seed", "time"):
        assert name in released.attributes


def test_several_architectures_are_compared(tmp_path, capsys):
    assert call(made(tmp_path / "two.csv"), "--out", tmp_path / "r.h5", *FEW) == 0
    printed = capsys.readouterr().out
    result = store.read(tmp_path / "r.h5")
    assert list(result.groups) == ["swa-128", "full", "joint/no constant", "joint/with constant"]
    joint = result.groups["joint/no constant"]
    assert list(joint["law"]) == ["free", "shared N", "shared D", "one"]
    assert joint["null"].shape == (4, 9)
    assert np.isnan(joint["null"][0]).all()
    assert joint["p_value"][list(joint["law"]).index("one")] == pytest.approx(0.1)
    assert joint["parameters"].shape == (4, 2, 5)
    assert str(joint["verdict"]) in printed
    assert "all architectures, no constant   32 points of 2" in printed
    direct = scaling.fit_joint(joint["n"], joint["d"], joint["loss"], joint["point_architecture"], resamples=9)
    np.testing.assert_allclose(direct.laws["shared N"].null, joint["null"][1])


def test_a_finished_run_is_printed_again_and_another_configuration_is_refused(tmp_path, capsys, monkeypatch):
    table, out = made(tmp_path / "one.csv", architectures=("swa",)), tmp_path / "new" / "r.h5"
    assert call(table, "--out", out, *FEW) == 0
    first, stamp = capsys.readouterr().out, out.stat()
    assert first.splitlines()[-1] == str(out)
    elsewhere = tmp_path / "copy.csv"
    elsewhere.write_text(table.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "compute", lambda *_: pytest.fail("computed again"))
        for same in (table, elsewhere):
            assert call(same, "--out", out, *FEW) == 0
            assert capsys.readouterr().out == first
        for changed in (["--seed", "1"], ["--alpha", "0.2", "0.3"], ["--released"], ["--min-tokens", "2B"]):
            assert call(table, "--out", out, *FEW, *changed) == 2
            said = capsys.readouterr().err
            assert "another configuration" in said
            assert "--overwrite" in said
            assert said.count("\n") == 1
    assert out.stat() == stamp
    assert list(out.parent.iterdir()) == [out]
    digest = store.read(out).digest()
    assert call(table, "--out", out, *FEW, "--seed", "1", "--overwrite") == 0
    assert store.read(out).digest() != digest
    assert call(table, "--out", tmp_path / "again.h5", *FEW) == 0
    assert store.read(tmp_path / "again.h5").digest() == digest


def test_bounds_few_sizes_and_runs(tmp_path, capsys):
    table = made(tmp_path / "few.csv", architectures=("swa",), sizes=(1.5e7, 6.5e7), runs=True)
    assert call(table, "--out", tmp_path / "r.h5", *FEW, "--over", "runs", "--alpha", "0.1", "0.2") == 0
    printed = capsys.readouterr().out
    group = store.read(tmp_path / "r.h5").groups["swa"]
    assert set(group["split"]) == {"all"}, "nothing can be held out of two sizes"
    assert group["parameters"][0, 2] == pytest.approx(0.2)
    assert group["bounds"][0, 2].tolist() == [0.1, 0.2]
    assert "alpha = 0.2 lies on its bound" in printed
    assert "2 distinct N" in printed
    assert "interval over runs" in printed


def test_training_runs_are_points_with_their_caveats(tmp_path, capsys):
    import models
    from models.presets import preset

    for name in ("nano", "mini"):
        folder = tmp_path / "runs" / name
        models.save(models.HybridLM(preset(name, "swa-32")), folder / "step_00000009")
        (folder / "run.json").write_text(f'{{"preset": "{name}/swa-32"}}')
        lines = [f'{{"tokens": {10**k}, "val_loss": {9 - k}}}' for k in range(4, 8)]
        (folder / "log.jsonl").write_text("\n".join(lines))
    assert call(tmp_path / "runs", "--out", tmp_path / "r.h5", *FEW, "--min-tokens", "50K") == 0
    printed = capsys.readouterr().out
    group = store.read(tmp_path / "r.h5").groups["swa-32"]
    assert group["d"].tolist() == [1e5, 1e6, 1e7] * 2
    assert group["run"].tolist() == ["mini"] * 3 + ["nano"] * 3
    assert "note: loss of a checkpoint whose learning rate has not decayed" in printed
    assert "note: checkpoints of one run share their noise" in printed
    assert call(tmp_path / "runs", "--out", tmp_path / "l.h5", *FEW, "--last") == 2
    assert "architecture 'swa-32' has 2 points; expected 5 or more" in capsys.readouterr().err


BAD = [
    (["@nowhere"], r"nowhere: no such file or folder"),
    (["@"], r"holds no log\.jsonl, nor does a folder in it"),
    ([], r"no points given"),
    (["@short.csv"], r"architecture 'short' has 2 points; expected 5 or more"),
    (["@broken.csv"], r"broken\.csv, line 3, column 'd': 'x' is not a positive"),
    (["@good.csv", "--alpha", "0.3", "0.2"], r"--alpha is 0\.3 0\.2; expected the lower bound first"),
    (["@good.csv", "--alpha", "20", "30"], r"bounds of alpha are"),
    (["@good.csv", "--level", "95"], r"--level is 95\.0; expected a share"),
    (["@good.csv", "--delta", "0"], r"--delta is 0\.0"),
    (["@good.csv", "--resamples", "0"], r"--resamples is 0"),
    (["@good.csv", "--joint-resamples", "-1"], r"--joint-resamples is -1"),
    (["@good.csv", "--min-tokens", "1e15"], r"--min-tokens is 1e15; the point with most tokens has"),
    (["@good.csv", "--min-tokens", "many"], r"--min-tokens is 'many'; expected a number of tokens"),
    (["@good.csv", "--over", "runs"], r"--over runs needs the run of every point"),
    (["@good.csv", "--over", "seeds"], r"seeds"),
    (["@good.csv", "--loss-column", "ppl"], r"no column 'ppl'"),
    (["@alike.csv"], r"architectures joint, swa: two names are alike, or one is 'joint'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    made(folder / "good.csv", architectures=("swa",))
    (folder / "short.csv").write_text("n,d,loss\n1e7,1e9,3\n2e7,1e9,2\n")
    (folder / "broken.csv").write_text("n,d,loss\n1e7,1e9,3\n2e7,x,2\n")
    made(folder / "alike.csv", architectures=("swa", "joint"))
    return folder


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) or "nothing" for arguments, _ in BAD])
def test_bad_input_is_one_line_and_nothing_is_written(folder, tmp_path, capsys, arguments, message):
    given = [str(folder / word.removeprefix("@")) if word.startswith("@") else word for word in arguments]
    assert call(*given, "--out", tmp_path / "r.h5") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    assert re.search(message, said.err), said.err
    assert list(tmp_path.iterdir()) == []


def test_help_is_fast_to_come_and_complete():
    script = (
        "import runpy, sys\nsys.argv = ['analyses.scaling_law', '--help']\n"
        "try:\n    runpy.run_module('analyses.scaling_law', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "slow = {'torch', 'scipy', 'matplotlib', 'transformers'} & set(sys.modules)\nassert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    for words in ("PATH [PATH ...]", "--alpha LOW HIGH", "--loss-column NAME", "--released", "--over"):
        assert words in done.stdout, words
    assert "None" not in done.stdout
