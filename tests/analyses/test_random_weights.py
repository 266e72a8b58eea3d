"""The untrained twin: the architecture's own initialisation from a seed, nothing of the trained weights."""

import pytest
import torch

from analyses.random_weights import untrained

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def paths(tiny, tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("twins")
    tiny.save(tiny.model("gdn", "full"), folder / "native")
    torch.manual_seed(1)
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=96)
    llama = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.03))
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.fill_(7.0)
    llama.save_pretrained(folder / "llama")
    return folder


@pytest.mark.parametrize("name", ["native", "llama"])
def test_twins_come_from_the_seed_alone(paths, name):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first, again, other = (untrained(paths / name, seed=s, device=CPU, dtype=torch.float32) for s in (5, 5, 6))
    assert torch.equal(torch.rand(4), expected), "torch's generator was moved"
    weights = [dict(model.named_parameters()) for model in (first, again, other)]
    matrices = [key for key, value in weights[0].items() if value.ndim == 2]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in matrices)
    assert not first.training
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_the_initialisation_is_the_familys_own(paths):
    """initializer_range of a Llama, GPT-2's 0.02 of a native model; none of the trained weights, which are 7."""
    llama = untrained(paths / "llama", seed=0, device=CPU, dtype=None)
    assert llama.hf.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.03, rel=0.05)
    native = untrained(paths / "native", seed=0, device=CPU, dtype=torch.bfloat16)
    assert native.embed.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert native.dtype == torch.bfloat16
    assert [layer.kind for layer in native.layers] == ["gdn", "full"]
