"""Figures from inner products: identities, sign conventions, delta-method errors."""

from __future__ import annotations

import math

import pytest
import torch

from diffattn.sensitivity.alignment import PRODUCTS, Weight, figures, lambda_of, products


def exact_figures(lam, first, second, *, constant=True, frozen=True):
    """Figures of G_1 = first, G_2 = -lam second for vectors in the plane."""
    maps = [torch.tensor(one, dtype=torch.float64) for one in (first, second)]
    weighted = [maps[0], -lam * maps[1]]
    drawn = products(maps, weighted, weighted[0] + weighted[1])
    weight = Weight(torch.tensor([[float(lam)]]), torch.tensor([[constant]]))
    return {name: value.item() for name, value in figures(drawn[None, None, None], weight, frozen=frozen).items()}


def test_products_are_the_named_inner_products():
    maps = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])]
    weighted = [maps[0], -2.0 * maps[1]]
    found = dict(zip(PRODUCTS, products(maps, weighted, torch.tensor([1.0, 6.0])).tolist(), strict=True))
    assert found == {
        "map_1": 25.0,
        "map_2": 2.0,
        "map_12": -1.0,
        "branch_1": 25.0,
        "branch_2": 8.0,
        "branch_12": 2.0,
        "combined": 37.0,
        "lemma1": 25.0 + 8.0 + 4.0,
    }


@pytest.mark.parametrize("lam", [-0.5, 1.5])
def test_cosine_is_of_the_maps_whatever_lambdas_sign(lam):
    found = exact_figures(lam, [2.0, 0.0], [1.0, 1.0])
    assert found["cos_theta"] == pytest.approx(math.cos(math.pi / 4))
    assert found["rho"] == pytest.approx(math.sqrt(2) / 2)
    assert found["lambda_rho"] == pytest.approx(lam * math.sqrt(2) / 2)
    assert found["norm_combined"] == pytest.approx(math.hypot(2 - lam, lam))
    assert found["lemma1_rhs"] == pytest.approx(found["norm_combined"])
    assert found["amplification"] == pytest.approx(math.hypot(2 - lam, lam) / 2)


def test_zero_lambda_keeps_the_angle_of_the_maps():
    found = exact_figures(0.0, [2.0, 0.0], [1.0, 1.0])
    assert found["cos_theta"] == pytest.approx(math.cos(math.pi / 4))
    assert found["lambda_rho"] == 0.0


@pytest.mark.parametrize(("constant", "frozen"), [(False, True), (True, False)])
def test_varying_or_differentiated_lambda_is_read_as_positive(constant, frozen):
    found = exact_figures(-0.5, [2.0, 0.0], [1.0, 1.0], constant=constant, frozen=frozen)
    assert found["cos_theta"] == pytest.approx(-math.cos(math.pi / 4))
    assert found["lambda_rho"] == pytest.approx(math.sqrt(2) / 4)


def test_one_branch_has_no_second_figures():
    vector = torch.tensor([3.0, 4.0])
    drawn = products([vector], [vector], vector)[None, None, None]
    found = figures(drawn, None, frozen=True)
    assert found["norm_1"].item() == found["norm_combined"].item() == found["lemma1_rhs"].item() == 5.0
    for name in ("norm_2", "weighted_2", "rho", "lambda_rho", "cos_theta", "norm_1_se", "cos_theta_se"):
        assert found[name].isnan().all(), name


def test_lambda_is_read_by_head_and_layer():
    maps = [torch.rand(2, 3, 4, 4)] * 2
    one = lambda_of([torch.ones(()), torch.tensor(-0.8)], maps).with_layer()
    assert one.constant.all()
    assert one.value.shape == (2, 4)
    by_head = lambda_of([torch.ones(()), -torch.tensor([0.2, 0.4, 0.9]).view(1, 3, 1, 1)], maps).with_layer()
    assert by_head.constant[0].tolist() == [True, True, True, False]
    assert by_head.value[0].tolist() == pytest.approx([0.2, 0.4, 0.9, 0.5])
    by_token = lambda_of([torch.ones(()), -torch.rand(2, 3, 4, 1)], maps).with_layer()
    assert not by_token.constant.any()
    assert lambda_of([torch.ones(())], maps[:1]) is None


def test_errors_are_those_of_repeated_draws():
    """The delta method against the spread of 400 repetitions with 64 correlated draws each."""
    torch.manual_seed(0)
    shared = torch.randn(64, 400, 1, 12)
    first, second = (
        (shared + torch.randn(64, 400, 1, 12)).double(),
        (0.7 * shared + torch.randn_like(shared)).double(),
    )
    drawn = products([first, second], [first, -0.8 * second], first - 0.8 * second)
    weight = Weight(torch.full((400, 1), 0.8), torch.ones(400, 1, dtype=torch.bool))
    found = figures(drawn, weight, frozen=True)
    for name in ("norm_1", "norm_combined", "rho", "lambda_rho", "cos_theta", "amplification"):
        assert found[f"{name}_se"].mean() == pytest.approx(found[name].std().item(), rel=0.12), name


def test_tiny_gradients_do_not_vanish_in_their_products():
    """1e-25 squared is 0 in float32: the products are taken in float64."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 1, 1, 6, generator=generator) * 1e-25 for _ in range(2)]
    found = products(maps, [maps[0], -0.8 * maps[1]], maps[0] - 0.8 * maps[1])
    large = [one * 1e25 for one in maps]
    expected = products(large, [large[0], -0.8 * large[1]], large[0] - 0.8 * large[1])
    assert found.abs().max() > 0
    torch.testing.assert_close(found * 1e50, expected, rtol=1e-5, atol=1e-12)
