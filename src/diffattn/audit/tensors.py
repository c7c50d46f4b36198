"""The images and attention maps beside a record: read from safetensors and checked. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from diffattn.audit.facts import Example

_LARGEST_EDGE = 8192
_PIXEL_SLACK = 1e-6


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file; what is none is named for what it looks like."""
    content = path.read_bytes()
    if content[:256].lstrip().lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise ValueError(f"{path} is an HTML page, not tensors: a download gave an error or a log-in page")
    try:
        return safetensors_numpy.load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({len(content)} bytes): {error!s:.200}") from error


def check_examples(examples: tuple[Example, ...], tensors: dict[str, np.ndarray], path: Path) -> None:
    """Raise unless every example has its two images and maps of one shape, and nothing else lies beside them.

    Raises:
        ValueError: naming the file, the tensor, the requirement and what was found.
    """
    unclaimed = set(tensors)
    keys = set()
    for example in examples:
        if example.key in keys:
            raise ValueError(f"{path} must serve every example under its own key; {example.key!r:.60} comes twice")
        keys.add(example.key)
        shape = None
        for which in ("clean", "adversarial"):
            image = _take(tensors, f"{example.key}.{which}", path, unclaimed)
            _check_image(image, f"{path}: {example.key}.{which}", shape)
            shape = image.shape
        _check_maps(example.key, tensors, path, unclaimed)
    if unclaimed:
        raise ValueError(f"{path} holds {sorted(unclaimed)[0]!r:.80}, which belongs to no example of record.json")


def _check_maps(key: str, tensors: dict[str, np.ndarray], path: Path, unclaimed: set[str]) -> None:
    number, shape = 1, None
    while any(f"{key}.{which}_map_{number}" in tensors for which in ("clean", "adversarial")):
        for which in ("clean", "adversarial"):
            name = f"{key}.{which}_map_{number}"
            found = _take(tensors, name, path, unclaimed)
            _check_array(found, f"{path}: {name}", dimensions=2)
            if shape is not None and found.shape != shape:
                raise ValueError(f"{path}: {name} must have the other maps' shape {shape}; got {found.shape}")
            shape = found.shape
        number += 1


def _take(tensors: dict[str, np.ndarray], name: str, path: Path, unclaimed: set[str]) -> np.ndarray:
    if name not in tensors:
        raise ValueError(f"{path} must hold the tensor {name!r:.80}")
    unclaimed.discard(name)
    return tensors[name]


def _check_image(image: np.ndarray, where: str, shape: tuple[int, ...] | None) -> None:
    _check_array(image, where, dimensions=3)
    if image.shape[0] not in (1, 3):
        raise ValueError(f"{where} must be an image [1 or 3, height, width]; got shape {image.shape}")
    if shape is not None and image.shape != shape:
        raise ValueError(f"{where} must have the clean image's shape {shape}; got {image.shape}")
    low, high = float(image.min()), float(image.max())
    if low < -_PIXEL_SLACK or high > 1 + _PIXEL_SLACK:
        raise ValueError(f"{where} must be in [0, 1]; got minimum {low:g} and maximum {high:g}")


def _check_array(value: np.ndarray, where: str, *, dimensions: int) -> None:
    if value.dtype != np.float32:
        raise ValueError(f"{where} must be float32; got {value.dtype}")
    if value.ndim != dimensions or not all(1 <= edge <= _LARGEST_EDGE for edge in value.shape):
        raise ValueError(f"{where} must have {dimensions} axes of 1 to {_LARGEST_EDGE}; got shape {value.shape}")
    if not np.isfinite(value).all():
        raise ValueError(f"{where} must be finite; {int((~np.isfinite(value)).sum())} values are not")
