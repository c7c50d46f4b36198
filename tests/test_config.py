"""Budgets are exact; unknown options are refused; the light modules stay light."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from diffattn.checks import from_mapping
from diffattn.config import ViTConfig, format_eps, parse_eps


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4/255", Fraction(4, 255)),
        (" 8 / 255 ", Fraction(8, 255)),
        ("0.5", Fraction(1, 2)),
        (0.25, Fraction(1, 4)),
        (0, 0),
    ],
)
def test_eps_is_read_exactly(text: object, value: Fraction) -> None:
    assert parse_eps(text) == value


@pytest.mark.parametrize("bad", ["four", "1/0", "", "-1/255", -0.1, float("nan"), float("inf"), None, True, [1]])
def test_bad_eps_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"eps must be a number or a fraction such as '4/255', at least 0; got"):
        parse_eps(bad)


@pytest.mark.parametrize(
    ("eps", "text"), [("4/255", "4/255"), ("0.5", "0.5"), ("0", "0"), ("1", "1"), ("8/510", "4/255")]
)
def test_eps_is_written_as_people_do(eps: str, text: str) -> None:
    assert format_eps(parse_eps(eps)) == text


def test_unknown_keys_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model has no option widht; it has image_size, patch_size"):
        from_mapping(ViTConfig, {"image_size": 8, "patch_size": 2, "widht": 3}, what="model")


@pytest.mark.parametrize("module", ["diffattn", "diffattn.config", "diffattn.statistics", "diffattn.cli"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist_and_unknown_ones_do_not() -> None:
    import diffattn

    for name in dir(diffattn):
        assert getattr(diffattn, name) is not None
        assert getattr(diffattn, name) is getattr(diffattn, name)
    folders = {path.stem for path in Path(diffattn.__file__).parent.iterdir()}
    assert not folders & set(dir(diffattn))  # importing a subpackage would take its name's place
    with pytest.raises(AttributeError, match="module 'diffattn' has no attribute 'nonsense'"):
        diffattn.nonsense  # noqa: B018
