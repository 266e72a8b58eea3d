"""A tiny Llama whose weights need no random generator: other people's programs ran on the same model."""

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_llama():
    """(vocab_size, width, phase, amplitude) -> LlamaForCausalLM with weights from a sine."""
    return _tiny_llama


def _tiny_llama(vocab_size: int, width: int, phase: float, amplitude: float = 1.2):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.ndim == 2:
                steps = torch.arange(parameter.numel(), dtype=torch.float64)
                wave = torch.sin(steps * (1.7 + 0.31 * index + phase) + steps.remainder(7) * index)
                parameter.copy_((amplitude * wave).view_as(parameter))
    return model
