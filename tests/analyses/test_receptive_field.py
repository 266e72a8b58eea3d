"""Planted answers: models whose weights are set by hand so that long-range information has one known road.

Every token carries its own identity, that of the token before it (a sliding window of 2) and, from one copy layer, a
histogram of what followed earlier occurrences of it. So every loss under every restriction is known in closed form,
computed here in float64 without the library.
"""

import itertools
import json
import math

import numpy as np
import pytest

from analyses import background, receptive_field
from analyses.conditions import Condition
from analyses.receptive_field import Config
from analyses.receptive_field_summary import NOT_RUN
from analyses.receptive_field_table import table
from probes import long_ppl

V, CONTEXT, PROMPT = 96, 160, 340


def key_loss(tiny, texts, key, window, kind, previous=True, floor=None):
    total, count = 0.0, 0
    for name, text in texts.items():
        ids = tiny.tokenizer().encode(text)
        for position in key[name]:
            part = ids[: position + 1] if floor is None else ids[max(0, position - floor) : position + 1]
            total += tiny.losses_by_hand(part, window, kind, previous)[-1]
            count += 1
    return total / count


@pytest.fixture(scope="module")
def studies(tiny, tmp_path_factory):
    """Both planted models in one grid of windows 2 and 16."""
    folder = tmp_path_factory.mktemp("planted")
    texts, key, _ = tiny.recall_folder(folder)
    tiny.save(tiny.planted("swa", "full", "full", "swa"), folder / "ckpt" / "through-full")
    tiny.save(tiny.planted("swa", "full", "lightning", "full"), folder / "ckpt" / "through-state")
    config = Config(
        paths=(folder / "ckpt",), out=folder / "r.h5", windows=(2, 16), grid=True, prompts=2, prompt_length=PROMPT,
        haystack="noise", texts=folder / "texts", key_tokens=folder / "keys",
    )  # fmt: skip
    return receptive_field.receptive_field(config), texts, key


def harm(result, name, label):
    group = result.groups[name]
    row = list(group["condition"]).index(label)
    return group["log_long_ppl_harm"][row], group["log_long_ppl_harm_interval"][row]


def test_losses_are_those_computed_by_hand(studies, tiny):
    result, texts, key = studies
    for name, kind in (("through-full", "full"), ("through-state", "state")):
        group, documents = result.groups[name], result.groups[f"{name}/documents"]
        ids = [tiny.tokenizer().encode(text) for text in texts.values()]
        every = [tiny.losses_by_hand(one, None, kind).mean() for one in ids]
        np.testing.assert_allclose(documents["loss"][0], every, atol=3e-5)
        assert documents["n_key"].tolist() == [8, 6, 4]
        assert abs(group["log_long_ppl"][0] - key_loss(tiny, texts, key, None, kind)) < 3e-5
        assert group["log_long_ppl"][0] < 0.2


@pytest.mark.parametrize(
    ("name", "kind", "hurts", "spares", "layer"),
    [("through-full", "full", "full", "efficient", 2), ("through-state", "state", "efficient", "full", 2)],
)
def test_only_the_road_matters_and_by_the_amount_computed_by_hand(studies, tiny, name, kind, hurts, spares, layer):
    result, texts, key = studies
    free = key_loss(tiny, texts, key, None, kind)
    for window in (2, 16):
        expected = key_loss(tiny, texts, key, window, kind) - free
        assert expected > 3.5
        found, (low, high) = harm(result, name, f"{hurts} -> {window}")
        assert abs(found - expected) < 5e-5
        assert 3.5 < low <= found <= high
        assert harm(result, name, f"{spares} -> {window}")[0] == 0, "the road was left alone: not one bit moves"
        floor, _ = harm(result, name, f"last {window} only")
        assert abs(floor - (key_loss(tiny, texts, key, None, kind, floor=window) - free)) < 5e-5
    by_layer = {other: harm(result, name, f"layer {other} -> 16")[0] for other in range(4)}
    assert [other for other, value in by_layer.items() if value != 0] == [layer]
    assert by_layer[layer] == harm(result, name, f"{hurts} -> 16")[0]


