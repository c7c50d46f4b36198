"""A table of sensitivity against a reference model's (Theorems 2 and 3), and the summaries of both."""

from __future__ import annotations

from typing import Any

import polars as pl

from diffattn.checks import require
from diffattn.statistics import Interval, bootstrap_interval, wilson_interval

_PLACE = ["index", "wrt", "reading"]
_GROUP = ["index", "layer", "wrt", "reading", "lambda", "head"]
_SUMMARY = ("norm_1", "norm_2", "norm_combined", "rho", "lambda_rho", "cos_theta")
_COMPARED = (
    "gamma",
    "rho",
    "lambda_rho",
    "cos_theta",
    "theorem2_rhs",
    "measured_ratio",
    "theorem3_threshold",
)


def compare_with_reference(
    table: pl.DataFrame, reference_table: pl.DataFrame, *, reference_name: str
) -> pl.DataFrame:
    """Set each layer's sensitivity beside the same layer of a reference model, at the same samples.

        gamma = |dA_1| / |dA_base|
        |dA| / |dA_base| = gamma sqrt(1 + (lambda rho)^2 - 2 lambda rho cos theta)               (Theorem 2)
        |dA| > |dA_base|  iff  cos theta < (1 + (lambda rho)^2 - gamma^-2) / (2 lambda rho)       (Theorem 3)

    Everything is of the whole layer. In the *jacobian* reading the norms are root mean squares over heads, since
    the two models may have different numbers of heads; in the *loss* reading they are of the layer's one scalar.

    Args:
        table: from `measure_sensitivity`; layers of one or two branches.
        reference_table: the same of the reference, such as a softmax model of the same depth.
        reference_name: what the reference is called in the result.

    Returns:
        One row a (sample, layer, wrt, reading, lambda): reference, gamma, rho, lambda_rho, cos_theta, theorem2_rhs,
        measured_ratio (of the derivatives of both combined maps), theorem3_threshold and more_sensitive (null
        unless lambda rho > 0, which the theorem needs), agrees: whether more_sensitive is measured_ratio > 1.
        A reference with one lambda reading serves both.

    Raises:
        ValueError: if the tables have different layers, samples, inputs or readings, or more than two branches.

    Source: arXiv 2510.00517, Theorems 2 and 3; gamma per layer and its root mean square over heads are ours.
    """
    require(bool(reference_name), f"reference_name must name the reference model; got {reference_name!r}")
    own, base = (_whole_layers(one, name) for one, name in ((table, "table"), (reference_table, "reference_table")))
    for column, what in (("index", "layers"), ("sample_id", "samples"), ("wrt", "inputs"), ("reading", "readings")):
        left, right = (set(one[column].unique()) for one in (own, base))
        require(
            left == right,
            f"table and reference_table must have the same {what}; got {len(left)} and {len(right)}, of which "
            f"{len(left & right)} are common",
        )
    require(
        own["branches"].max() in (1, 2),
        f"table must have layers of at most 2 branches for Theorems 2 and 3; got {own['branches'].max()}",
    )
    columns = [*_PLACE, "sample_id", "lambda"]
    base = base.select(*columns, pl.col("combined").alias("base"), pl.col("layer").alias("reference_layer"))
    kinds = base.select(*_PLACE, pl.col("lambda")).unique()
    missing = own.select(*_PLACE, "lambda").unique().join(kinds, on=[*_PLACE, "lambda"], how="anti")
    frozen = base.filter(pl.col("lambda") == "frozen").drop("lambda")
    filled = frozen.join(missing, on=_PLACE).select(base.columns)
    joined = own.join(pl.concat([base, filled]), on=columns, how="left", maintain_order="left")
    product = pl.col("lambda_rho").fill_null(0.0)
    square = 1 + product**2
    return (
        joined.with_columns(
            reference=pl.lit(reference_name),
            gamma=_ratio(pl.col("first"), pl.col("base")),
            measured_ratio=_ratio(pl.col("combined"), pl.col("base")),
        )
        .with_columns(
            theorem2_rhs=pl.col("gamma")
            * (square - 2 * product * pl.col("cos_theta").fill_null(0.0)).clip(lower_bound=0.0).sqrt(),
            theorem3_threshold=pl.when((product > 0) & (pl.col("gamma") > 0)).then(
                (square - pl.col("gamma") ** -2) / (2 * product)
            ),
        )
        .with_columns(more_sensitive=pl.col("cos_theta") < pl.col("theorem3_threshold"))
        .with_columns(agrees=pl.col("more_sensitive") == (pl.col("measured_ratio") > 1))
        .select(
            "sample_id",
            "layer",
            "index",
            "wrt",
            "reading",
            "lambda",
            "reference",
            "reference_layer",
            *_COMPARED,
            "more_sensitive",
            "agrees",
        )
    )


