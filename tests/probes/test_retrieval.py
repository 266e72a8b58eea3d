"""Retrieval tracing: rows equal patterns, recurrent rows re-assemble the output, planted copy heads are found."""

import contextlib

import pytest
import torch

import hooks
from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes import retrieval

VOCAB, TIME = 31, 29
KINDS = ("swa", "full", "lightning", "mamba2", "gdn", "headwise")
POSITIONS = (0, 7, -2, -1)


def build(kinds=KINDS, dtype=torch.float64, **settings):
    torch.manual_seed(11)
    config = dict(
        d_model=24, n_layers=len(kinds), n_heads=4, n_kv_heads=2, d_head=6, d_ffn=20, vocab_size=VOCAB, window=5,
        context_length=64, layer_kinds=kinds, efficient="gdn", rope_base=1e4, mamba2_state=5,
    )  # fmt: skip
    model = HybridLM(HybridConfig(**(config | settings))).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0, 0.3)
    return model.to(dtype)


@pytest.fixture
def ids():
    torch.manual_seed(0)
    return torch.randint(VOCAB, (2, TIME))


@pytest.fixture
def spans():
    return torch.tensor([[[3, 6], [0, 29]], [[20, 22], [6, 8]]])


RESTRICTIONS = {
    "none": [],
    "full with sinks": [("full", 4, 2)],
    "efficient": [("efficient", 3, 0)],
    "both": [("full", 6, 0), ("efficient", 2, 0)],
}


def restricted(model, name):
    stack = contextlib.ExitStack()
    for layers, window, sinks in RESTRICTIONS[name]:
        stack.enter_context(hooks.restrict(model, layers, window=window, sinks=sinks))
    return stack


@pytest.mark.parametrize("restriction", RESTRICTIONS)
@pytest.mark.parametrize("rope_on_full", [True, False])
def test_softmax_rows_are_rows_of_the_pattern(ids, spans, restriction, rope_on_full):
    model = build(rope_on_full=rope_on_full)
    with restricted(model, restriction):
        found = retrieval.trace(model, ids, POSITIONS, spans)
        points = {0: "attn", 1: "attn", 5: "attn.full"}
        names = [f"blocks.{layer}.{attn}.hook_pattern" for layer, attn in points.items()]
        with hooks.record(model, names, positions=POSITIONS) as patterns:
            model(ids)
    for (layer, attn), name in zip(points.items(), names, strict=True):
        p = patterns[name]
        heads = p.shape[1]
        assert attn.startswith("attn")
        for n in range(2):
            expected = torch.stack([p[b, :, :, slice(*spans[b, n].tolist())].sum(-1) for b in range(2)])
            torch.testing.assert_close(found.mass[:, layer, :heads, :, n], expected.float())
        h = torch.zeros(p.shape[:3], dtype=torch.float64)
        for index in torch.cartesian_prod(*map(torch.arange, p.shape[:3])).tolist():
            row = p[tuple(index)]
            h[tuple(index)] = -sum(float(x) * float(x.log()) for x in row if x > 0)
        torch.testing.assert_close(found.entropy[:, layer, :heads], h.float(), atol=1e-6, rtol=1e-5)
        visible = (p > 0).sum(-1)
        normalised = torch.where(visible > 1, h / visible.double().log(), torch.nan)
        torch.testing.assert_close(
            found.normalised_entropy[:, layer, :heads], normalised.float(), atol=1e-6, rtol=1e-5, equal_nan=True
        )
        assert torch.equal(found.largest[:, layer, :heads], p.argmax(-1))
    assert found.normalised_entropy[:, 1, :, 0].isnan().all()  # position 0 sees one key
    assert found.sink_mass.isnan().all()


@pytest.mark.parametrize("restriction", RESTRICTIONS)
def test_recurrent_rows_reassemble_the_layers_own_output(ids, restriction):
    """sum over j of W_tj v_j is hook_recurrence_out, whatever the window: a decomposition that is not a heuristic."""
    model = build()
    positions = torch.tensor([0, 7, TIME - 1])
    paths = {f"blocks.{layer}.attn": model.blocks[layer].attn for layer in (2, 3, 4)}
    paths["blocks.5.attn.efficient"] = model.blocks[5].attn.efficient
    with restricted(model, restriction):
        for prefix, mixer in paths.items():
            parts = ["q", "k", "log_decay"] + ["beta"] * (mixer.kind != "lightning")
            names = [f"{prefix}.hook_{part}" for part in [*parts, "v", "recurrence_out"]]
            _, cache = model.run_with_cache(ids, names_filter=names)
            w = mixer.effective_rows(positions, **{part: cache[f"{prefix}.hook_{part}"] for part in parts})
            read = torch.einsum("bhrt,bthv->brhv", w, cache[f"{prefix}.hook_v"])
            expected = cache[f"{prefix}.hook_recurrence_out"][:, positions]
            assert (read - expected).norm() <= 1e-12 * expected.norm()
            assert not w[:, :, 1, 8:].any()  # causal
            if restriction in ("efficient", "both"):
                assert not w[:, :, 2, : TIME - 3].any()
            else:
                assert w[:, :, 2, 0].any()


