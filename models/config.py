"""The shape of a hybrid language model, as one frozen, JSON-serialisable record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from models.errors import InputError

FORMAT, FORMAT_VERSION = "hybridscope", 1
SOFTMAX_KINDS = ("full", "swa")
RECURRENT_KINDS = ("lightning", "mamba2", "gdn")
EFFICIENT_KINDS = ("swa", *RECURRENT_KINDS)
LAYER_KINDS = ("full", *EFFICIENT_KINDS, "headwise")
LIGHTNING_SLOPES = ("alibi", "alibi-from-zero", "alibi-interleaved", "minimax", "transnormer")


class ConfigError(InputError):
    """A model shape that cannot be built; the message names the field, the value found and the value expected."""


@dataclass(frozen=True)
class HybridConfig:
    """Everything `HybridLM` needs to be built. Widths are in features, windows in tokens (self included)."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ffn: int
    """Width of the feed-forward layers; 0: blocks of a mixer alone (the Mamba-2 language model)."""
    vocab_size: int
    context_length: int | None
    """T the model was (or will be) trained at; longer inputs are extrapolation. None: a release does not say."""
    layer_kinds: tuple[str, ...]
    """One of LAYER_KINDS per layer, counted from 0."""
    efficient: str = "swa"
    """The efficient path of head-wise layers."""
    window: int | None = None
    """Visible keys of sliding-window paths, self included."""
    sinks: int = 0
    """First tokens that stay visible to sliding-window paths."""
    d_head: int = 64
    rope_base: float = 1e6
    rope_on_full: bool = True
    """False: no positional encoding on the full-attention paths (NoPE)."""
    rms_eps: float = 1e-6
    lightning_slopes: str = "alibi"
    mamba2_state: int = 128
    mamba2_expand: int = 2
    conv_width: int = 4
    """Taps of the short causal convolution of Mamba-2 and Gated DeltaNet."""
    gdn_beta_scale: float = 1.0
    """beta = scale * sigmoid(.): 1 keeps it in (0, 1), 2 allows negative eigenvalues."""

    # What released checkpoints have beside the paper's shape (models.released_formats)
    qk_norm_eps: float | None = None
    """RMSNorm of every query and key head of softmax attention before the rotation, with this eps; None: none."""
    attention_bias: bool = False
    """Biases of softmax attention's query, key and value projections."""
    attention_gate: bool = False
    """Softmax attention's heads are multiplied by sigmoid(W x) before the output projection."""
    learned_sinks: tuple[str, ...] = ()
    """Kinds of softmax layers with a learned sink logit per head: a softmax column that is dropped afterwards."""
    recurrent_heads: int | None = None
    """Heads of Lightning layers, query and key heads of Gated DeltaNet layers; None: n_heads."""
    recurrent_d_head: int | None = None
    """Key (and Lightning's value) dimension of those heads; None: d_head."""
    gdn_value_heads: int | None = None
    """Value heads of Gated DeltaNet, a multiple of its key heads; None: as many."""
    gdn_d_value: int | None = None
    """Value dimension of Gated DeltaNet; None: its key dimension."""
    lightning_silu: bool = True
    """SiLU on Lightning's queries, keys and values (MiniMax)."""
    lightning_qk_norm: bool = False
    """RMSNorm of every query and key head of Lightning (HypeNet)."""
    lightning_rope: bool = False
    """Rotary positions on Lightning's queries and keys (HypeNet)."""
    lightning_scale: float = 1.0
    """Lightning reads scale * S_t^T q_t; HypeNet's is K^-0.5."""
    embed_scale: float = 1.0
    """Factor of the token embeddings (muP, as the next two)."""
    residual_scale: float = 1.0
    """Factor of what a mixer or an MLP adds to the residual stream."""
    output_scale: float = 1.0
    """Factor of the final norm's output before the unembedding."""
    dense_below: int | None = None
    """Tokens from which on the released model attends sparsely, which is not built: as long an input is refused."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_kinds", tuple(self.layer_kinds))
        object.__setattr__(self, "learned_sinks", tuple(self.learned_sinks))
        self._check_positive()
        self._check_choices()
        self._check_layers()
        self._check_recurrent_heads()

    def _check_positive(self) -> None:
        names = ("d_model", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "context_length", "d_head",
                 "mamba2_state", "mamba2_expand", "conv_width")  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if name == "context_length" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"config.{name} is {value!r}; expected an integer >= 1.")
        if not isinstance(self.d_ffn, int) or isinstance(self.d_ffn, bool) or self.d_ffn < 0:
            raise ConfigError(f"config.d_ffn is {self.d_ffn!r}; expected an integer >= 1, or 0 for blocks without MLP.")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"config.n_kv_heads is {self.n_kv_heads}, which does not divide n_heads = {self.n_heads}; "
                "every kv head must serve the same number of query heads."
            )
        if self.d_head % 2:
            raise ConfigError(f"config.d_head is {self.d_head}; rotary embeddings need an even head dimension.")

    def _check_choices(self) -> None:
        if self.lightning_slopes not in LIGHTNING_SLOPES:
            raise ConfigError(
                f"config.lightning_slopes is {self.lightning_slopes!r}; expected one of {', '.join(LIGHTNING_SLOPES)}."
            )
        if self.efficient not in EFFICIENT_KINDS:
            raise ConfigError(f"config.efficient is {self.efficient!r}; expected one of {', '.join(EFFICIENT_KINDS)}.")
        if other := sorted(set(self.learned_sinks) - set(SOFTMAX_KINDS)):
            raise ConfigError(
                f"config.learned_sinks names {other[0]!r}; expected softmax kinds: {', '.join(SOFTMAX_KINDS)}."
            )
        if self.sinks < 0:
            raise ConfigError(f"config.sinks is {self.sinks}; expected 0 or more tokens.")

    def _check_layers(self) -> None:
        if len(self.layer_kinds) != self.n_layers:
            raise ConfigError(f"config.layer_kinds names {len(self.layer_kinds)} layers; n_layers is {self.n_layers}.")
        for index, kind in enumerate(self.layer_kinds):
            if kind not in LAYER_KINDS:
                raise ConfigError(
                    f"config.layer_kinds[{index}] is the unknown mixer {kind!r}; known: {', '.join(LAYER_KINDS)}."
                )
        if "headwise" in self.layer_kinds and self.n_heads % 2:
            raise ConfigError(
                f"head-wise mixing splits the heads into halves; n_heads is {self.n_heads}, expected an even number."
            )
        needs_window = "swa" in self.layer_kinds or ("headwise" in self.layer_kinds and self.efficient == "swa")
        if needs_window and (self.window is None or self.window < 1):
            raise ConfigError(f"config.window is {self.window!r}; sliding-window layers need an integer >= 1.")

    def _check_recurrent_heads(self) -> None:
        for name in ("recurrent_heads", "recurrent_d_head", "gdn_value_heads", "gdn_d_value", "dense_below"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"config.{name} is {value!r}; expected an integer >= 1, or null.")
            if value is not None and name != "dense_below" and "headwise" in self.layer_kinds:
                raise ConfigError(f"config.{name} is {value}, but head-wise layers share n_heads; expected null.")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"config.gdn_value_heads is {self.gdn_value_heads}, no multiple of the {self.key_heads} key heads; "
                "every key head must serve the same number of value heads."
            )
        if self.lightning_rope and self.key_width % 2:
            raise ConfigError(
                f"config.recurrent_d_head is {self.recurrent_d_head}; rotary embeddings need an even head dimension."
            )

    @property
    def key_heads(self) -> int:
        """Heads of Lightning, key heads of Gated DeltaNet."""
        return self.recurrent_heads or self.n_heads

    @property
    def value_heads(self) -> int:
        """Value heads of Gated DeltaNet."""
        return self.gdn_value_heads or self.key_heads

    @property
    def key_width(self) -> int:
        """K of Lightning and Gated DeltaNet."""
        return self.recurrent_d_head or self.d_head

    @property
    def value_width(self) -> int:
        """V of Gated DeltaNet."""
        return self.gdn_d_value or self.key_width

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> HybridConfig:
        """The inverse of `to_json`. Raises ConfigError on unknown or missing fields: no typo becomes a default."""
        found = {name: value for name, value in fields.items() if name not in ("format", "format_version")}
        known = {field.name for field in dataclasses.fields(cls)}
        required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
        if unknown := sorted(set(found) - known):
            raise ConfigError(f"unknown field(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}.")
        if missing := sorted(required - set(found)):
            raise ConfigError(f"missing field(s) {', '.join(missing)}.")
        return cls(**found)
