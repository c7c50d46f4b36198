"""Which samples a record shows, with their images and the attention maps before and after the attack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from diffattn.attacks.base import AttackResult
from diffattn.audit.facts import Example
from diffattn.models.capture import attention_layers, capture

MAP_NOTE = "mean over heads"


def collect_examples(
    model: nn.Module, images: Tensor, results: Sequence[AttackResult], *, broken: int = 3, survived: int = 1
) -> tuple[tuple[Example, ...], dict[str, np.ndarray]]:
    """The first samples that each attack broke and did not break, with the last attention layer's maps.

    Args:
        model: in eval mode; one without attention layers that we know gives examples without maps.
        images: [n, channels, height, width], what the attacks were given.
        results: one an attack and budget, each over those images.
        broken: how many broken samples of each.
        survived: how many survivors of each.

    Returns:
        the examples, and their float32 arrays by name as `AuditRecord.tensors` documents.
    """
    layers = list(attention_layers(model))
    layer = layers[-1] if layers else None
    examples: list[Example] = []
    tensors: dict[str, np.ndarray] = {}
    for result in results:
        rows = [
            int(row)
            for status, most in (("broken", broken), ("survived", survived))
            for row in np.flatnonzero(result.status == status)[:most]
        ]
        for row in rows:
            key = f"example{len(examples)}"
            pair = {"clean": images[row], "adversarial": result.adversarial[row]}
            for which, image in pair.items():
                tensors[f"{key}.{which}"] = image.detach().float().clamp(0, 1).cpu().numpy()
                if layer is not None:
                    maps = _weighted_maps(model, image, layer)
                    tensors.update({f"{key}.{which}_map_{b}": one for b, one in enumerate(maps, 1)})
            examples.append(
                Example(
                    sample_id=str(result.sample_ids[row]),
                    label=int(result.labels[row]),
                    clean_prediction=int(result.clean_prediction[row]),
                    attacked_prediction=int(result.prediction[row]),
                    status=result.status[row],
                    attack=result.attack["name"],
                    norm=result.norm,
                    eps=result.eps,
                    key=key,
                    layer=layer,
                    map_note=MAP_NOTE,
                )
            )
    return tuple(examples), tensors


def _weighted_maps(model: nn.Module, image: Tensor, layer: str) -> list[np.ndarray]:
    branches = capture(model, image[None], layers=[layer])[layer]
    with torch.no_grad():
        return [one[0].mean(dim=0).float().cpu().numpy() for one in branches.weighted]
