"""Our own layers speak the adapter's contract themselves."""

from __future__ import annotations

from diffattn.models.adapters.base import AttentionAdapter, adapt
from diffattn.models.attention.base import Attention


@adapt.register(Attention)
def adapt_ours(layer: Attention) -> AttentionAdapter:
    """The layer itself."""
    return layer
