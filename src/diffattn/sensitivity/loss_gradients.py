"""The loss reading: the gradient of the loss through each branch of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffattn.models.adapters import adapt
from diffattn.models.attention.base import Branches
from diffattn.models.capture import record
from diffattn.sensitivity.alignment import products
from diffattn.sensitivity.evaluation import LayerPoint, freeze_weights
from diffattn.validation import check_logits

Pull = Callable[[Tensor], Tensor]
"""A gradient at a layer's input [batch, tokens, width] -> [batch, D], there or further back."""


@dataclass(frozen=True)
class _Slot:
    """A scalar of the layer, <cotangent, tensor>, cut at the branches.

    Args:
        branches: at the layer's input, which is a leaf.
        cotangents: dL/d(w_b A_b) with the values held, one [batch, heads, queries, keys] tensor a branch.
        context: dL/d(context).
        shared: whether all branches have the same values, so that the cotangents are one.
    """

    branches: Branches
    cotangents: tuple[Tensor, ...]
    context: Tensor
    shared: bool


def loss_products(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    points: Sequence[LayerPoint],
    readings: Mapping[str, Sequence[str]],
    *,
    wrt: Sequence[str],
) -> dict[tuple[str, str, str], Tensor]:
    """Inner products of the loss gradients through each branch.

    With the values V_b held, L depends on the layer through the slots p_b = w_b A_b. Its cotangent there is
    c_b = dL/dp_b; head h of branch b gives g_b = d<c_b[h], w_b A_b[h](x)>/dx. The whole layer is one scalar, so
    its gradients are the sums over the heads.

    Args:
        model: images -> logits.
        images: [batch, channels, height, width].
        labels: [batch]; L is the cross-entropy summed over the batch.
        points: the layers at these images.
        readings: layer name -> "frozen" and perhaps "differentiated".
        wrt: "input" (the layer's tokens) and/or "pixels".

    Returns:
        {(layer, wrt, reading): [1, batch, heads + 1, 8]}, the last head the whole layer.
    """
    pixels = images.detach().clone().requires_grad_()
    names = [point.name for point in points]
    found = {}
    with torch.enable_grad():
        with record(model, names) as tape:
            logits = model(pixels)
        check_logits(logits, batch=len(images))
        # In float64: a confident sample's gradient in its true class is a difference that float32 loses.
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        outputs = [tape.outputs[name] for name in names]
        cotangents = torch.autograd.grad(loss, outputs, retain_graph=True)
        for point, cotangent in zip(points, cotangents, strict=True):
            inputs = tape.inputs[point.name]
            pulls: dict[str, Pull] = {"input": lambda gradient: gradient.flatten(1)}
            pulls["pixels"] = lambda gradient, inputs=inputs: torch.autograd.grad(
                inputs, pixels, gradient, retain_graph=True
            )[0].flatten(1)
            chosen = {kind: pulls[kind] for kind in wrt}
            for name, part in _layer_products(point, cotangent, readings[point.name], chosen).items():
                found[point.name, *name] = part
    return found


def _layer_products(
    point: LayerPoint, cotangent: Tensor, kinds: Sequence[str], pulls: Mapping[str, Pull]
) -> dict[tuple[str, str], Tensor]:
    """{(wrt, reading): [1, batch, heads + 1, 8]} of one layer, given dL/d(its output)."""
    adapter = adapt(point.module)
    tokens = point.tokens.detach().requires_grad_()
    branches = adapter.branches(tokens, point.mask)
    slot = _slot(branches, adapter.output, cotangent)
    maps = [_gradients(one, c, tokens) for one, c in zip(branches.maps, slot.cotangents, strict=True)]
    vectors: dict[str, tuple[Sequence[Tensor], Sequence[Tensor], Tensor]] = {}
    for kind in kinds:
        seen = freeze_weights(branches) if kind == "frozen" else branches
        weighted = [
            weight.detach() * gradient
            if kind == "frozen" and weight.numel() == 1
            else _gradients(weight * one, c, tokens)
            for weight, one, c, gradient in zip(seen.weights, seen.maps, slot.cotangents, maps, strict=True)
        ]
        vectors[kind] = (maps, weighted, _combined_gradients(seen, slot, tokens))
    return {
        (wrt, kind): products(
            [_pulled(one, pull) for one in first], [_pulled(one, pull) for one in second], _pulled(third, pull)
        )[None]
        for wrt, pull in pulls.items()
        for kind, (first, second, third) in vectors.items()
    }


def _slot(branches: Branches, output: Callable[[Tensor], Tensor], cotangent: Tensor) -> _Slot:
    """Carry dL/d(output) back to the context, and from there to each slot w_b A_b."""
    fixed = branches.detach()
    context = fixed.context.requires_grad_()
    (at_context,) = torch.autograd.grad(output(context), context, cotangent)
    cotangents = tuple(at_context @ value.transpose(-2, -1) for value in fixed.values)
    shared = all(value is branches.values[0] for value in branches.values)
    return _Slot(branches, cotangents, at_context, shared)


def _combined_gradients(branches: Branches, slot: _Slot, tokens: Tensor) -> Tensor:
    """The left side of Lemma 1: the layer's own combined map differentiated, [batch, heads, tokens, width].

    Branches with values of their own have no common slot; their context, with the values held, takes its place.
    """
    if slot.shared:
        return _gradients(branches.combined, slot.cotangents[0], tokens)
    held = replace(branches, values=tuple(value.detach() for value in branches.values))
    return _gradients(held.context, slot.context, tokens)


def _gradients(tensor: Tensor, cotangent: Tensor, tokens: Tensor) -> Tensor:
    """d<cotangent[h], tensor[h]>/dtokens for each head h: [batch, heads, tokens, width]."""
    rows = []
    for head in range(tensor.shape[-3]):
        masked = torch.zeros_like(tensor)
        masked.select(-3, head).copy_(cotangent.select(-3, head))
        rows.append(torch.autograd.grad(tensor, tokens, masked, retain_graph=True)[0])
    return torch.stack(rows, dim=1)


def _pulled(gradients: Tensor, pull: Pull) -> Tensor:
    """[batch, heads, tokens, width] -> [batch, heads + 1, D]: each head pulled back, then their sum."""
    rows = torch.stack([pull(row) for row in gradients.unbind(dim=1)], dim=1)
    return torch.cat([rows, rows.sum(dim=1, keepdim=True)], dim=1)
