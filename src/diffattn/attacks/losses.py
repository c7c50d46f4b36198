"""What an attack maximises: functions (logits, labels, targets) -> one loss per sample.

Every loss takes logits z [batch, classes], true labels y [batch] and targets t [batch] or None, and returns
[batch]. It grows as the sample moves towards the attacker's goal: away from y, or to t where targets are given.
A loss of your own with this signature works wherever a name does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from diffattn.registry import Registry

Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]

LOSSES: Registry[Loss] = Registry("loss")

# The classes that a loss needs, untargeted and targeted; a loss that is not here needs 2.
MIN_CLASSES = {"dlr": (3, 4)}


@LOSSES.register("cross_entropy")
def cross_entropy(logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
    """-log p_y, or log p_t where targets are given, with p = softmax(z).

    It is taken in float64: where z_y is more than about 16 above the rest, float32 loses the gradient in z_y. Its
    gradient is exactly 0 where softmax saturates (z times 1000), so it cannot be trusted there.
    """
    goal = labels if targets is None else targets
    loss = functional.cross_entropy(logits.double(), goal, reduction="none").to(logits.dtype)
    return loss if targets is None else -loss


@LOSSES.register("margin")
def margin(logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
    """max_{j != y} z_j - z_y, or z_t - max_{j != t} z_j where targets are given; above 0 once broken.

    Source: Carlini and Wagner (2017), f_6 before its clipping at -kappa. The own class is masked by -inf, so
    logits that are all negative are no special case. The direction of its gradient in the logits depends on
    neither their scale nor a shift.
    """
    goal = labels if targets is None else targets
    chosen = logits.gather(1, goal[:, None])[:, 0]
    others = logits.scatter(1, goal[:, None], -torch.inf).amax(dim=1)
    return others - chosen if targets is None else chosen - others


@LOSSES.register("dlr")
def difference_of_logits_ratio(logits: Tensor, labels: Tensor, targets: Tensor | None = None) -> Tensor:
    """The difference of logits ratio, invariant to a shift of the logits and to their scale.

    Untargeted, with z_(1) >= z_(2) >= ... the sorted logits: (max_{j != y} z_j - z_y) / (z_(1) - z_(3)).
    Targeted: (z_t - z_y) / (z_(1) - (z_(3) + z_(4)) / 2).

    Raises:
        ValueError: with fewer than 3 classes, or 4 where targets are given.

    Source: Croce and Hein (2020), the DLR and the targeted DLR loss; as in their code, 1e-12 is added to the
    denominator.
    """
    needed = MIN_CLASSES["dlr"][targets is not None]
    if logits.shape[1] < needed:
        kind = "untargeted" if targets is None else "targeted"
        raise ValueError(f"the {kind} dlr loss needs at least {needed} classes; got {logits.shape[1]}")
    ordered = logits.topk(needed, dim=1).values
    if targets is None:
        return margin(logits, labels, None) / (ordered[:, 0] - ordered[:, 2] + 1e-12)
    gain = logits.gather(1, targets[:, None]) - logits.gather(1, labels[:, None])
    return gain[:, 0] / (ordered[:, 0] - (ordered[:, 2] + ordered[:, 3]) / 2 + 1e-12)


def choose_loss(loss: str | Loss, *, num_classes: int, targeted: bool) -> tuple[Loss, str | None]:
    """The loss to use for so many classes, and a flag where it is not the one asked for.

    A loss that needs more classes than there are is replaced by `margin`. It is not divided by anything: of two
    logits, only the sign of their difference is invariant to shift and scale, and a sign has no gradient,
    while the direction of the margin's gradient, which is all that steepest ascent uses, is invariant.

    Raises:
        ValueError: for an unknown name.
    """
    if not isinstance(loss, str):
        return loss, None
    needed = MIN_CLASSES.get(loss, (2, 2))[targeted]
    if num_classes >= needed:
        return LOSSES[loss], None
    kind = "targeted" if targeted else "untargeted"
    return LOSSES["margin"], (
        f"loss_replaced: {kind} {loss} needs {needed} classes, the model has {num_classes}; margin was used"
    )
