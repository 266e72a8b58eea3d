"""Each mixer, given the same weights, equals Hugging Face's layer in fp32 to 1e-5, outputs and input gradients."""

import pytest
import torch

from models.config import HybridConfig
from models.mixers import MIXERS

D, HEADS, HEAD, TIME, TOLERANCE = 48, 3, 16, 77, 1e-5


def config(**changes) -> HybridConfig:
    fields = dict(
        d_model=D, n_layers=4, n_heads=HEADS, n_kv_heads=1, d_head=HEAD, d_ffn=80, vocab_size=97, context_length=128,
        layer_kinds=("full",) * 4, window=9, rope_base=1e4, mamba2_state=24, rms_eps=1e-6,
    )  # fmt: skip
    return HybridConfig(**{**fields, **changes})


def build(kind: str, layer: int = 0, **changes):
    torch.manual_seed(1)
    ours = MIXERS[kind](config(**changes), HEADS, 1, layer, "torch")
    ours.reset_parameters(0.2, 0.2)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "norm" in name or name.endswith((".D", "D", "conv_bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return ours


def compare(ours, theirs):
    """theirs: x -> output. Same input, same random direction pulled back."""
    torch.manual_seed(2)
    x = torch.randn(2, TIME, D)
    direction = torch.randn(2, TIME, D)
    results = []
    for call in (lambda x: ours(x, torch.arange(TIME)), theirs):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        (gradient,) = torch.autograd.grad((out * direction).sum(), leaf)
        results.append((out.detach(), gradient))
    (out, gradient), (expected, expected_gradient) = results
    assert expected.abs().max() > 0.05, "the reference must not be trivially small"
    assert (out - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item())
    assert (gradient - expected_gradient).abs().max() <= TOLERANCE * max(1.0, expected_gradient.abs().max().item())


@pytest.mark.parametrize("window", [None, 9])
def test_attention_equals_llama_and_mistral(window):
    from transformers import MistralConfig
    from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

    ours = build("full" if window is None else "swa")
    shape = MistralConfig(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD, sliding_window=window,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="eager",
    )  # fmt: skip
    theirs = MistralAttention(shape, layer_idx=0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    rotary = MistralRotaryEmbedding(shape)
    t = torch.arange(TIME)
    visible = (t[:, None] >= t) & (t[:, None] - t < (window or TIME))
    mask = torch.zeros(1, 1, TIME, TIME).masked_fill(~visible, float("-inf"))
    compare(ours, lambda x: theirs(x, rotary(x, t[None]), attention_mask=mask)[0])


def test_gdn_equals_qwen3_next():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    ours = build("gdn")
    shape = Qwen3NextConfig(
        hidden_size=D, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_value_heads=HEADS,
        linear_num_key_heads=HEADS, linear_key_head_dim=HEAD, linear_value_head_dim=HEAD, linear_conv_kernel_dim=4,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(shape, 0)
    weights = ours.state_dict()

    def by_head(names: str, rows: int) -> torch.Tensor:  # theirs interleaves the projections head by head
        stacked = torch.stack([weights[f"{name}_proj.weight"].reshape(HEADS, rows, D) for name in names], dim=1)
        return stacked.reshape(-1, D)

    theirs.load_state_dict({
        "in_proj_qkvz.weight": by_head("qkvg", HEAD), "in_proj_ba.weight": by_head("ba", 1),
        "conv1d.weight": weights["conv_weight"][:, None], "A_log": weights["A_log"], "dt_bias": weights["dt_bias"],
        "norm.weight": weights["norm.weight"], "out_proj.weight": weights["o_proj.weight"],
    }, strict=True)  # fmt: skip
    compare(ours, theirs)


def test_mamba2_equals_mamba2mixer():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    ours = build("mamba2")
    shape = Mamba2Config(
        hidden_size=D, num_heads=ours.n_heads, head_dim=HEAD, state_size=24, n_groups=1, expand=2, conv_kernel=4,
        use_conv_bias=True, use_bias=False, chunk_size=32, layer_norm_epsilon=1e-6, num_hidden_layers=1,
    )  # fmt: skip
    theirs = Mamba2Mixer(shape, 0)
    weights = ours.state_dict()
    theirs.load_state_dict({
        "in_proj.weight": _hugging_face_order(weights["in_proj.weight"], ours), "A_log": weights["A_log"],
        "conv1d.weight": weights["conv_weight"][:, None], "conv1d.bias": weights["conv_bias"], "D": weights["D"],
        "dt_bias": weights["dt_bias"], "norm.weight": weights["norm.weight"],
        "out_proj.weight": weights["o_proj.weight"],
    }, strict=True)  # fmt: skip
    compare(ours, theirs)


def _hugging_face_order(weight, ours):
    gate, inputs, key, query, dt = weight.split((ours.inner, ours.inner, ours.state, ours.state, ours.n_heads))
    return torch.cat((gate, inputs, key, query, dt))  # z, x, B, C, dt: the same order, spelled out


@pytest.mark.parametrize("layer", [0, 3])
def test_lightning_equals_minimax(layer):
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    ours = build("lightning", layer, lightning_slopes="minimax")
    shape = MiniMaxConfig(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD, num_hidden_layers=4,
        layer_types=["linear_attention"] * 4, block_size=32, hidden_act="silu",
    )  # fmt: skip
    theirs = MiniMaxLightningAttention(shape, layer)
    weights = ours.state_dict()
    per_head = [weights[f"{name}_proj.weight"].reshape(HEADS, HEAD, D) for name in "qkv"]
    theirs.load_state_dict({
        "qkv_proj.weight": torch.stack(per_head, dim=1).reshape(-1, D), "norm.weight": weights["norm.weight"],
        "out_proj.weight": weights["o_proj.weight"], "output_gate.weight": weights["g_proj.weight"],
    }, strict=False)  # fmt: skip
    compare(ours, lambda x: theirs(x, position_embeddings=None, attention_mask=None)[0])


def test_a_changed_slope_convention_is_noticed():
    plain, factored = (build("lightning", 3, lightning_slopes=name) for name in ("alibi", "minimax"))
    x = torch.randn(1, TIME, D)
    t = torch.arange(TIME)
    assert (plain(x, t) - factored(x, t)).abs().max() > 1e-2
