"""Hook points by name: checked names, and edits that are counted so that one that never acted cannot be scored."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

Edit = Callable[[Tensor], Tensor]


def resolve(model: Any, names: str | Iterable[str] | Callable[[str], bool]) -> list[str]:
    """The hook points that one name, several, or a predicate over names stands for, without repetition.

    Raises ValueError for an unknown name, with near ones, and for an empty selection.
    """
    known = list(model.hook_dict)
    if callable(names):
        wanted = [name for name in known if names(name)]
    else:
        wanted = [names] if isinstance(names, str) else list(names)
    if not wanted:
        raise ValueError("no hook point is named; give a hook name, several, or a predicate that matches one.")
    for name in wanted:
        if name not in model.hook_dict:
            near = ", ".join(difflib.get_close_matches(name, known, n=4, cutoff=0.5)) or "see model.hook_dict"
            raise ValueError(f"the model has no hook point {name!r}; near names: {near}.")
    return list(dict.fromkeys(wanted))


@contextmanager
def edited(model: Any, edits: Mapping[str, Edit]) -> Iterator[dict[str, int]]:
    """Inside, each named point's tensor is replaced by edit(tensor); yields how often each has fired so far.

    The caller's own hooks stay; those added before see the tensor unedited. Raises ValueError at the end, unless an
    exception is already on its way, if a point never fired or some fired more often than others.
    """
    names = resolve(model, edits)
    fired = dict.fromkeys(names, 0)

    def act(module: Any, args: Any, value: Tensor, name: str) -> Tensor:
        fired[name] += 1
        new = edits[name](value)
        if new.shape != value.shape:
            raise ValueError(
                f"the edit of {name} made shape {list(new.shape)} of {list(value.shape)}; expected the same shape."
            )
        return new.to(value)

    handles = []
    try:
        for name in names:
            handles.append(model.hook_dict[name].register_forward_hook(partial(act, name=name)))
        yield fired
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name, count in fired.items() if count == 0]
    if silent:
        raise ValueError(f"{', '.join(silent)} never fired, so the edit did not act; run the model inside the block.")
    if len(set(fired.values())) > 1:
        raise ValueError(f"the edited points fired unequally often ({fired}); expected once each in every forward.")
