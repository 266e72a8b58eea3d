"""Parity with the released gradient script; its curves are golden/gradient_peer.json, with their provenance."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.huggingface import HuggingFaceLM
from probes.gradient import gradient_influence

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gradient_peer.json").read_text())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("score", "n_targets"), [(s, n) for s in ("logit_sum", "argmax_logit") for n in (20, 3)])
def test_curves_equal_the_released_scripts(tiny_llama, score, n_targets, recompute):
    model = HuggingFaceLM(tiny_llama(len(GOLDEN["characters"]), 24, 5.882, 0.3))
    ids = [[GOLDEN["characters"].index(c) for c in text[: GOLDEN["context"]]] for text in GOLDEN["texts"]]
    result = gradient_influence(model, torch.tensor(ids), score=score, n_targets=n_targets, recompute=recompute)
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
