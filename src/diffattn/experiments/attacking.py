"""One attack on one model, with every adversarial image kept losslessly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import polars as pl
from safetensors.torch import save
from torch import nn

from diffattn.attacks.base import Attack, AttackResult
from diffattn.audit.facts import AttackFacts
from diffattn.audit.measure import attack_facts, sample_rows
from diffattn.data.images import ImageData
from diffattn.experiments.study import Report
from diffattn.files import write_atomic, write_json_atomic
from diffattn.threat_model import Threat


def attack_and_keep(
    model: nn.Module,
    data: ImageData,
    attack: Attack,
    budgets: Sequence[Threat],
    *,
    out: str | Path | None = None,
    seed: int = 0,
    batch_size: int = 128,
    report: Report | None = None,
) -> list[AttackFacts]:
    """Attack at every budget; with `out`, write what was found.

    `out` gets `adversarial.safetensors` (float32 [n, channels, height, width], one tensor a budget, named
    "Linf 4/255"), `samples.parquet` (a row a sample and budget) and `summary.json` (the figures).

    Args:
        model: [0, 1] pixels to logits, in eval mode.
        data: labelled images.
        attack: such as `PGD(steps=20)`.
        budgets: such as `[Linf("4/255")]`.
        out: folder; None writes nothing.
        seed: keys the random starts.
        batch_size: images at once.
        report: called with a line of text before each budget.

    Returns:
        the figures, one a budget.
    """
    images = data.pixels()
    facts: list[AttackFacts] = []
    results: list[AttackResult] = []
    for budget in budgets:
        if report is not None:
            report(f"attacking {len(data)} images, {budget.name} eps {budget.label}")
        start = time.perf_counter()
        result = attack(
            model, images, data.labels, budget, seed=seed, sample_ids=data.sample_ids, batch_size=batch_size
        )
        facts.append(attack_facts(result, seconds=time.perf_counter() - start))
        results.append(result)
    if out is not None:
        _write(Path(out), data, results, facts)
    return facts


def _write(out: Path, data: ImageData, results: Sequence[AttackResult], facts: Sequence[AttackFacts]) -> None:
    tensors = {f"{one.norm} {one.eps}": one.adversarial.float().contiguous() for one in results}
    write_atomic(out / "adversarial.safetensors", save(tensors))
    buffer = BytesIO()
    pl.concat([sample_rows(result) for result in results]).write_parquet(buffer)
    write_atomic(out / "samples.parquet", buffer.getvalue())
    summary = {
        "data": {"name": data.name, "split": data.split, "n": len(data), "fingerprint": data.fingerprint},
        "attacks": [asdict(one) for one in facts],
    }
    write_json_atomic(out / "summary.json", summary)
