"""--layers and --floor: chosen sets of layers restricted by themselves, and the plain truncated context."""

import re

import numpy as np
import pytest
import torch

import hooks
import models
from analyses import receptive_field
from analyses.conditions import Condition
from analyses.layer_subsets import parse, subset_conditions
from analyses.receptive_field import Config
from models import command_line
from models.errors import InputError

PROMPT, WINDOW = 330, 9


def test_sets_are_ids_joined_by_commas():
    assert parse(("5", "11, 5,17", "0,0"), 18) == [(5,), (5, 11, 17), (0,)]
    assert parse((), 18) == []


@pytest.mark.parametrize("given", ["18", "5,18", "-1", "full", "5,", "", "5;6", "²"])
def test_what_is_no_layer_is_refused(given):
    with pytest.raises(InputError, match=re.escape(f"--layers has {given!r}; expected ")):
        parse(("3", given), 18)


def test_each_set_meets_each_window_and_number_of_sinks():
    labels = [condition.label for condition in subset_conditions([(5,), (5, 11)], (64, 512), (0, 4))]
    assert labels == [
        "layer 5 -> 64", "layer 5 -> 64 + 4 sinks", "layer 5 -> 512", "layer 5 -> 512 + 4 sinks",
        "layers 5,11 -> 64", "layers 5,11 -> 64 + 4 sinks", "layers 5,11 -> 512", "layers 5,11 -> 512 + 4 sinks",
    ]  # fmt: skip


def test_a_set_is_restricted_and_no_other_layer(tiny):
    model = tiny.model("swa", "full", "gdn", "full")
    ids = torch.randint(90, (1, 40), generator=torch.Generator().manual_seed(0))
    free = model(ids)
    condition = Condition("layers", window=3, subset=(1, 3))
    with condition.applied(model):
        found = model(ids)
        assert [bool(layer.mixers[0].restrictions) for layer in model.layers] == [False, True, False, True]
    with hooks.restrict(model, "full", window=3):
        assert torch.equal(found, model(ids))
    assert not torch.equal(found, free)
    assert Condition("layers", window=6, subset=(0,)).changes_nothing(model.layers)
    assert not Condition("layers", window=6, subset=(0, 1)).changes_nothing(model.layers)
    assert Condition("layers", window=3, sinks=4, subset=(1, 2)).not_applicable(model.layers)
    assert not Condition("layers", window=3, sinks=4, subset=(0, 1)).not_applicable(model.layers)


@pytest.fixture(scope="module")
def study(tiny, tmp_path_factory):
    """One checkpoint at one window, with sets and the floor; and the same study without them."""
    folder = tmp_path_factory.mktemp("subsets")
    tiny.recall_folder(folder)
    tiny.save(tiny.model("swa", "full", "swa", "full", context_length=64), folder / "mixed")
    common = {
        "paths": (folder / "mixed",), "windows": (WINDOW,), "prompts": 2, "prompt_length": PROMPT, "haystack": "noise",
        "texts": folder / "texts", "key_tokens": folder / "keys",
    }  # fmt: skip
    chosen = Config(out=folder / "sets.h5", layers=("1", "3", "1,3", "0,2", "2,3"), floor=True, **common)
    return folder, receptive_field.receptive_field(chosen).groups


def test_the_set_of_all_full_layers_is_the_group_and_single_layers_lie_elsewhere(study):
    _, groups = study
    group, documents = groups["mixed"], groups["mixed/documents"]
    rows = {str(label): row for row, label in enumerate(group["condition"])}
    loss = documents["loss"]
    together = rows[f"layers 1,3 -> {WINDOW}"]
    assert np.array_equal(loss[together], loss[rows[f"full -> {WINDOW}"]])
    for label in ("layer 1", "layer 3", "layers 2,3"):
        assert not np.array_equal(loss[rows[f"{label} -> {WINDOW}"]], loss[together]), label
    assert np.array_equal(loss[rows[f"layers 2,3 -> {WINDOW}"]], loss[rows[f"layer 3 -> {WINDOW}"]]), "layer 2 has 6"
    assert group["status"][rows[f"layers 0,2 -> {WINDOW}"]].startswith("identical to none")
    assert group["restricted_ids"][together] == "1,3"
    assert group["restricted_ids"][rows[f"layer 3 -> {WINDOW}"]] == "3"
    assert group["restricted_layer"][[together, rows[f"layer 3 -> {WINDOW}"]]].tolist() == [-1, 3]
    effect = groups["mixed/layers"]["effect"][0]
    assert group["largest_effect"][together] == np.nanmax(effect[:, [1, 3]])
    assert group["reach"][together] == 1 + 2 * (WINDOW - 1)


def test_the_floor_is_a_model_that_is_given_the_last_tokens_only(study, tiny):
    folder, groups = study
    group, documents = groups["mixed"], groups["mixed/documents"]
    row = list(group["condition"]).index(f"last {WINDOW} only")
    model = models.load(folder / "mixed", device="cpu")
    texts, key, _ = tiny.recall_folder(folder / "again")
    for column, name in enumerate(documents["document"]):
        ids = torch.tensor([model.tokenizer.encode(texts[name])])
        losses = [-model(ids[:, p - WINDOW : p])[0, -1].log_softmax(-1)[ids[0, p]].item() for p in key[name]]
        assert abs(documents["key_loss"][row, column] - sum(losses)) < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "4"], r"--layers has '4'; expected layer ids 0 to 3 of a model of 4"),
        (["--layers", "full"], r"--layers has 'full'; expected absolute layer ids joined by commas, e\.g\. 5 or 5,11"),
    ],
)
def test_bad_sets_are_one_line(study, tmp_path, capsys, options, message):
    folder, _ = study
    given = [
        str(folder / "mixed"), "--out", str(tmp_path / "r.h5"), "--haystack", "noise", "--prompt-length", str(PROMPT),
        "--texts", str(folder / "texts"), "--key-tokens", str(folder / "keys"), *options,
    ]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        command_line.run(receptive_field.main, Config, arguments=given)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
