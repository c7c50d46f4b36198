"""The options of a training run as typed command-line arguments, read from the configuration dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from diffattn.config import TRAIN_PARTS, TrainConfig, ViTConfig, train_config_from_mapping
from diffattn.models.attention import ATTENTION
from diffattn.models.zoo import attention_options

_ELSEWHERE = {"attention_options"}


def add_train_arguments(parser: ArgumentParser, base: TrainConfig) -> None:
    """Add `--optim.lr`, `--data.limit`, `--precision`, `--model.depth`, ... with the base's values as defaults.

    Under `--model` stand the fields of `ViTConfig` and every attention layer's options; they are overrides, and
    None leaves the registered model's own.
    """
    for part, cls in TRAIN_PARTS.items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            if (part, item.name) != ("model", "overrides"):
                value = getattr(getattr(base, part), item.name)
                parser.add_argument(f"--{part}.{item.name}", type=hints[item.name], default=value)
    for name, kind in _model_options().items():
        parser.add_argument(f"--model.{name}", type=kind | None, default=base.model.overrides.get(name))
    parser.add_argument("--precision", type=str, default=base.precision)
    parser.add_argument("--seed", type=int, default=base.seed)


def train_config_of(values: Mapping[str, Any], base: TrainConfig) -> TrainConfig:
    """The configuration that parsed arguments (as nested mappings) and the base's own overrides describe.

    An override that no argument is named for stays, so that whoever builds the model can refuse it by name.
    """
    kept = {name: values[name] for name in (*TRAIN_PARTS, "precision", "seed")}
    given = {name: value for name, value in values["model"].items() if value is not None}
    kept["model"] = {**base.model.overrides, **given}
    return train_config_from_mapping(kept)


def _model_options() -> dict[str, Any]:
    """Name -> type of everything that `create_model` takes beside the model's name."""
    hints = get_type_hints(ViTConfig)
    found = {item.name: hints[item.name] for item in fields(ViTConfig) if item.name not in _ELSEWHERE}
    for name in ATTENTION:
        hints = get_type_hints(ATTENTION[name].__init__)
        for option in inspect.signature(ATTENTION[name]).parameters:
            if option in attention_options(name):
                found.setdefault(option, hints[option])
    return found
