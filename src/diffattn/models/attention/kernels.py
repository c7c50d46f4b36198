"""Attention on CPU a few samples at a time, with a backward pass of its own.

The kernel walks over the batch so that the maps of one step stay in cache, writes each gradient straight into the
packed gradient, and keeps the maps between the passes only while they are small. Letters as in `base` and `plain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from diffattn.models.attention.plain import Layout, hidden_entries, narrow_mask, plain_attention

CHUNK_BYTES = 2**21
"""Maps worked on at a time: they stay in a core's second-level cache."""

KEEP_BYTES = 2**25
"""Up to this size a layer's maps are kept for the backward pass; above, they are made again."""


@dataclass(frozen=True)
class _Mask:
    """What is added to the scores (-inf hides), and the rows that see nothing; broadcastable to [B, M, N, N]."""

    bias: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, attn_mask: Tensor | None, layout: Layout, dtype: torch.dtype) -> _Mask | None:
        if attn_mask is None:
            return None
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(~attn_mask, -torch.inf)
        else:
            bias = narrow_mask(attn_mask.detach(), dtype).masked_fill_(hidden_entries(attn_mask), -torch.inf)
        if bias.ndim == 4 and bias.shape[1] > 1:
            bias = bias.repeat_interleave(layout.branches, dim=1)
        blind = (bias == -torch.inf).all(dim=-1, keepdim=True)
        return cls(bias, blind if bool(blind.any()) else None)

    def at(self, part: slice) -> _Mask:
        """The mask of some samples."""
        if self.bias.ndim == 2 or self.bias.shape[0] == 1:
            return self
        return _Mask(self.bias[part], None if self.blind is None else self.blind[part])


def usable(packed: Tensor, weight: Tensor | None, attn_mask: Tensor | None) -> bool:
    """Whether the kernel is right here: on CPU, with no derivative but reverse mode, and no transform, asked for.

    Forward-mode AD, functorch transforms, compilers and learned masks need the plain operations.
    """
    if packed.device.type != "cpu" or torch.compiler.is_compiling() or _watched(packed, weight):
        return False
    return attn_mask is None or not attn_mask.requires_grad


def attend(packed: Tensor, weight: Tensor | None, attn_mask: Tensor | None, layout: Layout) -> Tensor:
    """merge((A_1 + weight A_2) V), the sum of one or two softmax maps, [B, N, H v]; see `Layout.norm_eps`.

    Its gradient is taken chunk by chunk; a second derivative goes through `plain_attention`.

    Args:
        packed: [B, N, columns].
        weight: of the second branch, a scalar or [B, H, N, 1]; None where there is one branch.
        attn_mask: as in `Attention.forward`.
        layout: the columns.
    """
    return _Attend.apply(packed, weight, attn_mask, layout)


class _Attend(torch.autograd.Function):
    """`attend`; its backward pass reads the maps that were kept, or makes them again."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any, packed: Tensor, weight: Tensor | None, attn_mask: Tensor | None, layout: Layout
    ) -> Tensor:
        batch, tokens, _ = packed.shape
        mask = _Mask.of(attn_mask, layout, packed.dtype)
        wide = torch.promote_types(packed.dtype, torch.float32)
        size = batch * layout.maps * tokens**2 * packed.element_size()
        keep = any(ctx.needs_input_grad) and size <= KEEP_BYTES
        kept: list[Tensor] = []
        merged = packed.new_empty(batch, tokens, layout.heads, layout.value_width)
        inverse = None if layout.norm_eps is None else packed.new_empty(batch, tokens, layout.heads, 1)
        for part in _parts(packed, layout):
            query, key, value = _operands(packed[part], layout)
            maps = _maps(query, key, mask, part, layout)
            if keep:
                kept.append(maps)
            context = _stack(_signed(maps, _samples(weight, part)), layout.value_heads) @ value
            context = context.view(-1, layout.heads, tokens, layout.value_width).transpose(1, 2)
            if inverse is None:
                merged[part] = context
                continue
            norm = torch.linalg.vector_norm(context, dim=-1, keepdim=True, dtype=wide)
            inverse[part] = (norm.square() / layout.value_width + layout.norm_eps).rsqrt()
            torch.mul(context, inverse[part], out=merged[part])
        merged = merged.flatten(2)
        ctx.layout = layout
        ctx.save_for_backward(packed, weight, attn_mask, None if inverse is None else merged, inverse, *kept)
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or _watched(grads[0]):
            return (*_plain_gradients(ctx, grads[0]), None, None)
        with torch.autocast("cpu", enabled=False):
            return (*_gradients(ctx, grads[0]), None, None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients in the packed projection and in the weight, chunk by chunk.

    With P a map, w its weight, A the signed sum, G the context's gradient: dV = A' G, dA = G V',
    dS = w P * (dA - rowsum(P * dA)), and the weight's gradient is rowsum(P * dA). w is a number a row, so it is
    applied to the narrow Q and dQ and not to dS.
    """
    packed, weight, attn_mask, merged, inverse, *kept = ctx.saved_tensors
    layout, tokens = ctx.layout, packed.shape[1]
    mask = None if kept else _Mask.of(attn_mask, layout, packed.dtype)
    into = torch.empty_like(packed)
    into_weight = None
    if weight is not None and ctx.needs_input_grad[1]:
        into_weight = packed.new_empty(packed.shape[0], layout.heads, tokens, 1)
    for index, part in enumerate(_parts(packed, layout)):
        query, key, value = _operands(packed[part], layout)
        maps = kept[index] if kept else _maps(query, key, mask, part, layout)
        into_query, into_key, into_value = layout.split(into[part])
        rows = _samples(weight, part)
        upstream = grad[part].unflatten(-1, (layout.heads, -1))
        if inverse is not None:
            upstream = _through_norm(upstream, merged[part].view_as(upstream), inverse[part])
        upstream = _stack(_contiguous(upstream.transpose(1, 2)), layout.value_heads)
        into_value.copy_((_stack(_signed(maps, rows), layout.value_heads).mT @ upstream).view(into_value.shape))
        by_branch = maps.view(-1, layout.heads, layout.branches, tokens, tokens)
        scores = by_branch * (upstream @ value.mT).view(-1, layout.heads, 1, tokens, tokens)
        sums = scores.sum(dim=-1, keepdim=True)
        scores = _stack(scores.addcmul_(by_branch, sums, value=-1).flatten(1, 2), layout.key_heads)
        found = (scores @ key).view(-1, layout.heads, layout.branches, tokens, layout.width)
        if rows is not None:
            found[:, :, 1] *= rows
            query.view_as(found)[:, :, 1] *= rows
        if into_weight is not None:
            into_weight[part] = sums[:, :, 1]
        torch.mul(found.flatten(1, 2), layout.scale, out=into_query)
        into_key.copy_((scores.mT @ _stack(query, layout.key_heads)).view(into_key.shape))
    if into_weight is None or weight is None:
        return into, None
    return into, into_weight.sum_to_size(weight.shape)


