"""The training run in ckpt/nano: three checkpoints in which retrieval appears, traced as a user would."""

import json
from pathlib import Path

import numpy as np

import models
from analyses import retrieval_tracing
from analyses.retrieval_tracing import Config
from analyses.run_checkpoints import find_runs

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "ckpt" / "nano"


def test_the_card_states_what_the_checkpoints_say():
    run = find_runs([RUN])["nano"]
    card = (RUN / "README.md").read_text("utf-8")
    assert len(run.checkpoints) == 3
    for path in run.checkpoints.values():
        training = json.loads((path / "training.json").read_text("utf-8"))
        row = next(line for line in card.splitlines() if f"`{path.name}`" in line)
        assert f"| {training['tokens']:,} |" in row
        assert f"| {training['niah']:.2f} |" in row
    assert f"needles of {run.described.context} tokens found" in card


def test_a_run_beside_single_checkpoints_does_not_hide_or_join_them():
    found = [path.name for path in models.find_checkpoints(ROOT / "ckpt")]
    assert "nano" not in found
    assert {"gdn", "swa-512", "swa-32-nope"} <= set(found)


def test_a_retrieval_head_forms_and_needles_are_found(tmp_path):
    config = Config(paths=(RUN,), out=tmp_path / "r.h5", choosing=4, tracing=12, no_ablation=True)
    group = retrieval_tracing.retrieval_tracing(config).groups["nano"]
    series = dict(zip(group["series"], group["curve"], strict=True))
    mass, accuracy = series["mass, first"], series["accuracy"]
    assert group["n_noted"] >= 1
    assert mass[-1] > 0.3
    assert mass[0] < 0.1
    assert accuracy[0] == 0
    assert accuracy[-1] > 0.5
    assert accuracy[1] <= accuracy[-1]
    assert np.isfinite(series["distance, followed"]).all()
