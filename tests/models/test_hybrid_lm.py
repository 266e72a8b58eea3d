"""HybridLM: hook points that tell the truth (parts re-assemble the whole), edits that act, memory of long inputs."""

import pytest
import torch

from kernels.operands import default_impl
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

KINDS = ("swa", "full", "lightning", "mamba2", "gdn", "headwise")
TIME, D = 19, 24


@pytest.fixture
def model():
    torch.manual_seed(7)
    model = HybridLM(
        HybridConfig(
            d_model=D,
            n_layers=6,
            n_heads=4,
            n_kv_heads=2,
            d_head=6,
            d_ffn=40,
            vocab_size=37,
            context_length=64,
            layer_kinds=KINDS,
            window=5,
            efficient="mamba2",
            rope_base=1e4,
            mamba2_state=5,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model


@pytest.fixture
def ids():
    return torch.randint(37, (2, TIME))


def test_every_hook_point_fires_once_and_the_residual_stream_adds_up(model, ids):
    plain = model(ids)
    logits, cache = model.run_with_cache(ids)
    assert set(cache) == set(model.hook_dict)
    assert torch.allclose(logits, plain, atol=2e-5)  # patterns and states were made explicitly this time
    total = cache["hook_embed"]
    for i in range(6):
        assert torch.equal(cache[f"blocks.{i}.hook_resid_pre"], total)
        total = total + cache[f"blocks.{i}.hook_attn_out"]
        assert torch.equal(cache[f"blocks.{i}.hook_resid_mid"], total)
        total = total + cache[f"blocks.{i}.hook_mlp_out"]
        assert torch.equal(cache[f"blocks.{i}.hook_resid_post"], total)
    hidden = cache["ln_final.hook_normalized"] * model.ln_final.weight
    assert torch.allclose(model.unembed(hidden), logits)


def test_patterns_are_causal_windowed_and_give_z(model, ids):
    _, cache = model.run_with_cache(ids)
    for layer, window in ((0, 5), (1, TIME)):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        t = torch.arange(TIME)
        visible = (t[:, None] >= t) & (t[:, None] - t < window)
        assert (pattern[:, :, ~visible] == 0).all()
        assert torch.allclose(pattern.sum(-1), torch.ones(2, 4, TIME), atol=1e-6)
        value = cache[f"blocks.{layer}.attn.hook_v"].repeat_interleave(2, dim=2)
        z = torch.einsum("bhts,bshv->bthv", pattern, value)
        assert torch.allclose(z, cache[f"blocks.{layer}.attn.hook_z"], atol=1e-6)


def test_query_head_h_reads_kv_head_h_over_group(model, ids):
    def silence(value, hook):
        value = value.clone()
        value[:, :, 1] = 0
        return value

    z = {}
    for name, edits in (("free", []), ("edited", [("blocks.1.attn.hook_v", silence)])):
        with model.hooks(fwd_hooks=[*edits, ("blocks.1.attn.hook_z", lambda v, hook, n=name: z.update({n: v}))]):
            model(ids)
    changed = (z["free"] - z["edited"]).abs().amax(dim=(0, 1, 3)) > 0
    assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_states_obey_their_recurrence_and_give_the_output(model, ids, layer):
    _, cache = model.run_with_cache(ids)
    part = {name.split("hook_")[1]: cache[name].double() for name in cache if f"blocks.{layer}.attn.hook" in name}
    state, kind = part["ssm_state"], KINDS[layer]
    query, key, value = part["q"], part["k"], part["v"]
    scale = 1.0
    if kind == "gdn":
        query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        scale = query.shape[-1] ** -0.5
    expected = torch.zeros_like(state[:, 0])
    for t in range(TIME):
        decay = part["log_decay"].exp() if kind == "lightning" else part["log_decay"][:, t].exp()
        decay = decay.reshape(-1, state.shape[2])[..., None, None]
        k = key[:, t].expand(-1, state.shape[2], -1)
        v, expected = value[:, t], decay * expected
        if kind == "gdn":
            v = (v - torch.einsum("bhk,bhkv->bhv", k, expected)) * part["beta"][:, t, :, None]
        if kind == "mamba2":
            v = v * part["beta"][:, t, :, None]
        expected = expected + torch.einsum("bhk,bhv->bhkv", k, v)
        assert (state[:, t] - expected).abs().max() < 1e-5
        out = scale * torch.einsum("bhk,bhkv->bhv", query[:, t].expand(-1, state.shape[2], -1), expected)
        if kind == "mamba2":
            out = out + model.blocks[layer].attn.D.double()[:, None] * value[:, t]
        assert (part["recurrence_out"][:, t] - out).abs().max() < 1e-5


def test_an_edited_write_propagates_and_an_edited_state_acts(model, ids):
    expected = model(ids)

    def without_token_3(write, hook):
        write = write.clone()
        write[:, 3] = 0
        return write

    moved = model.run_with_hooks(ids, fwd_hooks=[("blocks.2.attn.hook_ssm_write", without_token_3)]) - expected
    assert moved[:, :3].abs().max() < 1e-5
    assert (moved[:, 4:].abs().amax(dim=(0, 2)) > 1e-4).all()
    zeroed = model.run_with_hooks(ids, fwd_hooks=[("blocks.4.attn.hook_ssm_state", lambda s, hook: 0 * s)])
    assert (zeroed - expected).abs().max() > 1e-3


def test_batch_rows_are_independent_and_causal(model, ids):
    logits = model(ids)
    assert torch.allclose(model(ids[1:]), logits[1:], atol=1e-5)
    changed = ids.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 37
    assert torch.allclose(model(changed)[:, :11], logits[:, :11], atol=1e-6)
    assert (model(changed)[:, 11:] - logits[:, 11:]).abs().max() > 1e-3


def test_embeddings_are_accepted_and_receive_gradients(model, ids):
    embeddings = model.embed(ids).detach().requires_grad_()
    assert torch.equal(model(embeddings), model(ids))
    model(embeddings).logsumexp(-1).sum().backward()
    assert (embeddings.grad.norm(dim=-1) > 0).all()


def test_naive_float64_law_agrees(model, ids):
    law = HybridLM(model.config, impl="naive").eval()
    law.load_state_dict(model.state_dict())
    assert (law(ids) - model(ids)).abs().max() < 2e-5
    assert law.impl == "naive"


@pytest.mark.parametrize("layer", range(6))
def test_a_compiled_block_is_one_graph(model, layer):
    """A graph break costs pretraining a part of its speed, without an error."""
    torch._dynamo.reset()
    x, positions = torch.randn(2, TIME, D), torch.arange(TIME)
    whole = torch.compile(model.blocks[layer], backend="eager", fullgraph=True)
    assert torch.allclose(whole(x, positions), model.blocks[layer](x, positions), atol=1e-5)


def test_unknown_impl_is_refused(model):
    with pytest.raises(ValueError, match="'cuda'.*torch, naive"):
        HybridLM(model.config, impl="cuda")


def test_impl_follows_dtype_and_device_unless_it_was_chosen(model):
    def in_use(lm):
        return {lm.impl, *(mixer.impl for layer in lm.layers for mixer in layer.mixers)}

    assert in_use(model) == {"torch"}
    assert default_impl(torch.device("cuda"), torch.bfloat16) == "triton"
    assert default_impl(torch.device("cuda"), torch.float64) == "torch"
    assert default_impl(torch.device("cpu"), torch.float32) == "torch"
    assert in_use(HybridLM(model.config, impl="naive").double()) == {"naive"}
