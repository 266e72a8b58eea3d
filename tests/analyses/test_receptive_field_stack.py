"""Stacked summaries are the summaries, checkpoint by checkpoint, and refuse what cannot be stacked."""

import json
from pathlib import Path

import numpy as np
import pytest

from analyses import receptive_field_stack, store
from analyses.result import Dataset, Result, Variable
from models.errors import InputError

STORED = Path(__file__).parents[2] / "notebooks" / "results" / "receptive_field_grid.h5"


def summary(harm, conditions=("none", "full -> 2")):
    variables = {
        "log_long_ppl_harm": Variable(("condition",), np.array(harm), "nat", "harm"),
        "status": Variable(("condition",), ["", "identical"], "", "status"),
        "unknown": Variable(("condition",), np.array(harm), "1", "left out"),
    }
    return Dataset(variables, {"condition": Variable(("condition",), list(conditions), "", "condition")})


def result(groups, analysis="receptive_field"):
    return Result(groups, {"analysis": analysis, "config": json.dumps({"windows": [2]}), "seed": 0, "dtype": "float32"})


def test_values_of_every_checkpoint():
    made = receptive_field_stack.stacked({"sweep": result({"a": summary([0, 1.5]), "b": summary([0, 2.5])})})
    group = made.groups["sweep"]
    assert group["checkpoint"].tolist() == ["a", "b"]
    assert group.variables["log_long_ppl_harm"].dims == ("checkpoint", "condition")
    assert np.array_equal(group["log_long_ppl_harm"], np.array([[0, 1.5], [0, 2.5]], np.float32))
    assert group.variables["status"].dims == ("condition",)  # shared by all
    assert group["condition"].tolist() == ["none", "full -> 2"]
    assert "unknown" not in group.variables
    assert json.loads(made.attributes["studies"])["sweep"]["config"] == {"windows": [2]}


def test_of_a_study_at_several_lengths_the_lengths_are_kept():
    groups = {"a": summary([0, 1]), "a/lengths": summary([0, 2]), "b": summary([0, 3]), "b/lengths": summary([0, 4])}
    made = receptive_field_stack.stacked({"long": result(groups)})
    assert list(made.groups) == ["long/lengths"]
    assert made.groups["long/lengths"]["log_long_ppl_harm"].tolist() == [[0, 2], [0, 4]]


def test_a_stored_result(tmp_path, capsys):
    config = receptive_field_stack.Config((f"grid={STORED}",), tmp_path / "stacked.h5")
    receptive_field_stack.main(config)
    whole, made = store.read(STORED), store.read(tmp_path / "stacked.h5")
    names = made.groups["grid"]["checkpoint"].tolist()
    assert names == [name for name in whole.groups if "/" not in name]
    for index, name in enumerate(names):
        for variable in ("log_long_ppl_harm", "log_long_ppl_harm_interval", "niah"):
            stacked, own = made.groups["grid"][variable][index], whole.groups[name][variable]
            assert np.allclose(stacked, own, rtol=1e-6, equal_nan=True)
    assert config.out.stat().st_size < STORED.stat().st_size / 2


@pytest.mark.parametrize(
    ("groups", "analysis", "words"),
    [
        ({"a": summary([0, 1])}, "layerwise_probing", "expected one of analyses.receptive_field"),
        ({"a": summary([0, 1]), "b": summary([0, 1], ("none", "full -> 4"))}, "receptive_field", "other conditions"),
    ],
)
def test_what_cannot_be_stacked_is_refused(groups, analysis, words):
    with pytest.raises(InputError, match=words):
        receptive_field_stack.stacked({"x": result(groups, analysis)})


def test_a_study_without_a_name_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected NAME=FILE"):
        receptive_field_stack.main(receptive_field_stack.Config((str(STORED),), tmp_path / "x.h5"))
