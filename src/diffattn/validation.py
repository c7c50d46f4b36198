"""What a model, an attack or a measurement refuses to take as images and labels, and in which words."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PIXEL_SLACK = 1e-6


def check_images(images: Tensor, *, name: str = "images") -> None:
    """Raise unless `images` is a non-empty float tensor [batch, ...] of finite pixels in [0, 1].

    Pixels may leave [0, 1] by at most 1e-6 (rounding).

    Raises:
        ValueError: naming the requirement and what was received.
    """
    wanted = f"{name} must be a float tensor [batch, channels, height, width] of pixels in [0, 1]"
    if not isinstance(images, Tensor):
        raise ValueError(f"{wanted}; got {type(images).__name__}")
    if not images.is_floating_point():
        hint = "; divide by 255 and convert to float" if images.dtype == torch.uint8 else ""
        raise ValueError(f"{wanted}; got dtype {images.dtype}{hint}")
    if images.ndim < 2:
        raise ValueError(f"{wanted}; got shape {tuple(images.shape)}")
    if images.numel() == 0:
        raise ValueError(f"{wanted}; got an empty batch of shape {tuple(images.shape)}")
    low, high = (bound.item() for bound in torch.aminmax(images.detach()))
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"{wanted}; got NaN pixels")
    if low < -PIXEL_SLACK or high > 1 + PIXEL_SLACK:
        raise ValueError(
            f"{wanted}; got minimum {low:.4g} and maximum {high:.4g} (normalisation belongs inside the model)"
        )


def check_labels(labels: Tensor, *, batch: int, num_classes: int | None = None, name: str = "labels") -> None:
    """Raise unless `labels` is an int64 tensor [batch] of class indices in [0, num_classes).

    Raises:
        ValueError: naming the requirement and what was received.
    """
    wanted = f"{name} must be an int64 tensor [{batch}] of class indices"
    if not isinstance(labels, Tensor):
        raise ValueError(f"{wanted}; got {type(labels).__name__}")
    if labels.ndim == 2 and labels.shape[0] == batch:
        raise ValueError(f"{wanted}; got shape {tuple(labels.shape)}: one-hot rows? pass labels.argmax(dim=1)")
    if labels.dtype != torch.int64:
        raise ValueError(f"{wanted}; got dtype {labels.dtype}")
    if tuple(labels.shape) != (batch,):
        raise ValueError(f"{wanted}; got shape {tuple(labels.shape)}")
    if num_classes is not None and batch:
        low, high = (bound.item() for bound in torch.aminmax(labels))
        if low < 0 or high >= num_classes:
            raise ValueError(f"{wanted} in 0..{num_classes - 1}; got minimum {low} and maximum {high}")


def check_logits(logits: Tensor, *, batch: int) -> None:
    """Raise unless the model gave float logits [batch, classes] with at least two classes.

    Raises:
        ValueError: naming the requirement and what was received.
    """
    wanted = f"the model must return float logits [{batch}, classes] with at least 2 classes"
    if not isinstance(logits, Tensor):
        raise ValueError(f"{wanted}; got {type(logits).__name__}")
    if logits.ndim != 2 or logits.shape[0] != batch or logits.shape[1] < 2:
        raise ValueError(f"{wanted}; got shape {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"{wanted}; got dtype {logits.dtype}")
