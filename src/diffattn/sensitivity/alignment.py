"""From inner products of branch gradients to norms, rho, cos theta and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PRODUCTS = (
    "map_1",  # <dA_1, dA_1>
    "map_2",  # <dA_2, dA_2>
    "map_12",  # <dA_1, dA_2>
    "branch_1",  # <G_1, G_1>
    "branch_2",  # <G_2, G_2>
    "branch_12",  # <G_1, G_2>
    "combined",  # <d combined, d combined>
    "lemma1",  # sum_bc <G_b, G_c>
)
"""Order of the last axis of what `products` gives."""

FIGURES = (
    "norm_1",
    "norm_2",
    "weighted_1",
    "weighted_2",
    "norm_combined",
    "rho",
    "lambda_rho",
    "cos_theta",
    "amplification",
)
"""Figures that have a standard error."""

_SECOND_BRANCH = ("norm_2", "weighted_2", "rho", "lambda_rho", "cos_theta")


@dataclass(frozen=True)
class Weight:
    """The lambda of a layer's second branch, -w_2 / w_1, for each sample and head.

    Args:
        value: [batch, heads], the mean over the entries of a map.
        constant: [batch, heads], whether it is one number over those entries.
    """

    value: Tensor
    constant: Tensor

    def with_layer(self) -> Weight:
        """The same with a last head that stands for the whole layer."""
        same = (self.value == self.value[:, :1]).all(dim=1, keepdim=True)
        constant = self.constant.all(dim=1, keepdim=True) & same
        return Weight(
            torch.cat([self.value, self.value.mean(dim=1, keepdim=True)], dim=1),
            torch.cat([self.constant, constant], dim=1),
        )


def lambda_of(weights: Sequence[Tensor], maps: Sequence[Tensor]) -> Weight | None:
    """The layer's lambda; None for one branch. Maps are [batch, ..., heads, queries, keys]."""
    if len(weights) < 2:
        return None
    batch, heads = maps[0].shape[0], maps[0].shape[-3]
    ratio = (-weights[1] / weights[0]).expand(maps[0].shape).movedim(-3, 1).reshape(batch, heads, -1).double()
    low, high = ratio.amin(dim=-1), ratio.amax(dim=-1)
    return Weight(torch.where(low == high, low, ratio.mean(dim=-1)), low == high)


def products(maps: Sequence[Tensor], weighted: Sequence[Tensor], combined: Tensor) -> Tensor:
    """Inner products over the last axis, in float64: vectors [..., D] -> [..., 8] in the order of `PRODUCTS`.

    Args:
        maps: dA_b, one a branch.
        weighted: G_b, one a branch.
        combined: derivative of the layer's own combined map.
    """
    first, second = weighted[0], weighted[1] if len(weighted) > 1 else None
    norms = [_dot(one, one) for one in weighted]
    cross = [_dot(a, b) for index, a in enumerate(weighted) for b in weighted[index + 1 :]]
    zero = torch.zeros_like(norms[0])
    pair = second is not None
    columns = [
        _dot(maps[0], maps[0]),
        _dot(maps[1], maps[1]) if pair else zero,
        _dot(maps[0], maps[1]) if pair else zero,
        norms[0],
        norms[1] if pair else zero,
        _dot(first, second) if second is not None else zero,
        _dot(combined, combined),
        sum(norms, zero) + 2.0 * sum(cross, zero),
    ]
    return torch.stack(columns, dim=-1)


def figures(drawn: Tensor, weight: Weight | None, *, frozen: bool) -> dict[str, Tensor]:
    """The figures of a table from inner products.

        lambda_rho = sign(lambda) |G_2| / |G_1|,  cos_theta = <dA_1, dA_2> / (|dA_1| |dA_2|)

    where lambda is one number; where it varies over a map, or is differentiated, the signs are those of a
    positive lambda: lambda_rho = |G_2| / |G_1| and cos_theta = -<G_1, G_2> / (|G_1| |G_2|). Either way
    sum_bc <G_b, G_c> = |G_1|^2 (1 + lambda_rho^2 - 2 lambda_rho cos_theta) for two branches.

    Args:
        drawn: [K, batch, heads, 8]: the products along K random probes, or K = 1 with the exact ones.
        weight: lambda [batch, heads], None for one branch.
        frozen: whether lambda is held constant.

    Returns:
        name -> [batch, heads]; NaN where there is no such figure (a zero gradient, one branch). Standard errors
        by the delta method under "<name>_se", NaN where the products are exact.
    """
    x = dict(zip(PRODUCTS, drawn.unbind(dim=-1), strict=True))
    if weight is None:
        sign, scalar = torch.ones_like(x["map_1"][0]), torch.zeros_like(x["map_1"][0], dtype=torch.bool)
    else:
        scalar = weight.constant if frozen else torch.zeros_like(weight.constant)
        sign = torch.where(scalar, weight.value.sign(), 1.0)
    by_maps = _cosine(x["map_12"], x["map_1"], x["map_2"])
    by_branches = _cosine(-x["branch_12"], x["branch_1"], x["branch_2"])
    lambda_rho = _quotient(x["branch_2"], x["branch_1"])
    found = {
        "norm_1": _norm(x["map_1"]),
        "norm_2": _norm(x["map_2"]),
        "weighted_1": _norm(x["branch_1"]),
        "weighted_2": _norm(x["branch_2"]),
        "norm_combined": _norm(x["combined"]),
        "rho": _quotient(x["map_2"], x["map_1"]),
        "lambda_rho": (sign * lambda_rho[0], lambda_rho[1]),
        "cos_theta": tuple(torch.where(scalar, one, two) for one, two in zip(by_maps, by_branches, strict=True)),
        "amplification": _quotient(x["combined"], x["branch_1"]),
    }
    table = {"lemma1_rhs": x["lemma1"].mean(dim=0).clamp(min=0.0).sqrt()}
    for name, (value, influence) in found.items():
        missing = weight is None and name in _SECOND_BRANCH
        table[name] = torch.full_like(value, torch.nan) if missing else value
        table[f"{name}_se"] = torch.full_like(value, torch.nan) if missing else _standard_error(influence)
    return table


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum(dim=-1)


def _norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(E x) and each draw's influence on it."""
    value = x.mean(dim=0).clamp(min=0.0).sqrt()
    return value, (x - x.mean(dim=0)) / (2.0 * value)


def _quotient(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(E x / E y) and each draw's influence on it."""
    value = (x.mean(dim=0) / y.mean(dim=0)).sqrt()
    return value, 0.5 * value * (x / x.mean(dim=0) - y / y.mean(dim=0))


def _cosine(c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """E c / sqrt(E x E y) and each draw's influence on it."""
    scale = x.mean(dim=0).sqrt() * y.mean(dim=0).sqrt()
    value = (c.mean(dim=0) / scale).clamp(-1.0, 1.0)
    spread = x / x.mean(dim=0) + y / y.mean(dim=0) - 2.0
    return value, (c - c.mean(dim=0)) / scale - 0.5 * value * spread


def _standard_error(influence: Tensor) -> Tensor:
    """Of a mean over draws; NaN for one draw."""
    draws = influence.shape[0]
    if draws == 1:
        return torch.full_like(influence[0], torch.nan)
    return influence.std(dim=0) / draws**0.5
