"""Multi-head softmax attention (Vaswani et al. 2017): one map with weight 1."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from diffattn.config import require
from diffattn.models.attention.base import (
    ATTENTION,
    Attention,
    Branches,
    ScoreOperators,
    hidden_entries,
    masked_softmax,
    merge_heads,
)


@ATTENTION.register("softmax")
class SoftmaxAttention(Attention):
    """Softmax attention: A = softmax(Q K' / sqrt(d)), output = merge(A V) W_O.

    Args:
        embed_dim: width C; a multiple of `num_heads`.
        num_heads: number of heads H; d = v = C / H.
        layer_index: not used; every variant is built with it.
        qkv_bias: biases of the query, key and value projections.
        proj_bias: bias of the output projection.
        attn_dropout: see `Attention`.
        proj_dropout: see `Attention`.

    Raises:
        ValueError: if `embed_dim` is no multiple of `num_heads`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer_index: int = 0,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        attn_dropout: float = 0.0,
        proj_dropout: float = 0.0,
    ) -> None:
        super().__init__(embed_dim, num_heads, attn_dropout=attn_dropout, proj_dropout=proj_dropout)
        require(
            embed_dim % num_heads == 0,
            f"softmax attention needs embed_dim % num_heads == 0; got embed_dim={embed_dim}, num_heads={num_heads}",
        )
        self.layer_index = layer_index
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def branches(self, x: Tensor, attn_mask: Tensor | None = None) -> Branches:
        """One softmax map of weight 1."""
        query, key, value = self._project(x)
        scores = (query * self.scale) @ key.transpose(-2, -1)
        maps = masked_softmax(scores, attn_mask)
        mask = None if attn_mask is None else hidden_entries(attn_mask)
        return Branches((maps,), (maps.new_ones(()),), ("softmax",), (value,), mask)

    def signed_sum(self, branches: Branches) -> Tensor:
        """A V."""
        return branches.maps[0] @ branches.values[0]

    def fused_context(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        """A V by the fused kernel."""
        query, key, value = self._project(x)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=self.scale)

    def output(self, context: Tensor) -> Tensor:
        """merge(context) W_O."""
        return self.proj_drop(self.proj(merge_heads(context)))

    def score_operators(self) -> ScoreOperators:
        """Q, K, V and O, cut by head."""
        heads, width = self.num_heads, self.head_dim
        query, key, value = self.qkv.weight.view(3, heads, width, self.embed_dim)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.qkv.bias is not None:
            biases = tuple(self.qkv.bias.view(3, heads, width))
        return ScoreOperators(
            query=query,
            key=key,
            value=value,
            output=self.proj.weight.view(self.embed_dim, heads, width),
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=self.proj.bias,
            scale=self.scale,
            map_head=tuple(range(heads)),
            map_branch=(0,) * heads,
        )
