"""Attention layers against each other: forward, forward + backward, double backward, jvp and memory, as ratios.

Rows are layers with the same width and the same arithmetic per map (V2 has twice the query heads: more of both);
every time is the median over interleaved rounds, divided by that of the fastest softmax layer of the shape. Second
order runs at a quarter of the batch. Run: `python benchmarks/attention.py`, about four minutes on two cores. On a
shared machine `--one-thread` counts the time of one thread, which waits for nobody.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import accumulate, product
from statistics import median

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: the profiler says nothing of itself

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from diffattn.models.attention import DifferentialAttention, DifferentialAttentionV2, SoftmaxAttention

SHAPES = {
    "N65 C192": (65, 192, 6, False),
    "N197 C768": (197, 768, 12, False),
    "N77 C512 causal": (77, 512, 8, True),
}


def timm_layers(width: int, heads: int) -> dict[str, nn.Module]:
    """The softmax and differential layers of timm at the same arithmetic, fused and not."""
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


def interleaved(
    work: dict[str, Callable[[], None]], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median time of each piece of work, taken in turns so that noise meets all alike: 3 to 30 rounds."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for call in work.values():
        call()
    end = time.perf_counter() + seconds
    while len(next(iter(times.values()))) < 3 or (
        time.perf_counter() < end and len(next(iter(times.values()))) < 30
    ):
        for name, call in work.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: median(values) for name, values in times.items()}


def megabytes(call: Callable[[], object]) -> tuple[float, float]:
    """MiB that torch allocated during the call: the most at one time, and what its result still holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = call()
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    running = list(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))
    del kept
    return max(running) / 2**20, running[-1] / 2**20


def print_memory(layers: dict[str, nn.Module], x: Tensor, mask: Tensor | None) -> None:
    """What a layer keeps between its passes, and the peak of forward + backward, in MiB and against softmax."""
    rows = {}
    for name, layer in layers.items():
        tokens = x.detach().requires_grad_()
        held = megabytes(partial(layer, tokens, attn_mask=mask))[1]
        rows[name] = (held, megabytes(partial(forward_backward, layer, x, mask))[0])
    least = [min(row[column] for name, row in rows.items() if "softmax" in name) for column in (0, 1)]
    print("  kept between the passes / peak, MiB and ratio to the least softmax layer's")
    for name, (held, peak) in rows.items():
        print(f"  {name:28s} {held:7.1f} {peak:7.1f}   {held / least[0]:5.2f} {peak / least[1]:5.2f}")


MODES: dict[str, Callable[[nn.Module, Tensor, Tensor | None], None]] = {
    "forward": forward,
    "forward + backward": forward_backward,
    "double backward": double_backward,
    "jvp": directional,
}


def print_times(
    mode: str,
    layers: dict[str, nn.Module],
    x: Tensor,
    mask: Tensor | None,
    *,
    seconds: float,
    clock: Callable[[], float],
) -> None:
    second_order = mode in ("double backward", "jvp")
    if second_order:
        layers = {name: layer for name, layer in layers.items() if "fused" not in name}
        x = x[: max(1, len(x) // 4)]
    times = interleaved(
        {name: partial(MODES[mode], layer, x, mask) for name, layer in layers.items()}, seconds, clock
    )
    base = min(value for name, value in times.items() if "softmax" in name)
    print(f"  fastest softmax {base * 1e3:.1f} ms")
    for name, value in times.items():
        print(f"  {name:28s} {value / base:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0, help="for one table of times")
    parser.add_argument("--one-thread", action="store_true", help="one thread, and its own time")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--modes", nargs="+", default=[*MODES, "memory"], choices=[*MODES, "memory"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    clock = time.thread_time if options.one_thread else time.perf_counter
    if options.one_thread:
        torch.set_num_threads(1)
    for shape, name in product(options.shapes, options.dtypes):
        tokens, width, heads, is_causal = SHAPES[shape]
        dtype = getattr(torch, name)
        torch.manual_seed(0)
        layers = {
            key: layer.to(dtype).eval()
            for key, layer in (our_layers(width, heads) | timm_layers(width, heads)).items()
        }
        x = torch.randn(options.batch, tokens, width, dtype=dtype)
        mask = causal(tokens) if is_causal else None
        for mode in options.modes:
            print(f"\n{shape}, {name}, {mode}", flush=True)
            if mode == "memory":
                print_memory(layers, x, mask)
            else:
                print_times(mode, layers, x, mask, seconds=options.seconds, clock=clock)


if __name__ == "__main__":
    main()
