"""The paper's shapes S1-S5 and two miniatures, times its seven architectures and their variants.

Shapes and parameter counts: arXiv:2606.15378 and its released scaling table (S1-S4 counts of the SWA-128 family).
"""

from __future__ import annotations

import re

from models.config import ConfigError, HybridConfig

# layers, d_model, heads, kv heads, d_ffn, vocabulary, context, rope base, Mamba-2 state
SCALES = {
    "nano": (6, 128, 2, 1, 320, 4096, 4096, 1e4, 64),
    "mini": (8, 192, 3, 1, 480, 4096, 4096, 1e4, 64),
    "S1": (10, 384, 6, 2, 960, 73448, 16384, 1e6, 128),
    "S2": (12, 512, 8, 2, 1280, 73448, 16384, 1e6, 128),
    "S3": (16, 640, 10, 2, 1600, 73448, 16384, 1e6, 128),
    "S4": (18, 768, 12, 2, 1920, 73448, 16384, 1e6, 128),
    "S5": (30, 1280, 20, 2, 3200, 73448, 16384, 1e6, 128),
}
ARCHITECTURES = ("full", "swa-W", "lightning", "mamba2", "gdn")
SUFFIXES = ("-nope", "-1to3", "-headwise")


def preset(scale: str, architecture: str) -> HybridConfig:
    """The configuration of e.g. preset("S1", "swa-128"), preset("mini", "swa-32-nope"), preset("nano", "gdn-headwise").

    Layers are counted from 0. A hybrid alternates efficient (even) and full (odd) layers; -1to3 puts full attention
    where layer % 4 == 3; -headwise gives every layer half full and half efficient heads; -nope takes the rotary
    embedding from the full paths only.
    """
    if scale not in SCALES:
        raise ConfigError(f"scale {scale!r} is unknown; expected one of {', '.join(SCALES)}.")
    base, suffixes = _split(architecture)
    kind, window = _efficient_path(base, architecture)
    layers, d_model, heads, kv_heads, d_ffn, vocabulary, context, rope_base, state = SCALES[scale]
    return HybridConfig(
        d_model=d_model, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, d_ffn=d_ffn,
        vocab_size=vocabulary, context_length=context, layer_kinds=_pattern(kind, suffixes, layers),
        efficient=kind if kind != "full" else "swa", window=window, rope_base=rope_base,
        rope_on_full="-nope" not in suffixes, mamba2_state=state,
    )  # fmt: skip


def preset_from_name(name: str) -> HybridConfig:
    """preset("mini", "swa-32") from the one word "mini/swa-32" that the command line takes."""
    scale, slash, architecture = name.partition("/")
    if not slash:
        raise ConfigError(f"preset {name!r} has no '/'; expected SCALE/ARCHITECTURE such as mini/swa-32.")
    return preset(scale, architecture)


def _split(architecture: str) -> tuple[str, tuple[str, ...]]:
    base, found = architecture, []
    while True:
        suffix = next((s for s in SUFFIXES if base.endswith(s)), None)
        if suffix is None:
            break
        base = base.removesuffix(suffix)
        found.append(suffix)
    if len(set(found)) != len(found) or {"-1to3", "-headwise"} <= set(found):
        raise ConfigError(f"architecture {architecture!r} combines suffixes that exclude each other.")
    if base == "full" and set(found) - {"-nope"}:
        raise ConfigError(f"architecture {architecture!r}: 'full' has no efficient layers; only -nope applies.")
    return base, tuple(found)


def _efficient_path(base: str, architecture: str) -> tuple[str, int | None]:
    if base in ("full", "lightning", "mamba2", "gdn"):
        return base, None
    match = re.fullmatch(r"swa-([1-9][0-9]*)", base)
    if not match:
        raise ConfigError(
            f"architecture {architecture!r} is unknown; expected one of {', '.join(ARCHITECTURES)}, "
            f"optionally with {', '.join(SUFFIXES)}."
        )
    return "swa", int(match.group(1))


def _pattern(kind: str, suffixes: tuple[str, ...], layers: int) -> tuple[str, ...]:
    if kind == "full":
        return ("full",) * layers
    if "-headwise" in suffixes:
        return ("headwise",) * layers
    period = 4 if "-1to3" in suffixes else 2
    return tuple("full" if layer % period == period - 1 else kind for layer in range(layers))
