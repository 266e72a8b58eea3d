"""Parity with the released gradient script; its curves are golden/gradient_peer.json, with their provenance."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from models.huggingface import HuggingFaceLM
from probes.gradient import gradient_influence

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gradient_peer.json").read_text())


@pytest.mark.parametrize("keep_bytes", [0, math.inf])
@pytest.mark.parametrize(("score", "n_targets"), [(s, n) for s in ("logit_sum", "argmax_logit") for n in (20, 3)])
def test_curves_equal_the_released_scripts(tiny_llama, score, n_targets, keep_bytes):
    model = HuggingFaceLM(tiny_llama(len(GOLDEN["characters"]), 24, 5.882, 0.3))
    ids = [[GOLDEN["characters"].index(c) for c in text[: GOLDEN["context"]]] for text in GOLDEN["texts"]]
    result = gradient_influence(model, torch.tensor(ids), score=score, n_targets=n_targets, keep_bytes=keep_bytes)
    peer = np.array(GOLDEN["curves"][f"{score}, last {n_targets}"])
    np.testing.assert_allclose(result.norm.mean(0).numpy(), peer, rtol=1e-5)
    assert peer.min() > 0
    assert peer.max() / peer.min() > 3  # a flat curve would prove little


def test_the_huggingface_path_is_autograd_through_its_own_logits(tiny_llama):
    model = HuggingFaceLM(tiny_llama(18, 24, 5.882))
    ids = torch.randint(18, (2, 40), generator=torch.Generator().manual_seed(0))
    embedded = model.hf.get_input_embeddings()(ids[:, :-1]).detach().requires_grad_()
    log_p = model.hf(inputs_embeds=embedded).logits.log_softmax(-1)
    score = log_p[:, 29:].gather(-1, ids[:, 30:, None])[..., 0].mean(1)
    (gradient,) = torch.autograd.grad(score.sum(), embedded)
    result = gradient_influence(model, ids, n_targets=10, layers=True)
    np.testing.assert_allclose(result.norm.flip(-1), gradient.norm(dim=-1), rtol=2e-5)
    np.testing.assert_allclose(result.layers[:, 0], result.norm, rtol=1e-6)


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
@pytest.mark.parametrize("score", ["log_prob", "logit_sum"])
def test_scaled_embeddings_and_capped_logits_are_those_of_the_models_own_path_from_token_ids(family, score):
    """Gemma multiplies embeddings by sqrt(D) and Gemma 2 caps its logits: G(d) is that of the embedding module's output
    where the model itself makes it."""
    import transformers

    fields = dict(
        vocab_size=43, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=12, max_position_embeddings=128, sliding_window=8, initializer_range=0.5,
        query_pre_attn_scalar=12,
    )  # fmt: skip
    if family == "Gemma2":
        fields["final_logit_softcapping"] = 8.0
    name = "Gemma3TextConfig" if family == "Gemma3" else "Gemma2Config"
    torch.manual_seed(1)
    hf = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**fields)).eval()
    ids = torch.randint(43, (2, 40), generator=torch.Generator().manual_seed(0))
    seen = []

    def keep(module, args, output):
        output.retain_grad()
        seen.append(output)

    handle = hf.get_input_embeddings().register_forward_hook(keep)
    logits = hf(input_ids=ids[:, :-1] if score == "log_prob" else ids).logits
    handle.remove()
    if score == "log_prob":
        s = logits.log_softmax(-1)[:, -10:].gather(-1, ids[:, -10:, None])[..., 0].mean(1)
    else:
        s = logits[:, -10:].sum(-1).mean(1)
    s.sum().backward()
    if family == "Gemma2":
        assert logits.abs().max() > 6, "the cap bends them"
    result = gradient_influence(HuggingFaceLM(hf), ids, score=score, n_targets=10)
    np.testing.assert_allclose(result.score, s.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.norm.flip(-1), seen[0].grad.norm(dim=-1), rtol=2e-4, atol=1e-6)


def test_influence_through_the_windows_of_a_hugging_face_hybrid_ends_where_they_end():
    """Gemma 3 with windows of 8 beside one full layer: without the full mixer exactly 0 beyond 2 (8 - 1)."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(2)
    config = Gemma3TextConfig(
        vocab_size=43, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=12, max_position_embeddings=128, sliding_window=8, initializer_range=0.5,
        query_pre_attn_scalar=12, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = HuggingFaceLM(Gemma3ForCausalLM(config).eval())
    ids = torch.randint(43, (2, 40), generator=torch.Generator().manual_seed(0))
    full = [layer.mixers[0].hook_z.name for layer in model.layers if layer.kind == "full"]
    assert len(full) == 1
    through_all = gradient_influence(model, ids, n_targets=3).norm
    through_windows = gradient_influence(model, ids, n_targets=3, stop_at=full).norm
    assert (through_all > 0).all()
    assert (through_windows[:, : 14 + 3] > 0).all()
    assert not through_windows[:, 14 + 3 :].any()
