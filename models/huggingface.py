"""The door to Hugging Face models: a local directory (config.json, safetensors) becomes a scoring model, offline."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.huggingface_layers import HuggingFaceLayer, layer_views
from models.huggingface_tokenizer import HuggingFaceTokenizer, load_tokenizer
from models.safetensors_files import CheckpointError, read_json, scan


class HuggingFaceLM(nn.Module):
    """A causal LM of transformers behind the interface of HybridLM: logits, final_hidden, unembed, layers, tokenizer.

    `hf` is the model itself, unchanged. unembed(final_hidden(x)) == logits is checked when the object is made,
    because families scale or soft-cap their logits in different ways.
    """

    def __init__(self, hf: Any, tokenizer: HuggingFaceTokenizer | None = None, name: str = ""):
        super().__init__()
        self.hf: Any = hf  # a PreTrainedModel; transformers is not imported for its type
        self.tokenizer = tokenizer
        self.name = name
        self.train(hf.training)
        self._finish = self._find_finish()

    def forward(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T vocab"]:
        return self.hf(input_ids=input_ids, use_cache=False).logits

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The family's embedding module: scaled where it scales there (Gemma 3), not where the model does so later."""
        return self.hf.get_input_embeddings()(input_ids)

    def final_hidden(self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The residual stream after the final norm, what unembed takes; floating inputs are embeddings. No logits."""
        name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        return self.hf.base_model(**{name: inputs}, use_cache=False).last_hidden_state

    def unembed(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... vocab"]:
        """The output matrix with the family's scaling or soft-capping, at any number of positions."""
        return self._finish(self.hf.get_output_embeddings()(hidden))

    @property
    def config(self) -> Any:
        """The transformers config (of the text model, if there are several)."""
        return self.hf.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.hf.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.get_input_embeddings().weight.dtype

    @property
    def impl(self) -> str:
        """transformers' attention implementation in use: sdpa where the family supports it."""
        return str(self.hf.config._attn_implementation)

    @cached_property
    def layers(self) -> tuple[HuggingFaceLayer, ...]:
        """Views of all blocks, by absolute index. CheckpointError for a family whose layer types are not known here."""
        return layer_views(self.config, _blocks(self.hf))

    def num_parameters(self, embeddings: bool = True) -> int:
        """Parameters, tied ones once; embeddings=False leaves out the input and output embedding matrices."""
        left_out = [] if embeddings else [self.hf.get_input_embeddings().weight, self.hf.get_output_embeddings().weight]
        return sum(p.numel() for p in self.hf.parameters() if not any(p is weight for weight in left_out))

    @torch.no_grad()
    def _find_finish(self) -> Callable[[Tensor], Tensor]:
        """What the family does to its raw logits: of the known forms the one that reproduces its own logits best."""
        ids = torch.arange(min(8, self.config.vocab_size), device=self.device)[None]
        expected = self(ids).float()
        raw = self.hf.get_output_embeddings()(self.final_hidden(ids))
        finishes = _finishes(self.config)
        errors = [float((finish(raw).float() - expected).abs().max() / expected.abs().max()) for finish in finishes]
        best = min(range(len(finishes)), key=lambda index: errors[index])
        if not errors[best] <= (1e-4 if self.dtype in (torch.float32, torch.float64) else 2e-2):
            raise CheckpointError(
                f"model type {self.config.model_type!r}: no known scaling or soft-capping of the unembedding gives "
                f"its logits (relative error {errors[best]:.1e}, nan: not finite); it cannot be scored by positions."
            )
        return finishes[best]


def load_huggingface(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> HuggingFaceLM:
    """A model in eval mode from a directory with config.json and safetensors; opens no connection.

    device None: CUDA if there is one, else CPU. dtype None: fp32 on CPU, the stored dtype on CUDA. CheckpointError (a
    ValueError) naming the file for absent or damaged files, and for tensors that are missing (transformers would
    leave them random) or extra. trust_remote_code=True runs the Python files of the directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no directory; expected a checkpoint directory (config.json, model.safetensors)."
        )
    read_json(path / "config.json")
    scan(path)
    device = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    hf = _from_pretrained(path, dtype if dtype is not None else "auto", trust_remote_code)
    hf = hf.to(device).eval().requires_grad_(False)
    return HuggingFaceLM(hf, load_tokenizer(path), name=path.resolve().name)


def _from_pretrained(path: Path, dtype: torch.dtype | str, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, RuntimeError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: transformers cannot load this directory: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    hf, info = loaded
    for fault, remedy in (
        ("missing_keys", "transformers would leave it random"),
        ("mismatched_keys", "its shape is not the config's"),
        ("unexpected_keys", "it belongs to no layer of config.json"),
    ):
        if names := sorted(str(name) for name in info.get(fault) or ()):
            raise CheckpointError(
                f"{path}: tensor {names[0]!r} is in {fault} ({len(names)} in all): {remedy}; "
                "check config.json and weights."
            )
    return hf


def _blocks(hf: Any) -> nn.ModuleList:
    """The list of blocks of the text model: its one ModuleList with as many entries as the config has layers."""
    n_layers = hf.config.get_text_config().num_hidden_layers
    found = [
        child for child in hf.get_decoder().children() if isinstance(child, nn.ModuleList) and len(child) == n_layers
    ]
    if len(found) != 1:
        raise CheckpointError(
            f"model type {hf.config.model_type!r} has {len(found)} lists of {n_layers} blocks; expected exactly one."
        )
    return found[0]


def _finishes(config: Any) -> list[Callable[[Tensor], Tensor]]:
    """Forms that a family may apply to raw logits, those its config declares first."""
    finishes: list[Callable[[Tensor], Tensor]] = []
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    if cap:
        finishes.append(partial(_soft_cap, cap=cap))
    for attribute in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        scale = getattr(config, attribute, None)
        if scale:
            finishes += [partial(torch.mul, other=scale), partial(torch.div, other=scale)]
    return [*finishes, torch.Tensor.contiguous]


def _soft_cap(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap
