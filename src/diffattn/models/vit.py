"""One vision transformer (Dosovitskiy et al. 2021) with a swappable attention layer."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import Tensor, nn

from diffattn.checks import require
from diffattn.config import ViTConfig
from diffattn.models.attention import ATTENTION

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=FutureWarning)
    from timm.layers.drop import DropPath
    from timm.layers.mlp import Mlp
    from timm.layers.patch_embed import PatchEmbed

POSITION_STD = 0.02
_BUILDER_ARGUMENTS = {"embed_dim", "num_heads", "layer_index", "qkv_bias"}


def attention_options(attention: str) -> set[str]:
    """The options of an attention layer that a model's configuration may set.

    Raises:
        ValueError: for an unknown layer.
    """
    return set(inspect.signature(ATTENTION[attention]).parameters) - _BUILDER_ARGUMENTS


class Block(nn.Module):
    """Pre-norm block: x + Attn(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, config: ViTConfig, layer_index: int) -> None:
        super().__init__()
        drop_path = config.drop_path * layer_index / max(1, config.depth - 1)
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.attn = ATTENTION[config.attention](
            config.embed_dim,
            config.num_heads,
            layer_index=layer_index,
            **{"qkv_bias": config.qkv_bias, "proj_bias": True, "proj_dropout": config.dropout}
            | dict(config.attention_options),
        )
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.mlp = Mlp(config.embed_dim, int(config.embed_dim * config.mlp_ratio), drop=config.dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Pixels in [0, 1] in, logits out; normalisation lives inside.

    x = [class token; patches] + positions, D blocks, LayerNorm, pooling, a linear head.

    Args:
        config: the shape; kept as `model.config`.
        name: the registered name it was built by, or ""; kept as `model.name`.

    Raises:
        ValueError: for an unknown attention layer, or options that it does not take.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: ViTConfig, *, name: str = "") -> None:
        super().__init__()
        allowed = attention_options(config.attention)
        unknown = sorted(set(config.attention_options) - allowed)
        require(
            not unknown,
            f"attention_options must be options of the {config.attention} attention "
            f"({', '.join(sorted(allowed))}); got {', '.join(unknown)}",
        )
        self.config = config
        self.name = name
        self.patch_embed = PatchEmbed(config.image_size, config.patch_size, config.in_chans, config.embed_dim)
        tokens = self.patch_embed.num_patches + (config.pool == "cls")
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim)) if config.pool == "cls" else None
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, config.embed_dim))
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.depth))
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.num_classes)
        self.register_buffer("mean", torch.tensor(config.mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.std).view(1, -1, 1, 1), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Truncated normal (0.02) for matrices and positions, zero biases; LeCun-uniform patches by default."""
        nn.init.trunc_normal_(self.pos_embed, std=POSITION_STD)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=POSITION_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Classify.

        Args:
            images: [batch, in_chans, image_size, image_size], pixels in [0, 1].

        Returns:
            logits [batch, num_classes].

        Raises:
            ValueError: for images of another shape.
        """
        shape = (self.config.in_chans, self.config.image_size, self.config.image_size)
        require(
            images.ndim == 4 and tuple(images.shape[1:]) == shape,
            f"images must be [batch, {', '.join(map(str, shape))}]; got shape {tuple(images.shape)}",
        )
        x = self.patch_embed((images - self.mean) / self.std)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.config.pool == "cls" else x.mean(dim=1))
