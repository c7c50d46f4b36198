"""Branch gradients against closed forms, dense Jacobians and Lemma 1."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import nn

from diffattn.models.capture import attention_layers
from diffattn.sensitivity import measure_sensitivity
from small_models import OneLayer, attention, set_lambda, small_batch, small_vit

EXACT = 1e-10


def rows(table: pl.DataFrame, **where: object) -> pl.DataFrame:
    return table.filter(*(pl.col(name) == value for name, value in where.items()))


def worst(table: pl.DataFrame, left: str | pl.Expr, right: str | pl.Expr) -> float:
    """Largest relative difference of two columns without nulls."""
    left, right = (pl.col(one) if isinstance(one, str) else one for one in (left, right))
    values = table.select(((left - right) / right).abs().alias("gap"))["gap"]
    assert values.null_count() == 0
    return values.max()


def check_lemma1(table: pl.DataFrame) -> None:
    """The measured norm of the combined map's derivative is what the branches' figures say."""
    assert worst(table, "norm_combined", "lemma1_rhs") < EXACT
    two = table.filter(pl.col("branches") == 2)
    if two.height:
        product = pl.col("lambda_rho")
        squared = pl.col("weighted_1") ** 2 * (1 + product**2 - 2 * product * pl.col("cos_theta"))
        assert worst(two, pl.col("norm_combined") ** 2, squared) < EXACT


# --- Lemma 1 and Theorem 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [-0.5, 0.0, 0.8, 1.5])
def test_lemma1_v1(lam):
    model = small_vit("diffvit")
    set_lambda(model, lam)
    table = measure_sensitivity(model, *small_batch())
    check_lemma1(table)
    assert table["lambda"].unique().to_list() == ["frozen"]
    assert table["lambda_value"].to_numpy() == pytest.approx(lam)
    assert (table["lambda_rho"].sign() == np.sign(lam)).all()
    assert worst(table, pl.col("lambda_rho") + 3, lam * pl.col("rho") + 3) < EXACT
    assert table["cos_theta"].null_count() == 0


def test_lemma1_v2_in_both_lambda_readings():
    table = measure_sensitivity(small_vit("diffvit_v2"), *small_batch())
    check_lemma1(table)
    frozen, differentiated = (rows(table, **{"lambda": kind}) for kind in ("frozen", "differentiated"))
    assert frozen.height == differentiated.height
    assert frozen["norm_1"].to_numpy() == pytest.approx(differentiated["norm_1"].to_numpy())
    gap = (frozen["norm_combined"] / differentiated["norm_combined"] - 1).abs()
    assert gap.min() > 1e-6


def test_lemma1_on_a_trained_model():
    model = small_vit("diffvit", spread=3.0)
    images, labels = small_batch(24)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.train()
    start = torch.nn.functional.cross_entropy(model(images), labels).item()
    for _ in range(60):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.7 * start
    model.eval()
    check_lemma1(measure_sensitivity(model, images[:3], labels[:3]))


def test_lemma1_for_three_branches_with_their_own_values():
    model = OneLayer(attention("own_values", lambda_init=0.8)).double()
    torch.manual_seed(6)
    images = torch.rand(2, 1, 4, 8, dtype=torch.float64)
    table = measure_sensitivity(model, images, torch.tensor([0, 1]))
    assert table["branches"].unique().to_list() == [3]
    check_lemma1(table)


def test_theorem1_aligned_branches():
    """Equal maps: cos theta = 1, rho = 1, |dA| = |1 - lambda| |dA_1|."""
    layer = attention("differential", lambda_init=1.5)
    with torch.no_grad():
        for parameter in (layer.qkv.weight, layer.qkv.bias):
            maps = parameter[: 2 * layer.embed_dim].view(-1, 2, layer.head_dim, *parameter.shape[1:])
            maps[:, 1] = maps[:, 0]
    model = OneLayer(layer).double()
    set_lambda(model, 1.5)
    table = measure_sensitivity(model, torch.rand(2, 1, 4, 8, dtype=torch.float64), torch.tensor([0, 1]))
    assert table["cos_theta"].to_numpy() == pytest.approx(1.0)
    assert table["rho"].to_numpy() == pytest.approx(1.0)
    assert worst(table, "norm_combined", 0.5 * pl.col("norm_1")) < EXACT


def test_masked_layer_sees_no_further():
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    model = OneLayer(attention("differential_v2"), mask=mask).double()
    images = torch.rand(3, 1, 4, 8, dtype=torch.float64)
    table = measure_sensitivity(model, images, torch.tensor([0, 1, 2]))
    check_lemma1(table)
    model.mask = mask[None, None].expand(3, -1, -1, -1)
    assert_frame_equal(table, measure_sensitivity(model, images, torch.tensor([0, 1, 2])), rel_tol=1e-9)
    model.mask = None
    open_table = measure_sensitivity(model, images, torch.tensor([0, 1, 2]))
    assert (table["norm_1"] / open_table["norm_1"] - 1).abs().min() > 1e-3


# --- probes -------------------------------------------------------------------------------------------------------


def test_probes_agree_with_the_exact_figures_within_their_errors():
    model = small_vit("diffvit")
    images, labels = small_batch(2)
    options = {"readings": "jacobian", "sample_ids": ["a", "b"]}
    exact = measure_sensitivity(model, images, labels, **options)
    scores = {name: [] for name in ("norm_1", "norm_combined", "rho", "cos_theta", "amplification")}
    for seed in range(12):
        table = measure_sensitivity(model, images, labels, probes=128, seed=seed, **options)
        check_lemma1(table)
        assert set(table["probes"]) == {128}
        for name, found in scores.items():
            score = (table[name] - exact[name]) / table[f"{name}_se"]
            found.extend(score.to_list())
    for name, found in scores.items():
        assert abs(np.mean(found)) < 0.4, name
        assert 0.7 < np.sqrt(np.mean(np.square(found))) < 1.4, name


def test_probes_are_keyed_by_sample_alone():
    model = small_vit("diffvit")
    images, labels = small_batch(3)
    options = {"probes": 6, "seed": 2}
    ids = ["x", "y", "z"]
    whole = measure_sensitivity(model, images, labels, sample_ids=ids, **options)
    single = measure_sensitivity(model, images[1:2], labels[1:2], sample_ids=["y"], **options)
    one_by_one = measure_sensitivity(model, images, labels, sample_ids=ids, batch_size=1, **options)
    key = ["index", "wrt", "reading", "head", "sample_id"]
    assert_frame_equal(rows(whole, sample_id="y").sort(key), single.sort(key), rel_tol=1e-9)
    assert_frame_equal(whole, one_by_one, rel_tol=1e-9)
    other = measure_sensitivity(model, images, labels, sample_ids=ids, probes=6, seed=3, readings="jacobian")
    jacobian = rows(whole, reading="jacobian")
    assert (jacobian["norm_1"] != other["norm_1"]).all()


# --- the model is left alone, in every gradient mode --------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_modes(mode):
    model = small_vit("diffvit")
    images, labels = small_batch(2)
    expected = measure_sensitivity(model, images, labels)
    with mode():
        found = measure_sensitivity(model, images.clone(), labels.clone())
    assert_frame_equal(found, expected)


def test_model_is_left_as_it_was():
    model = small_vit("diffvit")
    model.blocks[0].train()
    model.head.requires_grad_(False)
    images, labels = small_batch(2)
    before = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pixels = images.clone()
    measure_sensitivity(model, images, labels)
    assert [module.training for module in model.modules()] == before
    assert not model.head.weight.requires_grad
    assert model.blocks[0].mlp.fc1.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(images, pixels)
    assert not images.requires_grad


def test_chosen_layers_keep_their_place():
    model = small_vit("diffvit")
    name = list(attention_layers(model))[1]
    whole = measure_sensitivity(model, *small_batch(2), probes=4)
    part = measure_sensitivity(model, *small_batch(2), probes=4, layers=[name])
    assert_frame_equal(part, rows(whole, index=1), rel_tol=1e-9)


def test_zero_gradients_have_no_angle():
    model = small_vit("diffvit")
    images, labels = small_batch(1)
    with torch.no_grad():
        model.head.weight.zero_()
    table = measure_sensitivity(model, images, labels, readings="loss")
    assert (table["norm_1"] == 0).all()
    assert table["rho"].null_count() == table["cos_theta"].null_count() == table.height


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"labels": torch.tensor([0, 7])},
            r"labels must be an int64 tensor \[2\].*0\.\.2; got minimum 0 and maximum 7",
        ),
        ({"images": torch.full((2, 1, 4, 4), 1.5)}, "images must be .* maximum 1.5"),
        ({"wrt": "tokens"}, "wrt must be one or more of input, pixels; got 'tokens'"),
        ({"readings": ()}, r"readings must be one or more of jacobian, loss; got \(\)"),
        ({"probes": 1}, "probes must be 'exact', 'auto' or an integer of at least 4"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"seed": 0.5}, "seed must be an integer; got 0.5"),
        ({"sample_ids": ["a", "a"]}, "sample_ids must be 2 different ids, one an image; got 2, 1 different"),
        ({"layers": ["nowhere"]}, "no attention layer named nowhere"),
    ],
)
def test_bad_arguments(change, message):
    images, labels = small_batch(2)
    arguments = {"images": images, "labels": labels} | change
    with pytest.raises(ValueError, match=message):
        measure_sensitivity(small_vit("diffvit"), **arguments)


def test_dropout_in_training_mode_is_refused():
    model = small_vit("diffvit", dropout=0.1)
    measure_sensitivity(model, *small_batch(1), probes=4)
    model.train()
    with pytest.raises(
        ValueError, match=r"'.*' is in training mode and drops at random; call model.eval\(\) first"
    ):
        measure_sensitivity(model, *small_batch(1))
    model = small_vit("diffvit", attn_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn' is in training mode"):
        measure_sensitivity(model, *small_batch(1))
    with pytest.raises(ValueError, match="reads its batch-mates"):
        measure_sensitivity(nn.Sequential(nn.BatchNorm2d(1), small_vit("vit")), *small_batch(1))


def test_non_finite_gradients_name_their_layer():
    model = small_vit("diffvit")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"layer 'blocks.1.attn': the jacobian gradients .* input .* 2 of 2 samples"
    ):
        measure_sensitivity(model, *small_batch(2))
