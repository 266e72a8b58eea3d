"""A tiny Hugging Face hybrid with a tokenizer through the command lines: transformers' own numbers come out."""

import importlib

import h5py
import numpy as np
import pytest
import torch

from analyses import receptive_field
from models import command_line

PROMPT = 330
COMMON = dict(
    vocab_size=96, hidden_size=32, intermediate_size=44, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, max_position_embeddings=512, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


def model():
    """Qwen3-Next: three gated delta layers and a full one, that remember more than a token or two."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    made = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **COMMON, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8,
            num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)
            if name.endswith(("A_log", "dt_bias")):
                parameter.fill_(-1.5)
    return made


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hf")
    tiny.recall_folder(folder)
    model().save_pretrained(folder / "hybrid")
    PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer().backend).save_pretrained(folder / "hybrid")
    return folder


def run(module, *arguments) -> int:
    with pytest.raises(SystemExit) as stop:
        command_line.run(module.main, module.Config, arguments=[str(argument) for argument in arguments])
    return stop.value.code


def losses(hf, ids):
    with torch.no_grad():
        log_p = hf(torch.as_tensor(ids)[None], use_cache=False).logits[0].log_softmax(-1)
    return -log_p[:-1].gather(-1, torch.as_tensor(ids)[1:, None])[:, 0]


def test_receptive_fields_of_a_hugging_face_hybrid(folder, tiny, tmp_path, capsys):
    out = tmp_path / "r.h5"
    code = run(
        receptive_field, folder / "hybrid", "--texts", folder / "texts", "--key-tokens", folder / "keys", "--out", out,
        "--documents", 2, "--prompts", 2, "--prompt-length", PROMPT, "--haystack", "noise", "--windows", 8,
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    hf, tokenizer = model(), tiny.tokenizer()
    with h5py.File(out) as file:
        group, table = file["hybrid"], file["hybrid/documents"]
        assert [label.decode() for label in group["condition"][:]] == ["none", "full -> 8", "efficient -> 8"]
        for column, name in enumerate(table["document"][:]):
            text = (folder / "texts" / f"{name.decode()}.txt").read_text()
            expected = losses(hf, tokenizer.encode(text))
            assert table["loss"][0, column] == pytest.approx(float(expected.mean()), rel=1e-5)
        assert (np.abs(table["loss"][1:] - table["loss"][0]) > 1e-4).all()
        assert [kind.decode() for kind in file["hybrid/layers/kind"][:]] == ["gdn", "gdn", "gdn", "full"]
        effect = file["hybrid/layers/effect"][0, :, :, 0]  # group x layer, on each layer's own input
        assert np.isfinite(effect).tolist() == [[False, False, False, True], [True, True, True, False]]
        assert (effect[np.isfinite(effect)] > 1e-3).all()
        for part in ("documents", "prompts"):  # longer than the documents is not longer than in training
            assert file[f"hybrid/{part}/extrapolation"][:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gradient_influence", ["--texts", "@texts", "--length", 64, "--max-texts", 1, "--layers", "--groups"]),
        (
            "retrieval_tracing",
            ["--tracing", 2, "--choosing", 2, "--length", PROMPT, "--haystack", "noise", "--no-ablation"],
        ),
        ("layerwise_probing", ["--samples", 8, "--length", PROMPT, "--haystack", "noise", "--classes", 2]),
    ],
)
def test_the_other_command_lines_take_the_directory(folder, tmp_path, capsys, name, arguments):
    module = importlib.import_module(f"analyses.{name}")
    given = [str(folder / a[1:]) if isinstance(a, str) and a.startswith("@") else a for a in arguments]
    assert run(module, folder / "hybrid", "--out", tmp_path / "r.h5", *given) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "hybrid" in said
    with h5py.File(tmp_path / "r.h5") as file:
        assert "gdn" in str(dict(file.attrs))
