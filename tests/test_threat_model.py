import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffattn.threat_model import L2, Linf, make_threat

THREATS = [Linf, L2]


def pixels(*shape, dtype=torch.float32, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("threat", THREATS)
def test_a_budget_keeps_its_text_and_its_value(threat):
    assert (threat("4/255").label, threat("4/255").eps) == ("4/255", 4 / 255)
    assert (threat(0.5).label, threat(0.5).eps) == ("0.5", 0.5)
    assert threat("4/255") == threat(" 4 / 255 ")
    with pytest.raises(AttributeError):
        threat("4/255").eps = 1.0


def test_linf_above_one_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"eps must be at most 1 for Linf.*got 4: write '4/255'"):
        Linf(4)
    with pytest.raises(ValueError, match=r"got '8': write '8/255'"):
        Linf("8")
    with pytest.raises(ValueError, match=r"write '4/255'") as caught:
        Linf("1e300")
    assert len(str(caught.value)) < 150
    with pytest.raises(ValueError, match=r"write '4/255'") as caught:
        Linf(10**300)
    assert len(str(caught.value)) < 250
    assert (Linf(4 / 255).label, Linf(4 / 255).eps) == ("4/255", 4 / 255)
    assert Linf(1).eps == 1
    assert L2(4).eps == 4


@pytest.mark.parametrize("threat", THREATS)
@pytest.mark.parametrize("eps", [-0.1, "four", math.nan, math.inf, True, None, "1/0"])
def test_a_budget_that_is_no_number_is_refused(threat, eps):
    with pytest.raises(ValueError, match="eps must be a number or a fraction such as '4/255', at least 0; got"):
        threat(eps)


def test_make_threat_knows_both_norms():
    assert make_threat("Linf", "4/255") == Linf("4/255")
    assert make_threat("L2", 0.5) == L2(0.5)
    with pytest.raises(ValueError, match="unknown norm 'linf'; did you mean Linf"):
        make_threat("linf", 0.1)


def test_distances_in_closed_form():
    center = torch.zeros(2, 1, 1, 2)
    points = torch.tensor([[[[0.25, 0.5]]], [[[0.75, 1.0]]]])
    assert Linf(1).distance(points, center).tolist() == [0.5, 1.0]
    assert L2(1).distance(points, center).tolist() == [math.hypot(0.25, 0.5), 1.25]
    assert L2(1).distance(points, center).dtype == torch.float64
    with pytest.raises(
        ValueError, match=r"points must have the shape of center \(2, 1, 1, 2\); got \(1, 1, 1, 2\)"
    ):
        Linf(1).distance(points[:1], center)


def test_projections_in_closed_form():
    center = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64)
    far = torch.tensor([[[[0.5 + 3, 0.5 - 4]]]], dtype=torch.float64)
    torch.testing.assert_close(Linf(0.1).project(far, center).flatten().tolist(), [0.6, 0.4])
    torch.testing.assert_close(L2(0.1).project(far, center).flatten().tolist(), [0.56, 0.42])
    near_the_edge = torch.full_like(center, 0.95)
    torch.testing.assert_close(Linf(0.1).project(far, near_the_edge).flatten().tolist(), [1.0, 0.85])


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.4)])
def test_a_point_inside_does_not_move(threat):
    center = pixels(3, 1, 2, 2) * 0.5 + 0.25
    inside = center + 0.05
    assert torch.equal(threat.project(inside, center), inside)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(THREATS),
    eps=st.sampled_from(["1/255", "4/255", "1/3", "1", "1e-9", "0"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    side=st.sampled_from([1, 8, 40]),
    reach=st.sampled_from([0.001, 0.1, 1.0, 1e4]),
    seed=st.integers(0, 10_000),
)
def test_a_projection_never_leaves_the_budget_nor_the_box(kind, eps, *, dtype, side, reach, seed):
    threat = kind(eps)
    center = pixels(4, 3, side, side, dtype=dtype, seed=seed)
    center[0] = center[0].round()  # corners of the box
    points = center + reach * (pixels(4, 3, side, side, dtype=dtype, seed=seed + 1) - 0.5)
    projected = threat.project(points, center)
    assert float(threat.distance(projected, center).max()) <= threat.eps
    assert 0 <= float(projected.min()) <= float(projected.max()) <= 1


@pytest.mark.parametrize("threat", [Linf("4/255"), L2(0.2)])
def test_the_rounding_margin_wastes_nothing_to_speak_of(threat):
    center = 0.25 + 0.5 * pixels(4, 3, 32, 32)
    projected = threat.project(center + 10 * (pixels(4, 3, 32, 32, seed=1) - 0.5), center)
    assert float(threat.distance(projected, center).min()) > threat.eps * (1 - 2e-5)


@pytest.mark.parametrize("threat", [Linf(0), L2(0)])
def test_an_empty_budget_gives_the_centre_back_bit_for_bit(threat):
    center = pixels(4, 3, 8, 8)
    center[0, 0, 0, 0] = 1 + 5e-7  # the rounding that images are allowed
    assert torch.equal(threat.project(center + 0.3, center), center)
    assert torch.equal(threat.random_start(center, range(4), 0), center)


@pytest.mark.parametrize("threat", [Linf("8/255"), L2(0.5)])
def test_random_starts_are_keyed_by_the_sample_alone(threat):
    center = pixels(5, 3, 8, 8)
    ids = ["a", "b", 3, 4, 5]
    together = threat.random_start(center, ids, 0, "pgd", 0)
    alone = threat.random_start(center[[3]], [4], 0, "pgd", 0)
    assert torch.equal(alone[0], together[3])
    assert not torch.equal(threat.random_start(center, ids, 0, "pgd", 1), together)
    assert float(threat.distance(together, center).max()) <= threat.eps


def test_linf_starts_are_uniform_in_the_ball():
    center = torch.full((200, 1, 10, 10), 0.5)
    moved = ((Linf(0.1).random_start(center, range(200), 0) - center) / 0.1).flatten().numpy()
    counts, _ = np.histogram(moved, bins=10, range=(-1, 1))
    assert abs(counts / 2000 - 1).max() < 0.1


def test_l2_starts_are_uniform_in_the_ball():
    center = torch.full((4000, 1, 1, 3), 0.5)
    moved = (L2(0.3).random_start(center, range(4000), 0) - center).flatten(1) / 0.3
    share = moved.norm(dim=1) ** 3  # the volume inside a radius: uniform in [0, 1]
    counts, _ = np.histogram(share.numpy(), bins=10, range=(0, 1))
    assert abs(counts / 400 - 1).max() < 0.2
    assert float(moved.mean(dim=0).abs().max()) < 0.03


def test_steps_ascend_steepest():
    gradient = torch.tensor([[[[3.0, -4.0]]], [[[0.0, 0.0]]], [[[3e-30, -4e-30]]]])
    assert Linf(1).step(gradient).flatten(1).tolist() == [[1, -1], [0, 0], [1, -1]]
    expected = torch.tensor([[0.6, -0.8], [0, 0], [0.6, -0.8]])
    torch.testing.assert_close(L2(1).step(gradient).flatten(1), expected)


def test_an_l2_budget_that_would_overflow_is_refused():
    with pytest.raises(ValueError, match="eps must be at most 1e\\+06 for L2, in pixel units; got 1e"):
        L2(1e308)
