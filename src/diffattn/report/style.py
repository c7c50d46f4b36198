"""How figures look: colours, markers, fonts, and text that matplotlib takes literally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure

from diffattn.report.text import REPLACEMENT, visible

P = ParamSpec("P")

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours for all kinds of colour vision, without the yellow that a white ground swallows."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.8,
    "text.usetex": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Look:
    """How one model looks in every figure: its name, colour, marker and line."""

    name: str
    color: str
    marker: str
    line: str = "-"


def looks(names: Sequence[str]) -> list[Look]:
    """A look for each model, by its place: colours for seven, then the same ones with other markers and lines."""
    lines = ("-", "--", "-.", ":")
    return [
        Look(
            name,
            PALETTE[index % len(PALETTE)],
            MARKERS[index % len(MARKERS)],
            lines[index // len(PALETTE) % len(lines)],
        )
        for index, name in enumerate(names)
    ]


def styled(make: Callable[P, Figure]) -> Callable[P, Figure]:
    """Make the figure under `STYLE`, and leave matplotlib's settings as they were."""

    @wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return make(*args, **kwargs)

    return wrapper


def literal(text: str) -> str:
    """Text that matplotlib takes literally and has glyphs for; a legend would leave out a leading underscore."""
    text = "".join(one if ord(one) in _glyphs() else REPLACEMENT for one in visible(text).replace("\n", " "))
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


@cache
def _glyphs() -> frozenset[int]:
    path = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans"))
    return frozenset(font_manager.get_font(path).get_charmap())
