"""The checks behind `python -m models.selfcheck`: each measures one property of a loaded model: pass, fail or n/a.

They need nothing but the surface that native and Hugging Face models share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hooks
from models.cache import Cache

TOKENS = 24
DECODED = 4
SMALL = 3  # window of the restrictions that are tried
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Check(NamedTuple):
    name: str
    verdict: str
    """pass, fail or n/a."""
    detail: str


Verdict = tuple[str, str]


def run(model: Any, quick: bool, max_window: int) -> Iterator[Check]:
    """All checks, the cheap ones first; `quick` ends with those. An exception in a check is its failure."""
    cheap: list[tuple[str, Callable[[Any], Verdict]]] = [
        ("logits with and without hook points", logits),
        ("row sums of the attention", row_sums),
        ("causality", causality),
        ("restrictions end without a trace", restoration),
    ]
    dear: list[tuple[str, Callable[[Any], Verdict]]] = [
        ("batch invariance", batching),
        ("left padding", padding),
        ("decode equals prefill", decoding),
        ("decode equals prefill, restricted", restricted_decoding),
        ("tied weights", tied),
        ("gradient path", gradients),
    ]
    for name, check in cheap if quick else cheap + dear:
        yield _checked(name, check, model)
    if not quick:
        for layer, path in representatives(model):
            check = partial(receptive_field, layer=layer, path=path, max_window=max_window)
            yield _checked(f"receptive field of layer {layer.index} ({layer.paths[path].kind})", check, model)


def _checked(name: str, check: Callable[[Any], Verdict], model: Any) -> Check:
    try:
        return Check(name, *check(model))
    except NotImplementedError as error:
        return Check(name, "n/a", str(error))
    except (ValueError, RuntimeError, IndexError, TypeError, KeyError, AttributeError) as error:
        return Check(name, "fail", f"{type(error).__name__}: {' '.join(str(error).split())}")


def tokens(model: Any, batch: int = 1, length: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _compared(model: Any, found: Tensor, expected: Tensor, what: str) -> Verdict:
    error = _error(found, expected)
    return ("pass" if error <= TOLERANCE[model.dtype] else "fail"), f"{what}: relative difference {error:.1e}"


@torch.no_grad()
def logits(model: Any) -> Verdict:
    """Our attention and every point listened to, against the family's own attention and nobody listening."""
    ids = tokens(model)
    plain: Callable[[], AbstractContextManager[Any]] = getattr(model, "plain", nullcontext)
    with plain():
        expected = model(ids)
    points = [name for name in model.hook_dict if not name.endswith(("hook_ssm_state", "hook_ssm_write"))]
    silent = [name for name in points if name.endswith("hook_pattern")]
    with hooks.record(model, [name for name in points if name not in silent]):
        found = model(ids)
    if not bool(expected.isfinite().all()):
        return "fail", "logits are not finite"
    return _compared(model, found, expected, f"{len(points) - len(silent)} points, {TOKENS} tokens")


@torch.no_grad()
def row_sums(model: Any) -> Verdict:
    names = [name for name in model.hook_dict if name.endswith("hook_pattern")]
    if not names:
        return "n/a", "no softmax layer with a pattern"
    with hooks.record(model, names) as seen:
        model.final_hidden(tokens(model))
    sinks = any(getattr(mixer, "sink_logits", None) is not None for layer in model.layers for mixer in layer.mixers)
    sums = torch.stack([pattern.sum(-1).flatten() for pattern in seen.values()])
    low, high = float(sums.min()), float(sums.max())
    future = max(float(pattern.triu(1).abs().max()) for pattern in seen.values())
    good = future == 0 and high <= 1 + 1e-4 and (low > 0 if sinks else low >= 1 - 1e-4)
    return "pass" if good else "fail", f"{low:.4f} to {high:.4f}{' (learned sinks take the rest)' if sinks else ''}"


