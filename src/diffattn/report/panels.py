"""Which figures a page shows: for each section, panels of one figure with a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup
from matplotlib.figure import Figure

from diffattn.audit.facts import LayerLipschitz, LayerSensitivity
from diffattn.audit.record import AuditRecord
from diffattn.report.comparison import Setting
from diffattn.report.figures import (
    Points,
    asr_figure,
    history_points,
    layer_figure,
    sensitivity_points,
)
from diffattn.report.style import Look
from diffattn.report.svg import inline_svg
from diffattn.report.text import number, shorten

Reading = tuple[str, str, str]
"""What is differentiated, by what, and how λ is treated: (reading, wrt, lambda_)."""

PER_MODEL = 24


@dataclass(frozen=True)
class Panel:
    """A figure as it stands in the page."""

    svg: Markup


class Pen:
    """Draws figures with ids that no other figure of the page has."""

    def __init__(self) -> None:
        self._drawn = 0

    def panel(self, figure: Figure, label: str, lines: Sequence[Points] = ()) -> Panel:
        """The figure as SVG; its label tells the lines' values to who cannot see it."""
        self._drawn += 1
        return Panel(inline_svg(figure, prefix=f"f{self._drawn}", label=shorten(_told(label, lines), 1500)))


def asr_panels(pen: Pen, rows: Sequence[Setting], looks: Sequence[Look]) -> list[Panel]:
    """ASR against eps, a panel for each attack and norm."""
    panels = []
    for label, norm in dict.fromkeys((row.label, row.norm) for row in rows):
        group = [row for row in rows if (row.label, row.norm) == (label, norm)]
        attacks = [
            (look, [one for row in group if (one := row.facts[place]) is not None])
            for place, look in enumerate(looks)
        ]
        attacks = [(look, facts) for look, facts in attacks if facts]
        title = f"{shorten(label, 26)}, {shorten(norm, 10)}: ASR against eps"
        told = "; ".join(
            f"{look.name}: "
            + ", ".join(f"{'none' if one.asr is None else f'{one.asr:.0%}'} at {one.eps}" for one in facts)
            for look, facts in attacks
        )
        panels.append(pen.panel(asr_figure(attacks, title=title), f"{title}. {told}"))
    return panels


def readings(records: Sequence[AuditRecord]) -> list[Reading]:
    """The readings of the sensitivity that any record has; Jacobian, layer's input and frozen λ go first."""
    found = {(row.reading, row.wrt, row.lambda_) for record in records for row in record.sensitivity}
    return sorted(found, key=lambda one: (one[2] != "frozen", one[1] != "input", one[0] != "jacobian"))


def reading_words(reading: Reading) -> str:
    """A reading as a caption says it."""
    what = "Jacobian of the maps" if reading[0] == "jacobian" else "gradient of the loss through each branch"
    weight = "held fixed" if reading[2] == "frozen" else "differentiated too"
    return f"{what}, with respect to {reading_by(reading)}, λ {weight}"


def reading_by(reading: Reading) -> str:
    """What a reading differentiates by, in words."""
    return "the layer's input" if reading[1] == "input" else "the pixels"


def alignment_panels(
    pen: Pen, records: Sequence[AuditRecord], looks: Sequence[Look], reading: Reading
) -> list[Panel]:
    """Mean cos θ and the share of cos θ < 0 by layer, of the models that have a second branch."""
    panels = []
    for quantity, title, ylabel, scale, zero in (
        ("cos_theta", "Alignment of the branches", "mean cos θ", 1.0, 0.0),
        ("negative_share", "How often the branches oppose", "samples with cos θ < 0 (%)", 100.0, None),
    ):
        lines = [
            sensitivity_points(_rows(record, reading), look, quantity, scale=scale)
            for record, look in zip(records, looks, strict=True)
        ]
        lines = [line for line in lines if _has_values(line)]
        if lines:
            limits = (-3.0, 103.0) if zero is None else _around_zero(lines)
            figure = layer_figure(lines, title=title, ylabel=ylabel, limits=limits, zero=zero)
            panels.append(pen.panel(figure, f"{title}: {ylabel} by layer", lines))
    return panels


def gradient_panels(
    pen: Pen, records: Sequence[AuditRecord], looks: Sequence[Look], reading: Reading
) -> list[Panel]:
    """Gradient norms of both branches and of the combined map by layer: a panel per model on one scale."""
    drawn: list[tuple[Look, int, list[Points]]] = []
    for record, look in list(zip(records, looks, strict=True))[:PER_MODEL]:
        rows = _rows(record, reading)
        second = sensitivity_points(rows, replace(look, line=":", marker="^"), "norm_2", label="A₂", heads=False)
        first = sensitivity_points(rows, replace(look, line="--", marker="s"), "norm_1", label="A₁", heads=False)
        both = "combined A₁ − λA₂" if _has_values(second) else "A (one map)"
        combined = sensitivity_points(
            rows, replace(look, line="-", marker="o"), "norm_combined", label=both, heads=False
        )
        lines = [line for line in (combined, first, second) if _has_values(line)]
        if lines:
            n = max(row.n for row in rows)
            drawn.append((look, n, lines if _has_values(second) else lines[:1]))
    norm = "Frobenius norm of the Jacobian" if reading[0] == "jacobian" else "norm of the loss gradient"
    everything = [line for _, _, lines in drawn for line in lines]
    panels = []
    for look, n, lines in drawn:
        figure = layer_figure(
            lines,
            title=f"{shorten(look.name, 34)} (n = {n})",
            ylabel=norm,
            positive=True,
            alongside=everything,
        )
        panels.append(pen.panel(figure, f"{look.name}: {norm} by layer", lines))
    return panels


