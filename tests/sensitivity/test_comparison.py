"""Theorems 2 and 3 as identities on measured tables, and the summaries."""

from __future__ import annotations

import polars as pl
import pytest

from diffattn.sensitivity import compare_with_reference, measure_sensitivity, summarise, summarise_comparison
from small_models import set_lambda, small_batch, small_vit


def tables(prefix="diffvit", *, lam=0.8, reference="vit", heads=4, **options):
    model, base = small_vit(prefix, seed=0), small_vit(reference, seed=5, num_heads=heads)
    set_lambda(model, lam)
    images, labels = small_batch(4)
    return tuple(measure_sensitivity(one, images, labels, **options) for one in (model, base))


@pytest.mark.parametrize(
    ("prefix", "lam"), [("diffvit", -0.5), ("diffvit", 0.8), ("diffvit", 1.5), ("diffvit_v2", 0.0)]
)
def test_theorems_2_and_3_are_identities(prefix, lam):
    table, base = tables(prefix, lam=lam)
    found = compare_with_reference(table, base, reference_name="a softmax ViT")
    kinds = 2 if prefix == "diffvit_v2" else 1
    assert found.height == 4 * 2 * 2 * 2 * kinds
    assert found["reference"].unique().to_list() == ["a softmax ViT"]
    gap = (found["theorem2_rhs"] / found["measured_ratio"] - 1).abs()
    assert gap.null_count() == 0
    assert gap.max() < 1e-10
    if lam < 0:
        assert found["theorem3_threshold"].null_count() == found["more_sensitive"].null_count() == found.height
    else:
        assert found["agrees"].all()
        assert 0 < found["more_sensitive"].sum() < found.height


def test_gamma_is_a_root_mean_square_over_heads():
    table, base = tables(readings="jacobian", wrt="input")
    found = compare_with_reference(table, base, reference_name="ViT").filter(sample_id="2", index=1)
    own, other = (
        one.filter(pl.col("sample_id") == "2", pl.col("index") == 1, pl.col("head") != "all")
        for one in (table, base)
    )
    assert (own.height, other.height) == (2, 4)
    expected = ((own["norm_1"] ** 2).mean() / (other["norm_combined"] ** 2).mean()) ** 0.5
    assert found["gamma"].item() == pytest.approx(expected, rel=1e-12)


def test_gamma_of_the_loss_is_of_one_scalar():
    table, base = tables(readings="loss", wrt="pixels")
    found = compare_with_reference(table, base, reference_name="ViT").filter(sample_id="2", index=1)
    own, other = (one.filter(sample_id="2", index=1, head="all") for one in (table, base))
    assert found["gamma"].item() == pytest.approx(own["norm_1"].item() / other["norm_1"].item(), rel=1e-12)


def test_softmax_against_itself_is_one():
    _, base = tables()
    found = compare_with_reference(base, base, reference_name="itself")
    for name in ("gamma", "theorem2_rhs", "measured_ratio"):
        assert found[name].to_numpy() == pytest.approx(1.0)
    assert found["theorem3_threshold"].null_count() == found.height


def test_differential_reference_with_both_lambda_readings():
    table, base = tables("diffvit_v2", reference="diffvit_v2", heads=2, readings="jacobian")
    found = compare_with_reference(table, base, reference_name="V2")
    own = base.filter(pl.col("head") == "all", pl.col("lambda") == "differentiated", pl.col("index") == 0)
    rows = found.filter(pl.col("lambda") == "differentiated", pl.col("index") == 0)
    first = table.filter(pl.col("head") == "all", pl.col("lambda") == "differentiated", pl.col("index") == 0)
    expected = first["norm_combined"] / own["norm_combined"]
    assert rows["measured_ratio"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-12)


def test_tables_that_do_not_match_are_refused():
    table, base = tables(readings="loss")
    with pytest.raises(ValueError, match="the same layers; got 2 and 1, of which 1 are common"):
        compare_with_reference(table, base.filter(index=0), reference_name="ViT")
    with pytest.raises(ValueError, match="the same samples; got 4 and 3"):
        compare_with_reference(table, base.filter(pl.col("sample_id") != "1"), reference_name="ViT")
    with pytest.raises(ValueError, match="the same inputs; got 2 and 1"):
        compare_with_reference(table, base.filter(wrt="input"), reference_name="ViT")
    with pytest.raises(
        ValueError, match="reference_table must be a table from measure_sensitivity; it lacks norm_1"
    ):
        compare_with_reference(table, base.drop("norm_1"), reference_name="ViT")
    with pytest.raises(ValueError, match="reference_name must name the reference model; got ''"):
        compare_with_reference(table, base, reference_name="")
    with pytest.raises(ValueError, match="at most 2 branches for Theorems 2 and 3; got 3"):
        compare_with_reference(table.with_columns(branches=3), base, reference_name="ViT")


def test_summary_rows():
    table, base = tables(probes=8)
    rows = summarise(table)
    assert len(rows) == 2 * 2 * 2 * 3
    row = next(
        one for one in rows if one["head"] == "all" and one["wrt"] == "pixels" and one["reading"] == "jacobian"
    )
    group = table.filter(layer=row["layer"], head="all", wrt="pixels", reading="jacobian")
    assert set(row) == {
        *("layer", "index", "head", "wrt", "reading", "lambda", "n", "probes"),
        *("norm_1", "norm_2", "norm_combined", "rho", "lambda_rho", "cos_theta", "negative_share"),
    }
    assert (row["n"], row["probes"], row["lambda"]) == (4, 8, "frozen")
    for name in ("norm_1", "cos_theta"):
        assert row[name]["value"] == pytest.approx(group[name].mean())
        assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
    assert row["negative_share"]["value"] == (group["cos_theta"] < 0).mean()
    assert {one["head"] for one in rows} == {0, 1, "all"}
    assert {one["probes"] for one in rows if one["reading"] == "loss"} == {0}
    softmax = summarise(base)[0]
    assert softmax["norm_2"] is softmax["cos_theta"] is softmax["negative_share"] is None


def test_comparison_summary_rows():
    table, base = tables()
    comparison = compare_with_reference(table, base, reference_name="ViT")
    rows = summarise_comparison(comparison)
    assert len(rows) == 2 * 2 * 2
    assert all(row["agreement"]["value"] == 1.0 for row in rows)
    first = comparison.filter(index=0, wrt="input", reading="jacobian")
    assert rows[0]["gamma"]["value"] == pytest.approx(first["gamma"].mean())
    assert rows[0]["more_sensitive_share"] == rows[0]["measured_share"]
