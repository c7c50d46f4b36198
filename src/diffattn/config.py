"""Every configuration of the project as a frozen dataclass, and budgets as exact fractions. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

T = TypeVar("T")


def parse_eps(eps: str | float | Fraction, *, name: str = "eps") -> Fraction:
    """Read a budget such as `"4/255"`, `"0.5"` or `0.5` as an exact fraction.

    Args:
        eps: a fraction as text, or a number; not negative, finite.
        name: what the error message calls it.

    Raises:
        ValueError: if it is no number, negative or not finite.
    """
    wanted = f"{name} must be a number or a fraction such as '4/255', at least 0"
    if isinstance(eps, bool) or not isinstance(eps, str | int | float | Fraction):
        raise ValueError(f"{wanted}; got {eps!r}")
    try:
        value = Fraction(eps.replace(" ", "")) if isinstance(eps, str) else Fraction(eps)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{wanted}; got {eps!r}") from error
    if value < 0:
        raise ValueError(f"{wanted}; got {eps!r}")
    return value


def format_eps(eps: Fraction) -> str:
    """Write a budget as people do: `4/255` where it is a multiple of 1/255, a decimal elsewhere."""
    if eps and (eps * 255).denominator == 1:
        return f"{eps * 255}/255"
    return f"{float(eps):.6g}"


def from_mapping(cls: type[T], values: Mapping[str, Any], *, what: str) -> T:
    """Make the dataclass `cls` from a mapping; an unknown key is an error that lists the known ones."""
    known = [item.name for item in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{what} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return cls(**values)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_positive_integer(name: str, value: Any) -> None:
    """Raise unless `value` is an int of at least 1 (a bool is not)."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        f"{name} must be an integer of at least 1; got {value!r}",
    )


def require_probability(name: str, value: Any) -> None:
    """Raise unless `value` is a number in [0, 1)."""
    require(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1,
        f"{name} must be in [0, 1); got {value!r}",
    )


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a vision transformer; the attention layer is named, its own options ride along.

    Args:
        image_size: height and width in pixels; a multiple of `patch_size`.
        patch_size: edge of a patch in pixels.
        in_chans: colour channels, 1 or 3.
        num_classes: width of the logits.
        embed_dim: width C of the residual stream.
        depth: number of blocks D.
        num_heads: number of **output** heads of each attention layer.
        mlp_ratio: hidden width of the MLP over `embed_dim`.
        attention: registered name of the attention layer.
        attention_options: keyword arguments of that layer, such as `{"lambda_init": 0.8}`.
        qkv_bias: whether the query, key and value projections have biases.
        dropout: dropout after the attention's and the MLP's output projection, in [0, 1).
        drop_path: stochastic depth at the last block, growing linearly from 0, in [0, 1).
        pool: "cls" reads the class token, "mean" the mean of the patch tokens.
        mean: per-channel mean subtracted from the [0, 1] pixels.
        std: per-channel standard deviation that divides them.
        norm_eps: epsilon of the LayerNorms.
    """

    image_size: int
    patch_size: int
    in_chans: int = 3
    num_classes: int = 10
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    attention: str = "softmax"
    attention_options: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    pool: str = "cls"
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check every field against its range."""
        for name in ("image_size", "patch_size", "in_chans", "embed_dim", "depth", "num_heads"):
            require_positive_integer(name, getattr(self, name))
        require_positive_integer("num_classes", self.num_classes)
        require(self.num_classes >= 2, f"num_classes must be at least 2; got {self.num_classes}")
        require(
            self.image_size % self.patch_size == 0,
            f"image_size must be a multiple of patch_size; got {self.image_size} and {self.patch_size}",
        )
        for name in ("dropout", "drop_path"):
            require_probability(name, getattr(self, name))
        require(self.mlp_ratio > 0, f"mlp_ratio must be above 0; got {self.mlp_ratio}")
        require(self.norm_eps > 0, f"norm_eps must be above 0; got {self.norm_eps}")
        require(self.pool in ("cls", "mean"), f"pool must be 'cls' or 'mean'; got {self.pool!r}")
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            require(
                len(values) in (1, self.in_chans) and all(math.isfinite(value) for value in values),
                f"{name} must be 1 or {self.in_chans} finite numbers; got {values}",
            )
            object.__setattr__(self, name, values)
        require(min(self.std) > 0, f"std must be above 0; got {self.std}")
        object.__setattr__(self, "attention_options", dict(self.attention_options))
