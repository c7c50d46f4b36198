"""What the records say against one another, in plain words: settings, differences, a sentence for each pair."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffattn.audit.facts import AttackFacts
from diffattn.audit.record import AuditRecord
from diffattn.report.text import joined, percent, percent_interval, shorten, visible

_Key = tuple[str, str, float]
"""An attack's options as JSON, the norm and eps."""


@dataclass(frozen=True)
class Setting:
    """One attack with its options under one budget; the records that share it can be compared.

    Args:
        label: the attack in words, options included where names alone would not tell.
        norm: of the budget.
        eps: the budget as text.
        eps_value: the budget in pixel units.
        facts: what each record says, None where a record lacks it.
    """

    label: str
    norm: str
    eps: str
    eps_value: float
    facts: tuple[AttackFacts | None, ...]

    @property
    def words(self) -> str:
        """For the middle of a sentence."""
        return f"{self.label} at eps {self.eps} ({self.norm})"


def settings(records: Sequence[AuditRecord]) -> list[Setting]:
    """Every attack and budget of any record: by norm and attack in the order they came, then by eps.

    Records that differ in nothing but the attack's seed share a setting.
    """
    found: dict[_Key, list[AttackFacts | None]] = {}
    empty: list[AttackFacts | None] = [None] * len(records)
    for place, record in enumerate(records):
        for one in record.attacks:
            key = (_options(one, seed=False), one.norm, one.eps_value)
            if found.get(key, empty)[place] is not None:
                key = (_options(one, seed=True), one.norm, one.eps_value)
            found.setdefault(key, empty.copy())[place] = one
    labels = _labels({key: next(one for one in row if one is not None) for key, row in found.items()})
    groups = list(dict.fromkeys((key[1], labels[key]) for key in found))
    rows = []
    for key, facts in found.items():
        first = next(one for one in facts if one is not None)
        rank = (groups.index((first.norm, labels[key])), first.eps_value)
        rows.append((rank, Setting(labels[key], first.norm, visible(first.eps), first.eps_value, tuple(facts))))
    return [setting for _, setting in sorted(rows, key=lambda row: row[0])]


def attack_label(attack: Mapping[str, Any]) -> str:
    """The attack's name with its steps and restarts: `PGD-20 × 2`."""
    steps, restarts = _several(attack.get("steps")), _several(attack.get("restarts"))
    label = attack_word(visible(str(attack["name"])))
    return label + (f"-{steps}" if steps else "") + (f" × {restarts}" if restarts else "")


def _labels(facts: Mapping[_Key, AttackFacts]) -> dict[_Key, str]:
    """A label for each setting; where two of one budget would read the same, with the options that differ."""
    alike: dict[tuple[str, str, float], list[_Key]] = {}
    for key, one in facts.items():
        alike.setdefault((attack_label(one.attack), one.norm, one.eps_value), []).append(key)
    labels = {}
    for (label, _, _), keys in alike.items():
        options = [facts[key].attack for key in keys]
        names = sorted({name for one in options for name in one})
        differing = [
            name for name in names if len({json.dumps(one.get(name), sort_keys=True) for one in options}) > 1
        ]
        for key, one in zip(keys, options, strict=True):
            told = ", ".join(f"{name} {one.get(name)}" for name in differing)
            labels[key] = f"{label} ({shorten(visible(told), 80)})" if differing else label
    return labels


def attack_word(name: str) -> str:
    """The attack's registered name as papers write it."""
    return name.upper() if name in ("pgd", "fgsm") else shorten(name, 40)


def difference(one: AttackFacts, other: AttackFacts) -> tuple[float, float, float] | None:
    """ASR of `one` minus ASR of `other`, with an interval.

    The interval joins the two recorded ones (Newcombe 1998, method 10); its lower end counts the errors of `one`
    as not broken and those of `other` as broken, its upper end the other way round.

    Returns:
        the difference and its ends in [-1, 1], or None where a side has no clean-correct sample.
    """
    if one.asr is None or other.asr is None or not one.n or not other.n:
        return None
    low = _newcombe_low(one, other)
    high = -_newcombe_low(other, one)
    return one.asr - other.asr, low, high


