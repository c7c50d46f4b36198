"""Multi-head softmax attention (Vaswani et al. 2017): one map with weight 1."""

from __future__ import annotations

from torch import Tensor, nn

from diffattn.checks import require, require_flag
from diffattn.models.attention.base import ATTENTION, Attention, Packed, ScoreOperators, merge_heads
from diffattn.models.attention.plain import Layout


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
        ValueError: if `embed_dim` is no multiple of `num_heads`, or a bias is not True or False.
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
        require_flag("qkv_bias", qkv_bias)
        require_flag("proj_bias", proj_bias)
        require(
            embed_dim % num_heads == 0,
            f"softmax attention needs embed_dim % num_heads == 0; got embed_dim={embed_dim}, num_heads={num_heads}",
        )
        self.layer_index = layer_index
        self.head_dim = embed_dim // num_heads
        self.layout = Layout(
            heads=num_heads,
            branches=1,
            key_heads=num_heads,
            value_heads=num_heads,
            width=self.head_dim,
            value_width=self.head_dim,
        )
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)

    def pack(self, x: Tensor) -> Packed:
        """One softmax map of weight 1."""
        return Packed(self.qkv(x), None, self.layout)

    def output(self, context: Tensor) -> Tensor:
        """merge(context) W_O."""
        return self.finish(merge_heads(context))

    def finish(self, merged: Tensor) -> Tensor:
        """Merged W_O."""
        return self.proj_drop(self.proj(merged))

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
            scale=self.layout.scale,
            map_head=tuple(range(heads)),
            map_branch=(0,) * heads,
        )
