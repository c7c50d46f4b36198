"""Records made of plausible numbers: no model is trained, every figure follows from a seed."""

from __future__ import annotations

import numpy as np
import polars as pl

from diffattn.audit.facts import (
    AttackFacts,
    CleanFacts,
    DataFacts,
    Example,
    LayerLipschitz,
    LayerSensitivity,
    Measured,
    ModelFacts,
    Reference,
    ReferenceRow,
    Skipped,
)
from diffattn.audit.record import AuditRecord
from diffattn.statistics import wilson_interval

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BUDGETS = (("1/255", 1 / 255), ("2/255", 2 / 255), ("4/255", 4 / 255), ("8/255", 8 / 255))


def attack_facts(
    n: int, broken: int, *, total: int, name="pgd", eps=("4/255", 4 / 255), norm="Linf", error=0, flags=()
):
    """Figures of one attack that agree with one another."""
    survived = n - broken - error
    low, high = wilson_interval(broken, n), wilson_interval(broken + error, n)
    robust = wilson_interval(survived, total)
    return AttackFacts(
        attack={"name": name, "steps": 20 if name == "pgd" else 1, "restarts": 1},
        norm=norm,
        eps=eps[0],
        eps_value=eps[1],
        n=n,
        broken=broken,
        survived=survived,
        error=error,
        asr=low.value if n else None,
        asr_low=low.low if n else None,
        asr_high=high.high if n else None,
        robust_accuracy=robust.value,
        robust_low=robust.low,
        robust_high=robust.high,
        flags=tuple(flags),
        forwards=21 * n,
        backwards=20 * n,
        seconds=12.5,
    )


def make_record(
    name: str = "vit",
    *,
    differential: bool = False,
    depth: int = 4,
    strength: float = 0.5,
    seed: int = 0,
    image_size: int = 32,
    chans: int = 3,
    examples: int = 4,
    error: int = 0,
    flags: tuple[str, ...] = (),
    bare: bool = False,
    figures: bool = True,
) -> AuditRecord:
    """A record of a softmax model, or of a differential one with two branches.

    Args:
        name: the model's name.
        differential: whether its layers have two branches.
        depth: number of attention layers.
        strength: how easily it breaks, in (0, 1).
        seed: where the numbers come from.
        image_size: edge of the example images.
        chans: their channels.
        examples: how many there are.
        error: samples that ended in an error under each attack.
        flags: of the last attack.
        bare: leave out all that may be absent.
        figures: whether there is more than one figure of a kind.
    """
    rng = np.random.default_rng(seed)
    total, correct = 2000, 1043
    attacks = []
    kinds = (
        ("pgd", "Linf", BUDGETS),
        ("fgsm", "Linf", BUDGETS),
        ("pgd", "L2", (("0.25", 0.25), ("0.5", 0.5))),
    )
    for attack, norm, budgets in kinds if figures else kinds[:1]:
        for index, eps in enumerate(budgets):
            share = 1 - (1 - strength * (0.8 if attack == "fgsm" else 1)) ** (index + 1)
            broken = min(int(correct * share), correct - error)
            attacks.append(attack_facts(correct, broken, total=total, name=attack, eps=eps, norm=norm, error=error))
    if flags:
        attacks[-1] = attack_facts(correct, 600, total=total, eps=("0.5", 0.5), norm="L2", error=error, flags=flags)
    clean = wilson_interval(correct, total)
    facts, tensors = _examples(rng, examples, image_size, chans, differential)
    return AuditRecord(
        created="2026-01-31T12:00:00+00:00",
        command=f"diffattn audit runs/{name} --data cifar10 --eps 1/255 4/255 --out audits/{name}",
        seed=seed,
        environment={"python": "3.11.2", "torch": "2.9.1", "cpu_threads": 2, "device": "cpu"},
        model=ModelFacts(
            name=name,
            path=f"runs/{name}",
            config={
                "attention": "differential" if differential else "softmax",
                "attention_options": {"lambda_init": 0.8} if differential else {},
                "depth": depth,
                "embed_dim": 192,
                "patch_size": 4,
            },
            parameters=480_000 + 400 * differential,
            sha256="ab" * 32,
        ),
        data=DataFacts(
            name="cifar10",
            split="test",
            n=total,
            skipped=() if bare else (Skipped("cifar10/test/77", "truncated PNG"),),
            fingerprint="cd" * 32,
            class_names=() if bare else CLASSES,
        ),
        clean=CleanFacts(total, correct, clean.value, clean.low, clean.high),
        attacks=tuple(attacks),
        sensitivity=() if bare else _sensitivity(rng, depth, differential)[: None if figures else 4 * depth],
        lipschitz=() if bare else _lipschitz(rng, depth, differential)[: None if figures else depth],
        reference=None if bare or not differential else _reference(rng, depth),
        examples=() if bare else facts,
        samples=_samples(attacks),
        sensitivity_table=None if bare else pl.DataFrame({"layer": ["blocks.0.attn"], "cos_theta": [0.1]}),
        tensors={} if bare else tensors,
        history=() if bare or not figures else _history(rng, strength),
    )


def _samples(attacks) -> pl.DataFrame:
    rows = [
        {
            "sample_id": f"cifar10/test/{index}",
            "label": index,
            "clean_prediction": index,
            "attack": one.name,
            "norm": one.norm,
            "eps": one.eps,
            "status": "broken",
            "prediction": 9 - index,
            "distance": one.eps_value,
        }
        for one in attacks
        for index in range(3)
    ]
    return pl.DataFrame(rows)


def _around(value: float, half: float) -> Measured:
    return Measured(value, value - half, value + half)


