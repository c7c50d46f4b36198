"""The figures as tables for a terminal; what is not a terminal gets them wide and plain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diffattn.audit.facts import AttackFacts
from diffattn.audit.record import AuditRecord

PLAIN_WIDTH = 160


class ModelRow(Protocol):
    """A named tuple of what is to be shown of a model, with its parameters among it."""

    def _asdict(self) -> dict[str, object]: ...


def show(table: Table, notes: Iterable[str] = ()) -> None:
    """Print a table, and a line a note."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(table)
    for note in notes:
        console.print(f"! {escape(note)}", highlight=False)


def show_records(records: Sequence[AuditRecord]) -> None:
    """Print the models with their clean accuracy, then every attack on each."""
    table = _table("model", "parameters", "clean accuracy")
    for record in records:
        clean = record.clean
        table.add_row(
            escape(record.model.name),
            f"{record.model.parameters:,}",
            escape(f"{clean.accuracy:.1%} [{clean.low:.1%}, {clean.high:.1%}] of {clean.n}"),
        )
    show(table)
    show_attacks({record.model.name: record.attacks for record in records})


def show_attacks(facts: Mapping[str, Sequence[AttackFacts]]) -> None:
    """Print what each attack broke, with intervals and counts, then the flags."""
    table = _table(
        "model", "attack", "norm", "eps", "ASR, 95 % interval", "broken / clean-correct", "robust accuracy"
    )
    for name, rows in facts.items():
        for row in rows:
            share = "–" if row.asr is None else f"{row.asr:.1%} [{row.asr_low:.1%}, {row.asr_high:.1%}]"
            robust = f"{row.robust_accuracy:.1%} [{row.robust_low:.1%}, {row.robust_high:.1%}]"
            counts = f"{row.broken} / {row.n}" + (f", {row.error} errors" if row.error else "")
            table.add_row(*map(escape, (name, row.name, row.norm, row.eps, share, counts, robust)))
    flags = [
        f"{name}, {row.name} {row.eps}: {flag}"
        for name, rows in facts.items()
        for row in rows
        for flag in row.flags
    ]
    show(table, flags)


def models_table(rows: Sequence[ModelRow]) -> Table:
    """The registered models."""
    table = _table("name", "attention", "image", "width", "depth", "heads", "parameters")
    for row in rows:
        table.add_row(*(f"{one:,}" if name == "parameters" else str(one) for name, one in row._asdict().items()))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table
