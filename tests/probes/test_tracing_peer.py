"""Parity with the three released tracing scripts; their numbers are golden/tracing_peer.json, with their provenance.

They ran on a Llama of transformers; the same weights in a native model of full-attention layers are traced here.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import retrieval
from probes.weight_distance import qk_distance

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tracing_peer.json").read_text())
NAMES = {
    "input_layernorm": "ln1", "post_attention_layernorm": "ln2", "self_attn": "attn", "embed_tokens": "embed",
    "model.norm": "ln_final", "lm_head": "unembed", "model.": "", "layers": "blocks",
}  # fmt: skip


def native(llama):
    """The same function as transformers' Llama, with hook points."""
    config = llama.config
    model = HybridLM(
        HybridConfig(
            d_model=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads, d_head=config.head_dim, d_ffn=config.intermediate_size,
            vocab_size=config.vocab_size, context_length=config.max_position_embeddings, rms_eps=config.rms_norm_eps,
            layer_kinds=("full",) * config.num_hidden_layers, rope_base=config.rope_parameters["rope_theta"],
        )
    ).eval()  # fmt: skip
    tensors = {}
    for name, tensor in llama.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    model.load_state_dict(tensors)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return tiny_llama(len(GOLDEN["characters"]), 24, 5.882, 0.6)


@pytest.fixture(scope="module")
def samples():
    ids = [torch.tensor([[GOLDEN["characters"].index(c) for c in prompt]]) for prompt in GOLDEN["prompts"]]
    return list(zip(ids, GOLDEN["spans_found_by_the_script"], strict=True))


def test_the_native_model_is_the_llama(llama, samples):
    for ids, _ in samples:
        torch.testing.assert_close(native(llama)(ids), llama(ids).logits, rtol=1e-4, atol=1e-5)


def test_head_scores(llama, samples):
    masses = [retrieval.attention_mass(native(llama), ids, torch.tensor([[span]]), (-2,)) for ids, span in samples]
    ours = torch.cat(masses)[..., 0, 0].mean(0)
    np.testing.assert_allclose(ours, GOLDEN["mass_at_position_minus_2"], rtol=1e-5)


@pytest.mark.parametrize("name", ["entropy_last_4", "entropy_normalised_last_4"])
def test_entropies(llama, samples, name):
    values = [
        retrieval.attention_entropy(native(llama), ids, normalised="normalised" in name).mean(-1) for ids, _ in samples
    ]
    np.testing.assert_allclose(torch.cat(values).mean(0), GOLDEN[name], rtol=1e-5)


def test_weight_distances(tiny_llama, llama):
    early = tiny_llama(len(GOLDEN["characters"]), 24, 5.9, 0.6)
    result = qk_distance(early.state_dict(), llama.state_dict(), llama.config.to_dict())
    np.testing.assert_allclose(result.distance, GOLDEN["qk_distance"], rtol=1e-6)
