"""The words in which options are refused: what is asked, of which name, and what was given. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, what: str) -> T:
    """Make the dataclass `cls` from a mapping; an unknown key is an error that lists the known ones."""
    known = [item.name for item in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    unknown = sorted(str(key) for key in set(values) - set(known))
    if unknown:
        raise ValueError(f"{what} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return cls(**values)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_positive_integer(value: Any) -> bool:
    """Whether it is an int of at least 1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_positive_integer(name: str, value: Any) -> None:
    """Raise unless `value` is an int of at least 1 (a bool is not)."""
    require(
        is_positive_integer(value),
        f"{name} must be an integer of at least 1; got {value!r}",
    )


def require_probability(name: str, value: Any) -> None:
    """Raise unless `value` is a number in [0, 1)."""
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1,
        f"{name} must be in [0, 1); got {value!r}",
    )


def require_number(
    name: str, value: Any, *, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise unless `value` is a finite number in [low, high], or in (low, high] with `open_low`."""
    limits = f"{'above' if open_low else 'at least'} {low:g}" + (
        f" and at most {high:g}" if high < math.inf else ""
    )
    require(
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (low < value if open_low else low <= value)
        and value <= high,
        f"{name} must be a number {limits}; got {value!r}",
    )


def require_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False: the text "False" is not."""
    require(isinstance(value, bool), f"{name} must be true or false; got {value!r}")