def test_recurrent_heads_report_shares_of_their_absolute_weights(ids, spans):
    model = build()
    found = retrieval.trace(model, ids, POSITIONS, spans)
    parts = ("q", "k", "beta", "log_decay")
    _, cache = model.run_with_cache(ids, names_filter=[f"blocks.4.attn.hook_{part}" for part in parts])
    where = torch.tensor([p % TIME for p in POSITIONS])
    w = model.blocks[4].attn.effective_rows(where, **{part: cache[f"blocks.4.attn.hook_{part}"] for part in parts})
    share = w.abs() / w.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(found.mass[0, 4, :4, :, 0], share[0, :, :, 3:6].sum(-1).float())
    assert torch.equal(found.largest[:, 4, :4], share.argmax(-1))
    assert not any(found.softmax[4])
    assert found.mass[:, 4, 4:].isnan().all()  # Mamba-2 has eight heads, this layer four
    without = retrieval.trace(model, ids, POSITIONS, spans, recurrent=False)
    assert without.mass[:, 2:5].isnan().all()
    assert (without.largest[:, 2:5] == -1).all()
    torch.testing.assert_close(without.mass[:, :2], found.mass[:, :2], equal_nan=True)


def test_no_epsilon_bias():
    p = torch.zeros(3, 5)
    p[0, 2] = 1
    p[1] = 0.2
    p[2, 1:3] = 0.5
    h = retrieval.entropy(p)
    assert h[0] == 0
    torch.testing.assert_close(h[1:], torch.tensor([5.0, 2.0]).log())
    torch.testing.assert_close(retrieval.normalised_entropy(h, torch.tensor([5, 5, 2])), torch.tensor([0.0, 1.0, 1.0]))
    assert retrieval.normalised_entropy(h[:1], torch.tensor([1])).isnan()


def test_learned_sinks_take_their_share():
    torch.manual_seed(0)
    q, k, z = torch.randn(2, 3, 4, 6), torch.randn(2, 9, 2, 6), torch.randn(4)
    rows = retrieval.attention_rows(q, k, torch.tensor([2, 5, 8]), sink_logits=z)
    torch.testing.assert_close(rows.p.sum(-1) + rows.sink_mass, torch.ones(2, 4, 3))
    scores = q[1, 2, 3] @ k[1, :, 1].T * 6**-0.5
    torch.testing.assert_close(rows.p[1, 3, 2], torch.cat([scores, z[3:]]).softmax(0)[:-1])


def test_soft_capped_scores_and_a_mask_made_beforehand():
    torch.manual_seed(0)
    q, k, at = 3 * torch.randn(2, 3, 4, 6), torch.randn(2, 9, 2, 6), torch.tensor([2, 5, 8])
    bands = ((4, 1), (7, 0))
    rows = retrieval.attention_rows(q, k, at, bands=bands, scale=0.7, softcap=1.5)
    seen = [0, 2, 3, 4, 5]  # by query 5: its last four keys and the sink, all of them among the last seven
    scores = 1.5 * torch.tanh(0.7 * k[1, seen, 1] @ q[1, 1, 3] / 1.5)
    torch.testing.assert_close(rows.p[1, 3, 1, seen], scores.softmax(0))
    assert rows.visible[1].nonzero().squeeze().tolist() == seen
    assert rows.visible[2].nonzero().squeeze().tolist() == [5, 6, 7, 8], "the sink is behind the second band"
    masked = retrieval.attention_rows(q, k, at, visible=rows.visible, scale=0.7, softcap=1.5)
    assert torch.equal(masked.p, rows.p)
    assert (retrieval.attention_rows(q, k, at, bands=bands, scale=0.7).p - rows.p).abs().max() > 0.1


def test_kv_groups():
    table = torch.tensor([[1.0, 3.0, 5.0, 9.0, torch.nan]])
    assert retrieval.by_kv_group(table, 2, 4).tolist() == [[2.0, 7.0]]
    assert retrieval.by_kv_group(table, 2, 4, "max").tolist() == [[3.0, 9.0]]
    with pytest.raises(ValueError, match="n_heads is 3 for 2 kv heads"):
        retrieval.by_kv_group(table, 2, 3)
    with pytest.raises(ValueError, match="how is 'sum'"):
        retrieval.by_kv_group(table, 2, 4, "sum")


