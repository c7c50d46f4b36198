"""Names find builders; an unknown one is told what there is."""

from __future__ import annotations

import pytest

from diffattn.registry import Registry


def test_register_find_and_list() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one")(1)
    assert registry["one"] == 1
    assert list(registry) == ["one"]
    assert "one" in registry
    assert "two" not in registry


def test_a_name_is_taken_once() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one")(1)
    with pytest.raises(ValueError, match="the thing name 'one' is taken already"):
        registry.register("one")(2)


def test_unknown_names_get_the_nearest_and_all() -> None:
    registry: Registry[int] = Registry("thing")
    for name in ("alpha", "beta"):
        registry.register(name)(0)
    with pytest.raises(ValueError, match=r"unknown thing 'alpa'; did you mean alpha\? Known: alpha, beta"):
        registry["alpa"]
    with pytest.raises(ValueError, match=r"unknown thing 'zzz'. Known: alpha, beta"):
        registry["zzz"]
