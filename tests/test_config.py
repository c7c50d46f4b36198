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


HUGE = ["1e100000000", "1e-100000000", "1e400", "1" * 65, 10**400, 10**5000, Fraction(10) ** 400]


BAD = ["four", "1/0", "", "-1/255", -0.1, float("nan"), float("inf"), None, True, [1], *HUGE]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_bad_eps_is_refused(bad: object) -> None:
    with pytest.raises(
        ValueError, match=r"eps must be a number or a fraction such as '4/255', at least 0; got"
    ) as caught:
        parse_eps(bad)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("level", range(1, 255))
def test_a_float_next_to_a_pixel_level_is_labelled_by_it(level: int) -> None:
    assert format_eps(parse_eps(level / 255)) == f"{level}/255"
    assert parse_eps(level / 255) == Fraction(level / 255)
    assert "/" not in format_eps(Fraction(level, 255) + Fraction(1, 10**9))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("mlp_ratio", ["x", None, [4], 1e300, float("inf"), float("nan"), 0, 1e-9, True, 10**400]),
        ("norm_eps", ["x", None, 0, 2.0, 10**400]),
        ("mean", [None, [[1]], ["a"], "1", 0.5, [], [10**400], [float("nan")], [True]]),
        ("std", [None, [[1]], ["a"], [0.0], [-1], [10**400]]),
        ("attention", [None, 1, "", ["softmax"]]),
        ("attention_options", [None, "x", [1], {1: 2}]),
        ("qkv_bias", ["False", "", 0, None]),
        ("dropout", ["x", None, 1.0, -0.1, 10**400, 10**5000, float("nan")]),
        ("image_size", [4098, 10**400, 8.0, None, True]),
        ("patch_size", [4098, 0, "2"]),
        ("embed_dim", [65537, 10**5000]),
        ("depth", [1025]),
        ("num_classes", [1_000_001, 1]),
        ("in_chans", [65]),
        ("num_heads", [65537]),
        ("pool", [None, ["cls"]]),
    ],
)
def test_wild_fields_are_refused_by_name(field: str, values: list) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field} must .*got") as caught:
            ViTConfig(**{"image_size": 8, "patch_size": 2, field: value})
        assert len(str(caught.value)) < 250


def test_missing_required_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"^model must have image_size; got patch_size$"):
        from_mapping(ViTConfig, {"patch_size": 2}, what="model")
    with pytest.raises(ValueError, match=r"^model must have image_size, patch_size; got no option$"):
        from_mapping(ViTConfig, {}, what="model")
    with pytest.raises(ValueError, match=r"^model must be a mapping from option to value; got 3$"):
        from_mapping(ViTConfig, 3, what="model")


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