def induction(strength=60.0):
    """Weights set by hand: layer 0 head 0 writes the previous token, layer 1 head 1 attends to the key after it.

    The stream holds [token now | token before | copied]; layer 0 looks one token back through positions one-hot in the
    embedding's last part. Layer 1 matches its own token with the token before each key, and copies that key's token.
    """
    n = 12
    d = 3 * n
    model = HybridLM(
        HybridConfig(
            d_model=d, n_layers=2, n_heads=2, n_kv_heads=2, d_head=n, d_ffn=4, vocab_size=n, window=2,
            context_length=64, layer_kinds=("swa", "full"), rope_base=1e4, rope_on_full=False,
        )
    ).double().requires_grad_(False)  # fmt: skip
    eye = torch.eye(n, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    model.embed.weight[:, :n] = eye
    first, second = model.blocks[0].attn, model.blocks[1].attn
    # keys and queries zero: layer 0 shares its weight between itself and the token before it; the value is the token
    first.v_proj.weight[:n, :n] = eye
    first.o_proj.weight[n : 2 * n, :n] = eye
    second.q_proj.weight[n : 2 * n, :n] = strength * eye
    second.k_proj.weight[n : 2 * n, n : 2 * n] = eye
    second.k_proj.weight[n : 2 * n, :n] = -0.5 * eye  # not the key that is the token itself
    second.v_proj.weight[n : 2 * n, :n] = eye
    second.o_proj.weight[2 * n :, n:] = eye
    model.unembed.weight[:, 2 * n :] = eye
    return model


@pytest.fixture
def needles():
    """Each prompt holds a, b, c, d somewhere and ends in a: the answer is b, c, d."""
    torch.manual_seed(3)
    prompts, ranges = [], []
    for start in (2, 5, 9):
        perm = torch.randperm(12)
        needle, noise = perm[:4], perm[4:]
        prompt = noise[torch.randint(8, (20,))]
        prompt[start : start + 4] = needle
        prompt[-1] = needle[0]
        prompts.append(prompt)
        ranges.append([start + 1, start + 4])
    return torch.stack(prompts), torch.tensor(ranges)


def test_planted_copy_head_is_found_and_nothing_else(needles):
    prompts, ranges = needles
    model = induction()
    result = retrieval.copy_score(model, prompts, ranges)
    assert result.success.all()
    assert result.n_scored == 3
    assert result.score[1].tolist() == [0.0, 1.0]
    assert result.score[0].max() == 0.0
    mass = retrieval.attention_mass(
        model, prompts, torch.stack([ranges[:, :1], ranges[:, :1] + 1], -1).squeeze(1)[:, None]
    )
    assert (mass[:, 1, 1, 0, 0] > 0.9).all()
    assert (mass[:, [0, 1], [0, 0], 0, 0] < 0.2).all()
    entropy = retrieval.attention_entropy(model, prompts, (-1,))
    assert (entropy[:, 1, 1] < 0.2).all()
    assert (entropy[:, 1, 0] > 0.99).all()


def test_null_model_copies_nothing_and_says_so(needles):
    prompts, ranges = needles
    result = retrieval.copy_score(induction(strength=0.0), prompts, ranges)
    assert result.n_scored == 0
    assert not result.success.any()
    assert result.score.isnan().all()


def test_a_longer_continuation_may_hold_the_value_later(needles):
    prompts, ranges = needles
    model = induction()
    before = torch.cat([prompts[:, :-1], prompts[:, :1]], 1)  # ends in a token whose follower is noise
    assert retrieval.copy_score(model, prompts, ranges, max_new_tokens=5).success.all()
    assert not retrieval.copy_score(model, before, ranges).success.all()


@pytest.mark.parametrize(("positions", "spans", "words"), [
    ((TIME,), None, f"positions is \\[{TIME}\\]"),
    ((), None, "positions is"),
    ((-1,), torch.zeros(1, 1, 2, dtype=torch.long), r"spans has shape \[1, 1, 2\]"),
    ((-1,), torch.tensor([[[4, 4]], [[1, 2]]]), "0 <= first < stop <= 29"),
    ((-1,), torch.tensor([[[4, 30]], [[1, 2]]]), "0 <= first < stop <= 29"),
])  # fmt: skip
def test_bad_arguments(ids, positions, spans, words):
    with pytest.raises(ValueError, match=words):
        retrieval.trace(build(("full",)), ids, positions, spans)


def test_bad_needles(ids):
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        retrieval.copy_score(build(("full",)), ids, torch.tensor([[1, 3], [1, 4]]))


def test_hooks_are_gone_and_nothing_large_is_kept(ids, spans):
    model = build()
    retrieval.trace(model, ids, POSITIONS, spans)
    assert not any(module._forward_hooks for module in model.modules())