def summarise(table: pl.DataFrame, *, seed: int = 0) -> list[dict[str, Any]]:
    """Means over samples of a sensitivity table, for each layer, head, input, reading and lambda.

    Args:
        table: from `measure_sensitivity`.
        seed: of the bootstrap.

    Returns:
        One dict a group, in the table's order: layer, index, head (int or "all"), wrt, reading, lambda, n, probes
        (0 when exact), and the means norm_1, norm_2, norm_combined, rho, lambda_rho, cos_theta as
        {"value", "low", "high"} with 95 % bootstrap intervals over samples; negative_share: the share of samples
        with cos_theta < 0, with its Wilson interval. Means and shares are over the samples that have the figure
        (a zero gradient has no cos_theta); one that no sample has is None.
    """
    rows = []
    for key, group in table.group_by(_GROUP, maintain_order=True):
        place = dict(zip(_GROUP, key, strict=True))
        head = place["head"]
        probes = group["probes"][0]
        rows.append(
            {
                "layer": place["layer"],
                "index": place["index"],
                "head": head if head == "all" else int(str(head)),
                "wrt": place["wrt"],
                "reading": place["reading"],
                "lambda": place["lambda"],
                "n": group.height,
                "probes": 0 if probes is None else probes,
                **{name: _mean(group[name], seed) for name in _SUMMARY},
                "negative_share": _share(group["cos_theta"] < 0),
            }
        )
    return rows


def summarise_comparison(comparison: pl.DataFrame, *, seed: int = 0) -> list[dict[str, Any]]:
    """Means over samples of `compare_with_reference`, for each layer, input, reading and lambda.

    Returns:
        One dict a group: layer, index, reference, reference_layer, wrt, reading, lambda, n, means of gamma, rho,
        lambda_rho, cos_theta, theorem2_rhs, measured_ratio and theorem3_threshold with bootstrap intervals, and the
        shares more_sensitive_share, measured_share (measured_ratio > 1) and agreement with Wilson intervals.
    """
    group_columns = ["index", "layer", "reference", "reference_layer", "wrt", "reading", "lambda"]
    return [
        {
            **dict(zip(group_columns, key, strict=True)),
            "n": group.height,
            **{name: _mean(group[name], seed) for name in _COMPARED},
            "more_sensitive_share": _share(group["more_sensitive"]),
            "measured_share": _share(group["measured_ratio"] > 1),
            "agreement": _share(group["agrees"]),
        }
        for key, group in comparison.group_by(group_columns, maintain_order=True)
    ]


def _whole_layers(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """The rows of whole layers, with `first` and `combined`: norms that different head counts share."""
    wanted = {"sample_id", "head", "branches", "norm_1", "norm_combined", "lambda_rho", "cos_theta", *_GROUP}
    absent = sorted(wanted - set(table.columns))
    require(not absent, f"{name} must be a table from measure_sensitivity; it lacks {', '.join(absent)}")
    heads = (pl.len().over([*_PLACE, "sample_id", "lambda"]) - 1).sqrt()
    scale = pl.when(pl.col("reading") == "jacobian").then(heads).otherwise(1.0)
    return table.with_columns(first=pl.col("norm_1") / scale, combined=pl.col("norm_combined") / scale).filter(
        pl.col("head") == "all"
    )


def _ratio(above: pl.Expr, below: pl.Expr) -> pl.Expr:
    """Quotient; null where `below` is 0."""
    return pl.when(below > 0).then(above / below)


def _mean(values: pl.Series, seed: int) -> dict[str, float] | None:
    found = values.drop_nulls().to_numpy()
    return _as_dict(bootstrap_interval(found, seed=seed)) if len(found) else None


def _share(flags: pl.Series) -> dict[str, float] | None:
    found = flags.drop_nulls()
    return _as_dict(wilson_interval(int(found.sum()), len(found))) if len(found) else None


def _as_dict(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}
