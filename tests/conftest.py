"""Shared set-up: one thread, and two models trained on digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny; two workers share the cores


@pytest.fixture(scope="session")
def digit_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A softmax and a differential model, trained for a few seconds on digits: checkpoint directories by name."""
    from diffattn.config import train_config_from_mapping
    from diffattn.train.loop import train_model

    paths = {}
    for name, options in (("vit", {}), ("diffvit", {"lambda_init": 0.8})):
        paths[name] = tmp_path_factory.mktemp("models") / name
        config = train_config_from_mapping(
            {
                "model": {"name": f"{name}_micro_patch2_8", "embed_dim": 32, "num_heads": 2, **options},
                "data": {"name": "digits", "limit": 400, "val_limit": 100},
                "optim": {"epochs": 4, "batch_size": 32, "lr": 0.004},
            }
        )
        train_model(config, paths[name])
    return paths
