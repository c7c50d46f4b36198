"""Differential attention, second version (Microsoft, January 2026): a sigmoid weight a token and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffattn.checks import require, require_flag, require_positive_integer
from diffattn.models.attention.base import ATTENTION, Attention, Packed, ScoreOperators, merge_heads
from diffattn.models.attention.plain import Layout

MAX_HEAD_DIM = 65536


@ATTENTION.register("differential_v2")
class DifferentialAttentionV2(Attention):
    """Differential attention V2: twice the query heads, shared keys and values, lambda read from the token.

    For output head i with the adjacent query heads (2i, 2i+1), which share the key-value head of i:

        A = softmax(Q_2i K' / sqrt(d)) - sigmoid(X W_lambda)_i softmax(Q_2i+1 K' / sqrt(d))
        output = merge(A V) W_O

    There is no sub-norm and no output scale. lambda depends on the input: one number a token and head.

    Args:
        embed_dim: width C.
        num_heads: number of **output** heads H; there are 2 H query heads.
        layer_index: not used; every variant is built with it.
        head_dim: width d of queries, keys and values, at most 65536; `embed_dim // num_heads` unless given.
        num_kv_heads: key-value heads, a divisor of `num_heads`; `num_heads` unless given.
        qkv_bias: biases of the query, key and value projections.
        proj_bias: bias of the output projection.
        attn_dropout: of each map before the subtraction; see `Attention`.
        proj_dropout: see `Attention`.

    Raises:
        ValueError: for impossible head counts or `head_dim`, or a bias that is not True or False.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer_index: int = 0,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        proj_bias: bool = False,
        attn_dropout: float = 0.0,
        proj_dropout: float = 0.0,
    ) -> None:
        super().__init__(embed_dim, num_heads, attn_dropout=attn_dropout, proj_dropout=proj_dropout)
        require_flag("qkv_bias", qkv_bias)
        require_flag("proj_bias", proj_bias)
        if head_dim is None:
            require(
                embed_dim % num_heads == 0,
                f"embed_dim must be a multiple of num_heads unless head_dim is given; got embed_dim={embed_dim}, "
                f"num_heads={num_heads}",
            )
            head_dim = embed_dim // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        require_positive_integer("head_dim", head_dim, high=MAX_HEAD_DIM)
        require_positive_integer("num_kv_heads", num_kv_heads)
        require(
            num_heads % num_kv_heads == 0,
            f"num_kv_heads must divide num_heads; got {num_kv_heads} and {num_heads}",
        )
        self.layer_index = layer_index
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layout = Layout(
            heads=num_heads,
            branches=2,
            key_heads=num_kv_heads,
            value_heads=num_kv_heads,
            width=head_dim,
            value_width=head_dim,
        )
        self.widths = (2 * num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.qkv = nn.Linear(embed_dim, sum(self.widths), bias=qkv_bias)
        self.lambda_proj = nn.Linear(embed_dim, num_heads, bias=False)
        self.proj = nn.Linear(num_heads * head_dim, embed_dim, bias=proj_bias)

    def pack(self, x: Tensor) -> Packed:
        """Two softmax maps with weights 1 and -sigmoid(X W_lambda) [B, H, N, 1]."""
        projection = self.qkv(x)
        weight = -torch.sigmoid(self.lambda_proj(x)).transpose(1, 2).unsqueeze(-1)
        return Packed(projection, weight.to(projection.dtype), self.layout)

    def output(self, context: Tensor) -> Tensor:
        """merge(context) W_O."""
        return self.finish(merge_heads(context))

    def finish(self, merged: Tensor) -> Tensor:
        """Merged W_O."""
        return self.proj_drop(self.proj(merged))

    def score_operators(self) -> ScoreOperators:
        """Q by map, K expanded to maps, V expanded to heads, O by head."""
        maps, heads, width = 2 * self.num_heads, self.num_heads, self.head_dim
        group = heads // self.num_kv_heads
        query, key, value = self.qkv.weight.split(self.widths)
        shape = (-1, width, self.embed_dim)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.qkv.bias is not None:
            parts = [part.view(-1, width) for part in self.qkv.bias.split(self.widths)]
            biases = (
                parts[0],
                parts[1].repeat_interleave(2 * group, 0),
                parts[2].repeat_interleave(group, 0),
            )
        return ScoreOperators(
            query=query.view(shape),
            key=key.view(shape).repeat_interleave(2 * group, dim=0),
            value=value.view(shape).repeat_interleave(group, dim=0),
            output=self.proj.weight.view(self.embed_dim, heads, width),
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=self.proj.bias,
            scale=self.layout.scale,
            map_head=tuple(index // 2 for index in range(maps)),
            map_branch=(0, 1) * heads,
        )
