"""HuggingFaceLM: a causal LM of transformers with the surface of HybridLM: layers, hook points, scoring, decoding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from kernels.operands import Impl, default_impl
from models.cache import Cache
from models.generate import generate
from models.huggingface import attention, norms, swaps
from models.huggingface.block import skipped
from models.huggingface.build import bound, described
from models.huggingface.continuation import cache_is_exact, continued
from models.huggingface.logits import find_finish
from models.huggingface.tokenizer import HuggingFaceTokenizer
from models.layers import Layer
from models.mixers.mixer import listened

IGNORE_PADDING = ("recurrent_gemma",)


class HuggingFaceLM(HookedRootModule):
    """`hf` is the transformers model; its softmax layers compute with kernels.attention, through AttentionInterface.

    Hook points have HybridLM's names (blocks.N.hook_resid_pre, blocks.N.attn.hook_z, ...); those that the family's code
    does not pass through do not exist. unembed(final_hidden(x)) == logits is checked when the object is made. On the
    meta device only `layers` and sizes are known. ValueError for a model that a HuggingFaceLM was made of before.
    """

    def __init__(self, hf: Any, tokenizer: HuggingFaceTokenizer | None = None, name: str = ""):
        super().__init__()
        self.hf: Any = hf  # a PreTrainedModel; transformers is not imported for its type
        self.tokenizer = tokenizer
        self.name = name
        self.train(hf.training)
        self.hook_embed = HookPoint()
        self._layers = tuple(described(hf))
        if self.device.type == "meta":
            return
        swaps.refuse_attached(hf)
        self._plain = str(hf.config._attn_implementation)
        hf.set_attn_implementation(attention.register())
        norms.fuse(hf)
        blocks, layers = bound(hf, self._layers)
        self._layers = tuple(layers)
        self.blocks = nn.ModuleList(blocks)
        self._settle_impl()
        self.setup()
        with torch.no_grad():
            ids = torch.arange(min(8, self.config.vocab_size), device=self.device)[None]
            raw = hf.get_output_embeddings()(self.final_hidden(ids))
            self._finish = find_finish(self.config, self(ids), raw)

    def forward(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"],
        cache: Cache | None = None,
        attention_mask: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T vocab"]:
        """The family's own logits. `attention_mask`: 1 for real tokens, pads at the ends only."""
        if cache is not None:
            return self.unembed(self.final_hidden(inputs, cache))
        return self.hf(**self.given(inputs, attention_mask), use_cache=False).logits

    def embed(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """The family's embedding module: scaled where it scales there (Gemma 3), not where the model does so later."""
        return self.hf.get_input_embeddings()(input_ids)

    def final_hidden(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"],
        cache: Cache | None = None,
        attention_mask: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The residual stream after the final norm, what unembed takes; floating inputs are embeddings. No logits.

        With a cache the inputs continue the sequences it holds (models.huggingface.continuation).
        """
        if cache is None:
            return self.hf.base_model(**self.given(inputs, attention_mask), use_cache=False).last_hidden_state
        if attention_mask is not None:
            raise ValueError("attention_mask was given with a cache; expected sequences of equal length there.")
        return continued(self, inputs, cache)

    def final_hidden_from(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"], layer: int, stream: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """final_hidden(inputs) when the stream before block `layer` is already known: earlier blocks do not run."""
        with skipped(self.blocks[:layer], stream):
            return self.final_hidden(inputs)

    def given(self, inputs: Tensor, attention_mask: Tensor | None) -> dict[str, Tensor]:
        """The arguments of the transformers model for these inputs, past hook_embed."""
        swaps.restore_all()
        if listened(self.hook_embed):
            inputs = self.hook_embed(inputs if inputs.is_floating_point() else self.embed(inputs))
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs}
        if attention_mask is not None:
            if self.refuses_padding and not bool(attention_mask.all()):
                raise ValueError(self.refuses_padding)
            given["attention_mask"] = attention_mask
            if "position_ids" in inspect.signature(self.hf.base_model.forward).parameters:
                given["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        return given

    def unembed(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... vocab"]:
        """The output matrix with the family's scaling or soft-capping, at any number of positions."""
        return self._finish(self.hf.get_output_embeddings()(hidden))

    def generate(self, input_ids: Int[Tensor, "B T"], max_new_tokens: int, **options: Any) -> Int[Tensor, "B N"]:
        """The tokens that follow; see models.generate.generate for the options."""
        return generate(self, input_ids, max_new_tokens, **options)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One description per block, by absolute index; "full" and "efficient" select paths of these."""
        return self._layers

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
    def impl(self) -> Impl:
        """Who computes softmax layers and exact windows where the model is now; everything else is transformers'.

        Softmax layers that hide nothing are torch's fused attention in 16 bits on CUDA, whatever this says.
        """
        return default_impl(self.device, self.dtype)

    @property
    def refuses_padding(self) -> str:
        """Why a padded batch would change results; empty if it does not."""
        if self.config.model_type not in IGNORE_PADDING:
            return ""
        return (
            f"the recurrent blocks of model type {self.config.model_type!r} ignore attention_mask, so pads would enter "
            "their states; pass sequences of equal length without padding."
        )

    @cached_property
    def has_exact_cache(self) -> bool:
        """Whether the family's cache gives what one forward gives; measured when first asked."""
        return cache_is_exact(self)

    def _settle_impl(self) -> None:
        for layer in self.layers:
            for mixer in layer.mixers:
                mixer.impl = self.impl

    def _apply(self, fn: Any, recurse: bool = True) -> HuggingFaceLM:
        super()._apply(fn, recurse)
        self._settle_impl()
        return self

    @contextmanager
    def plain(self, implementation: str | None = None) -> Iterator[Any]:
        """Inside, transformers' own attention computes (None: the one it was loaded with): for comparisons."""
        try:
            self.hf.set_attn_implementation(implementation or self._plain)
            yield self.hf
        finally:
            self.hf.set_attn_implementation(attention.NAME)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Parameters, tied ones once; embeddings=False leaves out the input and output embedding matrices."""
        left_out = [] if embeddings else [self.hf.get_input_embeddings().weight, self.hf.get_output_embeddings().weight]
        return sum(p.numel() for p in self.hf.parameters() if not any(p is weight for weight in left_out))
