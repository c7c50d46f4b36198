"""The resumable state of a run: one safetensors file, replaced atomically; its scalars are JSON in the header."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from diffattn.config import TrainConfig
from diffattn.files import write_atomic

STATE = Path("state") / "last.safetensors"
FORMAT = "diffattn-training-state"
FORMAT_VERSION = 1
_MODEL, _OPTIMIZER = "model.", "optimizer."


class RunState(NamedTuple):
    """Where a run stands after `epoch` epochs.

    Args:
        epoch: finished epochs.
        config: `comparable(TrainConfig)`.
        fingerprint: of the training images.
        history: one entry per finished epoch.
        tensors: the weights and the optimiser's moments and step counts, by name.
    """

    epoch: int
    config: dict[str, Any]
    fingerprint: str
    history: list[dict[str, Any]]
    tensors: dict[str, Tensor]


def comparable(config: TrainConfig) -> dict[str, Any]:
    """What must stay the same when a run is resumed, as JSON gives it back: all but the hardware."""
    values = dataclasses.asdict(config)
    del values["hardware"]
    return json.loads(json.dumps(values, allow_nan=False))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> list[str]:
    """Where two nested mappings differ: `optim.lr was 0.001 and is 0.01`."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, prefix=f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} was {before!r} and is {after!r}")
    return found


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers, and every tensor that the optimiser keeps of a parameter, on the CPU, by name."""
    tensors = {_MODEL + name: value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def restore_tensors(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put collected tensors back.

    Raises:
        ValueError: if they are not this model's, or a trained parameter's state is missing.
    """
    weights = {name.removeprefix(_MODEL): value for name, value in tensors.items() if name.startswith(_MODEL)}
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise ValueError(f"the saved state does not fit the model: {error}") from error
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        saved = {key: tensors.get(f"{_OPTIMIZER}{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
        missing = [key for key, value in saved.items() if value is None]
        if missing:
            raise ValueError(f"the saved state lacks {', '.join(missing)} of the optimiser for {name}")
        optimizer.state[parameter] = {
            key: value.to(parameter.device, copy=True) for key, value in saved.items() if value is not None
        }


def save_state(out: Path, state: RunState) -> None:
    """Write `state/last.safetensors` under `out`: whole, or not at all."""
    scalars = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **{key: value for key, value in state._asdict().items() if key != "tensors"},
    }
    metadata = {"state": json.dumps(scalars, allow_nan=False)}
    write_atomic(out / STATE, save_tensors(state.tensors, metadata=metadata))


def load_state(out: Path) -> RunState | None:
    """Read the last state of the run in `out`; None where there is none.

    Raises:
        ValueError: if the file is damaged or of another format, naming it.
    """
    path = out / STATE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            scalars = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if (scalars["format"], scalars["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {scalars['format']!r} version {scalars['format_version']!r}")
        return RunState(tensors=tensors, **{key: scalars[key] for key in RunState._fields if key != "tensors"})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no training state that this release can resume ({error}); "
            "start it over (resume=False, --restart) or give another out"
        ) from error
