"""Adapters: what every attention layer, ours or foreign, says of itself."""

from diffattn.models.adapters.base import AttentionAdapter, adapt, is_attention
from diffattn.models.adapters.ours import adapt_ours

__all__ = ["AttentionAdapter", "adapt", "adapt_ours", "is_attention"]
