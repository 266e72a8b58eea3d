"""One look for all figures: colours safe for colour-blind readers, told apart in grey by marker, line and hatch.

Colours: Okabe and Ito, "Color Universal Design" (2008), yellow left out as it fades on white.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")  # no display needed; before pyplot is imported anywhere

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from analyses.atomic import atomic_path
from models.errors import InputError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
SUFFIXES = (".png", ".pdf", ".svg")
SETTINGS: Any = {  # a dict of rcParams
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.prop_cycle": cycler(color=COLOURS),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Look:
    """How one series is drawn: `line` for curves (keyword arguments of plot), `bar` for areas (of bar)."""

    color: str
    marker: str
    linestyle: str
    hatch: str

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments of Axes.plot and errorbar."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle}

    @property
    def bar(self) -> dict[str, Any]:
        """Keyword arguments of Axes.bar."""
        return {"facecolor": self.color, "hatch": self.hatch, "edgecolor": "black"}


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name, in order; no two have the same marker and line, nor the same colour and line."""
    names = list(dict.fromkeys(names))
    limit = len(COLOURS) * len(LINES)
    if len(names) > limit:
        raise InputError(f"{len(names)} series in one figure, at most {limit} can be told apart; draw fewer files")
    return {
        name: Look(
            COLOURS[index % len(COLOURS)],
            MARKERS[index % len(MARKERS)],
            LINES[index // len(COLOURS)],
            HATCHES[index % len(HATCHES)],
        )
        for index, name in enumerate(names)
    }


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """The settings of all figures, for a block; the caller's own settings come back afterwards."""
    with matplotlib.rc_context(SETTINGS):
        yield


def save(figure: Figure, path: Path | str, source: str = "") -> None:
    """Write the figure atomically as PNG, PDF or SVG by its suffix; the same figure gives the same bytes. Closes it."""
    path = Path(path)
    suffix = check_suffix(path)
    metadata: dict[str, Any] = {} if suffix == ".png" else {"CreationDate" if suffix == ".pdf" else "Date": None}
    metadata["Source" if suffix != ".pdf" else "Subject"] = source
    salt = hashlib.sha256(source.encode()).hexdigest()  # SVG ids, random otherwise
    with atomic_path(path) as temporary, matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(temporary, format=suffix[1:], metadata=metadata)
    plt.close(figure)


def check_suffix(path: Path) -> str:
    """The suffix of a figure file, one of SUFFIXES."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"--out {path}: suffix {suffix!r}, expected one of {', '.join(SUFFIXES)}; rename the figure")
    return suffix
