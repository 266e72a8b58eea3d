"""Knockouts in Hugging Face families: soft-capping, learned sinks, gates, parallel and recurrent mixers."""

import pytest
import torch

import hooks

TIME = 21
SPANS = torch.tensor([[3, 5], [8, 11]])


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(7)
    return torch.randint(3, 97, (2, TIME))


@pytest.mark.parametrize(("name", "layer"), [("gemma2", 1), ("gpt_oss", 1), ("qwen3_next", 3), ("llama", 0)])
def test_softmax_is_renormalised_over_the_other_keys(wrapped, ids, name, layer):
    """From the plain pattern: p_s / (1 - sum of the hidden p), exact also with a learned sink's share in the rest."""
    model, prefix = wrapped(name), f"blocks.{layer}.attn"
    pattern, z = f"{prefix}.hook_pattern", f"{prefix}.hook_z"
    with hooks.record(model, pattern) as plain:
        model(ids)
    with hooks.record(model, z) as unhidden:
        before = model(ids)
    with hooks.knockout(model, SPANS, layers=[layer]), hooks.record(model, pattern) as seen:
        through_pattern = model(ids)
    with hooks.knockout(model, SPANS, layers=[layer]), hooks.record(model, z) as direct:
        out = model(ids)
    expected = plain[pattern].clone()
    for b, (first, stop) in enumerate(SPANS.tolist()):
        row = expected[b, :, -1].double()
        gone = row[:, first:stop].sum(-1, keepdim=True)
        assert (gone > 1e-6).all()
        row[:, first:stop] = 0
        expected[b, :, -1] = (row / (1 - gone)).to(expected)
    torch.testing.assert_close(seen[pattern], expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(out, through_pattern, atol=2e-4, rtol=1e-3)
    assert torch.equal(direct[z][:, :-1], unhidden[z][:, :-1])
    assert (direct[z][:, -1] - unhidden[z][:, -1]).abs().max() > 1e-5
    assert torch.equal(out[:, :-1], before[:, :-1])


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "minimax", "kimi_linear", "jamba", "recurrent_gemma", "lfm2"])
def test_recurrent_reads_are_those_of_a_state_without_the_writes(wrapped, ids, name):
    model = wrapped(name)
    mixer, out = model.layers[0].mixers[0], "blocks.0.attn.hook_recurrence_out"
    write = "hook_v" if mixer.kind in ("rglru", "conv") else "hook_k"
    spill = getattr(mixer, "conv_width", 1) - 1

    def unwritten(x):
        for b, (first, stop) in enumerate(SPANS.tolist()):
            x[b, first : stop + spill] = 0
        return x

    with hooks.record(model, out) as plain:
        before = model(ids)
    with hooks.patch(model, {f"blocks.0.attn.{write}": unwritten}), hooks.record(model, out) as law:
        model(ids)
    later = torch.arange(TIME)[None] >= SPANS[:, 1:] + spill
    with hooks.patch(model, {out: lambda x: torch.where(later[..., None, None], law[out], plain[out]).to(x)}):
        expected = model(ids)
    with hooks.knockout(model, SPANS, layers=[0], queries=None) as ran:
        found = model(ids)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    assert ran == {0: 2}
    assert (found - before)[later].abs().max() > 1e-5
    assert torch.equal(found[:, :3], before[:, :3])
    assert torch.equal(model(ids), before)


def test_parallel_paths_are_closed_one_by_one(wrapped, ids):
    model = wrapped("falcon_h1")
    before = model(ids)
    outs = {}
    for group in ("full", "efficient"):
        with hooks.knockout(model, SPANS, layers=group):
            outs[group] = model(ids)
        assert torch.equal(outs[group][:, :-1], before[:, :-1])
        assert not torch.equal(outs[group], before)
    assert not torch.equal(outs["full"], outs["efficient"])


def test_padding_and_a_cache_are_refused(wrapped, ids):
    import models

    model = wrapped("llama")
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="padded or cached"), hooks.knockout(model, SPANS, layers=[0]):
        model(ids, attention_mask=mask)
    cache = models.Cache()
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="padded or cached"), hooks.knockout(model, SPANS, layers=[0]):
        model(ids[:, -1:], cache=cache)
