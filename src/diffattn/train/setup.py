"""What a run needs before its first step: the devices, the data, a model that fits them, the optimiser."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from diffattn.config import TrainConfig
from diffattn.data.images import ImageData, load_data
from diffattn.models.vit import VisionTransformer
from diffattn.models.zoo import create_model
from diffattn.train.optim import build_optimizer

log = logging.getLogger(__name__)

_FABRIC_PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed"}


@dataclass(frozen=True)
class Run:
    """What the steps of a run share."""

    config: TrainConfig
    fabric: Fabric
    model: VisionTransformer
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    train: ImageData
    val: ImageData

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; the last one may see fewer images."""
        return math.ceil(len(self.train) / self.config.optim.batch_size)


def set_up(config: TrainConfig) -> Run:
    """Load the data, make the model, and hand both to the devices."""
    hardware = config.hardware
    try:
        fabric = Fabric(
            accelerator=hardware.accelerator,
            devices=hardware.devices,
            strategy=hardware.strategy,
            precision=_FABRIC_PRECISION[config.precision],  # pyright: ignore[reportArgumentType]
        )
    except (RuntimeError, MisconfigurationException) as error:
        raise ValueError(f"hardware must be what this machine has; got {hardware}: {error}") from error
    fabric.launch()
    train_data, val_data = _load(config)
    shape = tuple(train_data.images.shape[1:])
    overrides = {"num_classes": len(train_data.class_names), "in_chans": shape[0]} | dict(config.model.overrides)
    model = create_model(config.model.name, seed=config.seed, **overrides)
    wanted = (model.config.in_chans, model.config.image_size, model.config.image_size)
    if shape != wanted:
        raise ValueError(
            f"model {config.model.name!r} takes images of shape {wanted}, but data {config.data.name!r} has "
            f"{shape}; set data.image_size to {model.config.image_size}, or choose another model"
        )
    if model.config.num_classes < len(train_data.class_names):
        raise ValueError(
            f"model.overrides num_classes must be at least the data's {len(train_data.class_names)}; "
            f"got {model.config.num_classes}"
        )
    if config.augment.crop_padding >= shape[-1]:
        raise ValueError(
            f"augment.crop_padding must be below the image size {shape[-1]}; got {config.augment.crop_padding}"
        )
    optimizer = build_optimizer(model, config.optim)
    wrapped, _ = fabric.setup(model, optimizer)
    return Run(config, fabric, model, wrapped, optimizer, train_data, val_data)


def _load(config: TrainConfig) -> tuple[ImageData, ImageData]:
    data, in_chans = config.data, config.model.overrides.get("in_chans")
    val_name = data.val_name or data.name
    train_data = load_data(
        data.name, split=data.split, limit=data.limit, image_size=data.image_size, in_chans=in_chans, root=data.root
    )
    val_data = load_data(
        val_name,
        split=data.val_split,
        limit=data.val_limit,
        image_size=data.image_size,
        in_chans=in_chans,
        root=data.root,
    )
    if val_data.images.shape[1:] != train_data.images.shape[1:]:
        raise ValueError(
            f"training and validation images must have one shape; got {tuple(train_data.images.shape[1:])} and "
            f"{tuple(val_data.images.shape[1:])}; set data.image_size"
        )
    if val_data.class_names != train_data.class_names:
        raise ValueError(
            f"training and validation data must have the same class names; got {train_data.class_names[:4]} ... "
            f"and {val_data.class_names[:4]} ..."
        )
    if val_name == data.name and not set(train_data.sample_ids).isdisjoint(val_data.sample_ids):
        log.warning("data %r: validation images are training images too", data.name)
    return train_data, val_data
