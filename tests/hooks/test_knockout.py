"""Knockout: exactly the span is out of the softmax, or out of the state, and only for the queries asked for."""

import contextlib

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM

VOCAB, TIME, WINDOW = 31, 19, 6
KINDS = ("swa", "full", "gdn", "mamba2", "headwise", "lightning")
SPANS = torch.tensor([[2, 4], [9, 12], [0, 1]])
LAST_OF_SOFTMAX = {0: "blocks.0.attn", 1: "blocks.1.attn", 4: "blocks.4.attn.full"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    model = HybridLM(
        HybridConfig(
            d_model=24, n_layers=6, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=VOCAB, context_length=64,
            layer_kinds=KINDS, window=WINDOW, efficient="gdn", rope_base=1e4, mamba2_state=5,
        )
    ).eval().requires_grad_(False).double()  # fmt: skip
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.3)
        if name.endswith(("A_log", "dt_bias")):
            parameter.fill_(-1.5)
    return model


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(2)
    return torch.randint(VOCAB, (3, TIME))


def written_out(model, ids, layer, heads, queries):
    """The law: the layer's z from its own q, k, v with one explicit mask and one softmax over every pair of tokens."""
    prefix = LAST_OF_SOFTMAX[layer]
    attention = model.layers[layer].mixers[0]
    rotated = "rot_" if attention.rope_base is not None else ""
    names = [f"{prefix}.hook_{rotated}q", f"{prefix}.hook_{rotated}k", f"{prefix}.hook_v"]
    with hooks.record(model, names) as seen:
        model(ids)
    query, key, value = (seen[name].double() for name in names)
    share = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
    t, s = torch.arange(TIME)[:, None], torch.arange(TIME)[None]
    visible = (s <= t) & ((t - s < attention.window) if attention.window else True)
    visible = visible.expand(len(ids), query.shape[2], -1, -1).clone()
    for b, (first, stop) in enumerate(SPANS.tolist()):
        for head in heads:
            for row in queries:
                if row >= stop:
                    visible[b, head, row, first:stop] = False
    scores = torch.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5
    p = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", p, value), p


@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize(("layer", "heads", "queries"), [
    (1, (0, 1, 2, 3), [TIME - 1]), (1, (2,), [5, 12, TIME - 1]), (0, (0, 3), list(range(TIME))), (4, (1,), [TIME - 1]),
])  # fmt: skip
def test_softmax_rows_are_those_of_a_masked_softmax(model, ids, layer, heads, queries, pattern):
    expected, p = written_out(model, ids, layer, heads, queries)
    names = [f"{LAST_OF_SOFTMAX[layer]}.hook_z"] + [f"{LAST_OF_SOFTMAX[layer]}.hook_pattern"] * pattern
    asked = None if len(queries) == TIME else queries
    with hooks.knockout(model, SPANS, heads=[(layer, h) for h in heads], queries=asked) as ran:
        with hooks.record(model, names) as seen:
            model(ids)
    torch.testing.assert_close(seen[names[0]], expected, atol=1e-11, rtol=0)
    if pattern:
        torch.testing.assert_close(seen[names[1]].double(), p, atol=1e-7, rtol=0)
    assert ran == {layer: 1}


def test_other_queries_and_the_window_that_does_not_reach_keep_their_bits(model, ids):
    z = "blocks.1.attn.hook_z"
    with hooks.record(model, z) as plain:
        model(ids)
    with hooks.knockout(model, SPANS, layers=[1]), hooks.record(model, z) as seen:
        model(ids)
    assert torch.equal(seen[z][:, :-1], plain[z][:, :-1])
    assert ((seen[z] - plain[z])[:, -1].abs().amax(-1) > 1e-6).all()
    assert SPANS[:, 1].max() + WINDOW <= TIME
    with hooks.knockout(model, SPANS, layers=[0]):
        far = model(ids)
    assert torch.equal(far, model(ids)), "the last token's window begins behind every span"


@pytest.mark.parametrize(("layer", "kind"), [(2, "gdn"), (3, "mamba2"), (5, "lightning")])
def test_a_recurrent_state_is_that_without_the_writes(model, ids, layer, kind):
    """The law: a run whose operands at the span (and the convolution's spill) write nothing, read at later tokens."""
    prefix, mixer = f"blocks.{layer}.attn", model.layers[layer].mixers[0]
    spill, out, z = mixer.conv_width - 1, f"{prefix}.hook_recurrence_out", f"{prefix}.hook_z"
    points = {"gdn": "hook_beta", "mamba2": "hook_ssm_write", "lightning": "hook_ssm_write"}

    def unwritten(x):
        for b, (first, stop) in enumerate(SPANS.tolist()):
            x[b, first : stop + spill] = 0
        return x

    with hooks.record(model, [out, z]) as plain:
        model(ids)
    with hooks.patch(model, {f"{prefix}.{points[kind]}": unwritten}), hooks.record(model, out) as law:
        model(ids)
    later = torch.stack([torch.arange(TIME) >= stop + spill for _, stop in SPANS.tolist()])
    expected = torch.where(later[..., None, None], law[out], plain[out])
    captured = {}
    handle = model.hook_dict[out].register_forward_hook(lambda m, a, value: captured.update(out=value))
    with hooks.knockout(model, SPANS, layers=[layer], queries=None) as ran:
        mixer.hook_z.register_forward_hook(lambda m, a, value: captured.update(z=value))
        model(ids)
    handle.remove()
    mixer.hook_z._forward_hooks.clear()
    # a hook that was there before sees the read before it is replaced; z lies behind both
    with hooks.patch(model, {out: lambda x: expected}), hooks.record(model, z) as mixed:
        model(ids)
    torch.testing.assert_close(captured["z"], mixed[z], atol=1e-11, rtol=0)
    assert torch.equal(captured["z"][~later], plain[z][~later])
    assert ((captured["z"] - plain[z])[later].abs() > 1e-9).any()
    assert ran == {layer: 2}, "once without the writes, once as it is"


