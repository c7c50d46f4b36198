"""How a layer's branches are evaluated for differentiation, and what is refused beforehand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from diffattn.models.adapters import adapt
from diffattn.models.attention.base import Branches
from diffattn.models.capture import record
from diffattn.seeding import keyed_normal

Evaluate = Callable[[Tensor], Mapping[str, Branches]]
"""An input [batch, ...] -> the branches of some layers."""


@dataclass(frozen=True)
class LayerPoint:
    """A layer at the point of measurement.

    Args:
        name: its name inside the model.
        index: its place among the model's attention layers, from 0.
        module: the layer.
        tokens: its input [batch, tokens, width], without graph.
        mask: the attention mask it was given, or None.
        branches: its branches there, without graph.
    """

    name: str
    index: int
    module: nn.Module
    tokens: Tensor
    mask: Tensor | None
    branches: Branches


def check_measurable(module: nn.Module, *, name: str = "model") -> None:
    """Raise if a part in training mode makes the output random, or the module cannot be differentiated.

    Raises:
        ValueError: naming the part in training mode; or if the parameters or buffers are inference tensors.
    """
    if any(tensor.is_inference() for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            f"the {name}'s parameters must be normal tensors; got inference tensors: "
            f"build or load the {name} outside torch.inference_mode()"
        )
    for path, part in module.named_modules():
        if not part.training:
            continue
        rates = (getattr(part, key, None) for key in ("p", "drop_prob", "attn_dropout"))
        drops = any(isinstance(rate, float | int) and rate > 0 for rate in rates)
        batched = isinstance(part, nn.modules.batchnorm._BatchNorm)
        if drops or batched:
            reason = "drops at random" if drops else "reads its batch-mates"
            raise ValueError(
                f"{name} must give each sample one output, but {path or type(part).__name__!r} is in training mode "
                f"and {reason}; call {name}.eval() first"
            )


@contextmanager
def quiet_forward_mode() -> Iterator[None]:
    """Without gradients, and without the deprecation warning that torch's own first forward-mode pass gives."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
        yield


def at_pixels(model: nn.Module, layers: Sequence[str]) -> Evaluate:
    """Pixels -> the branches of these layers in the model's forward pass."""

    def evaluate(images: Tensor) -> Mapping[str, Branches]:
        with record(model, layers) as tape:
            model(images)
        return tape.branches

    return evaluate


def at_input(point: LayerPoint) -> Evaluate:
    """The layer's own input -> its branches."""
    adapter = adapt(point.module)
    return lambda tokens: {point.name: adapter.branches(tokens, point.mask)}


def freeze_weights(branches: Branches) -> Branches:
    """The same branches with weights that carry no derivative."""
    return replace(branches, weights=tuple(weight.detach() for weight in branches.weights))


def weight_readings(point: LayerPoint) -> tuple[str, ...]:
    """("frozen",), or ("frozen", "differentiated") where a weight has a derivative in the layer's input."""
    adapter = adapt(point.module)
    tokens, mask = point.tokens[:1], point.mask
    if mask is not None and mask.ndim > 2 and mask.shape[0] > 1:
        mask = mask[:1]
    direction = keyed_normal([0], tokens.shape[1:], "weight readings").to(tokens)
    with quiet_forward_mode():
        derivative = torch.func.jvp(lambda x: adapter.branches(x, mask).weights, (tokens,), (direction,))
    depends = any(bool(tangent.any()) for tangent in derivative[1])
    return ("frozen", "differentiated") if depends else ("frozen",)


def per_head(maps: Tensor) -> Tensor:
    """[batch, ..., heads, queries, keys] -> [batch, heads, everything else]."""
    return maps.movedim(-3, 1).flatten(2)
