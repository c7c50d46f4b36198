"""A linear classifier with closed-form robustness: an image at margin m breaks iff eps > m / ||w||_q, q dual."""

from __future__ import annotations

import torch
from torch import nn

PIXELS = 12


class Linear(nn.Module):
    """logits = W x + b on flattened images."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        return x.flatten(1) @ self.weight.T + self.bias


def linear_problem(classes=2, n=40, dtype=torch.float64, seed=0):
    """A linear classifier and images far from 0 and 1, all labelled as predicted; classes above 1 never win."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, PIXELS, generator=generator, dtype=torch.float64)
    bias = torch.zeros(classes, dtype=torch.float64)
    weight[2:], bias[2:] = 0, -100
    images = 0.45 + 0.1 * torch.rand(n, 3, 2, 2, generator=generator, dtype=torch.float64)
    bias[:2] = -(weight[:2] * 0.5).sum(dim=1)
    model = Linear(weight.to(dtype), bias.to(dtype)).eval()
    images = images.to(dtype)
    return model, images, model(images).argmax(dim=1)


def thresholds(model, images, labels, order):
    """The least distance that flips each image: m / ||w_0 - w_1||_q, with q dual to the norm."""
    logits = model(images).detach()
    margin = (logits[:, 0] - logits[:, 1]).abs()
    return margin / torch.linalg.vector_norm(model.weight[0] - model.weight[1], ord=order).detach()


def dividing_eps(least):
    """A budget in the widest gap (as a ratio) between the middle thresholds, so that no sample is a close call."""
    ordered = least.sort().values[len(least) // 4 : -len(least) // 4]
    widest = int((ordered[1:] / ordered[:-1]).argmax())
    return float(ordered[widest] * ordered[widest + 1]) ** 0.5
