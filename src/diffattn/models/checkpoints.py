"""Checkpoint directories: `model.safetensors`, and `config.json` with the architecture and the weights' hash."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from diffattn.checks import from_mapping
from diffattn.config import ViTConfig
from diffattn.files import read_json, write_atomic, write_json_atomic
from diffattn.models.vit import VisionTransformer

FORMAT = "diffattn-model"
FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
_LISTED = 8


def save_model(model: VisionTransformer, directory: str | Path) -> Path:
    """Write the model's checkpoint directory; each file atomically, the configuration last.

    Args:
        model: one of ours.
        directory: made where it is missing; a checkpoint in it is replaced.

    Returns:
        the directory.
    """
    directory = Path(directory)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    weights = save_tensors(tensors)
    write_atomic(directory / WEIGHTS, weights)
    write_json_atomic(
        directory / CONFIG,
        {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "name": model.name,
            "architecture": "vit",
            "config": dataclasses.asdict(model.config),
            "sha256": hashlib.sha256(weights).hexdigest(),
        },
    )
    return directory


def load_model(source: str | Path) -> VisionTransformer:
    """Load a checkpoint directory, strictly.

    Names and shapes are compared before the model's weights are allocated.

    Args:
        source: the directory that `save_model` or `diffattn train` wrote.

    Returns:
        the model in eval mode, on the CPU.

    Raises:
        ValueError: if there is no checkpoint, a file is no JSON or no safetensors (an HTML page, a truncated
            download), the weights are not those that the configuration names, or their names or shapes do not
            fit the model, or the configuration is none that can be built; each with what was found.
    """
    directory = Path(source)
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(f"{source} is no diffattn checkpoint directory: it has no {name}")
    description = read_json(directory / CONFIG)
    config, name = _read_description(description, directory / CONFIG)
    weights = (directory / WEIGHTS).read_bytes()
    tensors = read_safetensors(weights, directory / WEIGHTS)
    expected = description.get("sha256")
    found = hashlib.sha256(weights).hexdigest()
    if expected != found:
        raise ValueError(f"{directory / WEIGHTS} has sha256 {found}, but {CONFIG} names {expected}")
    with torch.random.fork_rng(devices=()):  # the initial weights are overwritten: keep the caller's generator
        with torch.device("meta"):
            require_fit(VisionTransformer(config), tensors, source=str(directory / WEIGHTS))
        model = VisionTransformer(config, name=name)
    load_strictly(model, tensors, source=str(directory / WEIGHTS))
    return model.eval()


def read_safetensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; what is none is named for what it looks like."""
    start = content[:512].lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise ValueError(f"{path} is an HTML page, not weights: a download gave an error or a log-in page")
    if start.startswith((b"pk\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise ValueError(f"{path} is a pickle or a zip archive (a .pt file?), not safetensors")
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({len(content)} bytes): {error}") from error


def require_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise unless the tensors' names and shapes are exactly the model's; the error lists what differs."""
    wanted = model.state_dict()
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(f"{source} does not fit {type(model).__name__}: {'; '.join(problems[:_LISTED])}{more}")


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Load a state dict that must fit (`require_fit`); where it has one dtype, the model takes it."""
    require_fit(model, tensors, source=source)
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) == 1:
        model.to(kinds.pop())
    model.load_state_dict(dict(tensors), strict=True)


def _read_description(description: Any, path: Path) -> tuple[ViTConfig, str]:
    """The configuration and the name of the model that `config.json` describes."""
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{path} is no {FORMAT} configuration: its 'format' must be {FORMAT!r}")
    version = description.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path} has format_version {version!r}; this release reads {FORMAT_VERSION}")
    architecture = description.get("architecture")
    if architecture != "vit":
        raise ValueError(f"{path} names the architecture {architecture!r}; this release knows 'vit'")
    config = description.get("config")
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold 'config', an object; got {type(config).__name__}")
    return from_mapping(ViTConfig, config, what=str(path)), str(description.get("name", ""))
