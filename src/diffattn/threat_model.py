"""What an attacker may do to an image: one small class per norm, and nothing about how to search.

A threat model knows the distance between images, the projection onto its budget, a random start and the
direction of steepest ascent. Images hold pixels in [0, 1]; every budget is in pixel units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from diffattn.checks import shown
from diffattn.config import format_eps, parse_eps
from diffattn.registry import Registry
from diffattn.seeding import keyed_normal, keyed_uniform


class Threat(Protocol):
    """What every threat model offers; attacks use nothing else."""

    name: ClassVar[str]

    @property
    def eps(self) -> float:
        """The budget as a float."""
        ...

    @property
    def label(self) -> str:
        """The budget as people write it, such as `4/255`."""
        ...

    def distance(self, points: Tensor, center: Tensor) -> Tensor:
        """Distance of each point from its centre: [batch], float64."""
        ...

    def project(self, points: Tensor, center: Tensor) -> Tensor:
        """The points brought back into the budget around their centres and into [0, 1]."""
        ...

    def random_start(self, center: Tensor, sample_ids: Sequence[int | str], *key: int | str) -> Tensor:
        """A random point of the budget around each centre, keyed by its sample and the key."""
        ...

    def step(self, gradient: Tensor) -> Tensor:
        """The direction of steepest ascent, of length 1 in the norm; 0 where the gradient is 0."""
        ...


LARGEST_L2 = 1e6

THREATS: Registry[type[Threat]] = Registry("norm")


def make_threat(norm: str, eps: str | float | Fraction) -> Threat:
    """Make the threat model of that norm ("Linf" or "L2") and budget.

    Raises:
        ValueError: for an unknown norm or a budget that it refuses.
    """
    return THREATS[norm](eps)  # pyright: ignore[reportCallIssue] - a protocol says nothing of constructors


@THREATS.register("Linf")
@dataclass(frozen=True, init=False)
class Linf:
    """Every pixel may move by at most eps: max_i |x_i - c_i| <= eps, with x in [0, 1].

    Args:
        eps: budget in pixel units, in [0, 1]: text such as "4/255" or a number.

    Raises:
        ValueError: if eps is no number, negative or above 1.
    """

    name: ClassVar[str] = "Linf"
    eps: float
    label: str

    def __init__(self, eps: str | float | Fraction) -> None:
        exact = parse_eps(eps)
        if exact > 1:
            hint = f"{exact}/255" if exact.denominator == 1 and exact <= 255 else "4/255"
            raise ValueError(
                f"eps must be at most 1 for Linf, pixels being in [0, 1]; got {shown(eps)}: write '{hint}'?"
            )
        object.__setattr__(self, "eps", float(exact))
        object.__setattr__(self, "label", format_eps(exact))

    def distance(self, points: Tensor, center: Tensor) -> Tensor:
        """max_i |x_i - c_i| of each sample, measured in float64: [batch, ...] -> [batch]."""
        return _difference(points, center).abs().amax(dim=1)

    def project(self, points: Tensor, center: Tensor) -> Tensor:
        """Clip every pixel to [c - e, c + e] and to [0, 1]; `distance` of the result never exceeds eps.

        e is eps less a rounding margin u (1/2 + eps), with u the dtype's spacing at 1: rounding c +- e to a
        value within [0, 1] moves it by at most u/4, rounding e itself by at most eps u/2, and the subtraction
        of the measurement (float64) by at most eps u/2. In float32 the margin is about 6e-8.
        """
        radius = max(0.0, self.eps - torch.finfo(center.dtype).eps * (0.5 + self.eps))
        return _clip_to_box(torch.minimum(torch.maximum(points, center - radius), center + radius), center)

    def random_start(self, center: Tensor, sample_ids: Sequence[int | str], *key: int | str) -> Tensor:
        """Uniform in the ball, c + eps u with u in [-1, 1)^D, then clipped to [0, 1] as in Madry et al. (2018)."""
        noise = keyed_uniform(sample_ids, center.shape[1:], *key).to(center.device)
        return self.project((center + self.eps * noise).to(center.dtype), center)

    def step(self, gradient: Tensor) -> Tensor:
        """The sign of the gradient: the maximiser of <g, d> over max |d_i| <= 1."""
        return gradient.sign()


@THREATS.register("L2")
@dataclass(frozen=True, init=False)
class L2:
    """The image may move by at most eps in Euclidean distance: ||x - c||_2 <= eps, with x in [0, 1].

    Args:
        eps: budget in pixel units, in [0, 1e6], which no image needs: text such as "0.5" or a number.

    Raises:
        ValueError: if eps is no number, negative or above 1e6.
    """

    name: ClassVar[str] = "L2"
    eps: float
    label: str

    def __init__(self, eps: str | float | Fraction) -> None:
        exact = parse_eps(eps)
        if exact > LARGEST_L2:
            raise ValueError(f"eps must be at most {LARGEST_L2:g} for L2, in pixel units; got {shown(eps)}")
        object.__setattr__(self, "eps", float(exact))
        object.__setattr__(self, "label", format_eps(exact))

    def distance(self, points: Tensor, center: Tensor) -> Tensor:
        """sqrt(sum_i (x_i - c_i)^2) of each sample, measured in float64: [batch, ...] -> [batch]."""
        return torch.linalg.vector_norm(_difference(points, center), dim=1)

    def project(self, points: Tensor, center: Tensor) -> Tensor:
        """Pull the points onto the ball of radius e, then clip to [0, 1]; `distance` never exceeds eps.

        Clipping towards a box that holds the centre shrinks every coordinate's distance, so the result is
        feasible; it is the nearest feasible point only where nothing is clipped.

        e is eps less a rounding margin, with u the dtype's spacing at 1 and D pixels: rounding c + s d to a
        value within [0, 1] moves each pixel by at most u/4, so the image by u/4 sqrt(D) (u/2 sqrt(D) is kept);
        the difference d, the scale s and their product are each within u/2 of theirs, relatively, and so are
        the sums of the norms (8 u eps is kept: 1e-6 eps in float32).
        """
        spacing = torch.finfo(center.dtype).eps
        pixels = center[0].numel()
        radius = max(0.0, self.eps * (1 - 8 * spacing) - spacing / 2 * pixels**0.5)
        shift = points - center
        norm = torch.linalg.vector_norm(shift.flatten(1), dim=1, dtype=torch.float64)
        scale = (radius / norm.clamp_min(torch.finfo(torch.float64).tiny)).to(center.dtype)
        inside = _per_sample(norm <= radius, center)
        points = torch.where(inside, points, center + shift * _per_sample(scale, center))
        return _clip_to_box(points, center)

    def random_start(self, center: Tensor, sample_ids: Sequence[int | str], *key: int | str) -> Tensor:
        """Uniform in the ball: c + eps r^(1/D) n / ||n||_2, n normal, r uniform in [0, 1); clipped to [0, 1]."""
        normal = keyed_normal(sample_ids, center.shape[1:], *key, "direction")
        share = (keyed_uniform(sample_ids, (1,), *key, "radius")[:, 0] + 1) / 2
        length = self.eps * share ** (1 / center[0].numel())
        direction = normal / _per_sample(torch.linalg.vector_norm(normal.flatten(1), dim=1), normal)
        noise = (direction * _per_sample(length, normal)).to(center.device)
        return self.project((center + noise).to(center.dtype), center)

    def step(self, gradient: Tensor) -> Tensor:
        """The maximiser g / ||g||_2 of <g, d> over ||d||_2 <= 1; divided by max |g_i| first, against underflow."""
        largest = gradient.flatten(1).abs().amax(dim=1)
        scaled = gradient / _per_sample(torch.where(largest > 0, largest, 1), gradient)
        norm = torch.linalg.vector_norm(scaled.flatten(1), dim=1)
        return scaled / _per_sample(torch.where(norm > 0, norm, 1), gradient)


def _difference(points: Tensor, center: Tensor) -> Tensor:
    """Points less centre in float64, one row a sample."""
    if points.shape != center.shape:
        raise ValueError(f"points must have the shape of center {tuple(center.shape)}; got {tuple(points.shape)}")
    return (points.detach().double() - center.detach().double()).flatten(1)


def _clip_to_box(points: Tensor, center: Tensor) -> Tensor:
    """Clip to [0, 1], widened to the centre where rounding put that outside."""
    return torch.minimum(torch.maximum(points, center.clamp(max=0)), center.clamp(min=1))


def _per_sample(values: Tensor, images: Tensor) -> Tensor:
    """Reshape [batch] so that it broadcasts over [batch, ...]."""
    return values.reshape(-1, *[1] * (images.ndim - 1))
