"""Closed forms, written out by hand in numpy: what tests compare with. No automatic differentiation here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class TwoTokenMap(NamedTuple):
    """A softmax map over two tokens and its Jacobian."""

    map: Array  # [2 queries, 2 keys]
    jacobian: Array  # [2 queries, 2 keys, 2 tokens, C]


def two_token_map(x: Array, query: Array, key: Array, query_bias: Array, key_bias: Array) -> TwoTokenMap:
    """Softmax attention over two keys is a sigmoid.

        A_i0 = s(delta_i),  A_i1 = 1 - s(delta_i),  delta_i = q_i . (k_0 - k_1) / sqrt(d)
        d delta_i / d x_t = ([t = i] Q' (k_0 - k_1) + (+1 if t = 0 else -1) K' q_i) / sqrt(d)
        d A_i0 = s (1 - s) d delta_i = - d A_i1

    Args:
        x: [2, C].
        query: [d, C].
        key: [d, C].
        query_bias: [d].
        key_bias: [d].
    """
    scale = 1.0 / np.sqrt(query.shape[0])
    queries, keys = x @ query.T + query_bias, x @ key.T + key_bias
    gap = keys[0] - keys[1]
    maps, jacobian = np.zeros((2, 2)), np.zeros((2, 2, *x.shape))
    for i in range(2):
        share = 1.0 / (1.0 + np.exp(-scale * queries[i] @ gap))
        maps[i] = share, 1.0 - share
        for t in range(2):
            slope = (1.0 if t == 0 else -1.0) * (key.T @ queries[i])
            if t == i:
                slope = slope + query.T @ gap
            jacobian[i, 0, t] = share * (1.0 - share) * scale * slope
            jacobian[i, 1, t] = -jacobian[i, 0, t]
    return TwoTokenMap(maps, jacobian)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x g / sqrt(mean x^2 + eps) over the last axis."""
    return x * gain / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def rms_norm_pullback(x: Array, gain: Array, eps: float, cotangent: Array) -> Array:
    """u -> J' u for `rms_norm`: with r^2 = mean x^2 + eps, g u / r - x (x . g u) / (n r^3)."""
    square = (x**2).mean(axis=-1, keepdims=True) + eps
    pulled = gain * cotangent
    inner = (x * pulled).sum(axis=-1, keepdims=True)
    return pulled / np.sqrt(square) - x * inner / (x.shape[-1] * square**1.5)


def cross_entropy_slope(logits: Array, label: int) -> Array:
    """d(-log softmax(logits)[label])/dlogits = softmax(logits) - onehot."""
    odds = np.exp(logits - logits.max())
    slope = odds / odds.sum()
    slope[label] -= 1.0
    return slope


def ramp_supremum(slope: float, offset: float, radius: float) -> float:
    """sup over 0 < |t| <= r of |s(t) - s(0)| / |t| for s(t) = tanh(slope (t - offset)), on a fine grid."""
    t = np.linspace(-radius, radius, 2_000_001)
    t = t[np.abs(t) > radius * 1e-5]
    return float((np.abs(np.tanh(slope * (t - offset)) - np.tanh(-slope * offset)) / np.abs(t)).max())
