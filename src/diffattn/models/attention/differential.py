"""Differential attention, first version (Ye et al., arXiv 2410.05258): softmax minus lambda times softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffattn.checks import is_finite_number, require, require_flag, shown
from diffattn.models.attention.base import ATTENTION, Attention, Packed, ScoreOperators, merge_heads
from diffattn.models.attention.plain import Layout, unit_rms

SUB_NORM_EPS = 1e-5
LAMBDA_STD = 0.1


def depth_lambda_init(layer_index: int) -> float:
    """The V1 schedule 0.8 - 0.6 exp(-0.3 l) for layer l counted from 0: 0.2, 0.356, 0.471, ..."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


@ATTENTION.register("differential")
class DifferentialAttention(Attention):
    """Differential attention V1.

    For output head i with the adjacent pair of query-key heads (2i, 2i+1), d = C / (2 H), v = 2 d:

        A = softmax(Q_2i K_2i' / sqrt(d)) - lambda softmax(Q_2i+1 K_2i+1' / sqrt(d))
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
        output = merge((1 - lambda_init) RMSNorm(A V_i)) W_O

    lambda is one number a layer and unrestricted; the norm (eps 1e-5, affine) is one, shared by the heads. With
    the same C and half the heads, the layer has the softmax layer's parameters plus 4 d + 2 d.

    Args:
        embed_dim: width C; a multiple of `2 * num_heads`.
        num_heads: number of **output** heads H: half of the softmax layer's it replaces.
        layer_index: position l of the layer in the model, from 0; used by `lambda_init="depth"`.
        lambda_init: a finite number, or "depth" for the schedule above.
        qkv_bias: biases of the query, key and value projections (none in the reference).
        proj_bias: bias of the output projection (none in the reference).
        attn_dropout: of each map before the subtraction; see `Attention`.
        proj_dropout: see `Attention`.

    Raises:
        ValueError: for an impossible head count or `lambda_init`, or a bias that is not True or False.
    """

    lambda_q1: nn.Parameter
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        layer_index: int = 0,
        lambda_init: float | str = "depth",
        qkv_bias: bool = False,
        proj_bias: bool = False,
        attn_dropout: float = 0.0,
        proj_dropout: float = 0.0,
    ) -> None:
        super().__init__(embed_dim, num_heads, attn_dropout=attn_dropout, proj_dropout=proj_dropout)
        require_flag("qkv_bias", qkv_bias)
        require_flag("proj_bias", proj_bias)
        require(
            embed_dim % (2 * num_heads) == 0,
            f"differential attention needs embed_dim % (2 * num_heads) == 0; got embed_dim={embed_dim}, "
            f"num_heads={num_heads} (num_heads counts output heads, half of the softmax layer's)",
        )
        self.layer_index = layer_index
        self.lambda_init = _resolve_lambda_init(lambda_init, layer_index)
        self.head_dim = embed_dim // (2 * num_heads)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)
        self.sub_norm = nn.RMSNorm(2 * self.head_dim, eps=SUB_NORM_EPS)
        self.layout = Layout(
            heads=num_heads,
            branches=2,
            key_heads=2 * num_heads,
            value_heads=num_heads,
            width=self.head_dim,
            value_width=2 * self.head_dim,
            norm_eps=SUB_NORM_EPS,
        )
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            vector = nn.Parameter(torch.empty(self.head_dim, dtype=torch.float32))
            nn.init.normal_(vector, std=LAMBDA_STD)
            self.register_parameter(name, vector)

    def lambda_value(self) -> Tensor:
        """The scalar lambda, computed in float32 or wider, differentiable."""
        kind = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = torch.exp((self.lambda_q1.to(kind) * self.lambda_k1.to(kind)).sum())
        second = torch.exp((self.lambda_q2.to(kind) * self.lambda_k2.to(kind)).sum())
        return first - second + self.lambda_init

    def pack(self, x: Tensor) -> Packed:
        """Two softmax maps with weights 1 and -lambda, the adjacent maps (2i, 2i+1) of head i."""
        projection = self.qkv(x)
        return Packed(projection, -self.lambda_value().to(projection.dtype), self.layout)

    def output(self, context: Tensor) -> Tensor:
        """merge((1 - lambda_init) RMSNorm(context)) W_O."""
        return self.finish(merge_heads(unit_rms(context, SUB_NORM_EPS)))

    def finish(self, merged: Tensor) -> Tensor:
        """(1 - lambda_init) merged diag(norm weight) W_O; the factors go into W_O, which is smaller than merged."""
        gain = (self.sub_norm.weight * (1.0 - self.lambda_init)).repeat(self.num_heads)
        return self.proj_drop(F.linear(merged, self.proj.weight * gain, self.proj.bias))

    def score_operators(self) -> ScoreOperators:
        """Q, K by map, V and O by head; the sub-norm lies between V and O and is not among them."""
        maps, heads, width = 2 * self.num_heads, self.num_heads, self.head_dim
        query, key, value = self.qkv.weight.view(3, self.embed_dim, self.embed_dim)
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if self.qkv.bias is not None:
            bias = self.qkv.bias.view(3, self.embed_dim)
            biases = (bias[0].view(maps, width), bias[1].view(maps, width), bias[2].view(heads, 2 * width))
        return ScoreOperators(
            query=query.view(maps, width, self.embed_dim),
            key=key.view(maps, width, self.embed_dim),
            value=value.view(heads, 2 * width, self.embed_dim),
            output=self.proj.weight.view(self.embed_dim, heads, 2 * width),
            query_bias=biases[0],
            key_bias=biases[1],
            value_bias=biases[2],
            output_bias=self.proj.bias,
            scale=self.layout.scale,
            map_head=tuple(index // 2 for index in range(maps)),
            map_branch=(0, 1) * heads,
        )

    def extra_repr(self) -> str:
        """Shape and lambda_init."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, lambda_init={self.lambda_init:.4g}"


def _resolve_lambda_init(lambda_init: float | str, layer_index: int) -> float:
    if lambda_init == "depth":
        return depth_lambda_init(layer_index)
    if is_finite_number(lambda_init):
        return float(lambda_init)
    raise ValueError(f"lambda_init must be a finite number or 'depth'; got {shown(lambda_init)}")
