"""Between frozen dataclasses and plain JSON values: a field is held to its annotation, an error names its key."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import numpy as np

T = TypeVar("T")

LONGEST_TEXT = 100_000
LARGEST_INTEGER = 2**63 - 1
DEEPEST = 32


def to_plain(value: Any, *, where: str) -> Any:
    """Turn a dataclass, and all it holds, into dicts, lists, numbers, text, booleans and None.

    A field called `name_` is written as `name` (`lambda_` as "lambda"); numpy scalars become Python's.

    Args:
        value: a dataclass or anything that JSON has a word for.
        where: what an error calls it.

    Raises:
        ValueError: for a number that is not finite (None is how an absent figure is written), a key that is no
            text, or a type that JSON has no word for; each with its key.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            json_name(item): to_plain(getattr(value, item.name), where=f"{where}.{json_name(item)}")
            for item in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} must have text as keys; got {key!r}")
        return {key: to_plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must be finite, or None where there is nothing to report; got {value}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{where} must be a JSON value; got {type(value).__name__}")


def from_plain(kind: type[T], value: Any, *, where: str) -> T:
    """Make the dataclass `kind` from what `to_plain` gave, strictly.

    Args:
        kind: a dataclass whose annotations use int, float, str, bool, None, Any, Literal, unions,
            `tuple[X, ...]`, `dict[str, X]` and other such dataclasses.
        value: JSON as Python reads it.
        where: what an error calls it: the file and the key.

    Raises:
        ValueError: for an unknown or missing key, a wrong type, or what the dataclass itself refuses.
    """
    return _read(kind, value, where)


def json_name(item: dataclasses.Field[Any]) -> str:
    """The JSON key of a dataclass's field: its name without a closing underscore."""
    return item.name.removesuffix("_")


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(kind), value, where)
    if origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind)):
            choices = ", ".join(repr(choice) for choice in typing.get_args(kind))
            raise ValueError(f"{where} must be one of {choices}; got {_shown(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list; got {_shown(value)}")
        item_kind = typing.get_args(kind)[0]
        return tuple(_read(item_kind, item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object; got {_shown(value)}")
        return {key: _read(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    return _read_scalar(kind, value, where)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object; got {_shown(value)}")
    hints = typing.get_type_hints(kind)
    items = {json_name(item): item for item in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(items))
    if unknown:
        raise ValueError(f"{where} has the unknown key {_shown(unknown[0])}; known: {', '.join(items)}")
    found = {}
    for key, item in items.items():
        if key in value:
            found[item.name] = _read(hints[item.name], value[key], f"{where}.{key}")
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} must have the key '{key}'")
    try:
        return kind(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    errors: list[ValueError] = []
    for kind in kinds:
        if kind is types.NoneType:
            continue
        try:
            return _read(kind, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        _check_open(value, where, DEEPEST)
        return value
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    if kind is str and isinstance(value, str) and len(value) <= LONGEST_TEXT:
        return value
    words = {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}
    raise ValueError(f"{where} must be {words.get(kind, kind)}; got {_shown(value)}")


def _check_open(value: Any, where: str, depth: int) -> None:
    """What has no schema is still held to a depth and to numbers that others can read."""
    if depth == 0:
        raise ValueError(f"{where} must be nested at most {DEEPEST} deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_open(item, where, depth - 1)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{where} must hold integers of at most 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} must hold finite numbers; got {value}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
