"""How a family's block writes into the residual stream, found by experiment, and the hook points that follow from it.

Every child of a block answers with noise of unit size; what the block makes of it, x + sum of c_i o_i, tells by least
squares which outputs are added, with which factors, and what the second half of the block reads. So pre-norm,
post-norm, parallel and scaled blocks need no code each, in any dtype, and a block that does something else is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class Term(NamedTuple):
    """Child `name` of the block, whose output is added times `factor`."""

    name: str
    factor: float


@dataclass(frozen=True)
class Layout:
    """x + attn = mid, mid + mlp = the block's output. () where a block has no such part or none that was recognised."""

    attn: tuple[Term, ...] = ()
    mlp: tuple[Term, ...] = ()
    has_mid: bool = False
    first: str = ""
    """The child that reads the block's input."""
    in_tuple: int = 0
    """Length of the tuple in which the block returns its output; 0: it returns the tensor."""


@dataclass
class _Seen:
    x: Tensor | None = None
    y: Tensor | None = None
    in_tuple: int = 0
    calls: list[tuple[str, Tensor | None, Tensor]] = field(default_factory=list)


@contextmanager
def answering_noise(blocks: Sequence[nn.Module], seed: int = 0) -> Iterator[list[_Seen]]:
    """Inside, one forward: children of the blocks return noise, and inputs and outputs are kept."""
    seen, handles = [_Seen() for _ in blocks], []
    generator = torch.Generator().manual_seed(seed)

    def start(module: nn.Module, args: Any, kwargs: Any, own: _Seen) -> None:
        own.x = stream(args, kwargs)

    def answer(module: nn.Module, args: Any, kwargs: Any, output: Any, own: _Seen, name: str) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        if not isinstance(value, Tensor) or own.x is None or value.shape != own.x.shape:
            return None
        noise = torch.randn(value.shape, generator=generator).to(value)
        own.calls.append((name, stream(args, kwargs), noise))
        return (noise, *output[1:]) if isinstance(output, tuple) else noise

    def end(module: nn.Module, args: Any, output: Any, own: _Seen) -> None:
        own.in_tuple = len(output) if isinstance(output, tuple) else 0
        own.y = output[0] if own.in_tuple else output

    try:
        for block, own in zip(blocks, seen, strict=True):
            handles.append(block.register_forward_pre_hook(partial(start, own=own), with_kwargs=True))
            handles.append(block.register_forward_hook(partial(end, own=own)))
            for name, child in block.named_children():
                act = partial(answer, own=own, name=name)
                handles.append(child.register_forward_hook(act, with_kwargs=True))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def stream(args: Any, kwargs: Any) -> Tensor | None:
    """The first [B, T, D] tensor among a module's arguments: its hidden states."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 3), None)


def layout_of(block: nn.Module, seen: _Seen, mixes: Callable[[str], bool]) -> Layout:
    """`mixes(child)`: whether the child holds a mixer, which tells the two parts of a parallel block apart."""
    if seen.x is None or seen.y is None or len({name for name, _, _ in seen.calls}) < len(seen.calls):
        return Layout(in_tuple=seen.in_tuple)
    outputs = {name: output for name, _, output in seen.calls}
    whole = _fit(seen.y, seen.x, outputs)
    if whole is None:
        return Layout(in_tuple=seen.in_tuple)
    first = next((name for name, read, _ in seen.calls if read is not None and torch.equal(read, seen.x)), "")
    terms = tuple(Term(name, _exact(block, factor)) for name, factor in whole.items())
    for position, (_, read, _) in enumerate(seen.calls):
        before = {name: output for name, _, output in seen.calls[:position]}
        if read is None or not before or any(torch.equal(read, x) for x in (seen.x, *before.values())):
            continue
        part = _fit(read, seen.x, before)
        if part and set(part) < set(whole) and first:
            attn = tuple(term for term in terms if term.name in part)
            return Layout(attn, tuple(term for term in terms if term not in attn), True, first, seen.in_tuple)
    attn = tuple(term for term in terms if mixes(term.name))
    return Layout(attn, tuple(term for term in terms if term not in attn), False, first, seen.in_tuple)


def _fit(target: Tensor, x: Tensor, outputs: dict[str, Tensor]) -> dict[str, float] | None:
    """{child: factor} with target = x + sum of factor * output, None if that is not so."""
    if target.shape != x.shape:
        return None
    columns = torch.stack([value.detach().double().flatten().cpu() for value in (x, *outputs.values())], 1)
    wanted = target.detach().double().flatten().cpu()
    found = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
    tolerance = TOLERANCE[x.dtype]
    rest = (columns @ found - wanted).norm() / wanted.norm()
    if not rest < tolerance or abs(float(found[0]) - 1) > tolerance:
        return None
    factors = dict(zip(outputs, found[1:].tolist(), strict=True))
    return {name: factor for name, factor in factors.items() if abs(factor) > tolerance}


def _exact(block: nn.Module, factor: float) -> float:
    """The number among 1 and the block's own attributes that the fitted factor stands for, if there is one."""
    known = [1.0, *(value for value in vars(block).values() if isinstance(value, float))]
    near = min(known, key=lambda value: abs(value - factor))
    return near if abs(near - factor) < 1e-3 * max(1.0, abs(near)) else factor
