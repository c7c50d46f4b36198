"""The figures: records in, matplotlib `Figure` out. No pyplot, no state; every interval is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffattn.audit.facts import AttackFacts, LayerSensitivity, Measured
from diffattn.audit.record import AuditRecord
from diffattn.report.style import Look, literal, styled
from diffattn.report.text import shorten

_WIDTH, _HEIGHT, _LEGEND_LINE = 4.6, 2.9, 0.19
_LARGEST, _MOST_TICKS, _LONGEST_NAME = 1e30, 13, 30
_LOG_RANGE = 10.0


@dataclass(frozen=True)
class Points:
    """One line of a figure: positions, values and intervals (None where there is none), and dots beside it."""

    look: Look
    x: Sequence[float]
    y: Sequence[Measured | None]
    label: str
    dots: Sequence[tuple[float, float | None]] = ()


@styled
def asr_figure(attacks: Sequence[tuple[Look, Sequence[AttackFacts]]], *, title: str) -> Figure:
    """ASR against eps, a line per model, for one attack and norm.

    Args:
        attacks: each model's look and its figures, one per budget.
        title: names the attack and the norm.
    """
    facts = [one for _, found in attacks for one in found]
    budgets = sorted({one.eps_value: one.eps for one in facts}.items())
    positive = [value for value, _ in budgets if value > 0]
    logarithmic = len(positive) == len(budgets) and positive[-1] / positive[0] > 8

    def place(value: float) -> float:
        return math.log2(value) if logarithmic else min(value, _LARGEST)

    spread = _spread([place(value) for value, _ in budgets])
    lines = []
    for index, (look, found) in enumerate(attacks):
        ordered = sorted(found, key=lambda one: one.eps_value)
        shift = 0.012 * spread * (index - (len(attacks) - 1) / 2)
        counts = sorted({one.n for one in ordered})
        n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        lines.append(
            Points(
                look,
                [place(one.eps_value) + shift for one in ordered],
                [
                    None if one.asr is None else _percent(Measured(one.asr, one.asr_low, one.asr_high))
                    for one in ordered
                ],
                f"{_name(look.name)} (n = {n})",
            )
        )
    figure, axes = _draw(lines, title=title)
    norm = facts[0].norm if facts else ""
    scale = ", log scale" if logarithmic else ""
    axes.set_xlabel(literal(f"eps ({norm} distance, pixels in [0, 1]{scale})"))
    axes.set_ylabel("ASR (% of clean-correct)")
    axes.set_ylim(-3, 103)
    _ticks(axes, [(place(value), label) for value, label in budgets])
    return figure


@styled
def layer_figure(
    lines: Sequence[Points],
    *,
    title: str,
    ylabel: str,
    limits: tuple[float, float] | None = None,
    zero: float | None = None,
    positive: bool = False,
    alongside: Sequence[Points] = (),
    xlabel: str = "attention layer, from the input",
) -> Figure:
    """Any figure by layer, or by another whole number such as the epoch: a line with intervals per `Points`.

    Args:
        lines: what is drawn; x are whole numbers.
        title: names what is shown.
        ylabel: the quantity and its unit.
        limits: of the vertical axis; None fits them.
        zero: where a reference line lies.
        positive: whether the values are positive, so that more than a decade calls for a logarithmic axis.
        alongside: lines of other figures that shall have the same vertical axis.
        xlabel: what x counts.
    """
    ranks = {x: rank for rank, x in enumerate(sorted({x for one in lines for x in one.x}))}
    shifted = []
    for index, one in enumerate(lines):
        shift = min(0.5, 0.1 * len(lines)) * ((index + 0.5) / len(lines) - 0.5)
        dots = [(ranks[x] + shift, y) for x, y in one.dots if x in ranks]
        shifted.append(replace(one, x=[ranks[x] + shift for x in one.x], dots=dots))
    figure, axes = _draw(shifted, title=title)
    axes.set_xlabel(literal(xlabel))
    axes.set_ylabel(literal(ylabel))
    if zero is not None:
        axes.axhline(zero, color="#5b6470", linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.5)
    if positive:
        _positive_axis(axes, [*lines, *alongside])
    if limits is not None:
        axes.set_ylim(*limits)
    _ticks(axes, [(rank, f"{x:g}") for x, rank in ranks.items()])
    axes.set_xlim(-0.5, max(len(ranks) - 0.5, 0.5))
    return figure


def sensitivity_points(
    rows: Iterable[LayerSensitivity],
    look: Look,
    quantity: str,
    *,
    label: str | None = None,
    scale: float = 1.0,
    heads: bool = True,
) -> Points:
    """The line of one model for one figure of `LayerSensitivity`: all heads together, single heads as dots.

    Args:
        rows: of one `wrt`, `reading` and `lambda_`.
        look: of the model.
        quantity: a field of `LayerSensitivity`, such as "cos_theta".
        label: of the line; the model's name and n where None.
        scale: multiplies every value; 100 makes percent.
        heads: whether single heads are shown.
    """
    rows = sorted(rows, key=lambda row: row.index)
    whole = [row for row in rows if row.head == "all"]
    found = [(row.index, getattr(row, quantity)) for row in rows if heads and row.head != "all"]
    return Points(
        look,
        [row.index for row in whole],
        [_scaled(getattr(row, quantity), scale) for row in whole],
        label or f"{_name(look.name)} (n = {max((row.n for row in whole), default=0)})",
        [(index, None if one is None or one.value is None else scale * one.value) for index, one in found],
    )


def history_points(record: AuditRecord, look: Look, key: str, *, scale: float = 1.0) -> Points:
    """One entry of the training history against the epoch."""
    x, y = [], []
    for entry in record.history:
        epoch, value = entry.get("epoch"), entry.get(key)
        if _is_number(epoch) and _is_number(value):
            x.append(float(epoch))
            y.append(Measured(scale * float(value)))
    return Points(look, x, y, _name(look.name))


def _draw(lines: Sequence[Points], *, title: str) -> tuple[Figure, Axes]:
    columns = 1 if max((len(one.label) for one in lines), default=0) > 24 else 2
    height = _HEIGHT + _LEGEND_LINE * math.ceil(len(lines) / columns)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(literal(title))
    handles = []
    crowded = max((len(one.x) for one in lines), default=0) > 20
    for one in lines:
        x = np.asarray(one.x, dtype=float)
        y, low, high = (_column(one.y, name) for name in ("value", "low", "high"))
        errors = np.stack([np.nan_to_num(np.maximum(y - low, 0)), np.nan_to_num(np.maximum(high - y, 0))])
        if one.dots:
            dots = np.array([[dot[0], _number(dot[1])] for dot in one.dots], dtype=float)
            axes.plot(dots[:, 0], dots[:, 1], ".", color=one.look.color, alpha=0.35, markersize=4, zorder=2)
        handles.append(
            axes.errorbar(
                x,
                y,
                yerr=errors if errors.any() else None,
                color=one.look.color,
                marker="" if crowded else one.look.marker,
                linestyle=one.look.line,
                capsize=3,
                elinewidth=1.3,
            )
        )
    figure.legend(handles, [literal(one.label) for one in lines], loc="outside lower center", ncols=columns)
    return figure, axes


def _positive_axis(axes: Axes, lines: Sequence[Points]) -> None:
    """From 0, or logarithmic where the values range over more than a decade."""
    values = np.concatenate([_column(one.y, "value") for one in lines]) if lines else np.empty(0)
    values = values[values > 1 / _LARGEST]
    if values.size and values.max() / values.min() > _LOG_RANGE:
        axes.set_yscale("log")
        axes.set_ylim(values.min() / 2, values.max() * 2)
        few = values.max() / values.min() < 300
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,), numticks=8))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
    else:
        ends = np.concatenate([_column(one.y, "high") for one in lines]) if lines else values
        top = max((float(end) for end in (*values, *ends) if math.isfinite(end)), default=1.0)
        axes.set_ylim(0, 1.06 * top or 1.0)


def _ticks(axes: Axes, places: Sequence[tuple[float, str]]) -> None:
    """Label as many places as fit, the first one always."""
    spread = _spread([place for place, _ in places])
    kept: list[tuple[float, str]] = []
    for place, label in places:
        if not kept or place - kept[-1][0] >= spread / _MOST_TICKS * max(1.0, len(label) / 5):
            kept.append((place, shorten(label, 12)))
    axes.set_xticks([place for place, _ in kept], [literal(label) for _, label in kept])
    if places:
        axes.set_xlim(places[0][0] - 0.08 * spread, places[-1][0] + 0.08 * spread)


def _spread(places: Sequence[float]) -> float:
    return (max(places) - min(places) if places else 0.0) or 1.0


def _column(values: Sequence[Measured | None], name: str) -> np.ndarray:
    return np.array([_number(None if one is None else getattr(one, name)) for one in values], dtype=float)


def _number(value: float | None) -> float:
    """NaN, which draws nothing, for an absent figure and for one that no axis can hold."""
    return math.nan if value is None or abs(value) > _LARGEST else value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _scaled(one: Measured | None, scale: float) -> Measured | None:
    if one is None:
        return None
    return Measured(*(None if end is None else scale * end for end in (one.value, one.low, one.high)))


def _percent(one: Measured) -> Measured | None:
    return _scaled(one, 100.0)


def _name(name: str) -> str:
    return shorten(name, _LONGEST_NAME)
