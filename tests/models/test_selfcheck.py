"""python -m models.selfcheck: every family passes, a broken model is seen, exit codes say which."""

import pytest
import torch

from models import command_line, selfcheck
from models.config import HybridConfig
from models.huggingface import HuggingFaceLM
from models.huggingface.attention import SoftmaxMixer
from models.hybrid_lm import HybridLM


def verdicts(model, **settings):
    return {check.name: (check.verdict, check.detail) for check in selfcheck.selfcheck(model, **settings)}


def call(*arguments):
    with pytest.raises(SystemExit) as stop:
        command_line.run(selfcheck.main, selfcheck.Config, arguments=[str(argument) for argument in arguments])
    return stop.value.code


def test_every_family_passes(family, wrapped):
    found = verdicts(wrapped(family))
    failed = {name: detail for name, (verdict, detail) in found.items() if verdict == "fail"}
    assert not failed
    assert found["logits with and without hook points"][0] == "pass"
    assert found["decode equals prefill, restricted"][0] == "pass"
    assert any(name.startswith("receptive field") and verdict == "pass" for name, (verdict, _) in found.items())


def test_native_models_pass():
    torch.manual_seed(0)
    config = HybridConfig(
        d_model=20, n_layers=4, n_heads=2, n_kv_heads=1, d_head=10, d_ffn=28, vocab_size=97, context_length=64,
        layer_kinds=("swa", "full", "gdn", "mamba2"), window=6, rope_base=1e4, mamba2_state=7,
    )  # fmt: skip
    model = HybridLM(config).eval().requires_grad_(False)
    found = verdicts(model)
    assert {verdict for verdict, _ in found.values()} == {"pass", "n/a"}
    assert "6 of 14 tokens, declared 6" in found["receptive field of layer 0 (swa)"][1]


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ("window", "receptive field of layer 0 (swa)"),
        ("restriction", "restrictions end without a trace"),
        ("scale", "logits with and without hook points"),
    ],
)
def test_a_model_that_does_not_keep_its_word_fails(broken, seen, wrapped, tiny_model, families, monkeypatch):
    """A window one token too wide, restrictions that are ignored, scores of another scale: each by its own line."""
    from kernels.attention import Band

    model = HuggingFaceLM(tiny_model("gemma3_text", **families["gemma3_text"][0]))
    if broken == "window":
        monkeypatch.setattr(SoftmaxMixer, "bands", lambda self: () if self.window is None else (Band(self.window + 1),))
    elif broken == "restriction":
        monkeypatch.setattr(SoftmaxMixer, "bands", lambda self: () if self.window is None else (Band(self.window),))
    else:
        model.layers[1].mixers[0].scale *= 2
    assert verdicts(model)[seen][0] == "fail"


def test_exit_codes_and_table(tmp_path, tiny_model, families, capsys, monkeypatch):
    tiny_model("gemma3_text", **families["gemma3_text"][0]).save_pretrained(tmp_path / "hf")
    assert call(tmp_path / "hf", "--quick") == 0
    said = capsys.readouterr().out
    assert "0      swa   5       4      2         Gemma3Attention" in said
    assert "1      full  -       4      2         Gemma3Attention" in said
    assert "pass  causality" in said
    assert said.splitlines()[-1].endswith("no check failed")
    assert call(tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
    assert call(tmp_path / "hf", "--dtype", "float8") == 2
    monkeypatch.setattr("models.checks.TOLERANCE", {torch.float32: -1.0})
    monkeypatch.setattr("models.huggingface.loading.selfcheck", lambda model, quick: ())
    assert call(tmp_path / "hf", "--quick") == 1


def test_a_directory_that_fails_the_cheap_part_is_not_loaded(tmp_path, tiny_model, families, monkeypatch):
    import models

    tiny_model("gemma3_text", **families["gemma3_text"][0]).save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(SoftmaxMixer, "bands", lambda self: ())
    with pytest.raises(models.CheckpointError, match="logits with and without hook points"):
        models.load(tmp_path / "hf", device="cpu")