def _sensitivity(rng, depth: int, differential: bool) -> tuple[LayerSensitivity, ...]:
    rows = []
    for wrt, reading in (("input", "jacobian"), ("pixels", "loss")):
        for index in range(depth):
            for head in ("all", 0, 1, 2):
                one = 0.1 * (index + 1) * rng.uniform(0.8, 1.2)
                two = one * rng.uniform(0.8, 1.1)
                cosine = float(np.clip(0.25 - 0.12 * index + 0.15 * rng.normal(), -0.9, 0.9))
                combined = (one**2 + (0.8 * two) ** 2 - 1.6 * one * two * cosine) ** 0.5 if differential else one
                rows.append(
                    LayerSensitivity(
                        layer=f"blocks.{index}.attn",
                        index=index,
                        head=head,
                        wrt=wrt,
                        reading=reading,
                        lambda_="frozen",
                        n=64,
                        probes=16 if reading == "jacobian" else 0,
                        norm_1=_around(one, 0.1 * one),
                        norm_2=_around(two, 0.1 * two) if differential else None,
                        norm_combined=_around(combined, 0.1 * combined),
                        rho=_around(two / one, 0.05) if differential else None,
                        lambda_rho=_around(0.8 * two / one, 0.04) if differential else None,
                        cos_theta=_around(cosine, 0.06) if differential else None,
                        negative_share=Measured(0.5 - cosine / 2, 0.4 - cosine / 2, 0.6 - cosine / 2)
                        if differential
                        else None,
                    )
                )
    return tuple(rows)


def _lipschitz(rng, depth: int, differential: bool) -> tuple[LayerLipschitz, ...]:
    rows = []
    for of, radius in (("map", 0.0), ("output", 0.0), ("output", 0.1)):
        for index in range(depth):
            value = (1.6 if differential else 1.0) * 0.5 * 2.2**index * rng.uniform(0.9, 1.1)
            rows.append(
                LayerLipschitz(
                    layer=f"blocks.{index}.attn",
                    index=index,
                    of=of,
                    kind="estimate",
                    radius=radius,
                    n=64,
                    median=value,
                    mean=_around(value, 0.1 * value),
                )
            )
    return tuple(rows)


def _reference(rng, depth: int) -> Reference:
    rows = []
    for index in range(depth):
        cosine = float(rng.uniform(-0.4, 0.4))
        rows.append(
            ReferenceRow(
                layer=f"blocks.{index}.attn",
                index=index,
                n=64,
                gamma=_around(1.1, 0.05),
                theorem2_rhs=_around(1.3, 0.1),
                measured_ratio=_around(1.3, 0.1),
                theorem3_threshold=_around(0.4, 0.02),
                cos_theta=_around(cosine, 0.06),
                more_sensitive_share=None if index else Measured(0.75, 0.63, 0.84),
            )
        )
    return Reference("vit", tuple(rows))


def _picture(rng, size: int, chans: int) -> np.ndarray:
    """A smooth colourful picture with a disc in it."""
    y, x = np.mgrid[0:size, 0:size] / size
    base = [
        0.5 + 0.4 * np.sin(2 * np.pi * (rng.uniform(0.3, 1) * x + rng.uniform(0.3, 1) * y + c / 3))
        for c in range(chans)
    ]
    disc = (x - rng.uniform(0.3, 0.7)) ** 2 + (y - rng.uniform(0.3, 0.7)) ** 2 < 0.06
    return np.where(disc, 1 - np.stack(base), np.stack(base)).clip(0, 1).astype(np.float32)


def _map(rng, tokens: int, sharp: float) -> np.ndarray:
    scores = rng.normal(size=(tokens, tokens)) * sharp
    scores[0, 1 + rng.integers(tokens - 1)] += 2.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _examples(rng, count: int, size: int, chans: int, differential: bool):
    facts, tensors = [], {}
    tokens = (max(size // 4, 2)) ** 2 + 1
    for index in range(count):
        eps_text, eps = BUDGETS[index % 4]
        clean = _picture(np.random.default_rng(index), size, chans)
        noise = rng.choice([-1.0, 1.0], size=clean.shape) * eps
        key = f"example-{index}"
        tensors[f"{key}.clean"] = clean
        tensors[f"{key}.adversarial"] = (clean + noise).clip(0, 1).astype(np.float32)
        for which, sharp in (("clean", 1.0), ("adversarial", 1.2)):
            tensors[f"{key}.{which}_map_1"] = _map(rng, tokens, sharp)
            if differential:
                tensors[f"{key}.{which}_map_2"] = -0.8 * _map(rng, tokens, sharp)
        survived = index == 3
        facts.append(
            Example(
                sample_id=f"cifar10/test/{index}",
                label=index % 10,
                clean_prediction=index % 10,
                attacked_prediction=index % 10 if survived else (index + 3) % 10,
                status="survived" if survived else "broken",
                attack="pgd",
                norm="Linf",
                eps=eps_text,
                key=key,
                layer="blocks.0.attn",
                map_note="mean over heads",
            )
        )
    return tuple(facts), tensors


def _history(rng, strength: float) -> tuple[dict, ...]:
    return tuple(
        {
            "epoch": epoch,
            "step": 79 * epoch,
            "train_loss": 1.2 + 1.1 * float(np.exp(-epoch / 5)) + 0.02 * float(rng.normal()),
            "val_loss": 1.4 + 0.8 * float(np.exp(-epoch / 4)) + 0.1 * strength,
            "val_accuracy": 0.52 - 0.4 * float(np.exp(-epoch / 4)),
            "lr": 1e-3,
            "seconds": 3.1,
        }
        for epoch in range(1, 21)
    )
