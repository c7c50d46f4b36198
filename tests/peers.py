"""Installed peers, called with our own words; a test that needs one that is absent is skipped.

Every function returns the peer's adversarial images. Pixels are in [0, 1] and steps are in pixel units.
"""

from __future__ import annotations

import warnings

import pytest
from torch import Tensor, nn


def quiet_import(name: str):
    """Import a peer whose own dependencies warn, or skip the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def torchattacks_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, *, norm: str, eps: float, step_size: float, steps: int
) -> Tensor:
    """PGD of torchattacks from the clean image."""
    attacks = quiet_import("torchattacks")
    build = {"Linf": attacks.PGD, "L2": attacks.PGDL2}[norm]
    return build(model, eps=eps, alpha=step_size, steps=steps, random_start=False)(images, labels)


def torchattacks_fgsm(model: nn.Module, images: Tensor, labels: Tensor, *, eps: float) -> Tensor:
    """FGSM of torchattacks."""
    return quiet_import("torchattacks").FGSM(model, eps=eps)(images, labels)


def foolbox_pgd(
    model: nn.Module, images: Tensor, labels: Tensor, *, norm: str, eps: float, step_size: float, steps: int
) -> Tensor:
    """PGD of foolbox from the clean image."""
    foolbox = quiet_import("foolbox")
    build = {"Linf": foolbox.attacks.LinfPGD, "L2": foolbox.attacks.L2PGD}[norm]
    attack = build(abs_stepsize=step_size, steps=steps, random_start=False)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=images.device)
    return attack(wrapped, images, labels, epsilons=eps)[1]
