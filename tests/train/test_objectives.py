import math

import pytest
import torch

from diffattn.train.objectives import cross_entropy


def test_smoothed_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]], dtype=torch.float64)
    labels = torch.tensor([1, 1])
    smoothed = [
        -(0.9 * math.log(0.75) + 0.1 * math.log(0.25)),
        -(0.9 * math.log(0.2) + 0.1 * math.log(0.8)),
    ]
    loss = cross_entropy(logits, labels, label_smoothing=0.2, reduction="none")
    assert loss.tolist() == pytest.approx(smoothed, rel=1e-12)
    assert cross_entropy(logits, labels, label_smoothing=0.2).item() == pytest.approx(sum(smoothed) / 2)
    assert cross_entropy(logits, labels, reduction="sum").item() == pytest.approx(-math.log(0.75) - math.log(0.2))


def test_half_precision_logits_are_widened():
    logits = torch.tensor([[0.0, 20.0]], dtype=torch.bfloat16)
    loss = cross_entropy(logits, torch.tensor([1]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log1p(math.exp(-20.0)), abs=1e-8)
