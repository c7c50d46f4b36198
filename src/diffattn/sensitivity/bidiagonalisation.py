"""The largest singular value of many linear maps at once, by Golub-Kahan-Lanczos bidiagonalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffattn.config import require

WINDOW, GROWTH = 3, 0.1
"""A value is settled only if the last 3 steps raised it by at most 0.1 rtol: a start that nearly misses the top
vector shows itself by growing again. On spectra with a second value 3 % below the first this cut the share of
misses at rtol 1e-2 from 8 % (residual alone) to 0.3 %, for two and a half steps."""


@dataclass(frozen=True)
class SingularTriplets:
    """The largest Ritz value of each map and how far to trust it.

    Args:
        value: [batch], float64; at most the largest singular value, up to rounding.
        vector: [batch, n], the right Ritz vector, of norm 1 (0 for a zero map).
        residual: [batch], |J' u - value v| / value: some singular value lies within this share of `value`.
        iterations: [batch], steps taken: one product with J and one with J' each.
        converged: [batch], whether the residual is at most the tolerance and the value has stopped growing.
    """

    value: Tensor
    vector: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor


def largest_singular_values(
    forward: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    rtol: float,
    max_iterations: int,
) -> SingularTriplets:
    """Bidiagonalise each map J_i from its start with full reorthogonalisation until its top triplet is settled.

    Step k extends orthonormal U_k, V_k with J V_k = U_k B_k and J' U_k = V_k B_k' + beta_k v_{k+1} e_k'. The top
    triplet (p, sigma, q) of the small bidiagonal B_k gives u = U_k p, v = V_k q with J v = sigma u and
    |J' u - sigma v| = beta_k |p_k|: a singular value of J lies that near to sigma. Which one, the residual cannot
    say; from a random start the largest is found with probability 1 in the end, and most often settles first. A
    result is frozen at its own last step, so it does not depend on the other maps.

    Args:
        forward: [batch, n] -> [batch, m], J_i applied to row i.
        adjoint: [batch, m] -> [batch, n], J_i' applied to row i.
        start: [batch, n], random.
        rtol: the residual that counts as settled, relative to sigma, in (0, 1); see also `GROWTH`.
        max_iterations: steps after which a map is given up as not converged.

    Raises:
        ValueError: if a product is not finite.

    Source: Golub and Kahan 1965; Golub and Van Loan, Matrix Computations, section 10.4.
    """
    batch = start.shape[0]
    tiny = 8 * torch.finfo(start.dtype).eps
    right, left = [_unit(start, floor=0.0)[0]], []
    bidiagonal = torch.zeros(batch, max_iterations, max_iterations + 1, dtype=torch.float64)
    value, residual = (torch.zeros(batch, dtype=torch.float64) for _ in range(2))
    iterations, history = torch.zeros(batch, dtype=torch.long), []
    running = torch.ones(batch, dtype=torch.bool)
    vector = torch.zeros_like(start)
    for step in range(1, max_iterations + 1):
        floor = tiny * value.to(start)
        u, alpha = _unit(_orthogonalised(forward(right[-1]), left), floor=floor)
        left.append(u)
        v, beta = _unit(_orthogonalised(adjoint(u), right), floor=torch.maximum(floor, tiny * alpha))
        bad = int((~torch.isfinite(alpha) | ~torch.isfinite(beta)).sum())
        require(not bad, f"the derivatives must be finite; got non-finite ones for {bad} of {batch} samples")
        bidiagonal[:, step - 1, step - 1], bidiagonal[:, step - 1, step] = alpha.cpu(), beta.cpu()
        p, sigma, q = torch.linalg.svd(bidiagonal[:, :step, :step])
        top = sigma[:, 0]
        error = torch.where(top > 0, beta.cpu() * p[:, -1, 0].abs() / top.clamp(min=1e-300), 0.0)
        history.append(top)
        grown = top - history[-1 - WINDOW] if step > WINDOW else top
        settled = (error <= rtol) & (grown <= GROWTH * rtol * top)
        value, residual = torch.where(running, top, value), torch.where(running, error, residual)
        iterations = torch.where(running, step, iterations)
        exhausted = (alpha == 0).cpu() | (beta == 0).cpu()
        ended = running & (settled | exhausted)
        last = step == max_iterations
        if bool(ended.any()) or last:
            ritz = torch.einsum("kbn,bk->bn", torch.stack(right), q[:, 0].to(start))
            chosen = (running if last else ended).to(start.device)
            vector = torch.where(chosen[:, None], _unit(ritz, floor=0.0)[0], vector)
        running = running & ~ended
        if not bool(running.any()):
            break
        right.append(v)
    return SingularTriplets(value, vector, residual, iterations, ~running)


def _orthogonalised(x: Tensor, basis: list[Tensor]) -> Tensor:
    """Row i of x [batch, n] without its parts along row i of each basis vector; twice, against rounding."""
    if not basis:
        return x
    stacked = torch.stack(basis, dim=1)
    for _ in range(2):
        parts = torch.einsum("bkn,bn->bk", stacked, x)
        x = x - torch.einsum("bkn,bk->bn", stacked, parts)
    return x


def _unit(x: Tensor, *, floor: Tensor | float) -> tuple[Tensor, Tensor]:
    """Rows of norm 1 and their norms; rows whose norm is at most the floor count as zero."""
    norm = torch.linalg.vector_norm(x, dim=1)
    norm = torch.where(norm <= floor, 0.0, norm)
    return x / torch.where(norm == 0, 1.0, norm)[:, None], norm
