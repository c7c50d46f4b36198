"""Models by name: a registered function gives a configuration, overrides change it, one class builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from diffattn.checks import require, shown
from diffattn.config import ViTConfig
from diffattn.models.vit import VisionTransformer, attention_options
from diffattn.registry import Registry
from diffattn.seeding import seeded

MODELS: Registry[Callable[[], ViTConfig]] = Registry("model")
"""Name -> a function that gives the model's default configuration."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DIFFERENTIAL = {"vit": ("softmax", 1), "diffvit": ("differential", 2), "diffvit_v2": ("differential_v2", 1)}


def _family(size: str, base: ViTConfig) -> None:
    """Register the softmax model and its differential twins: V1 with half the output heads, V2 with as many."""
    for prefix, (attention, divisor) in _DIFFERENTIAL.items():
        config = replace(base, attention=attention, num_heads=base.num_heads // divisor)
        MODELS.register(f"{prefix}_{size}")(lambda config=config: config)


_family("micro_patch2_8", ViTConfig(8, 2, in_chans=1, embed_dim=64, depth=2, num_heads=4))
_family("tiny_patch4_32", ViTConfig(32, 4, embed_dim=192, depth=12, num_heads=6))
_family("tiny_patch8_64", ViTConfig(64, 8, num_classes=200, embed_dim=192, depth=12, num_heads=6))
for _size, _width in (("small", 384), ("base", 768)):
    _family(
        f"{_size}_patch16_224",
        ViTConfig(
            224,
            16,
            num_classes=1000,
            embed_dim=_width,
            num_heads=_width // 64,
            mean=_IMAGENET_MEAN,
            std=_IMAGENET_STD,
        ),
    )


def create_model(name: str, *, seed: int | None = None, **overrides: Any) -> VisionTransformer:
    """Build a model by name.

        create_model("diffvit_tiny_patch4_32", num_classes=10, depth=1, lambda_init=0.8)

    Args:
        name: one of `diffattn list models`.
        seed: makes the initial weights a function of the name, the configuration and the seed alone; without
            it they come from torch's global generator.
        overrides: fields of `ViTConfig`, or options of the attention layer such as `lambda_init`.

    Returns:
        a model from [0, 1] pixels to logits, in training mode; `model.config` is what was built.

    Raises:
        ValueError: for an unknown name, an unknown or impossible option.
    """
    config = apply_overrides(MODELS[name](), overrides, what=f"model {name!r}")
    with nullcontext() if seed is None else seeded(seed, "initial weights"):
        return VisionTransformer(config, name=name)


def apply_overrides(config: ViTConfig, overrides: dict[str, Any], *, what: str) -> ViTConfig:
    """A configuration changed by fields of its own and by options of its attention layer."""
    known = {item.name for item in fields(ViTConfig)}
    own = {key: value for key, value in overrides.items() if key in known}
    options = {key: value for key, value in overrides.items() if key not in known}
    attention = own.get("attention", config.attention)
    allowed = attention_options(attention)
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise ValueError(
            f"{what} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}, and its "
            f"{attention} attention has {', '.join(sorted(allowed))}"
        )
    given = own.pop("attention_options", {})
    require(
        isinstance(given, Mapping), f"attention_options must be a mapping from option to value; got {shown(given)}"
    )
    kept = {} if attention != config.attention else dict(config.attention_options)
    merged = kept | dict(given) | options
    return replace(config, **own, attention_options=merged)


class ModelRow(NamedTuple):
    """A line of `diffattn list models`."""

    name: str
    attention: str
    image_size: int
    embed_dim: int
    depth: int
    num_heads: int
    parameters: int


def list_models() -> list[ModelRow]:
    """Every registered model with its parameter count (built without allocating its weights)."""
    rows = []
    for name in MODELS:
        config = MODELS[name]()
        with torch.device("meta"):
            parameters = count_parameters(VisionTransformer(config, name=name))
        rows.append(
            ModelRow(
                name,
                config.attention,
                config.image_size,
                config.embed_dim,
                config.depth,
                config.num_heads,
                parameters,
            )
        )
    return rows


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
