"""Tiny random models of the Hugging Face families, one of each a session; weights large enough to matter."""

import pytest
import torch

BASE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=44, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8)
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=20)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=12, mamba_chunk_size=8)
ALTERNATING = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
FULL, SWA5, GDN = ("full", 4, 2, None), ("swa", 4, 2, 5), ("gdn", 4, 2, None)

# model type -> (changes of BASE, (kind, heads, kv heads, window) of every layer)
FAMILIES = {
    "llama": ({}, [FULL] * 4),
    "qwen3": ({}, [FULL] * 4),
    "mistral": (dict(sliding_window=5), [SWA5] * 4),
    "gemma2": (
        dict(sliding_window=5, final_logit_softcapping=0.7, attn_logit_softcapping=0.5, query_pre_attn_scalar=7),
        [SWA5, FULL] * 2,
    ),
    "gemma3_text": (
        dict(sliding_window=5, final_logit_softcapping=0.4, query_pre_attn_scalar=7, layer_types=ALTERNATING),
        [SWA5, FULL] * 2,
    ),
    "gpt_oss": (
        dict(
            sliding_window=5, num_local_experts=3, num_experts_per_tok=2, layer_types=ALTERNATING,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        [SWA5, FULL] * 2,
    ),
    "cohere2": (dict(logit_scale=0.3, sliding_window=5), [SWA5] * 3 + [FULL]),
    "olmo3": (dict(sliding_window=5, layer_types=ALTERNATING), [SWA5, FULL] * 2),
    "granite": (dict(logits_scaling=3.0, residual_multiplier=0.4), [FULL] * 4),
    "qwen3_next": ({**DELTA, **EXPERTS}, [GDN] * 3 + [FULL]),
    "qwen3_5_text": (DELTA, [GDN] * 3 + [FULL]),
    "olmo_hybrid": ({**DELTA, "layer_types": LINEAR}, [GDN, FULL] * 2),
    "bamba": (
        {**MAMBA2, "mamba_n_groups": 2, "attn_layer_indices": [1]},
        [("mamba2", 8, 2, None), FULL, ("mamba2", 8, 2, None), ("mamba2", 8, 2, None)],
    ),
    "granitemoehybrid": (
        {
            **MAMBA2, "mamba_n_groups": 1, "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 20,
            "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        },
        [("mamba2", 8, 1, None), FULL, ("mamba2", 8, 1, None), ("mamba2", 8, 1, None)],
    ),
    "falcon_h1": (
        dict(
            mamba_n_heads=6, mamba_d_head=8, mamba_d_ssm=48, mamba_d_state=12, mamba_n_groups=1, mamba_chunk_size=8,
            lm_head_multiplier=0.2, ssm_out_multiplier=0.7, attention_out_multiplier=0.6,
        ),
        [("parallel", 10, 3, None)] * 4,
    ),
    "nemotron_h": (
        dict(
            mamba_num_heads=6, mamba_head_dim=8, ssm_state_size=12, n_groups=1, chunk_size=8,
            layers_block_type=["mamba", "attention", "mlp", "mamba"],
        ),
        [("mamba2", 6, 1, None), FULL, ("mlp", 0, 0, None), ("mamba2", 6, 1, None)],
    ),
    "zamba2": (
        dict(
            n_mamba_heads=8, mamba_d_state=12, chunk_size=8, mamba_ngroups=1, mamba_headdim=8, hybrid_layer_ids=[1, 3],
            layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1, use_mem_rope=True, adapter_rank=4,
        ),
        [("mamba2", 8, 1, None), ("parallel", 12, 3, None)] * 2,
    ),
    "jamba": (
        dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4, mamba_dt_rank=3),
        [("mamba1", 1, 1, None), FULL] * 2,
    ),
    "lfm2": (dict(layer_types=["conv", "full_attention"] * 2), [("conv", 1, 1, 3), FULL] * 2),
    "minimax": (
        dict(layer_types=LINEAR, num_local_experts=3, num_experts_per_tok=2, block_size=8),
        [("lightning", 4, 4, None), FULL] * 2,
    ),
    "kimi_linear": (
        dict(
            layer_types=LINEAR, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=8, qk_nope_head_dim=6,
            qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4, num_experts_per_tok=2, moe_intermediate_size=16,
            n_routed_experts=3, q_lora_rank=None, n_group=1, topk_group=1,
        ),
        [("kda", 4, 4, None), ("full", 4, 4, None)] * 2,
    ),
    "recurrent_gemma": (
        dict(lru_width=32, attention_window_size=5, block_types=("recurrent", "recurrent", "attention")),
        [("rglru", 4, 4, None), ("rglru", 4, 4, None), SWA5, ("rglru", 4, 4, None)],
    ),
}  # fmt: skip


def tiny(model_type: str, **changes):
    """The transformers model itself: fp32, eval, attention and mixers that depend on their input."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**BASE, **changes})
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            module.weight.mul_(6)
        if isinstance(module, torch.nn.Conv1d):
            module.weight.mul_(5)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")) or "dt_proj.bias" in name:
            parameter.fill_(-1.5)  # states that remember more than a token or two
    if getattr(config, "tie_word_embeddings", False) is False:
        model.get_output_embeddings().weight.mul_(20)  # logits large enough for soft-capping to matter
    return model


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


@pytest.fixture(scope="session")
def tiny_model():
    return tiny


@pytest.fixture(scope="session")
def families():
    return FAMILIES


@pytest.fixture(scope="session")
def plain():
    """family -> its transformers model, untouched."""
    models = {}

    def get(family: str):
        if family not in models:
            models[family] = tiny(family, **FAMILIES[family][0])
        return models[family]

    return get


@pytest.fixture(scope="session")
def wrapped(plain):
    """family -> HuggingFaceLM of a copy of the same weights."""
    from models.huggingface import HuggingFaceLM

    models = {}

    def get(family: str):
        if family not in models:
            copy = tiny(family, **FAMILIES[family][0])
            copy.load_state_dict(plain(family).state_dict())
            models[family] = HuggingFaceLM(copy)
        return models[family]

    return get
