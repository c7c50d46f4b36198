"""Directions that Jacobians are measured along: the whole basis, or random signs keyed by sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diffattn.checks import require
from diffattn.seeding import keyed_uniform

EXACT_LIMIT = 2048
AUTO_PROBES = 16
MIN_PROBES = 4


def resolve_probes(probes: int | str, dimension: int) -> int | None:
    """How many random probes serve an input of this dimension; None stands for the whole basis.

    Args:
        probes: "exact", "auto" (exact up to 2048 input dimensions, 16 probes above), or a number of at least 4.
        dimension: the number of inputs of one sample.

    Raises:
        ValueError: for anything else.
    """
    if probes == "exact":
        return None
    if probes == "auto":
        return None if dimension <= EXACT_LIMIT else AUTO_PROBES
    if not isinstance(probes, int) or isinstance(probes, bool) or probes < MIN_PROBES:
        raise ValueError(
            f"probes must be 'exact', 'auto' or an integer of at least {MIN_PROBES} (errors need a few); "
            f"got {probes!r}"
        )
    return probes


def directions(
    count: int | None, inputs: Tensor, *, per_pass: int, sample_ids: Sequence[int | str], key: Sequence[int | str]
) -> Iterator[Tensor]:
    """Chunks [R, batch, ...] of directions in the space of `inputs` [batch, ...], R <= `per_pass`.

    Args:
        count: number of Rademacher probes v, for which E |J v|^2 = |J|_F^2 and E <J_1 v, J_2 v> = <J_1, J_2>_F
            (Hutchinson 1990); None gives every basis vector, whose sum in place of the mean is exact.
        inputs: the point; its shape, dtype and device.
        per_pass: directions in a chunk, at least 1.
        sample_ids: [batch], with `key` the only source of a sample's signs.
        key: what else keys the signs, such as the seed.
    """
    require(per_pass >= 1, f"per_pass must be at least 1; got {per_pass}")
    shape = inputs.shape[1:]
    if count is None:
        dimension = math.prod(shape)
        for start in range(0, dimension, per_pass):
            chosen = torch.arange(start, min(start + per_pass, dimension), device=inputs.device)
            basis = inputs.new_zeros(len(chosen), dimension)
            basis[torch.arange(len(chosen), device=inputs.device), chosen] = 1.0
            yield basis.view(len(chosen), 1, *shape).expand(-1, *inputs.shape)
        return
    signs = keyed_uniform(sample_ids, (count, *shape), "probes", *key).transpose(0, 1)
    for chunk in signs.split(per_pass):
        yield torch.where(chunk < 0, -1.0, 1.0).to(inputs)
