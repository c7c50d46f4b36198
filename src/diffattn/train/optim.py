"""AdamW with decay for matrices only, and a learning rate that warms up linearly and falls as a cosine."""

from __future__ import annotations

import math

import torch
from torch import nn

from diffattn.config import OptimConfig

UNDECAYED = ("cls_token", "pos_embed")
"""Names of parameters that are no vectors, but are not decayed either."""


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter: on matrices and filters, not on vectors, tokens or lambdas."""
    last = name.rsplit(".", maxsplit=1)[-1]
    return parameter.ndim > 1 and last not in UNDECAYED and last != "bias" and not last.startswith("lambda")


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict]:
    """The trainable parameters as two groups for an optimiser: decayed and not; an empty group is left out."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[is_decayed(name, parameter)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over `parameter_groups`, in its fused form."""
    groups = parameter_groups(model, weight_decay=config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, config: OptimConfig, *, steps_per_epoch: int) -> float:
    """The learning rate of a step.

        warm-up, step < W:  lr (step + 1) / W
        after it:           min_lr + (lr - min_lr) (1 + cos(pi (step - W) / (S - W))) / 2

    with S = epochs * steps_per_epoch and W = round(warmup_epochs * steps_per_epoch).

    Args:
        step: counted from 0 over the whole training.
        config: lr, min_lr, epochs and warmup_epochs.
        steps_per_epoch: at least 1.
    """
    total = config.epochs * steps_per_epoch
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
