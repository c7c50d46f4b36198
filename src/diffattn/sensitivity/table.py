"""The table of sensitivity: its columns, and the rows of one layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from diffattn.sensitivity.alignment import FIGURES, figures, lambda_of
from diffattn.sensitivity.evaluation import LayerPoint

SCHEMA: dict[str, Any] = {
    "sample_id": pl.String,
    "layer": pl.String,
    "index": pl.Int64,
    "head": pl.String,
    "wrt": pl.String,
    "reading": pl.String,
    "lambda": pl.String,
    "branches": pl.Int64,
    "probes": pl.Int64,
    "lambda_value": pl.Float64,
    **dict.fromkeys(FIGURES, pl.Float64),
    "lemma1_rhs": pl.Float64,
    **dict.fromkeys((f"{name}_se" for name in FIGURES), pl.Float64),
}
"""Columns of the table; `measure_sensitivity` says what they mean."""


def layer_rows(
    point: LayerPoint,
    drawn: Tensor,
    *,
    wrt: str,
    reading: str,
    kind: str,
    probes: int | None,
    sample_ids: Sequence[int | str],
) -> pl.DataFrame:
    """Rows of one layer for one (wrt, reading, lambda), a sample's heads beside each other.

    Args:
        point: the layer at these samples.
        drawn: products [K, batch, heads + 1, 8].
        wrt: "input" or "pixels".
        reading: "jacobian" or "loss".
        kind: "frozen" or "differentiated" lambda.
        probes: K, or None when exact.
        sample_ids: [batch].

    Raises:
        ValueError: if a product is not finite, naming the layer.
    """
    finite = torch.isfinite(drawn).all(dim=-1).all(dim=-1).all(dim=0)
    if not finite.all():
        raise ValueError(
            f"layer {point.name!r}: the {reading} gradients with respect to {wrt} are not finite for "
            f"{int((~finite).sum())} of {len(sample_ids)} samples"
        )
    weight = lambda_of(point.branches.weights, point.branches.maps)
    weight = None if weight is None else weight.with_layer()
    heads = drawn.shape[2] - 1
    rows = len(sample_ids) * (heads + 1)
    constants = {
        "layer": point.name,
        "index": point.index,
        "wrt": wrt,
        "reading": reading,
        "lambda": kind,
        "branches": len(point.branches.maps),
        "probes": probes,
    }
    data: dict[str, list[Any]] = {name: [value] * rows for name, value in constants.items()}
    data["sample_id"] = [str(one) for one in sample_ids for _ in range(heads + 1)]
    data["head"] = [*map(str, range(heads)), "all"] * len(sample_ids)
    data["lambda_value"] = [None] * rows if weight is None else _nullable(weight.value)
    found = figures(drawn, weight, frozen=kind == "frozen")
    data |= {name: _nullable(value) for name, value in found.items()}
    return pl.DataFrame({name: data[name] for name in SCHEMA}, schema=SCHEMA)


def _nullable(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.flatten().tolist()]
