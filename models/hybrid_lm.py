"""HybridLM: a causal language model of any mixture of attention and recurrent layers, with TransformerLens hook points.

x_0 = E[ids];  x_{l+1} = x_l + mixer_l(norm x_l) + mlp_l(norm .);  logits = U norm(x_L)

The residual stream x is float32 at least, also where the weights have 16 bits: what mixers and MLPs add is rounded
once, their running sum never (as in Mamba's released models).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from kernels.operands import IMPLS, Impl, default_impl
from models.block import Block
from models.cache import Cache
from models.config import HybridConfig
from models.embedding import Embedding
from models.generate import generate
from models.layers import Layer, Path
from models.mixers import paths_of
from models.mixers.mixer import at_least_fp32
from models.norm import RMSNorm

INIT_STD = 0.02


class HybridLM(HookedRootModule):
    """Freshly initialised from torch's global generator; see models.load for trained weights.

    `impl` chooses who computes the kernels ("triton", "torch", or "naive" for the float64 law); None means
    kernels.operands.default_impl, settled anew when the model moves. The attribute `impl` is the one in use.
    `tokenizer` is None unless a checkpoint brought one; `source_format` names the release that it was converted from.
    """

    def __init__(self, config: HybridConfig, impl: str | None = None):
        super().__init__()
        if impl is not None and impl not in IMPLS:
            raise ValueError(f"impl is {impl!r}; this build has {', '.join(IMPLS)}.")
        self.config = config
        self._asked_impl = cast(Impl | None, impl)
        self.tokenizer: Any = None
        self.source_format: str | None = None
        self.embed = Embedding(config.vocab_size, config.d_model, config.embed_scale)
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(Block(config, layer, self.impl) for layer in range(config.n_layers))
        self.ln_final = RMSNorm(config.d_model, config.rms_eps)
        self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.reset_parameters()
        self.setup()
        self._settle_impl()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's scheme: normal(0.02), projections into the residual stream divided by sqrt(2 L)."""
        out_std = INIT_STD / (2 * self.config.n_layers) ** 0.5
        self.embed.weight.normal_(0.0, INIT_STD)
        self.unembed.weight.normal_(0.0, INIT_STD)
        for block in self._blocks():
            block.attn.reset_parameters(INIT_STD, out_std)
            if not block.has_mlp:
                continue
            block.mlp.gate_proj.weight.normal_(0.0, INIT_STD)
            block.mlp.up_proj.weight.normal_(0.0, INIT_STD)
            block.mlp.down_proj.weight.normal_(0.0, out_std)

    def _blocks(self) -> tuple[Block, ...]:
        return tuple(cast(Block, block) for block in self.blocks)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One description per block; "full" and "efficient" select paths of these, not layers."""
        described = []
        for index, block in enumerate(self._blocks()):
            mixers = paths_of(block.attn)
            paths = tuple(Path(mixer.kind, mixer.n_heads, mixer.window) for mixer in mixers)
            described.append(Layer(index, block.attn.kind, paths, mixers, block, (block.attn,)))
        return tuple(described)

    @property
    def impl(self) -> Impl:
        """Who computes the kernels of this model where it is now."""
        return self._asked_impl or default_impl(self.device, self.dtype)

    def _settle_impl(self) -> None:
        for layer in self.layers:
            for mixer in layer.mixers:
                mixer.impl = self.impl

    def _apply(self, fn: Any, recurse: bool = True) -> HybridLM:
        """What to(), cuda(), double() and the like go through: another device or dtype may need another impl."""
        super()._apply(fn, recurse)
        self._settle_impl()
        return self

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def num_parameters(self, embeddings: bool = True) -> int:
        """Trainable numbers; `embeddings=False` leaves out embedding and unembedding, as the paper's N does."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total if embeddings else total - self.embed.weight.numel() - self.unembed.weight.numel()

    def final_hidden(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"], cache: Cache | None = None
    ) -> Float[Tensor, "B T D"]:
        """The residual stream after the final norm: what `unembed` takes. Floating inputs are embeddings.

        With a cache the inputs continue the sequences it holds, and are added to it; hook points see the new tokens.
        Raises ValueError for a length at which the released model would attend sparsely (config.dense_below).
        """
        self._check_length(inputs.shape[1] + (0 if cache is None else cache.length))
        x = self.hook_embed(at_least_fp32(inputs if inputs.is_floating_point() else self.embed(inputs)))
        if cache is None:
            positions = torch.arange(x.shape[1], device=x.device)
            for block in self.blocks:
                x = block(x, positions)
        else:
            with cache.extended(self, x) as pasts:
                positions = torch.arange(cache.length, cache.length + x.shape[1], device=x.device)
                for block, past in zip(self.blocks, pasts, strict=True):
                    x = block(x, positions, past)
        return self._normed(x)

    def _normed(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        normed, scale = self.ln_final(x), self.config.output_scale
        return normed if scale == 1 else scale * normed

    def _check_length(self, length: int) -> None:
        limit = self.config.dense_below
        if limit is not None and length >= limit:
            raise ValueError(
                f"the input has {length} tokens; expected fewer than {limit}, from where on the released model attends "
                "sparsely, which is not built. Pass a shorter input."
            )

    def final_hidden_from(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"], layer: int, stream: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """final_hidden(inputs) when the stream before block `layer` is already known: earlier blocks do not run."""
        positions = torch.arange(stream.shape[1], device=stream.device)
        stream = at_least_fp32(stream)
        for block in self.blocks[layer:]:
            stream = block(stream, positions)
        return self._normed(stream)

    def forward(
        self, inputs: Int[Tensor, "B T"] | Float[Tensor, "B T D"], cache: Cache | None = None
    ) -> Float[Tensor, "B T vocab"]:
        return self.unembed(self.final_hidden(inputs, cache))

    def generate(self, input_ids: Int[Tensor, "B T"], max_new_tokens: int, **options: Any) -> Int[Tensor, "B N"]:
        """The tokens that follow; see models.generate.generate for the options."""
        return generate(self, input_ids, max_new_tokens, **options)
