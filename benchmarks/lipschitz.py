"""A layer's largest singular value to 1 %: ours against scipy's ARPACK and plain power iteration, in one run.

N = 65 tokens, width 192. One pre-norm block, and the attention layer alone; one sample, and 16 at once (the peers
take them one by one: a batch has one Krylov space a sample). Every figure is a median over interleaved rounds; the
reference value is ours at rtol 1e-5. Peers get the same products, J v by double vjp and J' u by a cached vjp: only
the algorithm differs. Run: `python benchmarks/lipschitz.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

from diffattn.models.vit import Block
from diffattn.models.zoo import MODELS
from diffattn.sensitivity import lipschitz_estimate, lipschitz_estimate_details

TOKENS, WIDTH, RTOL = 65, 192, 1e-2


class Products:
    """J v and J' u at one sample, counted."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.leaf = x.detach().requires_grad_()
        self.out = layer(self.leaf)
        self.dummy = torch.zeros_like(self.out, requires_grad=True)
        (self.pulled,) = torch.autograd.grad(self.out, self.leaf, self.dummy, create_graph=True)
        self.count = 0

    def forward(self, v: np.ndarray) -> np.ndarray:
        """J v."""
        self.count += 1
        tangent = torch.as_tensor(np.asarray(v, dtype=np.float32)).view_as(self.leaf)
        return torch.autograd.grad(self.pulled, self.dummy, tangent, retain_graph=True)[0].flatten().numpy()

    def adjoint(self, u: np.ndarray) -> np.ndarray:
        """J' u."""
        self.count += 1
        cotangent = torch.as_tensor(np.asarray(u, dtype=np.float32)).view_as(self.out)
        return torch.autograd.grad(self.out, self.leaf, cotangent, retain_graph=True)[0].flatten().numpy()


def arpack(layer: nn.Module, x: Tensor) -> tuple[float, int]:
    """scipy.sparse.linalg.svds, k = 1, at the same tolerance."""
    made = Products(layer, x)
    size = x.numel()
    operator = LinearOperator((size, size), matvec=made.forward, rmatvec=made.adjoint, dtype=np.float32)
    start = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    value = svds(operator, k=1, tol=RTOL, v0=start, return_singular_vectors=False)
    return float(value[0]), made.count


def power_iteration(layer: nn.Module, x: Tensor, most: int = 400) -> tuple[float, int]:
    """Repeat v <- J' J v until |J' u - sigma v| <= 1 % of sigma, u = J v / sigma: the same residual as ours."""
    made = Products(layer, x)
    v = np.random.default_rng(0).standard_normal(x.numel()).astype(np.float32)
    v /= np.linalg.norm(v)
    sigma = 0.0
    for _ in range(most):
        u = made.forward(v)
        sigma = float(np.linalg.norm(u))
        w = made.adjoint(u / sigma)
        if np.linalg.norm(w - sigma * v) <= RTOL * sigma:
            break
        v = w / np.linalg.norm(w)
    return sigma, made.count


def one_by_one(solve: Callable[[nn.Module, Tensor], tuple[float, int]], layer: nn.Module, x: Tensor) -> list[float]:
    return [solve(layer, x[i : i + 1])[0] for i in range(len(x))]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def layers() -> dict[str, nn.Module]:
    """Blocks and attention layers of the softmax and the V1 model, with weights far from their small start."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {}
    for name in ("vit_tiny_patch4_32", "diffvit_tiny_patch4_32"):
        block = Block(replace(MODELS[name](), depth=1), 0).eval()
        for parameter in block.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.1)
        kind = "V1" if name.startswith("diff") else "softmax"
        made |= {f"{kind} block": block, f"{kind} attention": block.attn}
    return made


def compare(layer: nn.Module, x: Tensor, rounds: int) -> str:
    """One line: times relative to ours, products and agreement."""
    exact = lipschitz_estimate(layer, x, rtol=1e-5, max_iterations=128)
    ours = lipschitz_estimate_details(layer, x, rtol=RTOL)
    peers = {"svds": arpack, "power": power_iteration}
    times: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    values = {}
    for _ in range(rounds):
        times["ours"].append(timed(lambda: lipschitz_estimate(layer, x, rtol=RTOL)))
        for name, solve in peers.items():
            start = time.perf_counter()
            values[name] = torch.tensor(one_by_one(solve, layer, x))
            times[name].append(time.perf_counter() - start)
    base = median(times["ours"])
    steps = f"{ours.iterations.min().item()}-{ours.iterations.max().item()}"
    worst = (ours.value / exact - 1).abs().max().item()
    parts = [f"ours {1e3 * base:7.1f} ms, {steps:>5} steps, off by {worst:.1e}"]
    for name in peers:
        ratio = median(t / o for t, o in zip(times[name], times["ours"], strict=True))
        off = (values[name] / exact - 1).abs().max().item()
        products = peers[name](layer, x[:1])[1]
        parts.append(f"{name} {ratio:5.2f}x, {products // 2:3d} steps, off by {off:.1e}")
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"N = {TOKENS}, C = {WIDTH}, float32, {torch.get_num_threads()} threads, to {RTOL:.0%}; ratios to ours")
    for name, layer in layers().items():
        for batch in (1, 16):
            torch.manual_seed(1)
            x = torch.randn(batch, TOKENS, WIDTH)
            print(f"{name:18s} batch {batch:2d}: {compare(layer, x, arguments.rounds)}", flush=True)


if __name__ == "__main__":
    main()
