"""Estimates of a layer's local Lipschitz constant: at a point, and the largest ratio found in a ball around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffattn.checks import require, require_number, require_positive_integer
from diffattn.models.adapters import adapt
from diffattn.seeding import keyed_normal
from diffattn.sensitivity.ball import largest_ratio
from diffattn.sensitivity.bidiagonalisation import Product, SingularTriplets, largest_singular_values
from diffattn.sensitivity.evaluation import check_measurable

OF = ("output", "map")
MOST_ITERATIONS = 4096


@dataclass(frozen=True, eq=False)
class LipschitzEstimate:
    """A local Lipschitz estimate of a layer for each sample, with how it was reached.

    Args:
        value: [batch]; the largest ratio found, the larger of `point` and what the search found; a lower bound.
        point: [batch]; the Jacobian's largest singular value at the point.
        residual: [batch]; relative residual of its singular triplet, at most rtol where converged.
        iterations: [batch]; products with the Jacobian and with its transpose.
        converged: [batch] bool.
        direction: [batch, tokens, width]; the top right singular vector, of norm 1.
        displacement: [batch, tokens, width]; the displacement with the largest ratio, 0 where that is the limit
            at the point.
        radius: of the ball, 0 for the point.
        of: "output" or "map".
    """

    value: Tensor
    point: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    direction: Tensor
    displacement: Tensor
    radius: float
    of: str


def lipschitz_estimate(
    layer: nn.Module,
    tokens: Tensor,
    *,
    of: str = "output",
    radius: float | None = None,
    rtol: float = 1e-2,
    max_iterations: int = 64,
    seed: int = 0,
    attn_mask: Tensor | None = None,
    sample_ids: Sequence[int | str] | None = None,
) -> Tensor:
    """Estimate of a layer's local Lipschitz constant in L2, a lower bound, for each sample.

        at the point: |J(x)|_2, the largest singular value of the Jacobian of f at x
        in a ball:    sup of |f(x + xi) - f(x)| / |xi| over 0 < |xi| <= radius, xi over all tokens of the sample

    The first is the second's limit as the radius goes to 0, so the second is never reported below it.

    Args:
        layer: module [batch, tokens, width] -> [batch, ...] that treats samples apart; in eval mode, or without
            dropout. Any module for "output"; an attention layer with an adapter for "map".
        tokens: [batch, tokens, width] floats, the layer's input.
        of: "output" for x -> layer(x); "map" for x -> the combined map, the heads stacked.
        radius: of the ball, above 0, in the norm of one sample's tokens; None for the point.
        rtol: relative residual at which the singular value counts as found, once it has stopped growing; in
            (0, 0.5]. The value's own error is most often far smaller. In float32 about 1e-5 is the least.
        max_iterations: largest number of bidiagonalisation steps, in 1..4096.
        seed: with `sample_ids` keys the random starts.
        attn_mask: passed to the layer.
        sample_ids: [batch]; 0..batch-1 unless given.

    Returns:
        [batch], in the tokens' dtype.

    Raises:
        ValueError: for bad arguments; a non-finite value or derivative; a sample that has not converged
            (`lipschitz_estimate_details` reports it instead).

    Source: the paper's L(x) = sup |A(x + xi) - A(x)| / |xi| (arXiv 2510.00517, Lemma 2); its estimator is not
    known. Point and ball, and how they are found, are ours.
    """
    found = lipschitz_estimate_details(
        layer,
        tokens,
        of=of,
        radius=radius,
        rtol=rtol,
        max_iterations=max_iterations,
        seed=seed,
        attn_mask=attn_mask,
        sample_ids=sample_ids,
    )
    if not found.converged.all():
        open_ones = int((~found.converged).sum())
        raise ValueError(
            f"{open_ones} of {len(tokens)} samples have not converged to rtol={rtol:g} in max_iterations="
            f"{max_iterations} (largest relative residual {found.residual.max().item():.2g}); raise max_iterations "
            "or rtol, or call lipschitz_estimate_details, which reports them"
        )
    return found.value


def lipschitz_estimate_details(
    layer: nn.Module,
    tokens: Tensor,
    *,
    of: str = "output",
    radius: float | None = None,
    rtol: float = 1e-2,
    max_iterations: int = 64,
    seed: int = 0,
    attn_mask: Tensor | None = None,
    sample_ids: Sequence[int | str] | None = None,
) -> LipschitzEstimate:
    """`lipschitz_estimate` with its residuals, steps and vectors; samples that have not converged are marked.

    Arguments, source and errors are the same, but for the error that a sample has not converged.
    """
    _check(layer, tokens, of, sample_ids)
    require_number("rtol", rtol, high=0.5, open_low=True)
    require_positive_integer("max_iterations", max_iterations)
    require(
        max_iterations <= MOST_ITERATIONS,
        f"max_iterations must be at most {MOST_ITERATIONS}, each keeping two vectors; got {max_iterations}",
    )
    if radius is not None:
        require_number("radius", radius, open_low=True)
    ids = list(range(len(tokens))) if sample_ids is None else list(sample_ids)
    with torch.inference_mode(mode=False):
        x = tokens.detach().clone()
        mask = None if attn_mask is None else attn_mask.detach().clone()
        start = keyed_normal(ids, x.shape[1:], seed, "lipschitz start").to(x).flatten(1)
        triplets = _point_triplets(layer, of, x, mask, start, rtol=rtol, max_iterations=max_iterations)
        point, direction = triplets.value.to(x), triplets.vector.view_as(x)
        value, displacement = point, torch.zeros_like(x)
        if radius is not None:
            ratio, found = largest_ratio(
                layer,
                lambda module, copies: _function(module, of, _repeated(mask, copies)),
                x,
                radius=radius,
                direction=direction,
                seed=seed,
                sample_ids=ids,
            )
            larger = ratio > point
            value = torch.where(larger, ratio, point)
            displacement = torch.where(larger[:, None, None], found, displacement)
    return LipschitzEstimate(
        value=value,
        point=point,
        residual=triplets.residual,
        iterations=triplets.iterations,
        converged=triplets.converged,
        direction=direction,
        displacement=displacement,
        radius=0.0 if radius is None else float(radius),
        of=of,
    )


def _check(layer: nn.Module, tokens: Tensor, of: str, sample_ids: Sequence[int | str] | None) -> None:
    wanted = "tokens must be a non-empty float tensor [batch, tokens, width] of finite values"
    require(isinstance(tokens, Tensor), f"{wanted}; got {type(tokens).__name__}")
    require(tokens.is_floating_point(), f"{wanted}; got dtype {tokens.dtype}")
    require(tokens.ndim == 3 and tokens.numel() > 0, f"{wanted}; got shape {tuple(tokens.shape)}")
    finite = torch.isfinite(tokens)
    require(bool(finite.all()), f"{wanted}; got {int((~finite).sum())} non-finite values")
    require(of in OF, f"of must be 'output' or 'map'; got {of!r}")
    require(
        sample_ids is None or len(sample_ids) == len(tokens),
        f"sample_ids must be {len(tokens)} ids, one a sample; got {0 if sample_ids is None else len(sample_ids)}",
    )
    check_measurable(layer, name="layer")


def _function(layer: nn.Module, of: str, attn_mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """What is differentiated: tokens -> [batch, anything]."""
    if of == "map":
        adapter = adapt(layer)
        return lambda x: adapter.branches(x, attn_mask).combined.flatten(1)
    if attn_mask is None:
        return lambda x: layer(x).flatten(1)
    return lambda x: layer(x, attn_mask=attn_mask).flatten(1)


def _repeated(attn_mask: Tensor | None, copies: int) -> Tensor | None:
    """The mask of a batch repeated `copies` times, copy by copy."""
    if attn_mask is None or attn_mask.ndim != 4 or attn_mask.shape[0] == 1:
        return attn_mask
    return attn_mask.repeat(copies, 1, 1, 1)


def _point_triplets(
    layer: nn.Module, of: str, x: Tensor, mask: Tensor | None, start: Tensor, *, rtol: float, max_iterations: int
) -> SingularTriplets:
    """Bidiagonalise the Jacobians of all samples side by side.

    The graph of J' u, which is linear in u, is built once; J' u and (its transpose) J v are backward passes
    through it. The samples do not mix, so one pass over the batch serves every sample.
    """

    def linearise(rows: Tensor) -> tuple[Product, Product]:
        here = rows.to(x.device)
        return _products(_function(layer, of, _chosen_mask(mask, here)), x[here])

    return largest_singular_values(linearise, start, rtol=rtol, max_iterations=max_iterations)


def _products(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Product, Product]:
    """Products with the samples' Jacobians and with their transposes."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        require(bool(torch.isfinite(out).all()), "layer must give finite outputs at tokens; got non-finite values")
        dummy = torch.zeros_like(out, requires_grad=True)
        (pulled,) = torch.autograd.grad(out, leaf, dummy, create_graph=True, materialize_grads=True)

    def adjoint(u: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(out, leaf, u.view_as(out), retain_graph=True, materialize_grads=True)
        return product.flatten(1)

    def forward(v: Tensor) -> Tensor:
        if not pulled.requires_grad:
            return torch.zeros_like(out)
        return torch.autograd.grad(pulled, dummy, v.view_as(pulled), retain_graph=True)[0]

    return forward, adjoint


def _chosen_mask(attn_mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """The mask of these samples."""
    if attn_mask is None or attn_mask.ndim != 4 or attn_mask.shape[0] == 1:
        return attn_mask
    return attn_mask[rows]
