"""What the page's template is given: the records as plain tables of words, numbers and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffattn.audit.facts import Example
from diffattn.audit.record import AuditRecord
from diffattn.report.comparison import Setting, attack_word
from diffattn.report.pictures import MapColumn, Tile, image_uri, magnified, map_columns
from diffattn.report.style import Look
from diffattn.report.text import number, percent, shorten

GALLERY_BYTES = 1_100_000
MAPS_PER_MODEL = 2
MOST_EXAMPLES = 9
SMALL = 96
"""Largest edge in pixels of the images that stand beside attention maps."""


@dataclass(frozen=True)
class ModelView:
    """A model in the tables: its look and what its record says, in words."""

    look: Look
    record: AuditRecord
    attention: str
    lambda_: str


@dataclass(frozen=True)
class Card:
    """One adversarial example: three pictures, predictions, and the attention maps."""

    example: Example
    truth: str
    before: str
    after: str
    budget: str
    factor: str
    tiles: tuple[tuple[str, Tile], ...]
    small: tuple[str, str]
    columns: tuple[MapColumn, ...]
    shown: str

    @property
    def size(self) -> int:
        """Characters of the pictures."""
        pictures = sum(len(tile.uri) for _, tile in self.tiles) + sum(map(len, self.small))
        return pictures + sum(len(column.clean.uri) + len(column.attacked.uri) for column in self.columns)


@dataclass(frozen=True)
class Gallery:
    """The examples of one model that are shown, and how many are not."""

    look: Look
    cards: tuple[Card, ...]
    left_out: int

    @property
    def with_maps(self) -> tuple[Card, ...]:
        """The examples whose attention maps are shown: other samples rather than one twice."""
        first = {card.example.sample_id: card for card in reversed(self.cards) if card.columns}
        ordered = [card for card in self.cards if first.get(card.example.sample_id) is card]
        return tuple(ordered[:MAPS_PER_MODEL])


def model_views(records: Sequence[AuditRecord], looks: Sequence[Look]) -> list[ModelView]:
    """One view per record."""
    return [
        ModelView(look, record, _attention(record), _lambda(record))
        for record, look in zip(records, looks, strict=True)
    ]


def warnings(records: Sequence[AuditRecord], rows: Sequence[Setting], names: Sequence[str]) -> list[str]:
    """What a reader must know before comparing: other images, flags, errors, skipped images."""
    found = []
    if len({record.data.fingerprint for record in records}) > 1:
        found.append(
            "These records were made on different images (their data fingerprints differ): compare with care."
        )
    for place, name in enumerate(names):
        facts = [one for row in rows if (one := row.facts[place]) is not None]
        errors, flags = max((one.error for one in facts), default=0), sum(bool(one.flags) for one in facts)
        if errors:
            found.append(
                f"{name}: up to {errors} images ended in an error (a value that is not finite). They count as "
                "neither broken nor robust, and widen the ASR's interval."
            )
        if flags:
            found.append(
                f"{name}: {flags} of {len(facts)} attack settings are flagged; its robustness may be overstated."
            )
    skipped = max(len(record.data.skipped) for record in records)
    if skipped:
        found.append(f"{skipped} unreadable image{'s were' if skipped > 1 else ' was'} left out of the data.")
    return found


def galleries(records: Sequence[AuditRecord], looks: Sequence[Look]) -> list[Gallery]:
    """The examples of each model: those that all models have first, broken ones before others, as many as fit."""
    known = [{_identity(example) for example in record.examples} for record in records if record.examples]
    common = set.intersection(*known) if known else set()
    budget = GALLERY_BYTES // max(1, len(known))
    result = []
    for record, look in zip(records, looks, strict=True):
        ordered = _ordered(record.examples, common)
        cards: list[Card] = []
        size = 0
        for example in ordered[:MOST_EXAMPLES]:
            card = _card(record, example)
            size += card.size
            if cards and size > budget:
                break
            cards.append(card)
        if cards:
            result.append(Gallery(look, tuple(cards), len(ordered) - len(cards)))
    return result


def _identity(example: Example) -> tuple[str, str, str, str]:
    return example.sample_id, example.attack, example.norm, example.eps


def _ordered(examples: Sequence[Example], common: set[tuple[str, str, str, str]]) -> list[Example]:
    """In turns from each attack and budget; within one, those that all models have first, then broken ones."""
    turns: dict[tuple[str, ...], int] = {}
    found = []
    for example in sorted(examples, key=lambda one: (_identity(one) not in common, one.status != "broken")):
        setting = _identity(example)[1:]
        turns[setting] = turns.get(setting, 0) + 1
        found.append((turns[setting], example))
    return [example for _, example in sorted(found, key=lambda entry: entry[0])]


def class_name(record: AuditRecord, index: int) -> str:
    """The class's name where the record knows it; -1 stands for logits that are not finite."""
    names = record.data.class_names
    if index < 0:
        return "no class (not finite)"
    return shorten(names[index], 40) if index < len(names) else f"class {index}"


def options_text(options: Any, longest: int = 2000) -> str:
    """An open-ended object on one line."""
    if isinstance(options, str):
        return shorten(options, longest)
    return shorten(json.dumps(options, ensure_ascii=False), longest)


def _card(record: AuditRecord, example: Example) -> Card:
    clean, adversarial = record.tensors[f"{example.key}.clean"], record.tensors[f"{example.key}.adversarial"]
    eps = next(
        (one.eps_value for one in record.attacks if (one.norm, one.eps) == (example.norm, example.eps)), None
    )
    picture, factor = magnified(clean, adversarial, eps if example.norm == "Linf" else None)
    truth, before, after = (
        class_name(record, one) for one in (example.label, example.clean_prediction, example.attacked_prediction)
    )
    shape = f"{clean.shape[2]} × {clean.shape[1]} pixels"
    columns, shown = map_columns(record, example)
    return Card(
        example=example,
        truth=truth,
        before=before,
        after=after,
        budget=f"{attack_word(example.attack)}, eps {shorten(example.eps, 20)} ({shorten(example.norm, 20)})",
        factor="no change" if factor is None else f"× {number(factor)}",
        tiles=(
            ("clean", Tile(image_uri(clean), f"clean image, {shape}, predicted {before}")),
            ("adversarial", Tile(image_uri(adversarial), f"adversarial image, {shape}, predicted {after}")),
            ("perturbation", Tile(image_uri(picture), f"perturbation around mid-grey, {shape}")),
        ),
        small=(image_uri(clean, most=SMALL), image_uri(adversarial, most=SMALL)),
        columns=tuple(columns),
        shown=shown,
    )


def _attention(record: AuditRecord) -> str:
    name = record.model.config.get("attention")
    return shorten(name, 40) if isinstance(name, str) else "–"


def _lambda(record: AuditRecord) -> str:
    """λ as it was set, and the range of λ over the layers as measured: λρ over ρ."""
    options = record.model.config.get("attention_options")
    initial = options.get("lambda_init") if isinstance(options, dict) else None
    ratios = [
        row.lambda_rho.value / row.rho.value
        for row in record.sensitivity
        if row.head == "all" and row.lambda_ == "frozen" and row.rho and row.lambda_rho
        if row.rho.value and row.lambda_rho.value is not None
    ]
    parts = []
    if isinstance(initial, int | float | str):
        parts.append("starts by depth" if initial == "depth" else f"starts at {shorten(str(initial), 12)}")
    if ratios:
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        parts.append(f"now {low}" if low == high else f"now {low} to {high}")
    return ", ".join(parts) or "–"


def share_text(value: float | None) -> str:
    """A share as the tables print it."""
    return percent(value, 0)
