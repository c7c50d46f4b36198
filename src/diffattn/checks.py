"""The words in which options are refused: what is asked, of which name, and what was given. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_SHOWN = 80


def from_mapping(cls: type[T], values: Mapping[str, Any], *, what: str) -> T:
    """Make the dataclass `cls` from a mapping.

    Raises:
        ValueError: for what is no mapping, an unknown key (listing the known ones) or a missing required one.
    """
    require(isinstance(values, Mapping), f"{what} must be a mapping from option to value; got {shown(values)}")
    items = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    known = [item.name for item in items]
    unknown = sorted(str(key) for key in set(values) - set(known))
    if unknown:
        raise ValueError(f"{what} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    absent = dataclasses.MISSING
    missing = [
        item.name
        for item in items
        if item.init and item.default is absent and item.default_factory is absent and item.name not in values
    ]
    require(not missing, f"{what} must have {', '.join(missing)}; got {', '.join(values) or 'no option'}")
    return cls(**values)


def shown(value: Any) -> str:
    """The value's repr, cut to about 80 characters; an integer too long to print is described."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def is_finite_number(value: Any) -> bool:
    """Whether `value` is an int or a float (a bool is not) that a float can hold, neither infinite nor NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def is_positive_integer(value: Any) -> bool:
    """Whether it is an int of at least 1 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_positive_integer(name: str, value: Any, *, high: int | None = None) -> None:
    """Raise unless `value` is an int of at least 1 (a bool is not), and at most `high` where that is given."""
    require(
        is_positive_integer(value),
        f"{name} must be an integer of at least 1; got {shown(value)}",
    )
    require(high is None or value <= high, f"{name} must be an integer of at most {high}; got {shown(value)}")


def require_probability(name: str, value: Any) -> None:
    """Raise unless `value` is a number in [0, 1)."""
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1,
        f"{name} must be in [0, 1); got {shown(value)}",
    )


def require_number(
    name: str, value: Any, *, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> None:
    """Raise unless `value` is a finite number in [low, high], or in (low, high] with `open_low`."""
    limits = f"{'above' if open_low else 'at least'} {low:g}" + (
        f" and at most {high:g}" if high < math.inf else ""
    )
    require(
        is_finite_number(value) and (low < value if open_low else low <= value) and value <= high,
        f"{name} must be a number {limits}; got {shown(value)}",
    )


def require_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False: the text "False" is not."""
    require(isinstance(value, bool), f"{name} must be true or false; got {shown(value)}")
