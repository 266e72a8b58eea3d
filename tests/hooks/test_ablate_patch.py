"""ablate and patch: the edit acts exactly where it was asked to, counted, and nothing stays behind."""

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

VOCAB, TIME = 31, 13
KINDS = ("swa", "full", "gdn", "mamba2", "headwise", "lightning")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    model = HybridLM(
        HybridConfig(
            d_model=24, n_layers=6, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=VOCAB, context_length=64,
            layer_kinds=KINDS, window=4, efficient="gdn", rope_base=1e4, mamba2_state=5,
        )
    ).eval().requires_grad_(False).double()  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.25)
    return model


@pytest.fixture
def ids():
    torch.manual_seed(2)
    return torch.randint(VOCAB, (3, TIME))


def without_columns(model, layer, path, heads, ids):
    """The law: the same columns of the output projection's input set to zero by its weight."""
    projection = model.layers[layer].mixers[path].o_proj
    before = projection.weight.clone()
    width = projection.in_features // (projection.in_features // model.config.d_head)
    for head in heads:
        projection.weight[:, head * width : (head + 1) * width] = 0
    out = model(ids)
    projection.weight.copy_(before)
    return out


@pytest.mark.parametrize(("layer", "path", "head", "column"), [
    (0, 0, 3, 3), (1, 0, 0, 0), (2, 0, 2, 2), (3, 0, 7, 7), (5, 0, 1, 1), (4, 0, 1, 1), (4, 1, 3, 1),
])  # fmt: skip
def test_zero_is_a_projection_without_the_head(model, ids, layer, path, head, column):
    with hooks.ablate(model, heads=[(layer, head)], how="zero") as fired:
        out = model(ids)
    assert torch.allclose(out, without_columns(model, layer, path, [column], ids), atol=1e-12)
    assert (out - model(ids)).abs().max() > 1e-6
    assert list(fired.values()) == [1]


def test_groups_of_heads(model, ids):
    every = [(1, h) for h in range(4)] + [(4, h) for h in range(2)]  # the full path of the head-wise layer
    with hooks.ablate(model, heads=every, how="zero"):
        single = model(ids)
    with hooks.ablate(model, layers="full", how="zero") as fired:
        group = model(ids)
    assert torch.equal(single, group)
    assert list(fired) == ["blocks.1.attn.hook_z", "blocks.4.attn.full.hook_z"]
    with hooks.ablate(model, layers=[4], how="zero"):
        layer = model(ids)
    assert not torch.equal(layer, group)


def test_means_are_those_of_all_tokens_and_replace_the_head(model, ids):
    other = torch.randint(VOCAB, (2, 9))
    means = hooks.head_means(model, [ids, other])
    assert set(means) == {(layer.index, h) for layer in model.layers for h in range(layer.n_heads)}
    full = hooks.head_means(model, [ids, other], "full")
    assert set(full) == {*((1, h) for h in range(4)), (4, 0), (4, 1)}, "the full heads of the head-wise layer too"
    assert all(torch.equal(full[head], means[head]) for head in full)
    _, first = model.run_with_cache(ids, names_filter="blocks.2.attn.hook_z")
    _, second = model.run_with_cache(other, names_filter="blocks.2.attn.hook_z")
    tokens = torch.cat([c["blocks.2.attn.hook_z"].flatten(0, 1) for c in (first, second)])
    assert torch.allclose(means[2, 1], tokens.mean(0)[1], atol=1e-12)
    with hooks.ablate(model, heads=[(2, 1)], means=means), hooks.record(model, "blocks.2.attn.hook_z") as seen:
        model(ids)
    z = seen["blocks.2.attn.hook_z"]
    assert torch.allclose(z[:, :, 1], means[2, 1].expand(3, TIME, -1))
    assert torch.equal(z[:, :, [0, 2, 3]], first["blocks.2.attn.hook_z"][:, :, [0, 2, 3]])