def lipschitz_panels(pen: Pen, records: Sequence[AuditRecord], looks: Sequence[Look]) -> list[Panel]:
    """Local Lipschitz estimates by layer, a panel for the map and one for the output, at a point and in a ball."""
    grouped = [_by_ball(record.lipschitz) for record in records]
    panels = []
    for kind in sorted({kind for groups in grouped for kind in groups}):
        lines = []
        radii = [row.radius for groups in grouped for row in groups.get(kind, [])]
        for groups, look in zip(grouped, looks, strict=True):
            rows = sorted(groups.get(kind, []), key=lambda row: row.index)
            n = max((row.n for row in rows), default=0)
            label = f"{shorten(look.name, 30)} (n = {n})"
            lines.append(Points(look, [row.index for row in rows], [row.mean for row in rows], label))
        lines = [line for line in lines if _has_values(line)]
        where = "at the point" if kind[1] == 0 else f"radius {_range(radii)}"
        title = f"{'Attention map' if kind[0] == 'map' else 'Layer output'}, {where}"
        if lines:
            ylabel = "Lipschitz estimate, L2"
            figure = layer_figure(lines, title=title, ylabel=ylabel, positive=True)
            panels.append(pen.panel(figure, f"{title}: mean local Lipschitz estimate by layer", lines))
    return panels


def history_panels(pen: Pen, records: Sequence[AuditRecord], looks: Sequence[Look]) -> list[Panel]:
    """Training loss, validation loss and validation accuracy against the epoch."""
    panels = []
    for key, title, ylabel, scale, positive in (
        ("train_loss", "Training loss", "loss", 1.0, True),
        ("val_loss", "Validation loss", "loss", 1.0, True),
        ("val_accuracy", "Validation accuracy", "accuracy (%)", 100.0, False),
    ):
        lines = [
            history_points(record, look, key, scale=scale) for record, look in zip(records, looks, strict=True)
        ]
        lines = [line for line in lines if _has_values(line)]
        if lines:
            figure = layer_figure(lines, title=title, ylabel=ylabel, positive=positive, xlabel="epoch")
            panels.append(pen.panel(figure, f"{title} by epoch", [_ends(line) for line in lines]))
    return panels


def _rows(record: AuditRecord, reading: Reading) -> list[LayerSensitivity]:
    return [row for row in record.sensitivity if (row.reading, row.wrt, row.lambda_) == reading]


def _around_zero(lines: Sequence[Points]) -> tuple[float, float]:
    """Limits of an axis for cosines: the same on both sides of 0, near enough to see them."""
    measured = [end for line in lines for one in line.y if one for end in (one.value, one.low, one.high)]
    values = [
        abs(value) for value in (*measured, *(dot[1] for line in lines for dot in line.dots)) if value is not None
    ]
    edge = next((edge for edge in (0.1, 0.25, 0.5) if max(values) < 0.95 * edge), 1.05)
    return -edge, edge


def _by_ball(rows: Sequence[LayerLipschitz]) -> dict[tuple[str, int], list[LayerLipschitz]]:
    """The rows by what is measured and by the ball's place among the layer's: 0 the point, then by radius.

    A ball's radius may follow from the layer's own input, so that each layer and model has another one.
    """
    radii: dict[tuple[str, int], set[float]] = {}
    for row in rows:
        radii.setdefault((row.of, row.index), {0.0}).add(row.radius)
    groups: dict[tuple[str, int], list[LayerLipschitz]] = {}
    for row in rows:
        place = sorted(radii[row.of, row.index]).index(row.radius)
        groups.setdefault((row.of, place), []).append(row)
    return groups


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values), 2), number(max(values), 2)
    return low if low == high else f"{low} to {high}"


def _has_values(line: Points) -> bool:
    return any(one is not None and one.value is not None for one in line.y)


def _ends(line: Points) -> Points:
    return replace(line, x=[line.x[0], line.x[-1]], y=[line.y[0], line.y[-1]])


def _told(label: str, lines: Sequence[Points]) -> str:
    told = []
    for line in lines:
        values = [
            f"{x:g}: {number(y.value)}" for x, y in zip(line.x, line.y, strict=True) if y and y.value is not None
        ]
        told.append(f"{line.label}: {', '.join(values)}")
    return f"{label}. {'; '.join(told)}"
