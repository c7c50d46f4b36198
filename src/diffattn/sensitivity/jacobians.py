"""The Jacobian reading: Frobenius inner products of branch Jacobians, by forward-mode derivatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffattn.models.attention.base import Branches
from diffattn.sensitivity.alignment import products
from diffattn.sensitivity.directions import directions, resolve_probes
from diffattn.sensitivity.evaluation import Evaluate, freeze_weights, per_head, quiet_forward_mode

Tensors = dict[str, dict[str, tuple[Tensor, ...]]]


def jacobian_products(
    evaluate: Evaluate,
    inputs: Tensor,
    readings: Mapping[str, Sequence[str]],
    *,
    probes: int | str,
    per_pass: int,
    sample_ids: Sequence[int | str],
    key: Sequence[int | str],
) -> tuple[dict[tuple[str, str], Tensor], int | None]:
    """Inner products of the Jacobians of each layer's branches with respect to `inputs`.

    One derivative along a direction v gives J v for every branch, head and layer; |J|_F^2 is the sum of |J v|^2
    over a basis, or its mean over random signs v.

    Args:
        evaluate: inputs -> branches of the layers in `readings`.
        inputs: [batch, ...].
        readings: layer name -> "frozen" and perhaps "differentiated".
        probes: see `resolve_probes`.
        per_pass: directions differentiated at once.
        sample_ids: [batch], keys of the probes.
        key: what else keys them.

    Returns:
        {(layer, reading): [K, batch, heads + 1, 8]}, the last head the whole layer (the heads' Jacobians
        stacked), with K = 1 when exact; and the number of probes, None when exact.
    """
    count = resolve_probes(probes, math.prod(inputs.shape[1:]))

    def along(direction: Tensor) -> dict[tuple[str, str], Tensor]:
        return _products_along(evaluate, inputs, readings, direction)

    found: dict[tuple[str, str], list[Tensor]] = {}
    with quiet_forward_mode():
        for chunk in directions(count, inputs, per_pass=per_pass, sample_ids=sample_ids, key=key):
            for name, part in torch.func.vmap(along)(chunk).items():
                parts = found.setdefault(name, [])
                if count is None and parts:
                    parts[0] = parts[0] + part.sum(dim=0, keepdim=True)
                else:
                    parts.append(part.sum(dim=0, keepdim=True) if count is None else part)
    stacked = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: torch.cat([one, one.sum(dim=2, keepdim=True)], dim=2) for name, one in stacked.items()}, count


def _products_along(
    evaluate: Evaluate, inputs: Tensor, readings: Mapping[str, Sequence[str]], direction: Tensor
) -> dict[tuple[str, str], Tensor]:
    """The products along one direction [batch, ...]: {(layer, reading): [batch, heads, 8]}."""

    def tensors(x: Tensor) -> Tensors:
        evaluated = evaluate(x)
        return {name: _differentiated(evaluated[name], readings[name]) for name in readings}

    derivative = torch.func.jvp(tensors, (inputs,), (direction,))
    values: Tensors = derivative[0]
    tangents: Tensors = derivative[1]
    found = {}
    for name, kinds in readings.items():
        value, tangent = values[name], tangents[name]
        frozen = tuple(weight * one for weight, one in zip(value["weights"], tangent["maps"], strict=True))
        for kind in kinds:
            weighted = frozen if kind == "frozen" else tangent["weighted"]
            maps = [per_head(one) for one in tangent["maps"]]
            found[name, kind] = products(maps, [per_head(one) for one in weighted], per_head(tangent[kind][0]))
    return found


def _differentiated(branches: Branches, kinds: Sequence[str]) -> dict[str, tuple[Tensor, ...]]:
    """What is differentiated of a layer: maps, and for each reading its own combined map."""
    wanted = {"maps": branches.maps, "weights": branches.weights, "frozen": (freeze_weights(branches).combined,)}
    if "differentiated" in kinds:
        wanted |= {"weighted": branches.weighted, "differentiated": (branches.combined,)}
    return wanted
