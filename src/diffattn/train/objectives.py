"""What training minimises."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy against smoothed targets, in float32 or wider (Szegedy et al. 2016, section 7).

        loss_i = -sum_c t_ic log softmax(z_i)_c,   t_ic = (1 - s) [c = y_i] + s / classes

    Args:
        logits: [batch, classes].
        labels: int64 [batch].
        label_smoothing: s in [0, 1).
        reduction: "mean" over the batch, "sum", or "none" for [batch].
    """
    logits = logits if logits.element_size() >= 4 else logits.float()
    return F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction=reduction)
