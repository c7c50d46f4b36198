"""What every attention layer is: a signed sum of softmax maps applied to values.

Shapes: B batch, H output heads, M maps (H times the branches), N tokens, C width, d query-key width, v value
width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffattn.checks import require, require_positive_integer, require_probability
from diffattn.models.attention import kernels
from diffattn.models.attention.plain import Layout, hidden_entries, plain_maps
from diffattn.registry import Registry

ATTENTION: Registry[Callable[..., Attention]] = Registry("attention layer")
"""Name -> class of an attention layer; a class registers itself in its own file."""


@dataclass(frozen=True)
class Branches:
    """The signed sum that a layer computes at one input, before any dropout: sum_b weights[b] * maps[b].

    Args:
        maps: one [B, H, queries, keys] tensor a branch.
        weights: one tensor a branch, broadcastable to a map; V1: (1, -lambda).
        kinds: "softmax", or "derived" for a map that is no softmax of scores.
        values: one [B, H, keys, v] tensor a branch; the same tensor in every branch where they share it.
        mask: bool, True where the layer never looks, broadcastable to a map; None where it sees everything.
    """

    maps: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    kinds: tuple[str, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None = None

    @property
    def weighted(self) -> tuple[Tensor, ...]:
        """weights[b] * maps[b], one [B, H, queries, keys] tensor a branch."""
        return tuple(weight * one for weight, one in zip(self.weights, self.maps, strict=True))

    @property
    def combined(self) -> Tensor:
        """The combined map sum_b weights[b] * maps[b], [B, H, queries, keys]."""
        first, *rest = zip(self.weights, self.maps, strict=True)
        total = first[0] * first[1]
        for weight, one in rest:
            total = torch.addcmul(total, one, weight)
        return total

    @property
    def context(self) -> Tensor:
        """sum_b weights[b] * maps[b] @ values[b], [B, H, queries, v]."""
        if all(value is self.values[0] for value in self.values):
            return self.combined @ self.values[0]
        parts = [one @ value for one, value in zip(self.weighted, self.values, strict=True)]
        return torch.stack(parts).sum(dim=0)

    def detach(self) -> Branches:
        """The same tensors without their graph."""
        mask = None if self.mask is None else self.mask.detach()
        maps, weights = (tuple(one.detach() for one in part) for part in (self.maps, self.weights))
        detached = {id(value): value.detach() for value in self.values}
        return Branches(maps, weights, self.kinds, tuple(detached[id(value)] for value in self.values), mask)


@dataclass(frozen=True)
class ScoreOperators:
    """The linear maps behind a layer's scores: S_m = scale * (X Q_m' + q_m)(X K_m' + k_m)'.

    Map m belongs to output head `map_head[m]` and branch `map_branch[m]`; value head h serves output head h.
    Grouped-query keys and values are expanded views: one entry a map (a head), however many share it.

    Args:
        query: [M, d, C].
        key: [M, d, C].
        value: [H, v, C].
        output: [C, H, v].
        query_bias: [M, d] or None.
        key_bias: [M, d] or None.
        value_bias: [H, v] or None.
        output_bias: [C] or None.
        scale: what multiplies the scores.
        map_head: output head of each map.
        map_branch: branch of each map, from 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    scale: float
    map_head: tuple[int, ...]
    map_branch: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """One projection of the tokens that holds what one or two softmax maps and their values are made of.

    Args:
        projection: [B, N, columns].
        weight: of the second branch, a scalar or [B, H, N, 1]; None where there is one branch. The first is 1.
        layout: how the columns are cut.
    """

    projection: Tensor
    weight: Tensor | None
    layout: Layout

    def branches(self, attn_mask: Tensor | None) -> Branches:
        """The maps, by plain operations."""
        query, key, value = self.layout.split(self.projection)
        maps = plain_maps(query, key, attn_mask, self.layout)
        if self.layout.value_heads < self.layout.heads:
            value = value.repeat_interleave(self.layout.heads // self.layout.value_heads, dim=1)
        split = maps.unflatten(1, (-1, self.layout.branches)).unbind(dim=2)
        one = maps.new_ones(())
        weights = (one,) if self.weight is None else (one, self.weight)
        mask = None if attn_mask is None else hidden_entries(attn_mask)
        return Branches(split, weights, ("softmax",) * len(split), (value,) * len(split), mask)


class Attention(nn.Module, ABC):
    """One self-attention layer; a variant says what its branches are and what follows them.

    A variant of one or two softmax maps that share their values gives `pack` and `finish`; any other gives
    `branches`. `forward(x)` is `output(branches(x).context)` either way.

    Args:
        embed_dim: width C.
        num_heads: number of output heads H.
        attn_dropout: dropout of each map before the signed sum, in [0, 1); none in eval mode.
        proj_dropout: dropout after the output projection, in [0, 1).
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, attn_dropout: float = 0.0, proj_dropout: float = 0.0
    ) -> None:
        super().__init__()
        require_positive_integer("embed_dim", embed_dim)
        require_positive_integer("num_heads", num_heads)
        require_probability("attn_dropout", attn_dropout)
        require_probability("proj_dropout", proj_dropout)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.attn_dropout = attn_dropout
        self.proj_drop = nn.Dropout(proj_dropout)
        self._listeners: list[Callable[[Branches], None]] = []

    def branches(self, x: Tensor, attn_mask: Tensor | None = None) -> Branches:
        """The layer's maps, weights and values at x, differentiable, before any dropout."""
        return self.pack(x).branches(attn_mask)

    def pack(self, x: Tensor) -> Packed:
        """The layer's projection of x; not asked of a variant with `branches` of its own."""
        raise NotImplementedError(f"{type(self).__name__} must define pack() and finish(), or branches()")

    def finish(self, merged: Tensor) -> Tensor:
        """What follows the merged context [B, N, H v], divided by its root mean square if `pack` says so."""
        raise NotImplementedError(f"{type(self).__name__} must define pack() and finish(), or branches()")

    @abstractmethod
    def output(self, context: Tensor) -> Tensor:
        """What follows the signed sum: context [B, H, N, v] -> [B, N, C]."""

    @abstractmethod
    def score_operators(self) -> ScoreOperators:
        """The weights behind the scores."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Attend.

        Two paths: on CPU a kernel with gradients of any order that keeps small maps only (`kernels`); plain
        operations where a map is dropped out, under forward-mode AD and functorch transforms, in compiled code, on
        other devices, and for a variant with `branches` of its own. Listeners do not choose the path, so they
        change no bit of the output: beside the kernel, the branches they hear are made from the same projection by
        plain operations, and belong to the graph as outputs of x, not as the way to the layer's output.

        Args:
            x: tokens [B, N, C].
            attn_mask: as in `scaled_dot_product_attention`: bool, True where a query may look, or float, added to
                the scores (-inf hides); [N, N] or [B or 1, H or 1, N, N]. A row that sees no key gives zeros.

        Returns:
            [B, N, C].

        Raises:
            ValueError: for tokens or a mask of another shape.
        """
        self._check(x, attn_mask)
        dropping = self.training and self.attn_dropout > 0
        if type(self).branches is not Attention.branches:
            return self._attend_plainly(self.branches(x, attn_mask), dropping)
        packed = self.pack(x)
        if dropping or not kernels.usable(packed.projection, packed.weight, attn_mask):
            return self._attend_plainly(packed.branches(attn_mask), dropping)
        merged = kernels.attend(packed.projection, packed.weight, attn_mask, packed.layout)
        if self._listeners:
            self._tell(packed.branches(attn_mask))
        return self.finish(merged)

    def _attend_plainly(self, branches: Branches, dropping: bool) -> Tensor:
        self._tell(branches)
        if dropping:
            maps = tuple(F.dropout(one, self.attn_dropout) for one in branches.maps)
            branches = replace(branches, maps=maps)
        return self.output(self.signed_sum(branches))

    def signed_sum(self, branches: Branches) -> Tensor:
        """The context of these branches; what `pack` makes has 1 as first weight, and one product by V will do."""
        if type(self).branches is not Attention.branches:
            return branches.context
        combined, *second = branches.maps
        if second:
            combined = torch.addcmul(combined, second[0], branches.weights[1])
        return combined @ branches.values[0]

    def _tell(self, branches: Branches) -> None:
        for listener in self._listeners:
            listener(branches)

    @contextmanager
    def listen(self, callback: Callable[[Branches], None]) -> Iterator[None]:
        """Hand `callback` the branches of every forward pass inside the block; no output changes."""
        self._listeners.append(callback)
        try:
            yield
        finally:
            self._listeners.remove(callback)

    def _check(self, x: Tensor, attn_mask: Tensor | None) -> None:
        require(
            x.ndim == 3 and x.shape[-1] == self.embed_dim,
            f"x must be [batch, tokens, {self.embed_dim}]; got shape {tuple(x.shape)}",
        )
        if attn_mask is None:
            return
        batch, tokens, _ = x.shape
        wanted = f"[{tokens}, {tokens}] or [{batch} or 1, {self.num_heads} or 1, {tokens}, {tokens}]"
        shape = tuple(attn_mask.shape)
        fits = shape == (tokens, tokens) or (
            len(shape) == 4
            and shape[0] in (1, batch)
            and shape[1] in (1, self.num_heads)
            and shape[2:] == (tokens, tokens)
        )
        require(fits, f"attn_mask must be {wanted}; got shape {shape}")
        require(
            attn_mask.dtype == torch.bool or attn_mask.is_floating_point(),
            f"attn_mask must be bool (True: may look) or float (added to the scores); got {attn_mask.dtype}",
        )


def merge_heads(context: Tensor) -> Tensor:
    """[B, H, N, v] -> [B, N, H * v]."""
    return context.transpose(1, 2).flatten(2)
