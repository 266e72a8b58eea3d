"""GPU tests run where there is a GPU: `python -m pytest -m gpu`. A directory with code of its own, for all tests."""

import json
import os
import sys
from pathlib import Path

# Test processes share the cores. Threads of several on one core wait for one another by spinning: 6 processes of 2
# threads on 2 cores took 12 to 23 s where 6 of one thread took 3 to 4 s. Read when torch is imported.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    share = str(max(1, len(os.sched_getaffinity(0)) // workers if sys.platform == "linux" else 1))
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, share)

import pytest
import torch

CONFIGURATION = """
from transformers import LlamaConfig


class XConfig(LlamaConfig):
    model_type = "x_llama"
"""
MODELING = """
from torch import nn
from transformers import LlamaForCausalLM

from .configuration_x import XConfig


class XForCausalLM(LlamaForCausalLM):
    config_class = XConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = nn.Tanh()
"""


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; run `python -m pytest -m gpu` on one")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def forget_dynamic_modules():
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def remote_code(tmp_path, monkeypatch) -> Path:
    """A directory of model type x_llama, a Llama whose own Python files put tanh into its MLPs; a cache of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget_dynamic_modules()
    torch.manual_seed(0)
    shape = dict(
        vocab_size=96, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "x"
    LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3)).save_pretrained(folder)
    (folder / "configuration_x.py").write_text(CONFIGURATION)
    (folder / "modeling_x.py").write_text(MODELING)
    fields = json.loads((folder / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "x_llama"}))
    yield folder
    forget_dynamic_modules()
