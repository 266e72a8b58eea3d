"""Where points come from: tables with named columns, training runs; what is wrong is named by file, line and column."""

import json
import shutil
import struct

import numpy as np
import pytest

import models
from analyses import scaling_runs
from analyses.scaling_points import Points, read_table
from models.errors import InputError
from models.presets import preset

GOOD = "scale\tn\td\tloss\tarchitecture\nS1\t1e7\t2B\t3.5\tswa\nS1\t10M\t4e9\t3.25\tswa\n"


def written(path, text):
    path.write_text(text)
    return path


def test_a_table_with_suffixes_comments_and_labels(tmp_path):
    points = read_table(written(tmp_path / "t.tsv", "# where from\n\n" + GOOD))
    assert points.n.tolist() == [1e7, 1e7]
    assert points.d.tolist() == [2e9, 4e9]
    assert points.loss.tolist() == [3.5, 3.25]
    assert points.architecture == ("swa", "swa")
    assert points.scale == ("S1", "S1")
    assert points.run == ("", "")


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        ("params,tokens,val_loss", "2e7,6e9,3", (2e7, 6e9, 3.0)),
        ("N,D,Loss", "2e7,6e9,3", (2e7, 6e9, 3.0)),
        ("n_params,d_over_n,longppl", "2e7,300,20", (2e7, 6e9, np.log(20))),
        ("n,token_multiplier,perplexity", "2e7,300.5n,20", (2e7, 6.01e9, np.log(20))),
        ("n,d,log_longppl", ' 2e7 ,"6e9",3', (2e7, 6e9, 3.0)),
    ],
)
def test_names_that_columns_may_have(tmp_path, header, row, expected):
    points = read_table(written(tmp_path / "released.csv", f"\ufeff{header}\n{row}\n"))
    assert (points.n[0], points.d[0], points.loss[0]) == pytest.approx(expected)
    assert points.architecture == ("released",)


def test_the_released_table_as_it_is(tmp_path):
    path = written(tmp_path / "r.tsv", "model_size\ttoken_multiplier\tn\tloss\nS1\t200.110938n\t14999424\t20.7426\n")
    points = read_table(path, perplexity=True)
    assert points.loss[0] == pytest.approx(np.log(20.7426))
    assert points.d[0] == pytest.approx(200.110938 * 14999424)
    assert points.scale == ("S1",)


def test_a_loss_column_is_chosen_by_name(tmp_path):
    path = written(tmp_path / "t.csv", "n,d,loss,longppl,ruler_nll\n1e7,2e9,3,20,1.5\n")
    with pytest.raises(InputError, match="'loss' and 'longppl' both give loss; choose with --loss-column"):
        read_table(path)
    assert read_table(path, loss_column="loss").loss[0] == 3
    assert read_table(path, loss_column="longppl").loss[0] == pytest.approx(np.log(20))
    assert read_table(path, loss_column="ruler_nll").loss[0] == 1.5
    with pytest.raises(InputError, match="no column 'niah'; the header has n, d, loss, longppl, ruler_nll"):
        read_table(path, loss_column="niah")


