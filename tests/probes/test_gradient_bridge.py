"""TransformerLens's bridge offers the same model under hook names; its gradients there are those of the lean path."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from transformer_lens.model_bridge.sources import build_bridge_from_module

from models.huggingface import HuggingFaceLM
from probes.gradient import gradient_influence

VOCAB, T, TARGETS, N_LAYERS = 61, 48, 5, 3


@pytest.fixture(scope="module")
def llama():
    """A random Llama in fp32 with every size different."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=N_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bridge(llama):
    return build_bridge_from_module(copy.deepcopy(llama), type(llama).__name__, hf_config=llama.config)


@pytest.fixture(scope="module")
def lean(llama):
    return HuggingFaceLM(copy.deepcopy(llama))


def score_of(logits, ids, score):
    if score == "log_prob":
        chosen = logits[:, -TARGETS:].log_softmax(-1).gather(-1, ids[:, -TARGETS:, None])
        return chosen[..., 0].mean(1)
    mean = logits[:, -TARGETS:].mean(1)
    return mean.sum(-1) if score == "logit_sum" else mean.max(-1).values


@pytest.mark.parametrize("score", ["log_prob", "logit_sum", "argmax_logit"])
def test_curves_of_every_layer_agree_with_the_bridges_hooks(lean, bridge, score):
    ids = torch.randint(VOCAB, (2, T), generator=torch.Generator().manual_seed(0))
    read = ids[:, :-1] if score == "log_prob" else ids
    seen = {}

    def keep(gradient, hook, name):  # hook.name is that of the point behind the alias
        seen[name] = gradient.norm(dim=-1).flip(-1)

    embedded = bridge.embed(read).detach().requires_grad_()
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(N_LAYERS)]
    with bridge.hooks(bwd_hooks=[(name, partial(keep, name=name)) for name in names]):
        score_of(bridge(embedded), ids, score).sum().backward()
    assert sorted(seen) == names, "every point fired"
    ours = gradient_influence(lean, ids, score=score, n_targets=TARGETS, layers=True)
    np.testing.assert_allclose(ours.norm, embedded.grad.norm(dim=-1).flip(-1), rtol=1e-5)
    for layer, name in enumerate(names):
        np.testing.assert_allclose(ours.layers[:, layer], seen[name], rtol=1e-5, err_msg=name)
    assert ours.norm.max() / ours.norm.min() > 3, "a flat curve would prove little"


def test_blocks_of_a_hugging_face_model_run_again_in_backward_and_stop_gradients_at_their_mixers(lean):
    """In eval mode, where transformers' own switch does nothing; hook points act in the second run too."""
    ids = torch.randint(VOCAB, (1, T), generator=torch.Generator().manual_seed(1))
    mixers = [f"blocks.{layer}.attn.hook_z" for layer in range(N_LAYERS)]
    found = {}
    for keep_bytes in (0, math.inf):
        calls = [0] * N_LAYERS
        handles = []
        for index, layer in enumerate(lean.layers):

            def called(*_, calls=calls, index=index):
                calls[index] += 1

            handles.append(layer.block.mlp.register_forward_pre_hook(called))
        plain = gradient_influence(lean, ids, n_targets=TARGETS, keep_bytes=keep_bytes)
        for handle in handles:
            handle.remove()
        assert calls == [1 if keep_bytes else 2] * N_LAYERS
        last = gradient_influence(lean, ids, n_targets=TARGETS, stop_at=mixers[:-1], keep_bytes=keep_bytes)
        none = gradient_influence(lean, ids, n_targets=TARGETS, stop_at=mixers, keep_bytes=keep_bytes)
        assert (plain.norm > 0).all()
        assert (last.norm > 0).all(), "the last layer's attention alone reaches every token"
        assert not none.norm[:, TARGETS:].any()
        found[keep_bytes] = torch.stack([plain.norm, last.norm, none.norm])
    assert torch.allclose(found[0], found[math.inf], rtol=1e-5)
    assert not torch.allclose(found[0][0], found[0][1], rtol=0.1)