def test_damage_on_matched_tokens_is_that_computed_by_hand_and_smaller(studies, tiny):
    """Matched tokens lie in the filler, where short copies do as well: documents weigh by their matched tokens."""
    result, texts, key = studies
    group, documents = result.groups["through-full"], result.groups["through-full/documents"]
    changes, excess = [], []
    counts = background.in_tokens(texts, tiny.tokenizer(), 4).token_counts
    for name, text in texts.items():
        ids, offsets = tiny.tokenizer().encode_with_offsets(text)
        pairs = long_ppl.matched_tokens(
            ids, offsets, tiny.key_tokens(text, key[name]), text, counts=counts, position_scale=len(text) / 8
        )
        assert not set(pairs.matched) & set(key[name])
        losses = [tiny.losses_by_hand(ids, window, "full") for window in (16, None)]
        changes.append((losses[0] - losses[1])[pairs.matched - 1])
        excess.append((losses[0] - losses[1])[pairs.key - 1] - changes[-1])
    row = list(group["condition"]).index("full -> 16")
    assert documents["n_matched"].tolist() == [len(change) for change in changes] == documents["n_pairs"].tolist()
    assert abs(group["matched_loss_harm"][row] - np.concatenate(changes).mean()) < 5e-5
    assert abs(group["excess_harm"][row] - np.concatenate(excess).mean()) < 5e-5
    assert group["matched_loss_harm"][row] < 1.5 < 3.5 < group["log_long_ppl_harm"][row]


def test_the_measured_effect_tells_the_road_from_dead_layers(studies):
    layers, group = studies[0].groups["through-full/layers"], studies[0].groups["through-full"]
    assert layers["window"].tolist() == [2, 16, 20]
    assert layers["effect"].shape == (3, 2, 4, 3)
    effect = layers["effect"][1]  # 16
    assert np.isnan(effect[0, [0, 3]]).all()
    assert np.isnan(effect[1, [1, 2]]).all()
    assert (effect[0, 2] > 0.3).all()
    assert (effect[0, 1] == 0).all(), "a layer that puts out nothing cannot be changed"
    assert (effect[1, [0, 3]] == 0).all()
    vacuous = dict(zip(group["condition"], group["vacuous"], strict=True))
    assert vacuous["efficient -> 16"] == 1 == vacuous["efficient -> 16 + 4 sinks"] == vacuous["layer 1 -> 16"]
    assert vacuous["full -> 16"] == 0 == vacuous["layer 2 -> 16"]
    assert math.isnan(vacuous["none"])
    assert math.isnan(vacuous["last 16 only"])
    status = dict(zip(group["condition"], group["status"], strict=True))
    assert status["efficient -> 2"] == NOT_RUN == status["layer 0 -> 16"]
    assert status["full -> 16"] == ""


def test_reach_and_sinks_are_described(studies):
    full, state = (studies[0].groups[name] for name in ("through-full", "through-state"))
    reach = [dict(zip(group["condition"], group["reach"], strict=True)) for group in (full, state)]
    assert reach[0]["full -> 16"] == 1 + 2 * 15
    assert reach[0]["full reach 20"] == 20
    assert reach[0]["efficient reach 20"] == 3, "two windows of 2 cannot cross more"
    assert math.isnan(reach[0]["full -> 16 + 4 sinks"])
    assert reach[1]["efficient -> 16"] == 1 + 1 + 15
    where = list(full["condition"]).index("full reach 20")
    assert [full[f"restricted_{key}"][where] for key in ("group", "window", "reach", "sinks", "layer")] == [
        "full", 0, 20, 0, -1,
    ]  # fmt: skip
    status = dict(zip(state["condition"], state["status"], strict=True))
    assert status["efficient -> 16 + 4 sinks"] == "n/a: a recurrent state has no sinks"
    where = list(state["condition"]).index("efficient -> 16 + 4 sinks")
    for key in ("log_long_ppl", "log_long_ppl_harm", "matched_loss", "loss", "niah", "niah_change", "vacuous", "reach"):
        assert math.isnan(state[key][where]), key


