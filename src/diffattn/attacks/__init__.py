"""Attacks on any images -> logits callable, under a threat model."""

from diffattn.attacks.base import ATTACKS, Attack, AttackResult
from diffattn.attacks.gradient import FGSM, PGD, GradientAttack
from diffattn.attacks.losses import LOSSES, Loss

__all__ = ["ATTACKS", "FGSM", "LOSSES", "PGD", "Attack", "AttackResult", "GradientAttack", "Loss"]
