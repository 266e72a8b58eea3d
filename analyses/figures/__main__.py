"""Draw stored results: python -m analyses.figures FILE.h5 [FILE.h5 ...] --out FIGURE.png|pdf|svg

The root attribute `analysis` of the files names the module of this package whose `draw(results) -> Figure` draws them.
"""

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import tyro

from models import command_line
from models.errors import InputError

PACKAGE = "analyses.figures"
NOT_ANALYSES = ("style", "receptive_field_controls")


@dataclass(frozen=True)
class Config:
    """Draw one figure from the results of one analysis (several files are compared in it)."""

    out: Path
    """The figure: .png, .pdf or .svg."""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE.h5 [FILE.h5 ...]")] = ()
    """Results that `python -m analyses.NAME` wrote, all of the same analysis."""


def main(config: Config) -> None:
    """Check everything cheap first, then read, draw and save."""
    from analyses import store
    from analyses.figures import style

    if not config.files:
        raise InputError("no result given; name at least one FILE.h5 that an analysis wrote")
    style.check_suffix(config.out)
    drawer = drawer_of({path: store.read_attributes(path).get("analysis", "") for path in config.files})
    results = [store.read(path) for path in config.files]
    with style.styled():
        figure = drawer.draw(results)
        style.save(figure, config.out, source=" ".join(path.name for path in config.files))
    print(config.out)


def drawer_of(analyses: dict[Path, str]) -> ModuleType:
    """The module that draws files {path: analysis}; InputError if they differ or nobody draws them."""
    names = sorted(set(analyses.values()))
    if len(names) > 1:
        listed = ", ".join(f"{path}: {name}" for path, name in analyses.items())
        raise InputError(f"the files come from {len(names)} analyses ({listed}); draw one analysis at a time")
    name = names[0]
    drawn = f"figures exist for: {', '.join(available()) or 'none'}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in NOT_ANALYSES:
        raise InputError(f"{next(iter(analyses))}: analysis {name!r} has no figure; {drawn}")
    try:
        return importlib.import_module(f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{PACKAGE}.{name}":
            raise
        raise InputError(f"{next(iter(analyses))}: analysis {name!r} has no figure; {drawn}") from error


def available() -> list[str]:
    """Analyses that have a figure."""
    folder = Path(__file__).parent
    return sorted(path.stem for path in folder.glob("[a-z]*.py") if path.stem not in NOT_ANALYSES)


def cli(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    command_line.run(main, Config, prog=f"python -m {PACKAGE}", arguments=arguments)


if __name__ == "__main__":
    cli()
