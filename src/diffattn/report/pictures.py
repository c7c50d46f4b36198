"""Images, perturbations and attention maps as PNG data URIs."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import matplotlib
import numpy as np
from PIL import Image

from diffattn.audit.facts import Example
from diffattn.audit.record import AuditRecord

SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
_MOST_TOKENS = 128


@dataclass(frozen=True)
class Tile:
    """A picture with what it shows in words."""

    uri: str
    alt: str


@dataclass(frozen=True)
class MapColumn:
    """One column of the attention maps: the clean tile, the attacked one, and the scale that both share."""

    title: str
    clean: Tile
    attacked: Tile
    scale: str = ""
    bar: str = ""


def image_uri(image: np.ndarray, *, most: int | None = None) -> str:
    """An image [1 or 3, height, width] in [0, 1] as a PNG data URI, one pixel a pixel, or `most` pixels an edge."""
    pixels = np.rint(np.clip(image, 0.0, 1.0) * 255).astype(np.uint8)
    picture = Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)))
    if most is not None:
        picture.thumbnail((most, most), Image.Resampling.BOX)
    return _png(picture)


def magnified(clean: np.ndarray, adversarial: np.ndarray, limit: float | None) -> tuple[np.ndarray, float | None]:
    """The perturbation around mid-grey: 0.5 + f (adversarial - clean), with f = 0.5 / limit.

    Args:
        clean: [c, h, w] in [0, 1].
        adversarial: the same shape.
        limit: what maps to black and white: eps for L_inf; None takes the largest change there is.

    Returns:
        the picture and f; f is None where nothing changed.
    """
    change = adversarial.astype(np.float64) - clean
    largest = limit or float(np.abs(change).max())
    if not change.any() or largest <= 0:
        return np.full_like(clean, 0.5), None
    factor = 0.5 / largest
    return np.clip(0.5 + factor * change, 0.0, 1.0), factor


def as_grid(attention: np.ndarray) -> tuple[np.ndarray, str]:
    """What is shown of a map [queries, keys], and which part that is.

    The class token's row over the patch grid where keys - 1 is a square, the mean over queries where keys is one,
    the whole matrix elsewhere (block means where it has more than 128 rows or columns).
    """
    keys = attention.shape[1]
    for first, what in ((1, "class token's row over the patches"), (0, "mean over queries, over the patches")):
        edge = math.isqrt(keys - first)
        if edge >= 1 and edge**2 == keys - first:
            row = attention[0, 1:] if first else attention.mean(axis=0)
            return row.reshape(edge, edge), what
    return _reduced(attention), "whole matrix, a row per query"


def map_columns(record: AuditRecord, example: Example) -> tuple[list[MapColumn], str]:
    """The attention maps of an example: each weighted branch's magnitude, and the combined map, clean and attacked.

    Returns:
        the columns, and which part of the maps they show; no columns where the record holds no map.
    """
    clean, attacked = record.branch_maps(example, "clean"), record.branch_maps(example, "adversarial")
    if not clean:
        return [], ""
    shown = as_grid(clean[0])[1]
    pairs = [(as_grid(np.abs(one))[0], as_grid(np.abs(two))[0]) for one, two in zip(clean, attacked, strict=True)]
    top = max(float(max(one.max(), two.max())) for one, two in pairs) or 1.0
    names = ["A₁", "λ·A₂"] if len(pairs) == 2 else [f"|w{number} A{number}|" for number in range(1, len(pairs) + 1)]
    columns = [
        _column(name if len(pairs) > 1 else "A", *pair, low=0.0, high=top, colors=SEQUENTIAL)
        for name, pair in zip(names, pairs, strict=True)
    ]
    if len(pairs) > 1:
        both = as_grid(sum(clean[1:], clean[0]))[0], as_grid(sum(attacked[1:], attacked[0]))[0]
        most = float(max(np.abs(one).max() for one in both)) or 1.0
        title = "A₁ − λ·A₂" if len(pairs) == 2 else "combined"
        columns.append(_column(title, *both, low=-most, high=most, colors=DIVERGING))
    return columns, shown


def _column(
    title: str, clean: np.ndarray, attacked: np.ndarray, *, low: float, high: float, colors: str
) -> MapColumn:
    def tile(grid: np.ndarray, which: str) -> Tile:
        most = np.unravel_index(np.abs(grid).argmax(), grid.shape)
        alt = f"{title}, {which}: from {grid.min():.2g} to {grid.max():.2g}, strongest in row {most[0] + 1}, "
        return Tile(colored_uri(grid, low, high, colors), f"{alt}column {most[1] + 1}")

    scale = f"±{high:.2g}" if low < 0 else f"0 to {high:.2g}"
    bar = colored_uri(np.linspace(low, high, 64)[None], low, high, colors)
    return MapColumn(title, tile(clean, "clean"), tile(attacked, "attacked"), scale, bar)


def colored_uri(grid: np.ndarray, low: float, high: float, colors: str) -> str:
    """A matrix through a colour map from `low` to `high`, as a PNG data URI."""
    share = (grid.astype(np.float64) - low) / ((high - low) or 1.0)
    return _png(Image.fromarray(np.ascontiguousarray(matplotlib.colormaps[colors](share, bytes=True)[..., :3])))


def _reduced(matrix: np.ndarray) -> np.ndarray:
    for axis in (0, 1):
        if matrix.shape[axis] > _MOST_TOKENS:
            starts = np.unique(np.linspace(0, matrix.shape[axis], _MOST_TOKENS, endpoint=False).astype(int))
            counts = np.diff(np.append(starts, matrix.shape[axis]))
            total = np.add.reduceat(matrix, starts, axis=axis)
            matrix = total / (counts[:, None] if axis == 0 else counts)
    return matrix


def _png(picture: Image.Image) -> str:
    content = io.BytesIO()
    picture.save(content, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
