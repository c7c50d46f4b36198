"""The largest ratio |f(x + xi) - f(x)| / |xi| in an L2 ball, by projected-gradient ascent from several starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from diffattn.seeding import keyed_normal

RANDOM_STARTS = 2
STEPS = 30

MakeFunction = Callable[[nn.Module, int], Callable[[Tensor], Tensor]]
"""(layer, copies of the batch) -> tokens [copies * batch, tokens, width] -> values [copies * batch, anything]."""


def largest_ratio(
    layer: nn.Module,
    make_function: MakeFunction,
    x: Tensor,
    *,
    radius: float,
    direction: Tensor,
    seed: int,
    sample_ids: Sequence[int | str],
) -> tuple[Tensor, Tensor]:
    """Search the ball around each sample for the largest ratio.

    Starts: radius times the direction and its negative, and two random points of the sphere. Each takes 30 steps
    along the normalised gradient of the log ratio, accepted where the ratio grows; a step that does not halves
    the step size. The best point is scored once more with the layer in float64, so that the difference of two
    close values is no rounding error.

    Args:
        layer: the module.
        make_function: what is measured of it.
        x: [batch, tokens, width].
        radius: above 0.
        direction: [batch, tokens, width], of norm 1 or 0.
        seed: with `sample_ids` keys the random starts.
        sample_ids: [batch].

    Returns:
        the ratio [batch] and its displacement [batch, tokens, width], of norm at most `radius` up to rounding.
    """
    random = keyed_normal(sample_ids, (RANDOM_STARTS, *x.shape[1:]), seed, "lipschitz ball").to(x)
    starts = torch.cat([direction[None], -direction[None], random.transpose(0, 1)])
    xi = _on_sphere(starts, radius).flatten(0, 1)
    copies = starts.shape[0]
    function = make_function(layer, copies)
    points = x.repeat(copies, 1, 1)
    with torch.no_grad():
        values = function(points)
    xi, ratio = _ascend(function, points, values, xi, radius)
    by_start = ratio.unflatten(0, (copies, -1))
    best = by_start.argmax(dim=0)
    found = xi.unflatten(0, (copies, -1))[best, torch.arange(len(x), device=x.device)]
    return _rescored(layer, make_function, x, found).to(x), found


def _ascend(
    function: Callable[[Tensor], Tensor], points: Tensor, values: Tensor, xi: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """Displacements and their ratios after `STEPS` steps; each row has its own step size."""
    size = torch.full((len(xi), 1, 1), radius / 2, dtype=xi.dtype, device=xi.device)
    ratio, gradient = _ratio_and_gradient(function, points, values, xi)
    for _ in range(STEPS):
        tried = _inside(xi + size * _on_sphere(gradient, 1.0), radius)
        tried_ratio, tried_gradient = _ratio_and_gradient(function, points, values, tried)
        better = (tried_ratio > ratio)[:, None, None]
        xi, gradient = torch.where(better, tried, xi), torch.where(better, tried_gradient, gradient)
        ratio = torch.where(better.flatten(), tried_ratio, ratio)
        size = torch.where(better, (1.5 * size).clamp(max=radius), 0.5 * size)
    return xi, ratio


def _ratio_and_gradient(
    function: Callable[[Tensor], Tensor], points: Tensor, values: Tensor, xi: Tensor
) -> tuple[Tensor, Tensor]:
    """|f(x + xi) - f(x)| / |xi| [rows] (0 where xi is), and the gradient of its logarithm (0 where it is not)."""
    with torch.enable_grad():
        leaf = xi.detach().requires_grad_()
        change = (function(points + leaf) - values).square().sum(dim=1)
        (gradient,) = torch.autograd.grad(change.sum(), leaf)
    change, square = change.detach(), xi.square().sum(dim=(1, 2))
    ratio = torch.where(square > 0, (change / torch.where(square > 0, square, 1.0)).sqrt(), 0.0)
    usable = ((change > 0) & (square > 0))[:, None, None]
    pull = gradient / torch.where(change > 0, change, 1.0)[:, None, None]
    push = 2.0 * xi / torch.where(square > 0, square, 1.0)[:, None, None]
    return ratio, torch.where(usable, 0.5 * (pull - push), 0.0)


def _rescored(layer: nn.Module, make_function: MakeFunction, x: Tensor, xi: Tensor) -> Tensor:
    """The ratio at each displacement, in float64."""
    wide = copy.deepcopy(layer).double()
    function = make_function(wide, 1)
    point, change = x.double(), xi.double()
    with torch.no_grad():
        difference = torch.linalg.vector_norm(function(point + change) - function(point), dim=1)
    norm = torch.linalg.vector_norm(change, dim=(1, 2))
    return torch.where(norm > 0, difference / torch.where(norm > 0, norm, 1.0), 0.0)


def _on_sphere(x: Tensor, radius: float) -> Tensor:
    """Rows over the last two axes scaled to norm `radius`; a zero row stays."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x * (radius / torch.where(norm > 0, norm, 1.0))


def _inside(x: Tensor, radius: float) -> Tensor:
    """Rows over the last two axes scaled down to norm `radius` where they are longer."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x * (radius / norm.clamp(min=radius))
