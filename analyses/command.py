"""What the commands of the analyses do alike: a plan run by all ranks of a job, its result shown by the first rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from analyses import distributed

if TYPE_CHECKING:
    from analyses.result import Result


class Plan(Protocol):
    """What every analysis decides before it computes."""

    def identity(self) -> Mapping[str, Any]: ...

    def attributes(self) -> Mapping[str, Any]: ...


AnyPlan = TypeVar("AnyPlan", bound=Plan)


@contextlib.contextmanager
def planned(
    make: Callable[[Any, str], AnyPlan], config: Any, analysis: str
) -> Iterator[tuple[AnyPlan, dict[str, Any]]]:
    """`make(config, device)` inside this process's job, and what run_units and run_stages are given for any plan."""
    with distributed.session() as ranks:
        plan = make(config, ranks.device)
        common = {
            "target": config.out,
            "analysis": analysis,
            "config": plan.identity(),
            "attributes": plan.attributes,
            "overwrite": config.overwrite,
            "ranks": ranks,
        }
        yield plan, common


def show(result: Result, table: Callable[[Result], str], out: Path) -> None:
    """Print the table and where the result lies, on the first rank alone."""
    if distributed.is_first():
        print(table(result))
        print(out)
