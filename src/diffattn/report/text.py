"""Words and numbers as the page and the figures show them; text from a record is taken as data from anywhere."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

NO_BREAK = "\N{NO-BREAK SPACE}"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_KEPT = "\n\t"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories that show nothing or change how their neighbours are shown (direction overrides)."""


def visible(text: str) -> str:
    """The text with every control, direction, private and surrogate character replaced by U+FFFD."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in _KEPT or unicodedata.category(character) not in _HIDDEN else REPLACEMENT
        for character in text
    )


def shorten(text: str, longest: int) -> str:
    """The text, or its two ends around an ellipsis where it has more than `longest` characters."""
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def distinct(names: Sequence[str], *, longest: int = 60) -> list[str]:
    """The names, shortened and visible; those that collide get a number: `vit #1`, `vit #2`."""
    names = [shorten(visible(name).strip() or "unnamed", longest) for name in names]
    taken = {name for name in names if names.count(name) == 1}
    result = []
    for name in names:
        number, shown = 1, name
        while names.count(name) > 1 and (shown := f"{name} #{number}") in taken:
            number += 1
        taken.add(shown)
        result.append(shown)
    return result


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage, a dash for None."""
    return "–" if share is None else f"{100 * share:.{digits}f}{NO_BREAK}%"


def percent_interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """An interval of shares in percent, such as [48.1, 53.9]; empty where an end is missing."""
    if low is None or high is None:
        return ""
    return f"[{100 * low:.{digits}f},{NO_BREAK}{100 * high:.{digits}f}]"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, a dash for None."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}".replace("-", "−")


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