def test_one_recurrent_head_at_one_query(model, ids):
    out = "blocks.2.attn.hook_z"
    seen = []
    with hooks.knockout(model, SPANS, heads=[(2, 1)], queries=[-2]):
        handle = model.hook_dict[out].register_forward_hook(lambda m, a, value: seen.append(value))
        model(ids)
        handle.remove()
    with hooks.record(model, out) as plain:
        model(ids)
    changed = (seen[-1] - plain[out]).abs().amax(-1) > 0  # GDN normalises every head by itself
    assert changed[:, TIME - 2, 1].all()
    changed[:, TIME - 2, 1] = False
    assert not changed.any()


def test_groups_and_their_union(model, ids):
    with hooks.knockout(model, SPANS, layers="full", queries=None):
        full = model(ids)
    single = [(1, h) for h in range(4)] + [(4, h) for h in range(2)]
    with hooks.knockout(model, SPANS, heads=single, queries=None):
        assert torch.equal(model(ids), full)
    with hooks.knockout(model, SPANS, layers="full", queries=None):
        with hooks.knockout(model, SPANS, layers="efficient", queries=None):
            both = model(ids)
    assert (full - model(ids)).abs().max() > 1e-6
    assert (both - full).abs().max() > 1e-6


def test_when_every_path_is_closed_nothing_of_the_span_is_left():
    softmax_only = softmax_model()
    spans = torch.tensor([[3, 5]])
    one = torch.arange(12)[None]
    two = one.clone()
    two[0, 3:5] = torch.tensor([20, 21])
    results = []
    for given in (one, two):
        with hooks.knockout(softmax_only, spans, layers="full", queries=None):
            with hooks.knockout(softmax_only, spans, layers="efficient", queries=None):
                results.append(softmax_only(given))
    assert torch.equal(results[0][:, 5:], results[1][:, 5:]), "no detour is left"
    assert not torch.equal(results[0][:, 3:5], results[1][:, 3:5])


def softmax_model():
    torch.manual_seed(1)
    config = HybridConfig(
        d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=VOCAB, context_length=64,
        layer_kinds=("full", "swa", "full"), window=4, rope_base=1e4,
    )  # fmt: skip
    return HybridLM(config).eval().requires_grad_(False).double()


@pytest.mark.parametrize("layer", range(6))
def test_leaving_gives_the_model_back_also_by_an_exception(model, ids, layer):
    before = model(ids)
    hooked = sum(len(point._forward_hooks) for point in model.hook_dict.values())
    with contextlib.suppress(RuntimeError), hooks.knockout(model, SPANS, layers=[layer]):
        assert not torch.equal(model(ids), before) or layer == 0
        raise RuntimeError
    assert torch.equal(model(ids), before)
    assert sum(len(point._forward_hooks) for point in model.hook_dict.values()) == hooked
    assert all(not mixer.knockouts for one in model.layers for mixer in one.mixers)


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "either heads or layers"),
    ({"layers": [1], "heads": [(1, 0)]}, "either heads or layers"),
    ({"heads": []}, "heads is empty"),
    ({"heads": [(1, 4)]}, r"no head \(1, 4\)"),
    ({"heads": [(9, 0)]}, r"no head \(9, 0\)"),
    ({"layers": [7]}, "layer 7 does not exist"),
    ({"layers": "fast"}, "layers is 'fast'"),
])  # fmt: skip
def test_unknown_layers_and_heads_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message), hooks.knockout(model, SPANS, **arguments):
        pass


@pytest.mark.parametrize("spans", [torch.tensor([[3, 3]]), torch.tensor([3, 4]), torch.tensor([[0.0, 1.0]]), [[0, 1]],
                                   torch.tensor([[-1, 2]])])  # fmt: skip
def test_spans_that_are_no_ranges_are_refused(model, spans):
    with pytest.raises(ValueError, match="spans are"), hooks.knockout(model, spans, layers=[1]):
        pass


@pytest.mark.parametrize("layer", [1, 2])
def test_what_cannot_be_hidden_is_an_error(model, ids, layer):
    import models

    with pytest.raises(ValueError, match="never ran"), hooks.knockout(model, SPANS, layers=[layer]):
        pass
    with pytest.raises(ValueError, match="spans (of|are of)"), hooks.knockout(model, SPANS, layers=[layer]):
        model(ids[:2])
    with pytest.raises(ValueError, match="cache"), hooks.knockout(model, SPANS, layers=[layer]):
        model(ids, cache=models.Cache())
    if layer == 2:
        with pytest.raises(ValueError, match="a knockout already"), hooks.knockout(model, SPANS, layers=[2]):
            with hooks.knockout(model, SPANS, layers=[2]):
                model(ids)