def test_the_table_is_aligned_and_complete(studies):
    result = studies[0]
    blocks = table(result).split("\n\n")
    names = ["through-full", "through-state", "through-full:", "through-state:", "Controls:", "Losses"]
    assert [block.split()[0] for block in blocks] == names
    for block, name in zip(blocks[:2], ("through-full", "through-state"), strict=True):
        head, beyond, columns, *rows = block.splitlines()
        assert head == f"{name}   n = 18 key tokens in 3 documents, 2 needle prompts of {PROMPT} tokens"
        assert beyond == "extrapolation: 2 prompts longer than the training length"
        assert len(rows) == len(result.groups[name]["condition"])
        ends = [columns.index(title) + len(title) for title in ("log(LongPPL)", "all tokens", "needles")]
        for row in rows:
            if "n/a: " not in row and "only" not in row:
                assert all(row[end - 1].isdigit() and row[end : end + 1] in ("", " ") for end in ends), row
        assert rows[0].split()[:2] == ["none", f"{result.groups[name]['log_long_ppl'][0]:.3f}"]
        last = next(row for row in rows if row.startswith("last 16 only"))
        assert " n/a " in last, "the floor knows no loss over all tokens"
    assert sum("identical" in row for row in blocks[0].splitlines()) == 4 + 4
    assert any(row.endswith("n/a: a recurrent state has no sinks") for row in blocks[1].splitlines())


def test_an_untrained_model_shows_nothing_and_narrow_windows_change_not_one_bit(tiny, tmp_path):
    tiny.recall_folder(tmp_path, count=12)
    tiny.save(tiny.model("gdn", "full", std=None, context_length=CONTEXT), tmp_path / "c" / "untrained")
    tiny.save(tiny.model("swa", "swa", context_length=CONTEXT), tmp_path / "c" / "narrow")
    config = Config(
        paths=(tmp_path / "c",), out=tmp_path / "r.h5", windows=(6, 16), documents=12, prompts=3, prompt_length=PROMPT,
        haystack="noise", texts=tmp_path / "texts", key_tokens=tmp_path / "keys",
    )  # fmt: skip
    result = receptive_field.receptive_field(config)
    untrained, narrow = result.groups["untrained"], result.groups["narrow"]
    assert untrained["condition"].tolist() == narrow["condition"].tolist()
    for row in range(1, 5):
        low, high = untrained["log_long_ppl_harm_interval"][row]
        assert low <= 0 <= high
        assert high - low < 0.01
    assert abs(untrained["log_long_ppl"] - math.log(V)).max() < 0.02
    assert (
        set(untrained["log_long_ppl_harm_verdict"][1:]) == {"equivalent"} == set(untrained["excess_harm_verdict"][1:])
    )
    assert narrow["log_long_ppl_harm_verdict"].tolist() == ["", "", "", "equivalent", "equivalent"]
    assert (untrained["niah"] == 0).all()
    assert (untrained["vacuous"][1:] == 0).all(), "nothing was lost, although something moved"
    for row, label in enumerate(narrow["condition"]):
        expected = math.nan if label.startswith("full") else 0.0
        for key in ("log_long_ppl_harm", "loss_harm", "matched_loss_harm", "niah_change"):
            np.testing.assert_array_equal([narrow[key][row], *narrow[f"{key}_interval"][row]], [expected] * 3)
    documents = result.groups["narrow/documents"]
    assert np.isnan(documents["key_loss"][1:3]).all()
    assert (documents["bucket_loss"][3:] == documents["bucket_loss"][0])[..., :5].all()


def test_settings_are_recorded_as_resolved(studies, tiny):
    result = studies[0]
    config = json.loads(result.attributes["config"])
    assert (config["resolved_dtype"], config["resolved_impl"], config["device_type"]) == ("float32", "torch", "cpu")
    assert config["prompt_lengths"] == {"through-full": PROMPT, "through-state": PROMPT}
    assert config["document_names"] == ["text0", "text1", "text2"]
    assert result.attributes["n_documents"] == 3
    assert json.loads(result.attributes["layer_kinds"])["through-state"] == ["swa", "full", "lightning", "full"]
    assert Condition("none").label == result.groups["through-full"]["condition"][0]
    assert len(set(itertools.chain(config["document_sha256"]))) == 3
