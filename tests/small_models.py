"""Small models in float64 whose derivatives tests can afford to compute densely."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

import oracles
from diffattn.models.attention import ATTENTION, Attention, Branches, DifferentialAttention
from diffattn.models.vit import VisionTransformer
from diffattn.models.zoo import create_model


class OneLayer(nn.Module):
    """Pixels are tokens, [n, 1, N, C]; the logits are a linear map of the mean output token."""

    def __init__(self, layer: Attention, *, classes: int = 3, mask: Tensor | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.mask = mask
        self.head = nn.Linear(layer.embed_dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layer(images.squeeze(1), attn_mask=self.mask).mean(dim=1))


class OwnValues(DifferentialAttention):
    """Three maps with weights (1, -lambda, 0.3), the second with values of its own."""

    def branches(self, x: Tensor, attn_mask: Tensor | None = None) -> Branches:
        two = super().branches(x, attn_mask)
        third = two.maps[0].transpose(-2, -1)
        return replace(
            two,
            maps=(*two.maps, third),
            weights=(*two.weights, third.new_full((), 0.3)),
            kinds=(*two.kinds, "derived"),
            values=(two.values[0], two.values[1].tanh(), two.values[0]),
        )

    def signed_sum(self, branches: Branches) -> Tensor:
        return branches.context


def attention(name: str, width: int = 8, heads: int = 2, *, seed: int = 0, std: float = 0.7, **options: object):
    """A layer with random weights of some size, so that its maps are far from uniform."""
    torch.manual_seed(seed)
    cls = OwnValues if name == "own_values" else ATTENTION[name]
    layer = cls(width, heads, qkv_bias=True, **options).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=std)
    return layer


def set_lambda(model: nn.Module, value: float) -> None:
    """Give every V1 layer of the model this lambda exactly."""
    for module in model.modules():
        if isinstance(module, DifferentialAttention):
            with torch.no_grad():
                module.lambda_q1.copy_(module.lambda_q2)
                module.lambda_k1.copy_(module.lambda_k2)
            module.lambda_init = value


def small_vit(prefix: str, *, seed: int = 0, spread: float = 6.0, **overrides: object) -> VisionTransformer:
    """Two blocks of width 8 on 4 x 4 pixels (5 tokens), float64, eval; matrices `spread` times the usual."""
    options = {"image_size": 4, "patch_size": 2, "embed_dim": 8, "num_classes": 3, "num_heads": 2}
    model = create_model(f"{prefix}_micro_patch2_8", seed=seed, **(options | overrides)).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(spread)
    return model


def small_batch(n: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 4, 4] and labels [n]."""
    torch.manual_seed(seed)
    return torch.rand(n, 1, 4, 4, dtype=torch.float64), torch.arange(n) % 3


def two_token_layer(name: str) -> Attention:
    """One head of width 2, for two tokens."""
    return attention(name, width=2, heads=1, seed=3, **({} if name == "softmax" else {"lambda_init": 0.6}))


def two_token_images() -> Tensor:
    """[1, 1, 2, 2]: two tokens of width 2 as pixels."""
    torch.manual_seed(4)
    return torch.randn(1, 1, 2, 2, dtype=torch.float64).sigmoid()


def score_arrays(layer: Attention) -> dict[str, np.ndarray]:
    """The score operators' tensors as arrays; an absent bias is 0."""
    parts = vars(layer.score_operators()).items()
    return {name: value.detach().numpy() if isinstance(value, Tensor) else value or 0.0 for name, value in parts}


def two_token_maps(layer: Attention, images: Tensor) -> list[oracles.TwoTokenMap]:
    """The closed form of each of the layer's maps at these images."""
    arrays = score_arrays(layer)
    names = ("query", "key", "query_bias", "key_bias")
    return [
        oracles.two_token_map(images[0, 0].numpy(), *(arrays[name][m] for name in names))
        for m in range(len(arrays["query"]))
    ]