BAD = [
    ("", "no header; expected a line of column names"),
    ("n,d,loss\n", "a header without rows"),
    ("n,d\n1,2\n", r"no column gives loss \(n, d\); name one of loss, val_loss"),
    ("d,loss\n1,2\n", "no column gives n"),
    ("n,loss\n1,2\n", "no column gives d"),
    ("n,params,d,loss\n1,1,2,3\n", "columns 'n' and 'params' both give n; keep one"),
    ("n,d,d_over_n,loss\n1,1,2,3\n", "columns 'd' and 'd_over_n' both give d; keep one"),
    ("n,d,loss\n1e7,2e9\n", "line 2: 2 cells, the header has 3 columns"),
    ("# x\nn,d,loss\n1e7,2e9,3\n\n1e7,2e9,abc\n", "line 5, column 'loss': 'abc' is not a positive, finite number"),
    ("n,d,loss\n1e7,-2e9,3\n", "line 2, column 'd': '-2e9'"),
    ("n,d,loss\n1e7,2e9,nan\n", "line 2, column 'loss': 'nan'"),
    ("n,d,loss\n,2e9,3\n", "line 2, column 'n': ''"),
    ("n,d,ppl\n1e7,2e9,0.9\n", "line 2, column 'ppl': perplexity 0.9 has no positive log"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read_table(written(tmp_path / "t.csv", text))
    assert str(tmp_path / "t.csv") in str(caught.value)


def test_a_binary_is_no_table(tmp_path):
    (tmp_path / "t.h5").write_bytes(b"\x89HDF\r\n\x1a\n\xff\xfe")
    with pytest.raises(InputError, match="not a text table"):
        read_table(tmp_path / "t.h5")


def test_points_are_known_by_their_values():
    rows = [(1e7, 2e9, 3.0, "swa", "S1", ""), (2e7, 2e9, 2.5, "full", "S2", "r")]
    points = Points.of(rows)
    assert points.rows == rows
    assert points.sha256 == Points.of(list(rows)).sha256 != Points.of(rows[:1]).sha256
    assert points.where([False, True]).rows == rows[1:]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run as models.pretrain leaves it: a repeated line, lines without validation, two checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    shape = preset("nano", "swa-32")
    model = models.HybridLM(shape)
    for step in (3, 8):
        models.save(model, folder / f"step_{step:08d}")
    lines = [
        {"step": 2, "tokens": 200, "loss": 7.0},
        {"step": 3, "tokens": 300, "val_loss": 6.5, "niah": 0.0},
        {"step": 8, "tokens": 800, "val_loss": 9.9},
        {"step": 8, "tokens": 800, "val_loss": 5.5},
    ]
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "run.json").write_text(json.dumps({"preset": "nano/swa-32", "seed": 0}))
    return folder, model.num_parameters(embeddings=False)


def test_a_run_gives_a_point_a_checkpoint(run):
    folder, count = run
    points = scaling_runs.read_run(folder)
    assert points.rows == [
        (count, 300.0, 6.5, "swa-32", "nano", "mine"),
        (count, 800.0, 5.5, "swa-32", "nano", "mine"),
    ]
    assert scaling_runs.read_run(folder, last=True).d.tolist() == [800.0]
    assert scaling_runs.find_runs(folder) == scaling_runs.find_runs(folder.parent) == [folder]


@pytest.mark.parametrize("architecture", ["mamba2", "gdn-headwise"])
def test_a_run_without_weights_or_preset_is_counted_from_its_config(tmp_path, architecture):
    model = models.HybridLM(preset("nano", architecture))
    models.save(model, tmp_path / "arch" / "step_00000001")
    assert scaling_runs._parameters(tmp_path / "arch") == model.num_parameters(embeddings=False)
    (tmp_path / "arch" / "step_00000001" / "model.safetensors").unlink()
    (tmp_path / "arch" / "log.jsonl").write_text('{"tokens": 10, "val_loss": 2.0}\n')
    points = scaling_runs.read_run(tmp_path / "arch")
    assert points.n[0] == model.num_parameters(embeddings=False)
    assert points.architecture == ("arch",)


def test_runs_that_cannot_be_read(run, tmp_path):
    with pytest.raises(InputError, match=r"holds no log\.jsonl"):
        scaling_runs.find_runs(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(run[0], copy)
    cases = [
        ('{"tokens": 5, "loss": 1.0}\n', "no line has val_loss"),
        ('{"tokens": 5, "val_loss"\n', r"log\.jsonl, line 1: not a line of a training log"),
        ('\n{"val_loss": 1.0}\n', r"line 2: not a line of a training log \('tokens'\)"),
        ('{"tokens": 5, "val_loss": NaN}\n', "line 1: tokens 5, val_loss nan"),
    ]
    for text, message in cases:
        (copy / "log.jsonl").write_text(text)
        with pytest.raises(InputError, match=message):
            scaling_runs.read_run(copy)
    (copy / "log.jsonl").write_text('{"tokens": 5, "val_loss": 1.0}\n')
    weights = copy / "step_00000008" / "model.safetensors"
    for content, message in (
        (b"", "not a readable safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a readable safetensors file"),
        (struct.pack("<Q", 2) + b"{}", r"has no embed\.weight"),
    ):
        weights.write_bytes(content)
        with pytest.raises(InputError, match=message):
            scaling_runs.read_run(copy)
    (copy / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is not valid JSON"):
        scaling_runs.read_run(copy)
    for step in copy.glob("step_*"):
        shutil.rmtree(step)
    (copy / "run.json").unlink()
    with pytest.raises(InputError, match=r"no step_\*/config\.json"):
        scaling_runs.read_run(copy)
