"""Functions that a family's code looks up by name, replaced while one of its mixers runs, and only then.

A mixer's forward is entered and left through module hooks, which also act when a block is computed again in backward;
what was replaced is put back on leaving, by an exception too. Nothing is replaced unless somebody listens or a
restriction is in force.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

Frame = list[tuple[Any, str, bool, Any]]
_frames: list[Frame] = []
_mixers: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
_running: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def attach(site: nn.Module, mixer: Any) -> None:
    """Let `mixer.replacements()` (name -> function of the original and its arguments) act inside site's forward.

    Names are looked for in the modeling file of the site; `mixer.methods()` are (object, name, function) instead.
    `mixer.entered(arguments)` is told the arguments of every forward, by name. A site that several layers share
    (Zamba2) has a mixer for each, told apart by the argument layer_idx.
    """
    mixers = _mixers.setdefault(site, [])
    mixers.append(mixer)
    if len(mixers) > 1:
        return
    signature = inspect.signature(type(site).forward)
    home = sys.modules[type(site).__module__]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = signature.bind_partial(module, *args, **kwargs).arguments
        arguments = {**bound, **bound.get("kwargs", {})}
        own = _running[module] = _chosen(mixers, arguments)
        own.entered(arguments)
        swaps = [(home, name, function) for name, function in own.replacements().items() if hasattr(home, name)]
        swaps += own.methods() if hasattr(own, "methods") else []
        _frames.append([_replaced(owner, name, function) for owner, name, function in swaps])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _frames:
            _restore(_frames.pop())

    site.register_forward_pre_hook(enter, with_kwargs=True)
    site.register_forward_hook(leave, always_call=True)


def refuse_attached(hf: nn.Module) -> None:
    """Raises ValueError for a model that has mixers attached already: a second set would fight for the same names."""
    for name, module in hf.named_modules():
        if module in _mixers:
            raise ValueError(
                f"{name} of this {type(hf).__name__} belongs to a HuggingFaceLM already; expected one without. "
                "Use the HuggingFaceLM made first, or load the model again."
            )


def running(site: nn.Module) -> Any:
    """The mixer for which this site's forward runs; None for a module without one."""
    return _running.get(site)


def restore_all() -> None:
    """Put back what an interrupted forward (a KeyboardInterrupt) may have left; nothing to do otherwise."""
    while _frames:
        _restore(_frames.pop())


def _chosen(mixers: list[Any], arguments: Mapping[str, Any]) -> Any:
    if len(mixers) == 1:
        return mixers[0]
    return next(mixer for mixer in mixers if mixer.layer == arguments["layer_idx"])


def _replaced(owner: Any, name: str, function: Any) -> tuple[Any, str, bool, Any]:
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, partial(function, original))
    return owner, name, own, original


def _restore(frame: Frame) -> None:
    for owner, name, own, original in reversed(frame):
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