def _through_norm(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """The gradient in the context, of unit = context * inverse: inverse (grad - unit mean(grad * unit))."""
    along = (grad * unit).sum(dim=-1, keepdim=True)
    return torch.addcmul(grad, unit, along, value=-1 / grad.shape[-1]).mul_(inverse)


def _plain_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The same gradients by plain operations, themselves differentiable."""
    packed, weight, attn_mask, *_ = ctx.saved_tensors
    again = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[:2]
    with torch.enable_grad():
        merged = plain_attention(packed, weight, attn_mask, ctx.layout)
        wanted: list[Tensor] = [one for one, need in zip((packed, weight), needed, strict=True) if need]
        found = iter(torch.autograd.grad(merged, wanted, grad, create_graph=again))
    return [next(found) if need else None for need in needed]


def _watched(*tensors: Tensor | None) -> bool:
    """Whether a functorch transform is on, or one of these carries a tangent or is a batch of cotangents."""
    if torch._C._are_functorch_transforms_active():
        return True
    given = [one for one in tensors if one is not None]
    batched = any(is_legacy_batchedtensor(one) for one in given)
    return batched or any(forward_ad.unpack_dual(one).tangent is not None for one in given)


def _parts(packed: Tensor, layout: Layout) -> Iterator[slice]:
    """The batch in steps of about CHUNK_BYTES of maps, a sample at least."""
    batch, tokens, _ = packed.shape
    step = max(1, CHUNK_BYTES // max(1, layout.maps * tokens**2 * packed.element_size()))
    return (slice(first, first + step) for first in range(0, batch, step))


def _samples(rows: Tensor | None, part: slice) -> Tensor | None:
    """These samples' weight: a scalar is everybody's."""
    return rows if rows is None or rows.ndim == 0 else rows[part]


def _operands(packed: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous copies of the scaled query, the key and the value; the caller may write into them."""
    query, key, value = layout.split(packed)
    scaled = torch.mul(query, layout.scale, out=query.new_empty(query.shape))
    return scaled, _contiguous(key), _contiguous(value)


def _contiguous(heads: Tensor) -> Tensor:
    return torch.clone(heads, memory_format=torch.contiguous_format)


def _stack(heads: Tensor, groups: int) -> Tensor:
    """[n, heads, N, width] -> [n, groups, heads / groups * N, width]: heads that share a partner, as more rows."""
    return heads.view(heads.shape[0], groups, -1, heads.shape[-1])


def _maps(query: Tensor, key: Tensor, mask: _Mask | None, part: slice, layout: Layout) -> Tensor:
    """The softmax maps [n, M, N, N] of `_operands`."""
    scores = (_stack(query, layout.key_heads) @ key.mT).view(*query.shape[:3], -1)
    if mask is None:
        return torch.softmax(scores, dim=-1)
    here = mask.at(part)
    maps = torch.softmax(scores.add_(here.bias), dim=-1)
    return maps if here.blind is None else maps.masked_fill_(here.blind, 0.0)


def _signed(maps: Tensor, rows: Tensor | None) -> Tensor:
    """A_1 + rows A_2, [n, H, N, N]; with one branch, the maps."""
    if rows is None:
        return maps
    first, second = maps.unflatten(1, (-1, 2)).unbind(dim=2)
    return torch.addcmul(first, second, rows)
