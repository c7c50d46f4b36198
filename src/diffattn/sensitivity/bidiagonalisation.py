"""The largest singular value of many linear maps at once, by Golub-Kahan-Lanczos bidiagonalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diffattn.checks import require

WINDOW, GROWTH = 3, 0.1
"""A value is settled only if the last 3 steps raised it by at most 0.1 rtol: a start that nearly misses the top
vector shows itself by growing again. On spectra with a second value 3 % below the first this cut the share of
misses at rtol 1e-2 from 8 % (residual alone) to 0.3 %, for two and a half steps."""

Product = Callable[[Tensor], Tensor]
"""[rows, n] -> [rows, m] or back: a linear map applied to each row, its own to each."""

Linearise = Callable[[Tensor], tuple[Product, Product]]
"""Indices of maps -> (products with J_i, products with J_i')."""


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
    linearise: Linearise, start: Tensor, *, rtol: float, max_iterations: int
) -> SingularTriplets:
    """Bidiagonalise each map J_i from its start with full reorthogonalisation until its top triplet is settled.

    Step k extends orthonormal U_k, V_k with J V_k = U_k B_k and J' U_k = V_k B_k' + beta_k v_{k+1} e_k'. The top
    triplet (p, sigma, q) of the small bidiagonal B_k gives u = U_k p, v = V_k q with J v = sigma u and
    |J' u - sigma v| = beta_k |p_k|: a singular value of J lies that near to sigma. Which one, the residual cannot
    say; from a random start the largest is found with probability 1 in the end, and most often settles first. A
    result is frozen at its own last step, so it does not depend on the other maps; when half of the maps are done,
    the others go on without them.

    Args:
        linearise: rows -> the products with J_i and J_i' for these i.
        start: [batch, n], random.
        rtol: the residual that counts as settled, relative to sigma, in (0, 1); see also `GROWTH`.
        max_iterations: steps after which a map is given up as not converged.

    Raises:
        ValueError: if a product is not finite.

    Source: Golub and Kahan 1965; Golub and Van Loan, Matrix Computations, section 10.4.
    """
    batch = start.shape[0]
    result = SingularTriplets(
        value=torch.zeros(batch, dtype=torch.float64),
        vector=torch.zeros_like(start),
        residual=torch.zeros(batch, dtype=torch.float64),
        iterations=torch.zeros(batch, dtype=torch.long),
        converged=torch.zeros(batch, dtype=torch.bool),
    )
    rows = torch.arange(batch)
    forward, adjoint = linearise(rows)
    space = _Space.begin(start, max_iterations)
    for step in range(1, max_iterations + 1):
        space.extend(forward, adjoint)
        top, error, ritz, settled = space.top_triplet(rtol)
        open_rows = ~result.converged[rows]
        closing = open_rows & (settled if step < max_iterations else True)
        result.value[rows[open_rows]], result.residual[rows[open_rows]] = top[open_rows], error[open_rows]
        result.iterations[rows[open_rows]] = step
        if bool(closing.any()):
            chosen = closing.to(start.device)
            result.vector[rows[closing].to(start.device)] = space.right_vectors(ritz)[chosen]
            result.converged[rows[closing & settled]] = True
        still = ~result.converged[rows]
        if not bool(still.any()):
            break
        if 2 * int(still.sum()) <= len(rows) and step < max_iterations:
            rows, space = rows[still], space.restricted(still)
            forward, adjoint = linearise(rows)
    return result


@dataclass
class _Space:
    """The Krylov spaces of some maps: bases as lists of [rows, n], B as [rows, K, K + 1], the values by step."""

    right: list[Tensor]
    left: list[Tensor]
    bidiagonal: Tensor
    history: list[Tensor]
    exhausted: Tensor

    @classmethod
    def begin(cls, start: Tensor, most: int) -> _Space:
        """Only the first right vector."""
        small = torch.zeros(len(start), most, most + 1, dtype=torch.float64)
        return cls([_unit(start, floor=0.0)[0]], [], small, [], torch.zeros(len(start), dtype=torch.bool))

    def extend(self, forward: Product, adjoint: Product) -> None:
        """One step: a left and a right vector more."""
        tiny = 8 * torch.finfo(self.right[0].dtype).eps
        scale = self.history[-1] if self.history else torch.zeros(len(self.right[0]))
        floor = tiny * scale.to(self.right[0])
        u, alpha = _unit(_orthogonalised(forward(self.right[-1]), self.left), floor=floor)
        self.left.append(u)
        v, beta = _unit(_orthogonalised(adjoint(u), self.right), floor=torch.maximum(floor, tiny * alpha))
        self.right.append(v)
        bad = int((~torch.isfinite(alpha) | ~torch.isfinite(beta)).sum())
        require(not bad, f"the derivatives must be finite; got non-finite ones for {bad} of {len(u)} samples")
        step = len(self.left)
        self.bidiagonal[:, step - 1, step - 1], self.bidiagonal[:, step - 1, step] = alpha.cpu(), beta.cpu()
        self.exhausted = ((alpha == 0) | (beta == 0)).cpu()

    def top_triplet(self, rtol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The largest Ritz value, its relative residual, its coefficients in the right basis, and if it settled."""
        step = len(self.left)
        p, sigma, q = torch.linalg.svd(self.bidiagonal[:, :step, :step])
        top, beta = sigma[:, 0], self.bidiagonal[:, step - 1, step]
        error = torch.where(top > 0, beta * p[:, -1, 0].abs() / top.clamp(min=1e-300), 0.0)
        grown = top - self.history[-WINDOW] if step > WINDOW else top
        self.history.append(top)
        settled = ((error <= rtol) & (grown <= GROWTH * rtol * top)) | self.exhausted
        return top, error, q[:, 0], settled

    def right_vectors(self, ritz: Tensor) -> Tensor:
        """[rows, n] of norm 1 from coefficients [rows, k]."""
        basis = torch.stack(self.right[: ritz.shape[1]])
        return _unit(torch.einsum("kbn,bk->bn", basis, ritz.to(basis)), floor=0.0)[0]

    def restricted(self, keep: Tensor) -> _Space:
        """The spaces of the kept maps alone."""
        here = keep.to(self.right[0].device)
        return _Space(
            [one[here] for one in self.right],
            [one[here] for one in self.left],
            self.bidiagonal[keep],
            [one[keep] for one in self.history],
            self.exhausted[keep],
        )


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
