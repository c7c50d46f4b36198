"""Recording what the attention layers of a model do in a forward pass, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffattn.models.adapters import adapt, is_attention
from diffattn.models.attention.base import Branches
from diffattn.validation import check_images

_WRAPPERS = ("module", "_forward_module", "_orig_mod")


@dataclass
class Tape:
    """What each recorded layer saw and did in the last forward pass, by layer name.

    The tensors are the very ones of the pass: in the graph where gradients are on, with their tangents under
    forward-mode AD.

    Attributes:
        branches: maps, weights and values.
        inputs: tokens [batch, tokens, width].
        masks: the attention mask the layer was given, or None.
        outputs: [batch, tokens, width].
    """

    branches: dict[str, Branches] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor | None] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention layer that an adapter knows, by its name inside the model, in the model's order.

    Wrappers (DistributedDataParallel, Fabric, torch.compile) are looked through.
    """
    for wrapper in _WRAPPERS:
        inner = model._modules.get(wrapper)
        if inner is not None and len(model._modules) == 1:
            return attention_layers(inner)
    return {name or "attention": module for name, module in model.named_modules() if is_attention(module)}


@contextmanager
def record(model: nn.Module, layers: Iterable[str] | None = None) -> Iterator[Tape]:
    """Record the branches, inputs and outputs of attention layers in the forward passes inside the block.

    No logit changes: a layer that runs a fused kernel goes on doing so, and its maps are computed beside it.

        with record(model) as tape:
            logits = model(images)
        tape.branches["blocks.0.attn"].combined

    Args:
        model: any module that holds attention layers with an adapter.
        layers: names from `attention_layers`; all of them unless given.

    Raises:
        ValueError: if the model has no attention layer, or none of that name.
    """
    tape = Tape()
    with ExitStack() as stack:
        for name, layer in _chosen(model, layers).items():
            handles = (
                layer.register_forward_pre_hook(_input_hook(tape, name), with_kwargs=True),
                layer.register_forward_hook(_output_hook(tape, name)),
            )
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(adapt(layer).listen(_branch_listener(tape, name)))
        yield tape


def capture(model: nn.Module, images: Tensor, layers: Iterable[str] | None = None) -> dict[str, Branches]:
    """The branches of each attention layer at these images, detached.

    Args:
        model: maps images to logits; left in the mode it is in.
        images: [batch, channels, height, width], pixels in [0, 1].
        layers: names from `attention_layers`; all of them unless given.

    Raises:
        ValueError: for bad images, or a model without attention layers.
    """
    check_images(images)
    with torch.no_grad(), record(model, layers) as tape:
        model(images)
    return {name: branches.detach() for name, branches in tape.branches.items()}


def _chosen(model: nn.Module, layers: Iterable[str] | None) -> Mapping[str, nn.Module]:
    found = attention_layers(model)
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention layer that diffattn knows")
    if layers is None:
        return found
    names = [layers] if isinstance(layers, str) else list(layers)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no attention layer named {', '.join(unknown)}; there are {', '.join(found)}")
    return {name: found[name] for name in names}


def _input_hook(tape: Tape, name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape.inputs[name] = args[0] if args else kwargs["x"]
        tape.masks[name] = args[1] if len(args) > 1 else kwargs.get("attn_mask")

    return hook


def _output_hook(tape: Tape, name: str) -> Any:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        tape.outputs[name] = output

    return hook


def _branch_listener(tape: Tape, name: str) -> Any:
    def listener(branches: Branches) -> None:
        tape.branches[name] = branches

    return listener
