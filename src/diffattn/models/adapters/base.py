"""The adapter's contract, and the dispatch from a module's class to its adapter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import singledispatch
from typing import Protocol

from torch import Tensor, nn

from diffattn.models.attention.base import Branches, ScoreOperators


class AttentionAdapter(Protocol):
    """Three things about a layer at an input, and a way to listen to its forward passes."""

    def branches(self, x: Tensor, attn_mask: Tensor | None = None) -> Branches:
        """The signed sum at x, differentiable, before any dropout."""
        ...

    def output(self, context: Tensor) -> Tensor:
        """What the layer does after: sub-norm, output projection."""
        ...

    def score_operators(self) -> ScoreOperators:
        """The weights behind the scores."""
        ...

    def listen(self, callback: Callable[[Branches], None]) -> AbstractContextManager[None]:
        """Hand `callback` the branches of every forward pass inside the block; no output changes."""
        ...


@singledispatch
def adapt(layer: nn.Module) -> AttentionAdapter:
    """The adapter of an attention layer, chosen by the module's class.

    Raises:
        ValueError: for a module that is no known attention layer.
    """
    raise ValueError(
        f"{type(layer).__module__}.{type(layer).__qualname__} is no attention layer that diffattn knows; "
        "register an adapter for its class with diffattn.models.adapters.adapt.register"
    )


def is_attention(module: nn.Module) -> bool:
    """Whether some adapter is registered for the module's class."""
    return adapt.dispatch(type(module)) is not adapt.dispatch(nn.Module)