def overlap(one: AttackFacts, other: AttackFacts) -> bool:
    """Whether the two ASR intervals share a point, or either is missing: then no order is claimed."""
    ends = (one.asr_low, one.asr_high, other.asr_low, other.asr_high)
    if any(end is None for end in ends):
        return True
    one_low, one_high, other_low, other_high = (end for end in ends if end is not None)
    return one_low <= other_high and other_low <= one_high


def compare(first: int, second: int, rows: Sequence[Setting], names: Sequence[str], *, brief: bool = False) -> str:
    """One sentence or two: which of two models breaks more, where, by how much and how sure that is.

    Args:
        first: place of the model compared with.
        second: place of the other.
        rows: from `settings`.
        names: of all models.
        brief: leave out both models' own figures where the difference is clear.
    """
    shared = []
    for row in rows:
        a, b = row.facts[first], row.facts[second]
        if a is not None and b is not None and (found := difference(b, a)) is not None:
            shared.append((row, a, b, found))
    one, other = names[second], names[first]
    if not shared:
        return f"{one} and {other} share no attack and budget, so their figures cannot be compared."
    clear = [entry for entry in shared if not overlap(entry[1], entry[2])]
    more = sum(entry[3][0] > 0 for entry in clear)
    row, a, b, gap = max(clear or shared, key=lambda entry: abs(entry[3][0]))
    detail = (
        f"{one} {percent(b.asr)} {percent_interval(b.asr_low, b.asr_high)}, "
        f"{other} {percent(a.asr)} {percent_interval(a.asr_low, a.asr_high)}"
    )
    if not clear:
        where = f"in any of the {len(shared)} attack settings" if len(shared) > 1 else f"under {row.words}"
        most = f"the largest gap, under {row.words}, is " if len(shared) > 1 else ""
        return (
            f"No clear difference between {one} and {other} {where}: the 95 % intervals overlap ({most}{detail})."
        )
    points = f"{100 * abs(gap[0]):.1f} percentage points"
    ends = sorted((abs(gap[1]), abs(gap[2])))
    direction = "more" if gap[0] > 0 else "fewer"
    lead = _lead((one, other), row, more=more, fewer=len(clear) - more, shared=len(shared))
    interval = percent_interval(*ends)
    return f"{lead} {points} {direction} {interval}{'' if brief else f' ({detail})'}."


def alone(rows: Sequence[Setting], name: str) -> str:
    """One sentence about a single model: its weakest and strongest showing."""
    known = [(row, one) for row in rows for one in row.facts if one is not None and one.asr is not None]
    if not known:
        return f"{name} was not attacked, or classifies none of the images correctly: there is no ASR to report."
    weakest, strongest = min(known, key=_asr), max(known, key=_asr)
    parts = []
    for row, one in (weakest,) if weakest is strongest else (weakest, strongest):
        interval = percent_interval(one.asr_low, one.asr_high)
        parts.append(
            f"{row.words} breaks {percent(one.asr)} {interval} of the {one.n:,} images it classifies correctly"
        )
    return f"{name}: {joined(parts)}."


def _lead(pair: tuple[str, str], row: Setting, *, more: int, fewer: int, shared: int) -> str:
    one, other = pair
    verb = "more" if more else "less"
    if shared == 1:
        return f"{one} breaks {verb} often than {other} under {row.words}:"
    open_ = shared - more - fewer
    rest = f", with no clear difference in {open_}" if open_ else ""
    count = f"all {shared}" if shared in (more, fewer) else f"{more or fewer} of {shared}"
    where = f"in {count} attack settings"
    if more and fewer:
        where += f" and less often in {fewer}"
    return f"{one} breaks {verb} often than {other} {where}{rest}. The widest gap is under {row.words}:"


def _newcombe_low(one: AttackFacts, other: AttackFacts) -> float:
    share, other_share = one.broken / one.n, (other.broken + other.error) / other.n
    below = share - (one.asr_low if one.asr_low is not None else 0.0)
    above = (other.asr_high if other.asr_high is not None else 1.0) - other_share
    return max(-1.0, share - other_share - math.hypot(below, above))


def _asr(entry: tuple[Setting, AttackFacts]) -> float:
    return entry[1].asr or 0.0


def _options(one: AttackFacts, *, seed: bool) -> str:
    options = {name: value for name, value in one.attack.items() if seed or name != "seed"}
    return json.dumps(options, sort_keys=True, ensure_ascii=False)


def _several(value: object) -> int | None:
    """The number where it is a whole one above 1 that a label can hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 < value < 10**9 else None
