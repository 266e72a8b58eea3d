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
LIGHTNING_SLOPES = ("alibi", "alibi-from-zero", "minimax", "transnormer")


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
    vocab_size: int
    context_length: int
    """T the model was (or will be) trained at; longer inputs are extrapolation."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_kinds", tuple(self.layer_kinds))
        self._check_positive()
        self._check_choices()
        self._check_layers()

    def _check_positive(self) -> None:
        names = ("d_model", "n_layers", "n_heads", "n_kv_heads", "d_ffn", "vocab_size", "context_length", "d_head",
                 "mamba2_state", "mamba2_expand", "conv_width")  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"config.{name} is {value!r}; expected an integer >= 1.")
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
