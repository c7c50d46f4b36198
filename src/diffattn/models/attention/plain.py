"""The packed projection of a layer, and attention on it by plain operations, which have every derivative.

A packed projection holds queries, keys and values side by side, [B, N, columns]. Letters as in `base`; K key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Layout:
    """How the columns of a packed projection are cut: M d queries, K d keys, then the value heads, v wide.

    Args:
        heads: output heads H.
        branches: maps a head, 1 or 2; those of head i are adjacent.
        key_heads: K, a divisor of M; adjacent maps share a key head.
        value_heads: a divisor of H; adjacent heads share a value head.
        width: d.
        value_width: v.
        norm_eps: with a number, the context of each token and head is divided by its root mean square
            sqrt(mean(context^2) + norm_eps).
    """

    heads: int
    branches: int
    key_heads: int
    value_heads: int
    width: int
    value_width: int
    norm_eps: float | None = None

    @property
    def scale(self) -> float:
        """1 / sqrt(d)."""
        return self.width**-0.5

    @property
    def maps(self) -> int:
        """M."""
        return self.heads * self.branches

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [B, M, N, d], [B, K, N, d] and [B, value heads, N, v] of [B, N, columns]."""
        widths = (self.maps * self.width, self.key_heads * self.width, self.value_heads * self.value_width)
        query, key, value = packed.split(widths, dim=-1)
        return (
            query.unflatten(-1, (-1, self.width)).transpose(1, 2),
            key.unflatten(-1, (-1, self.width)).transpose(1, 2),
            value.unflatten(-1, (-1, self.value_width)).transpose(1, 2),
        )


def plain_maps(query: Tensor, key: Tensor, attn_mask: Tensor | None, layout: Layout) -> Tensor:
    """The softmax maps [B, M, N, N] of `Layout.split`'s query and key by plain operations."""
    stacked = (query * layout.scale).unflatten(1, (layout.key_heads, -1)).flatten(2, 3)
    scores = (stacked @ key.transpose(-2, -1)).view(*query.shape[:3], -1)
    return masked_softmax(scores, attn_mask, maps_per_head=layout.branches)


def plain_attention(packed: Tensor, weight: Tensor | None, attn_mask: Tensor | None, layout: Layout) -> Tensor:
    """What `attend` computes by plain operations, with every derivative."""
    query, key, value = layout.split(packed)
    maps = plain_maps(query, key, attn_mask, layout)
    if weight is not None:
        first, second = maps.unflatten(1, (-1, 2)).unbind(dim=2)
        maps = torch.addcmul(first, second, weight)
    stacked = maps.unflatten(1, (layout.value_heads, -1)).flatten(2, 3)
    context = (stacked @ value).view(*maps.shape[:3], -1)
    if layout.norm_eps is not None:
        context = unit_rms(context, layout.norm_eps)
    return context.transpose(1, 2).flatten(2)


def unit_rms(context: Tensor, eps: float) -> Tensor:
    """Context / sqrt(mean(context^2) + eps) over the last dimension."""
    return F.rms_norm(context, context.shape[-1:], None, eps)


def masked_softmax(scores: Tensor, attn_mask: Tensor | None, *, maps_per_head: int = 1) -> Tensor:
    """Softmax over the keys that the mask shows; a row that sees no key is zero, not NaN.

    Args:
        scores: [B, M, queries, keys], M = H * maps_per_head.
        attn_mask: as in `Attention.forward`.
        maps_per_head: adjacent maps that share a mask head.
    """
    if attn_mask is None:
        return scores.softmax(dim=-1)
    if attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
        attn_mask = attn_mask.repeat_interleave(maps_per_head, dim=1)
    visible = ~hidden_entries(attn_mask)
    if attn_mask.is_floating_point():
        scores = scores + narrow_mask(attn_mask.masked_fill(~visible, 0.0), scores.dtype)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).masked_fill(~visible, 0.0)


def hidden_entries(attn_mask: Tensor) -> Tensor:
    """True where the layer never looks: where a bool mask is False or a float mask is -inf."""
    return ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf


def narrow_mask(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask in the scores' type: float32's lowest number, say, must not become -inf in bfloat16."""
    return attn_mask.clamp(min=torch.finfo(dtype).min).to(dtype)