def test_patching_the_whole_stream_gives_the_other_prompts_answer(model, ids):
    other = torch.randint(VOCAB, (3, TIME))
    name = "blocks.3.hook_resid_pre"
    with hooks.record(model, name) as seen:
        expected = model(other)
    with hooks.patch(model, {name: seen[name]}):
        assert torch.equal(model(ids), expected)

    def last_only(x):
        x[:, -1] = seen[name][:, -1]
        return x

    with hooks.patch(model, {name: last_only}):
        mixed = model(ids)
    assert torch.equal(mixed[:, :-1], model(ids)[:, :-1])
    assert not torch.equal(mixed[:, -1], model(ids)[:, -1])


def test_gradients_flow_through_a_patch(model, ids):
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    with hooks.patch(model, {"blocks.1.hook_attn_out": lambda x: x * scale}):
        model(ids).log_softmax(-1)[..., 0].sum().backward()
    step = 1e-5
    losses = []
    for factor in (1 + step, 1 - step):
        with hooks.patch(model, {"blocks.1.hook_attn_out": lambda x, factor=factor: x * factor}):
            losses.append(model(ids).log_softmax(-1)[..., 0].sum())
    assert torch.allclose(scale.grad, (losses[0] - losses[1]) / (2 * step), rtol=1e-6)


def test_nothing_stays_behind_and_the_callers_hooks_survive(model, ids):
    seen = []
    model.add_hook("blocks.2.attn.hook_z", lambda z, hook: seen.append(z))
    plain = model(ids)
    with pytest.raises(RuntimeError, match="mine"), hooks.ablate(model, heads=[(2, 0)], how="zero"):
        raise RuntimeError("mine")
    with hooks.ablate(model, heads=[(2, 0)], how="zero"):
        model(ids)
    assert torch.equal(model(ids), plain)
    assert len(seen) == 3
    model.reset_hooks()


def test_an_edit_that_never_acted_is_an_error(model, ids):
    with pytest.raises(ValueError, match=r"blocks\.2\.attn\.hook_z never fired"), \
         hooks.ablate(model, heads=[(2, 0)], how="zero"):  # fmt: skip
        pass

    def partly():
        with hooks.patch(model, {"hook_embed": lambda x: x, "blocks.2.hook_mlp_out": lambda x: x}):
            model(ids)
            model.blocks[2](torch.zeros(1, 3, 24, dtype=torch.float64), torch.arange(3))

    with pytest.raises(ValueError, match="fired unequally often"):
        partly()


@pytest.mark.parametrize(("arguments", "words"), [
    ({"heads": [(1, 4)], "how": "zero"}, r"no head \(1, 4\); expected .*1: 4"),
    ({"heads": [(9, 0)], "how": "zero"}, r"no head \(9, 0\)"),
    ({"heads": [], "how": "zero"}, "heads is empty"),
    ({"how": "zero"}, "exactly one of the two"),
    ({"heads": [(1, 0)], "layers": "full"}, "exactly one of the two"),
    ({"heads": [(1, 0)]}, r"heads \[\(1, 0\)\] have no mean"),
    ({"heads": [(1, 0)], "how": "noise"}, "how is 'noise'"),
])  # fmt: skip
def test_bad_ablations_are_refused(model, arguments, words):
    with pytest.raises(ValueError, match=words), hooks.ablate(model, **arguments):
        pass


def test_bad_patches_are_refused(model, ids):
    with pytest.raises(ValueError, match="no hook point 'blocks.1.hook_atn_out'; near names"), \
         hooks.patch(model, {"blocks.1.hook_atn_out": lambda x: x}):  # fmt: skip
        pass
    with pytest.raises(ValueError, match=r"made shape \[2, 3\] of \[3, 13, 24\]"), \
         hooks.patch(model, {"hook_embed": torch.zeros(2, 3)}):  # fmt: skip
        model(ids)
    with pytest.raises(ValueError, match="batches is empty"):
        hooks.head_means(model, [])
