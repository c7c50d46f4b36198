"""Lipschitz estimates against dense singular values, known spectra and known suprema."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import oracles
from diffattn.sensitivity import lipschitz_estimate, lipschitz_estimate_details
from diffattn.sensitivity.bidiagonalisation import largest_singular_values
from small_models import attention

NAMES = ["softmax", "differential", "differential_v2"]
WIDTH, TOKENS = 8, 4


class Matrix(nn.Module):
    """x -> M x over all tokens of a sample."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.matrix.T


class Ramp(nn.Module):
    """x -> tanh(slope (a . x - offset)) b: one direction matters."""

    def __init__(self, slope: float, offset: float) -> None:
        super().__init__()
        self.slope, self.offset = slope, offset
        torch.manual_seed(3)
        self.register_buffer("a", nn.functional.normalize(torch.randn(6), dim=0))
        self.register_buffer("b", nn.functional.normalize(torch.randn(5), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.slope * (x.flatten(1) @ self.a - self.offset))[:, None] * self.b


class Cube(nn.Module):
    """x -> x^3: the Jacobian at 0 is 0, the supremum over the ball is radius^2, along an axis."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


def tokens(batch: int = 3, seed: int = 2) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(batch, TOKENS, WIDTH, dtype=torch.float64)


def value_of(layer, of, x, mask=None):
    return layer(x, attn_mask=mask).flatten(1) if of == "output" else layer.branches(x, mask).combined.flatten(1)


def dense_norms(layer, of, x, mask=None):
    return torch.stack(
        [
            torch.linalg.matrix_norm(
                torch.autograd.functional.jacobian(lambda t: value_of(layer, of, t[None], mask)[0], one).flatten(1),
                2,
            )
            for one in x
        ]
    )


@pytest.mark.parametrize(("name", "of"), list(itertools.product(NAMES, ["output", "map"])))
def test_point_estimate_is_the_dense_norm(name, of):
    layer, x = attention(name, WIDTH), tokens()
    expected = dense_norms(layer, of, x)
    loose = lipschitz_estimate(layer, x, of=of)
    assert (loose <= expected * (1 + 1e-12)).all()
    assert (loose >= expected * 0.99).all()
    tight = lipschitz_estimate(layer, x, of=of, rtol=1e-9)
    assert torch.allclose(tight, expected, rtol=1e-12)


def test_masks_reach_the_layer():
    layer, x = attention("differential", WIDTH), tokens()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    for of in ("output", "map"):
        found = lipschitz_estimate(layer, x, of=of, attn_mask=mask, rtol=1e-9)
        assert torch.allclose(found, dense_norms(layer, of, x, mask), rtol=1e-10)
        ball = lipschitz_estimate(layer, x, of=of, attn_mask=mask[None, None].expand(3, -1, -1, -1), radius=0.5)
        assert torch.allclose(ball, lipschitz_estimate(layer, x, of=of, attn_mask=mask, radius=0.5))


def test_known_singular_values():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (10, 6))
    spectrum = torch.tensor([3.0, 2.9, 1.0, 0.5, 0.1, 0.0], dtype=torch.float64)
    layer = Matrix(left[:, :6] @ torch.diag(spectrum) @ right.T)
    found = lipschitz_estimate_details(layer, torch.randn(4, 2, 3, dtype=torch.float64), rtol=1e-8)
    assert torch.allclose(found.value, torch.full((4,), 3.0, dtype=torch.float64))
    assert found.converged.all()
    assert (found.iterations <= 7).all()
    overlap = (found.direction.flatten(1) @ right[:, 0]).abs()
    assert overlap.numpy() == pytest.approx(1.0)
    assert (found.radius, found.of) == (0.0, "output")
    assert (found.displacement == 0).all()


def test_residual_bounds_the_distance_to_a_singular_value():
    torch.manual_seed(1)
    matrices = torch.randn(50, 20, 30, dtype=torch.float64)
    for steps in (1, 2, 4):
        found = largest_singular_values(
            lambda rows: (
                lambda v: torch.einsum("bmn,bn->bm", matrices[rows], v),
                lambda u: torch.einsum("bmn,bm->bn", matrices[rows], u),
            ),
            torch.randn(50, 30, dtype=torch.float64),
            rtol=1e-12,
            max_iterations=steps,
        )
        spectra = torch.linalg.svdvals(matrices)
        distance = (spectra - found.value[:, None]).abs().amin(dim=1)
        assert (distance <= found.residual * found.value + 1e-12).all()
        assert (found.value <= spectra[:, 0] + 1e-12).all()
        assert not found.converged.any()


def test_zero_and_rank_one_jacobians_end_at_once():
    zero = lipschitz_estimate_details(Matrix(torch.zeros(4, 6)), torch.randn(2, 2, 3))
    assert (zero.value == 0).all()
    assert zero.converged.all()
    ramp = lipschitz_estimate_details(Ramp(2.0, 0.3), torch.zeros(1, 2, 3))
    assert ramp.value.item() == pytest.approx(2.0 * (1 - torch.tanh(torch.tensor(0.6)).item() ** 2), rel=1e-5)
    assert ramp.iterations.item() <= 3


def test_close_singular_values_are_told_apart():
    """A second value 3 % below the first: the residual alone would stop there for 1 start in 13."""
    torch.manual_seed(0)
    spectrum = torch.cat([torch.tensor([1.0, 0.97]), 0.5 * torch.rand(298)]).double()
    starts = torch.randn(1000, 300, dtype=torch.float64)
    products = (lambda v: v * spectrum, lambda u: u * spectrum)
    found = largest_singular_values(lambda rows: products, starts, rtol=1e-2, max_iterations=64)
    assert found.converged.all()
    assert ((1 - found.value) > 1e-2).double().mean() < 0.01
    assert found.iterations.double().mean() < 10


def test_batch_mates_do_not_matter():
    layer, x = attention("differential", WIDTH), tokens(4)
    ids = ["a", "b", "c", "d"]
    for radius in (None, 0.7):
        whole = lipschitz_estimate(layer, x, sample_ids=ids, radius=radius)
        parts = [lipschitz_estimate(layer, x[i : i + 1], sample_ids=[ids[i]], radius=radius) for i in range(4)]
        assert torch.allclose(whole, torch.cat(parts), rtol=1e-12)


def test_unconverged_samples_are_reported():
    layer, x = attention("softmax", WIDTH), tokens()
    message = r"3 of 3 samples have not converged to rtol=0\.01 in max_iterations=2 \(largest relative residual"
    with pytest.raises(ValueError, match=message):
        lipschitz_estimate(layer, x, max_iterations=2)
    found = lipschitz_estimate_details(layer, x, max_iterations=2)
    assert not found.converged.any()
    assert (found.value <= dense_norms(layer, "output", x)).all()


@pytest.mark.parametrize(("slope", "offset", "radius"), [(4.0, 0.5, 1.0), (4.0, 0.5, 0.2), (3.0, -0.8, 2.0)])
def test_ball_finds_the_supremum_of_a_ramp(slope, offset, radius):
    layer = Ramp(slope, offset).double()
    found = lipschitz_estimate_details(layer, torch.zeros(2, 2, 3, dtype=torch.float64), radius=radius)
    expected = oracles.ramp_supremum(slope, offset, radius)
    assert found.value.numpy() == pytest.approx(expected, rel=1e-4)
    assert (found.value >= found.point).all()
    assert (found.displacement.flatten(1).norm(dim=1) <= radius * (1 + 1e-12)).all()


def test_ball_leaves_a_point_without_derivative():
    found = lipschitz_estimate_details(Cube(), torch.zeros(4, 2, 3, dtype=torch.float64), radius=0.5)
    assert (found.point == 0).all()
    assert found.value.numpy() == pytest.approx(0.25, rel=1e-3)


def test_random_starts_find_what_the_top_vector_does_not_see():
    """f = (x_1 + x_1^2 / 10, 5 relu(x_2 - 0.3)): slope 1 and 0 at the point, 3.5 from there to (0, 1)."""
    found = lipschitz_estimate_details(Hidden(), torch.zeros(32, 1, 2, dtype=torch.float64), radius=1.0)
    assert found.point.numpy() == pytest.approx(1.0)
    best = found.value > 3.49
    assert (found.value <= 3.5 + 1e-9).all()
    assert best.double().mean() > 0.4


@pytest.mark.parametrize(("name", "of"), list(itertools.product(NAMES, ["output", "map"])))
def test_no_sampled_ratio_is_larger(name, of):
    layer, x, radius = attention(name, WIDTH), tokens(2), 1.0
    found = lipschitz_estimate_details(layer, x, of=of, radius=radius)
    assert (found.value >= found.point).all()
    moved = found.value > found.point
    change = value_of(layer, of, x + found.displacement) - value_of(layer, of, x)
    ratio = change.norm(dim=1) / found.displacement.flatten(1).norm(dim=1)
    assert torch.allclose(ratio[moved], found.value[moved])
    assert (found.displacement[~moved] == 0).all()
    torch.manual_seed(7)
    xi = nn.functional.normalize(torch.randn(500, 2, TOKENS * WIDTH, dtype=torch.float64), dim=2)
    best = torch.where(moved[:, None, None], found.displacement, found.direction)
    near = nn.functional.normalize(best.flatten(1) + 0.3 * xi, dim=2)
    xi = radius * torch.cat([xi, near]) * torch.rand(1000, 2, 1, dtype=torch.float64)
    shifted = (x + xi.view(1000, *x.shape)).flatten(0, 1)
    ratios = (value_of(layer, of, shifted).unflatten(0, (1000, 2)) - value_of(layer, of, x)).norm(dim=2) / xi.norm(
        dim=2
    )
    assert (ratios.amax(dim=0) <= found.value * 1.02).all()


def test_tiny_balls_in_single_precision_are_no_rounding_error():
    layer, x = attention("differential", WIDTH), tokens()
    found = lipschitz_estimate(layer.float(), x.float(), radius=1e-5)
    exact = dense_norms(layer.double(), "output", x)
    assert (found <= exact * 1.001).all()
    assert (found >= exact * 0.99).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradient_modes_and_the_layer_left_as_it_was(mode):
    layer, x = attention("softmax", WIDTH), tokens()
    layer.qkv.weight.requires_grad_(False)
    expected = lipschitz_estimate(layer, x, radius=0.5)
    with mode():
        assert torch.equal(lipschitz_estimate(layer, x.clone(), radius=0.5), expected)
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert not layer.qkv.weight.requires_grad
    assert layer.proj.weight.requires_grad
    assert not x.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": "maps"}, "of must be 'output' or 'map'; got 'maps'"),
        ({"radius": 0.0}, "radius must be a number above 0; got 0.0"),
        ({"rtol": 0.0}, r"rtol must be a number above 0 and at most 0\.5; got 0\.0"),
        ({"max_iterations": 0}, "max_iterations must be an integer of at least 1; got 0"),
        ({"tokens": torch.zeros(2, 3)}, r"tokens must be .*; got shape \(2, 3\)"),
        ({"tokens": torch.zeros(2, 3, 8, dtype=torch.int64)}, r"tokens must be .*; got dtype torch\.int64"),
        ({"tokens": torch.full((2, 3, 8), torch.nan)}, "tokens must be .*; got 48 non-finite values"),
        ({"sample_ids": ["a"]}, "sample_ids must be 3 ids, one a sample; got 1"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"layer": attention("softmax", WIDTH), "tokens": tokens()} | change
    with pytest.raises(ValueError, match=message):
        lipschitz_estimate(**arguments)


def test_bad_layers():
    with pytest.raises(ValueError, match="Linear is no attention layer that diffattn knows"):
        lipschitz_estimate(nn.Linear(WIDTH, WIDTH).double(), tokens(), of="map")
    layer = attention("softmax", WIDTH, attn_dropout=0.1)
    with pytest.raises(ValueError, match=r"drops at random; call layer.eval\(\) first"):
        lipschitz_estimate(layer.train(), tokens())
    layer = attention("softmax", WIDTH)
    with torch.no_grad():
        layer.proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="layer must give finite outputs at tokens"):
        lipschitz_estimate(layer, tokens())
    with pytest.raises(ValueError, match="derivatives must be finite; got non-finite ones for 1 of 1 samples"):
        lipschitz_estimate(SquareRoot(), torch.zeros(1, 2, 3))


class SquareRoot(nn.Module):
    """Infinite slope at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


class Hidden(nn.Module):
    """Flat at 0 in its second input, steep further on."""

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0, 0] + 0.1 * x[:, 0, 0] ** 2
        return torch.stack([first, 5.0 * (x[:, 0, 1] - 0.3).relu()], dim=1)


def test_what_cannot_be_measured_is_refused():
    from diffattn.models.attention import SoftmaxAttention
    from diffattn.models.zoo import create_model
    from diffattn.sensitivity import measure_sensitivity

    with torch.inference_mode():
        layer, model = SoftmaxAttention(8, 2).eval(), create_model("vit_micro_patch2_8").eval()
    with pytest.raises(ValueError, match="the layer's parameters must be normal tensors; got inference tensors"):
        lipschitz_estimate(layer, torch.randn(1, 3, 8))
    with pytest.raises(ValueError, match="the model's parameters must be normal tensors; got inference tensors"):
        measure_sensitivity(model, torch.rand(1, 1, 8, 8), torch.tensor([0]))
    with pytest.raises(ValueError, match="max_iterations must be at most 4096.*got 100000"):
        lipschitz_estimate(SoftmaxAttention(8, 2).eval(), torch.randn(1, 3, 8), max_iterations=100000)