@torch.no_grad()
def causality(model: Any) -> Verdict:
    ids = tokens(model)
    changed = ids.clone()
    changed[:, TOKENS // 2 :] = (changed[:, TOKENS // 2 :] + 1) % model.config.vocab_size
    found, expected = model.final_hidden(changed), model.final_hidden(ids)
    if _error(found[:, TOKENS // 2 :], expected[:, TOKENS // 2 :]) == 0:
        return "n/a", "other tokens give the same output"
    half = TOKENS // 2
    return _compared(model, found[:, :half], expected[:, :half], "outputs before a changed token")


@torch.no_grad()
def restoration(model: Any) -> Verdict:
    ids, before = tokens(model), model.final_hidden(tokens(model))
    layers = restrictable(model)
    if not layers:
        return "n/a", "no layer can be restricted"
    with hooks.restrict(model, layers, window=TOKENS):
        whole = model.final_hidden(ids)
    with hooks.restrict(model, layers, window=1):
        narrow = model.final_hidden(ids)
    if not torch.equal(model.final_hidden(ids), before):
        return "fail", "the model is not what it was before a restriction"
    if _error(narrow, before) == 0:
        changed = ids.clone()
        changed[:, 0] = (changed[:, 0] + 1) % model.config.vocab_size
        if torch.equal(model.final_hidden(changed)[:, -1], before[:, -1]):
            return "n/a", "the last token's output does not depend on the first token anyway"
        return "fail", "a restriction to one token changes nothing"
    return _compared(model, whole, before, f"{len(layers)} layers restricted to all {TOKENS} tokens")


@torch.no_grad()
def batching(model: Any) -> Verdict:
    ids = tokens(model, 3)
    alone = torch.cat([model.final_hidden(row[None]) for row in ids])
    return _compared(model, model.final_hidden(ids), alone, "3 rows together and one by one")


@torch.no_grad()
def padding(model: Any) -> Verdict:
    if not hasattr(model, "plain"):
        return "n/a", "native models take no padding"
    if refusal := model.refuses_padding:
        return "n/a", refusal
    ids, pad = tokens(model), 5
    mask = torch.ones(1, TOKENS + pad, dtype=torch.long, device=ids.device)
    mask[:, :pad] = 0
    padded = torch.cat([ids[:, :pad], ids], 1)
    found = model.final_hidden(padded, attention_mask=mask)[:, pad:]
    return _compared(model, found, model.final_hidden(ids), f"{pad} pads before {TOKENS} tokens")


@torch.no_grad()
def decoding(model: Any) -> Verdict:
    ids, given = tokens(model), TOKENS - DECODED
    cache = Cache()
    parts = [model.final_hidden(ids[:, :given], cache=cache)]
    parts += [model.final_hidden(ids[:, t : t + 1], cache=cache) for t in range(given, TOKENS)]
    exact = getattr(model, "has_exact_cache", True)
    how = "" if exact else " (the family's cache is not exact: computed anew for every token)"
    return _compared(model, torch.cat(parts, 1), model.final_hidden(ids), f"{given} + {DECODED} tokens{how}")


def restricted_decoding(model: Any) -> Verdict:
    if not (layers := restrictable(model)):
        return "n/a", "no layer can be restricted"
    with hooks.restrict(model, layers, window=SMALL):
        return decoding(model)


def tied(model: Any) -> Verdict:
    hf = getattr(model, "hf", None)
    if hf is None or not getattr(model.config, "tie_word_embeddings", False):
        return "n/a", "input and output embeddings are separate"
    same = hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    return "pass" if same else "fail", f"one matrix: {same}"


def gradients(model: Any) -> Verdict:
    """From the logits of a middle position to all embeddings: finite, none from the future, some from itself."""
    embedded, middle = model.embed(tokens(model)).detach().requires_grad_(), TOKENS // 2
    with torch.enable_grad():
        hidden = model.final_hidden(embedded)[0, middle]
        (gradient,) = torch.autograd.grad(model.unembed(hidden).float().log_softmax(-1)[0], embedded)
    norm = gradient[0].float().norm(dim=-1)
    good = bool(norm.isfinite().all()) and float(norm[middle]) > 0 and float(norm[middle + 1 :].max()) == 0
    return "pass" if good else "fail", f"{int((norm[: middle + 1] > 0).sum())} of {middle + 1} visible tokens reached"


def representatives(model: Any) -> list[tuple[Any, int]]:
    """The first layer of every kind and window, and the path in it."""
    first: dict[tuple[str, int | None], tuple[Any, int]] = {}
    for layer in model.layers:
        for index, path in enumerate(layer.paths):
            first.setdefault((path.kind, path.window), (layer, index))
    return list(first.values())


def restrictable(model: Any) -> list[int]:
    """Layers all of whose paths can be restricted."""
    return [
        layer.index for layer in model.layers
        if layer.paths and all(hasattr(mixer, "restrictions") for mixer in layer.mixers)
    ]  # fmt: skip


def receptive_field(model: Any, layer: Any, path: int, max_window: int) -> Verdict:
    """Tokens that the mixer's output depends on, by gradient: alone, and restricted to SMALL tokens."""
    if f"blocks.{layer.index}.hook_attn_out" not in model.hook_dict or layer.index not in restrictable(model):
        return "n/a", getattr(layer.mixers[path], "refusal", "the mixer's output has no place in this family's block")
    own = layer.paths[path].window
    if len(layer.paths) > 1:
        own = None
    found = []
    if own is not None and own > max_window:
        found.append((True, f"own window {own} not measured (more than {max_window} tokens)"))
    else:
        length = TOKENS if own is None else own + 8
        reached, expected = _reach(model, layer, length, nullcontext()), length if own is None else own
        found.append((reached == expected, f"{reached} of {length} tokens, declared {own or 'all'}"))
    widest = max(getattr(mixer, "conv_width", 1) for mixer in layer.mixers)
    limited = _reach(model, layer, TOKENS, hooks.restrict(model, [layer.index], window=SMALL))
    expected = min(SMALL, own or SMALL) + widest - 1
    found.append((limited == expected, f"restricted to {SMALL}: {limited} tokens, expected {expected}"))
    return "pass" if all(good for good, _ in found) else "fail", "; ".join(text for _, text in found)


def _reach(model: Any, layer: Any, length: int, restriction: AbstractContextManager[Any]) -> int:
    """Farthest token + 1 that the mixer's output at the last position depends on."""
    held: dict[str, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        held["in"] = x.detach().requires_grad_()
        return held["in"]

    def keep(x: Tensor) -> Tensor:
        held["out"] = x
        return x

    points = {f"blocks.{layer.index}.hook_resid_pre": leaf, f"blocks.{layer.index}.hook_attn_out": keep}
    with restriction, hooks.patch(model, points), torch.enable_grad():
        model.final_hidden(tokens(model, 1, length))
        (gradient,) = torch.autograd.grad(held["out"][0, -1].float().square().sum(), held["in"])
    reached = gradient[0].float().norm(dim=-1).flip(0).nonzero().flatten()
    return int(reached.max()) + 1 if len(reached) else 0
