"""Attention layers against each other: forward, forward + backward, double backward and jvp, as ratios in one run.

Rows are layers with the same width and the same arithmetic per map; every figure is the median over interleaved
rounds of time(layer) / time(fastest softmax layer of the shape). Run: `python benchmarks/attention.py`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from diffattn.models.attention import DifferentialAttention, DifferentialAttentionV2, SoftmaxAttention

SHAPES = {
    "N65 C192": (65, 192, 6, False),
    "N197 C768": (197, 768, 12, False),
    "N77 C512 causal": (77, 512, 8, True),
}


def timm_layers(width: int, heads: int) -> dict[str, nn.Module]:
    """timm's softmax and differential layers at the same arithmetic, fused and not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from timm.layers.attention import Attention
        from timm.layers.diff_attention import DiffAttention
    layers: dict[str, nn.Module] = {}
    for fused in (True, False):
        word = "fused" if fused else "explicit"
        softmax = Attention(width, num_heads=heads, qkv_bias=True)
        differential = DiffAttention(width, num_heads=heads // 2, qkv_bias=True)
        for layer in (softmax, differential):
            layer.fused_attn = fused
        layers[f"timm softmax, {word}"] = softmax
        layers[f"timm differential, {word}"] = differential
    return layers


def our_layers(width: int, heads: int) -> dict[str, nn.Module]:
    """Ours: softmax, V1 with half the output heads, V2 with as many."""
    return {
        "our softmax": SoftmaxAttention(width, heads, qkv_bias=True),
        "our differential V1": DifferentialAttention(
            width, heads // 2, lambda_init=0.8, qkv_bias=True, proj_bias=True
        ),
        "our differential V2": DifferentialAttentionV2(width, heads // 2, qkv_bias=True, proj_bias=True),
    }


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def forward(layer: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    with torch.no_grad():
        layer(x, attn_mask=mask)


def forward_backward(layer: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    tokens = x.detach().requires_grad_()
    out = layer(tokens, attn_mask=mask)
    out.backward(torch.ones_like(out))
    layer.zero_grad(set_to_none=True)


def double_backward(layer: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    tokens = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(tokens, attn_mask=mask).square().sum(), tokens, create_graph=True)
    torch.autograd.grad(gradient.square().sum(), tokens)


def directional(layer: nn.Module, x: Tensor, mask: Tensor | None) -> None:
    torch.func.jvp(partial(layer, attn_mask=mask), (x,), (torch.ones_like(x),))


def interleaved(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each piece of work, taken in turns so that noise meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for call in work.values():
        call()
    for _ in range(rounds):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


MODES: dict[str, Callable[[nn.Module, Tensor, Tensor | None], None]] = {
    "forward": forward,
    "forward + backward": forward_backward,
    "double backward": double_backward,
    "jvp": directional,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    for shape in options.shapes:
        tokens, width, heads, is_causal = SHAPES[shape]
        for dtype in (getattr(torch, name) for name in options.dtypes):
            torch.manual_seed(0)
            layers = our_layers(width, heads) | timm_layers(width, heads)
            x = torch.randn(options.batch, tokens, width, dtype=dtype)
            mask = causal(tokens) if is_causal else None
            for mode in options.modes:
                second_order = mode in ("double backward", "jvp")
                work = {
                    name: partial(MODES[mode], layer.to(dtype).eval(), x, mask)
                    for name, layer in layers.items()
                    if not (second_order and name.startswith("timm") and "fused" in name)
                }
                times = interleaved(work, options.rounds)
                base = min(value for name, value in times.items() if "softmax" in name)
                print(f"\n{shape}, {str(dtype)[6:]}, {mode}: fastest softmax {base * 1e3:.1f} ms")
                for name, value in times.items():
                    print(f"  {name:28s} {value / base:5.2f}")


if __name__ == "__main__":
    main()
