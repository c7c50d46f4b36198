"""Attention layers: one variant, one file; importing the package registers them all."""

from diffattn.models.attention.base import ATTENTION, Attention, Branches, ScoreOperators
from diffattn.models.attention.differential import DifferentialAttention, depth_lambda_init
from diffattn.models.attention.differential_v2 import DifferentialAttentionV2
from diffattn.models.attention.softmax import SoftmaxAttention

__all__ = [
    "ATTENTION",
    "Attention",
    "Branches",
    "DifferentialAttention",
    "DifferentialAttentionV2",
    "ScoreOperators",
    "SoftmaxAttention",
    "depth_lambda_init",
]
