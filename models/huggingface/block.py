"""The residual-stream hook points of one Hugging Face block, fired by module hooks on the block and its children.

hook_attn_out and hook_mlp_out are what is added to the stream, scaled as the family scales it and after a post-norm, so
resid_mid = resid_pre + attn_out and resid_post = resid_mid + mlp_out hold as in native models. An edit of the sum of
several outputs (parallel mixers, a shared expert) or of resid_mid changes the output that is added last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from models.huggingface.layout import Layout, Term, stream
from models.mixers.mixer import listened


class HuggingFaceBlock(nn.Module):
    """`attn` is the layer's mixer (blocks.N.attn.hook_q), or holds both of a parallel layer (attn.full, .efficient)."""

    def __init__(self, block: nn.Module, mixers: Sequence[nn.Module]):
        super().__init__()
        self.__dict__["hf"] = block
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()
        if len(mixers) == 1:
            self.attn = mixers[0]
        elif mixers:
            self.attn = nn.ModuleDict(dict(zip(("full", "efficient"), mixers, strict=True)))
        self._x: Tensor | None = None
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave)

    def settle(self, layout: Layout, in_tuple: int) -> None:
        """Points for the parts that were recognised; the others do not exist. `in_tuple`: see Layout."""
        self.in_tuple = in_tuple
        children = dict(self.__dict__["hf"].named_children())
        if layout.attn:
            self.hook_attn_out = HookPoint()
        if layout.mlp:
            self.hook_mlp_out = HookPoint()
        if layout.has_mid:
            self.hook_resid_mid = HookPoint()
            children[layout.first].register_forward_pre_hook(self._remember, with_kwargs=True)
        for name, terms in (("attn", layout.attn), ("mlp", layout.mlp)):
            held: dict[str, Tensor] = {}
            for term in terms:
                act = partial(self._written, part=name, term=term, terms=terms, held=held)
                children[term.name].register_forward_hook(act)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not listened(self.hook_resid_pre):
            return None
        x = stream(args, kwargs)
        assert x is not None
        new = self.hook_resid_pre(x)
        args = tuple(new if value is x else value for value in args)
        return args, {name: new if value is x else value for name, value in kwargs.items()}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._x = None
        if not listened(self.hook_resid_post):
            return None
        if isinstance(output, tuple):
            return (self.hook_resid_post(output[0]), *output[1:])
        return self.hook_resid_post(output)

    def _remember(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._x = stream(args, kwargs) if listened(self.hook_resid_mid) else None

    def _written(
        self, module: nn.Module, args: Any, output: Any, part: str, term: Term, terms: tuple[Term, ...],
        held: dict[str, Tensor],
    ) -> Any:  # fmt: skip
        point: HookPoint = getattr(self, f"hook_{part}_out")
        mid: HookPoint | None = getattr(self, "hook_resid_mid", None) if part == "attn" else None
        if not listened(point) and not (mid is not None and listened(mid)):
            return None
        value = output[0] if isinstance(output, tuple) else output
        if term.name in held:
            held.clear()  # of a forward that failed half-way
        held[term.name] = value
        if len(held) < len(terms):
            return None
        write = sum((scaled(held[t.name], t.factor) for t in terms[1:]), scaled(held[terms[0].name], terms[0].factor))
        held.clear()
        new = self._through(point, mid, write)
        if new is write:
            return None
        value = new / term.factor if len(terms) == 1 else value + (new - write) / term.factor
        return (value, *output[1:]) if isinstance(output, tuple) else value

    def _through(self, point: HookPoint, mid: HookPoint | None, write: Tensor) -> Tensor:
        """The write after its own point and after that of the stream it makes."""
        new: Tensor = point(write)
        if mid is None or not listened(mid):
            return new
        x, self._x = self._x, None
        assert x is not None
        before = x + new
        after = mid(before)
        return new if after is before else after - x


@contextmanager
def skipped(blocks: Iterable[Any], stream: Tensor) -> Iterator[None]:
    """Inside, these blocks return `stream` without computing anything."""
    changed = []
    try:
        for own in blocks:
            block = own.__dict__["hf"]
            if "forward" in vars(block):
                raise ValueError(
                    f"{type(block).__name__} has a forward of its own already; expected an unwrapped block."
                )
            value = (stream, *[None] * (own.in_tuple - 1)) if own.in_tuple else stream
            block.forward = partial(_given, value)
            changed.append(block)
        yield
    finally:
        for block in changed:
            del block.forward


def _given(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
