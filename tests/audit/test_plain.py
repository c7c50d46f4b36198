from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest

from diffattn.audit.plain import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    value: float | None
    lambda_: int = 0


@dataclass(frozen=True)
class Outer:
    name: str
    head: int | Literal["all"]
    inner: Inner
    rows: tuple[Inner, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    flag: bool = False


FULL = Outer("a", "all", Inner(1.5, 2), (Inner(None), Inner(0.0)), {"steps": 20, "deep": {"list": [1, None]}}, True)


def test_a_dataclass_comes_back_equal_and_trailing_underscores_are_left_out():
    plain = to_plain(FULL, where="x")
    assert plain["inner"] == {"value": 1.5, "lambda": 2}
    assert from_plain(Outer, plain, where="x") == FULL


def test_numpy_scalars_become_pythons():
    plain = to_plain({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}, where="x")
    assert plain == {"a": 0.5, "b": 3, "c": True}
    assert [type(value) for value in plain.values()] == [float, int, bool]


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_a_figure_that_is_not_finite_is_refused_by_its_key(value):
    with pytest.raises(ValueError, match=r"x\.rows\[1\]\.value must be finite, or None"):
        to_plain(Outer("a", 0, Inner(1.0), (Inner(1.0), Inner(value))), where="x")


def test_what_json_has_no_word_for_is_refused():
    with pytest.raises(ValueError, match=r"x\.a must be a JSON value; got set"):
        to_plain({"a": {1}}, where="x")
    with pytest.raises(ValueError, match="x must have text as keys; got 1"):
        to_plain({1: 2}, where="x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, r"x\.name must be text; got 3"),
        ({"head": "some"}, r"x\.head must be an integer; got 'some'"),
        ({"head": True}, r"x\.head must be an integer; got True"),
        ({"flag": 1}, r"x\.flag must be true or false; got 1"),
        ({"rows": {}}, r"x\.rows must be a list"),
        ({"rows": [3]}, r"x\.rows\[0\] must be an object; got 3"),
        ({"inner": {"value": "1"}}, r"x\.inner\.value must be a finite number; got '1'"),
        ({"inner": {"value": 10**400}}, r"x\.inner\.value must be a finite number"),
        ({"inner": {}}, r"x\.inner must have the key 'value'"),
        ({"inner": {"value": 1, "lambda_": 2}}, r"x\.inner has the unknown key 'lambda_'; known: value, lambda"),
        ({"options": []}, r"x\.options must be an object"),
        ({"options": {"n": 2**70}}, r"x\.options\.n must hold integers of at most 64 bits"),
        ({"name": "a" * 200_000}, r"x\.name must be text; got 'aaa"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(changes, message):
    plain = to_plain(FULL, where="x") | changes
    with pytest.raises(ValueError, match=message) as caught:
        from_plain(Outer, plain, where="x")
    assert len(str(caught.value)) < 200


def test_open_values_are_held_to_a_depth():
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="nested at most 32 deep"):
        from_plain(Outer, to_plain(FULL, where="x") | {"options": {"a": deep}}, where="x")
