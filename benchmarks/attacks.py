"""PGD-20 against torchattacks, foolbox and the lower bound, as ratios in one run; then what bfloat16 buys.

The model is a ViT that has briefly learnt noisy prototypes; its parameters are frozen for everybody (foolbox is
half as slow again where they are not). Every attack starts from the clean images, so that verdicts can be compared
sample by sample. The lower bound of a row runs steps x (forward + input-backward) on the samples that still stand
at that step of our run, and nothing else. Every figure is the median over interleaved rounds.
Run: `python benchmarks/attacks.py`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from diffattn.attacks import PGD
from diffattn.models.zoo import create_model
from diffattn.threat_model import Linf

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the peers' own dependencies deprecate each other
    import foolbox
    import torchattacks

STEPS = 20
CLASSES = 10
Clock = Callable[[], float]


def prototypes(n: int, generator: torch.Generator, noise: float = 0.5) -> tuple[Tensor, Tensor]:
    """Coarse patterns under heavy noise: [n, 3, 32, 32] in [0, 1] and their classes."""
    patterns = torch.rand(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat_interleave(8, 2)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    images = patterns.repeat_interleave(8, 3)[labels]
    return (0.5 + 0.3 * (images - 0.5) + noise * 0.3 * torch.randn(images.shape, generator=generator)).clamp(
        0, 1
    ), labels


def trained_model(depth: int, updates: int, generator: torch.Generator) -> nn.Module:
    model = create_model("vit_tiny_patch4_32", depth=depth, num_classes=CLASSES, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(updates):
        images, labels = prototypes(32, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def bare_loop(model: nn.Module, images: Tensor, labels: Tensor, active: list[int]) -> None:
    """Forward and input-backward on the first `active[k]` images at step k."""
    for count in active:
        points = images[:count].clone().requires_grad_()
        loss = nn.functional.cross_entropy(model(points), labels[:count], reduction="sum")
        torch.autograd.grad(loss, points)


def rival_torchattacks(model: nn.Module, images: Tensor, labels: Tensor, eps: float, step: float) -> Tensor:
    return torchattacks.PGD(model, eps=eps, alpha=step, steps=STEPS, random_start=False)(images, labels)


def rival_foolbox(model: nn.Module, images: Tensor, labels: Tensor, eps: float, step: float) -> Tensor:
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step, steps=STEPS, random_start=False)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=images.device)
    return attack(wrapped, images, labels, epsilons=eps)[1]


def medians(contenders: dict[str, Callable[[], object]], rounds: int, clock: Clock) -> dict[str, float]:
    """Seconds of each contender, interleaved; the first round warms up and is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            start = clock()
            run()
            if turn:
                seconds[name].append(clock() - start)
    return {name: median(values) for name, values in seconds.items()}


def compare(model: nn.Module, images: Tensor, labels: Tensor, eps: str, *, rounds: int, clock: Clock) -> None:
    """One budget: times over the lower bound, and how many verdicts differ from torchattacks'."""
    threat = Linf(eps)
    step = 2.5 * threat.eps / STEPS
    full = PGD(steps=STEPS, step_size=step, random_start=False)
    half = PGD(steps=STEPS, step_size=step, random_start=False, precision="bfloat16")
    results = {"float32": full(model, images, labels, threat), "bfloat16": half(model, images, labels, threat)}
    active = [int((results["float32"].backwards > k).sum()) for k in range(STEPS)]
    times = medians(
        {
            "lower bound": partial(bare_loop, model, images, labels, active),
            "ours, float32": partial(full, model, images, labels, threat),
            "ours, bfloat16": partial(half, model, images, labels, threat),
            "torchattacks, float32": partial(rival_torchattacks, model, images, labels, threat.eps, step),
            "foolbox, float32": partial(rival_foolbox, model, images, labels, threat.eps, step),
        },
        rounds,
        clock,
    )
    broken = results["float32"].broken
    print(f"\nPGD-{STEPS}, Linf {eps}, {len(images)} images, {broken} broken in float32")
    print(f"{'':24s}{'/ lower bound':>14s}{'/ torchattacks':>15s}{'seconds':>9s}")
    for name, seconds in times.items():
        to_bound = seconds / times["lower bound"] if active[0] else float("nan")
        print(f"{name:24s}{to_bound:14.2f}{seconds / times['torchattacks, float32']:15.2f}{seconds:9.2f}")
    theirs = model(rival_torchattacks(model, images, labels, threat.eps, step)).argmax(dim=1) != labels
    for name, result in results.items():
        ours = result.status == "broken"
        report_sets(name, ours, theirs.numpy())


def report_sets(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    more, fewer = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    verdict = "the same broken set as torchattacks" if not more + fewer else "not the same broken set"
    print(f"ours, {name}: {verdict} ({int(ours.sum())} broken; {more} only by ours, {fewer} only by theirs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60, help="training steps of the model")
    parser.add_argument("--eps", nargs="+", default=["1e-4", "4/255"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine, with --threads 1")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(1)
    model = trained_model(arguments.depth, arguments.updates, generator)
    images, labels = prototypes(4 * arguments.images, generator)
    with torch.no_grad():
        right = model(images).argmax(dim=1) == labels
    images, labels = images[right][: arguments.images], labels[right][: arguments.images]
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, vit_tiny_patch4_32 depth {arguments.depth}"
    )
    print(f"{float(right.float().mean()):.0%} of the images are clean-correct; those are attacked")
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for eps in arguments.eps:
        compare(model, images, labels, eps, rounds=arguments.rounds, clock=clock)


if __name__ == "__main__":
    main()
