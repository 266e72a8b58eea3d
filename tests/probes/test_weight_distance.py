"""Q/K distance: each head's own rows and its group's, by hand; gates, widths and fused matrices right or refused."""

import math

import pytest
import torch

from models.config import HybridConfig
from models.hybrid_lm import HybridLM
from probes.weight_distance import qk_distance

CONFIG = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "model_type": "qwen3"}


def weights(q_rows=24, layers=2, fill=1.0):
    prefix = "model.layers.{}.self_attn.{}_proj.weight"
    return {
        prefix.format(layer, part): torch.full((rows, 8), fill)
        for layer in range(layers)
        for part, rows in (("q", q_rows), ("k", 12))
    }


def test_one_changed_head_and_one_changed_group():
    """head_dim 6 is not 8 / 4: slices by the true width."""
    reference, current = weights(), weights()
    current["model.layers.1.self_attn.q_proj.weight"][12:18] += 0.5  # head 2
    current["model.layers.0.self_attn.k_proj.weight"][6:] *= 3.0  # kv head 1: query heads 2 and 3
    result = qk_distance(current, reference, CONFIG)
    assert result.query.tolist() == [[0, 0, 0, 0], [0, 0, 0.5, 0]]
    assert result.key.tolist() == [[0, 0, 2.0, 2.0], [0, 0, 0, 0]]
    assert torch.equal(result.distance, result.query + result.key)


def test_relative_frobenius_norm_in_float64():
    torch.manual_seed(0)
    reference = {name: torch.randn_like(w) for name, w in weights().items()}
    current = {name: torch.randn_like(w) for name, w in weights().items()}
    result = qk_distance(current, reference, CONFIG)
    for layer in range(2):
        for head in range(4):
            total = 0.0
            for part, index in (("q", head), ("k", head // 2)):
                a, b = (w[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for w in (current, reference))
                rows = range(6 * index, 6 * index + 6)
                num = sum((float(a[r, c]) - float(b[r, c])) ** 2 for r in rows for c in range(8))
                total += math.sqrt(num / sum(float(b[r, c]) ** 2 for r in rows for c in range(8)))
            assert result.distance[layer, head].item() == pytest.approx(total, rel=1e-12)


def test_gated_queries_are_the_first_half_of_each_heads_rows():
    config = CONFIG | {"model_type": "qwen3_next"}
    reference, current = weights(q_rows=48), weights(q_rows=48)
    name = "model.layers.0.self_attn.q_proj.weight"
    current[name][12 * 3 + 6 :] += 9.0  # the gate of head 3: no part of the query
    assert qk_distance(current, reference, config).distance.abs().max() == 0
    current[name][12 * 3 : 12 * 3 + 6] += 1.0
    assert qk_distance(current, reference, config).query.tolist() == [[0, 0, 0, 1.0], [0] * 4]


def test_native_layers_and_their_paths():
    torch.manual_seed(0)
    config = HybridConfig(
        d_model=16, n_layers=4, n_heads=4, n_kv_heads=2, d_head=4, d_ffn=12, vocab_size=9, context_length=32,
        layer_kinds=("gdn", "full", "headwise", "mamba2"), window=4, efficient="swa", rope_base=1e4, mamba2_state=4,
    )  # fmt: skip
    model = HybridLM(config).requires_grad_(False)
    reference = {name: w.clone() for name, w in model.state_dict().items()}
    model.blocks[2].attn.efficient.q_proj.weight[4:] += 1.0
    model.blocks[1].attn.k_proj.weight[:4] = 0
    result = qk_distance(model.state_dict(), reference, config.__dict__)
    assert result.query[2].nonzero().flatten().tolist() == [3]  # full heads 0, 1, then efficient 2, 3
    assert result.key[1].tolist() == [1, 1, 0, 0]
    assert result.distance[0].tolist() == [0] * 4
    assert result.distance[3].isnan().all()
    assert result.unfolded_norms == ()


def test_norms_behind_the_projection_are_reported():
    reference = weights() | {"model.layers.1.self_attn.q_norm.weight": torch.ones(6)}
    assert qk_distance(weights(), reference, CONFIG).unfolded_norms == (1,)


@pytest.mark.parametrize(("change", "config", "words"), [
    ({"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(4, 8)}, {}, r"self_attn\.qkv_proj\.weight joins"),
    ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(25, 8)}, {}, "has 25 rows; expected a multiple of 6"),
    ({"model.layers.0.self_attn.q_proj.weight": torch.zeros(18, 8)}, {}, "has 3 heads of 6 rows and .* 2"),
    ({}, {"model_type": "qwen3_next", "head_dim": 5}, "24 rows; expected a multiple of 10"),
])  # fmt: skip
def test_layouts_that_are_not_understood_are_refused(change, config, words):
    with pytest.raises(ValueError, match=words):
        qk_distance(weights() | change, weights() | change, CONFIG | config)


def test_checkpoints_of_two_models_and_empty_ones_are_refused():
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight is nothing in one"):
        qk_distance(weights(layers=1), weights(), CONFIG)
    with pytest.raises(ValueError, match="no q_proj"):
        qk_distance({}, {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, CONFIG)
    alone = {name: w for name, w in weights().items() if "k_proj" not in name}
    with pytest.raises(ValueError, match="has no model.layers.0.self_attn.k_proj.weight beside it"):
        qk_distance(alone, alone, CONFIG)
