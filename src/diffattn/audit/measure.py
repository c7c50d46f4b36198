"""The parts of an audit: clean accuracy, one attack, sensitivity and Lipschitz estimates as a record's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from diffattn.attacks.base import AttackResult
from diffattn.audit.facts import (
    AttackFacts,
    CleanFacts,
    LayerLipschitz,
    LayerSensitivity,
    Measured,
    Reference,
    ReferenceRow,
    finite,
)
from diffattn.models.capture import attention_layers, record
from diffattn.sensitivity.comparison import compare_with_reference, summarise, summarise_comparison
from diffattn.sensitivity.lipschitz import lipschitz_estimate_details
from diffattn.statistics import bootstrap_interval, wilson_interval

_MEASURED = ("norm_1", "norm_2", "norm_combined", "rho", "lambda_rho", "cos_theta", "negative_share")


def clean_facts(predictions: np.ndarray, labels: np.ndarray) -> CleanFacts:
    """Accuracy without an attack, with its Wilson interval."""
    correct = int((predictions == labels).sum())
    interval = wilson_interval(correct, len(labels))
    return CleanFacts(len(labels), correct, interval.value, interval.low, interval.high)


def attack_facts(result: AttackResult, *, seconds: float) -> AttackFacts:
    """An attack's counts and shares; the interval of the ASR is widened by the errors, both ways."""
    correct = result.clean_prediction == result.labels
    broken, survived, error = (
        int(((result.status == status) & correct).sum()) for status in ("broken", "survived", "error")
    )
    n, total = int(correct.sum()), len(result)
    robust = wilson_interval(survived, total)
    return AttackFacts(
        attack=dict(result.attack),
        norm=result.norm,
        eps=result.eps,
        eps_value=result.eps_value,
        n=n,
        broken=broken,
        survived=survived,
        error=error,
        asr=broken / n if n else None,
        asr_low=wilson_interval(broken, n).low if n else None,
        asr_high=wilson_interval(broken + error, n).high if n else None,
        robust_accuracy=survived / total,
        robust_low=robust.low,
        robust_high=robust.high,
        flags=result.flags,
        forwards=int(result.forwards.sum()),
        backwards=int(result.backwards.sum()),
        seconds=round(seconds, 3),
    )


def sample_rows(result: AttackResult) -> pl.DataFrame:
    """What became of every sample, in the columns of a record's `samples.parquet`."""
    return pl.DataFrame(
        {
            "sample_id": [str(name) for name in result.sample_ids],
            "label": result.labels,
            "clean_prediction": result.clean_prediction,
            "attack": result.attack["name"],
            "norm": result.norm,
            "eps": result.eps,
            "status": [str(status) for status in result.status],
            "prediction": result.prediction,
            "distance": result.distance,
            "forwards": result.forwards,
            "backwards": result.backwards,
        }
    )


def sensitivity_facts(table: pl.DataFrame, *, seed: int) -> tuple[LayerSensitivity, ...]:
    """The summaries of a sensitivity table as a record holds them."""
    rows = []
    for row in summarise(table, seed=seed):
        facts = {"lambda_" if key == "lambda" else key: value for key, value in row.items()}
        for name in _MEASURED:
            facts[name] = None if row[name] is None else Measured(**row[name])
        rows.append(LayerSensitivity(**facts))
    return tuple(rows)


def lipschitz_facts(
    model: nn.Module,
    images: Tensor,
    *,
    sample_ids: Sequence[str],
    radii: Sequence[float] = (),
    rtol: float = 1e-2,
    seed: int = 0,
    batch_size: int = 32,
) -> tuple[tuple[LayerLipschitz, ...], tuple[str, ...]]:
    """Local Lipschitz estimates of every attention layer at the inputs that these images give it.

    Args:
        model: in eval mode.
        images: [n, channels, height, width] in [0, 1].
        sample_ids: n ids.
        radii: balls to search beside the point, as shares of the median norm of a sample's tokens, above 0.
        rtol: see `lipschitz_estimate`.
        seed: keys the starts.
        batch_size: samples at once.

    Returns:
        the rows, and a note for every layer where samples had not converged (their estimate is still a lower
        bound, and counts).
    """
    rows, notes = [], []
    inputs: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
    for part in torch.split(images, batch_size):
        with torch.no_grad(), record(model) as tape:
            model(part)
        for name, tokens in tape.inputs.items():
            inputs.setdefault(name, []).append((tokens, tape.masks[name]))
    for index, (name, layer) in enumerate(attention_layers(model).items()):
        norms = torch.cat([tokens.flatten(1).norm(dim=1) for tokens, _ in inputs[name]])
        for of in ("output", "map"):
            for share in (None, *radii):
                radius = None if share is None else share * norms.median().item()
                found, start, stuck = [], 0, 0
                for tokens, mask in inputs[name]:
                    ids = sample_ids[start : start + len(tokens)]
                    start += len(tokens)
                    details = lipschitz_estimate_details(
                        layer,
                        tokens,
                        of=of,
                        radius=radius,
                        rtol=rtol,
                        seed=seed,
                        attn_mask=mask,
                        sample_ids=ids,
                    )
                    found.append(details.value.double())
                    stuck += int((~details.converged).sum())
                values = torch.cat(found).numpy()
                rows.append(
                    LayerLipschitz(
                        layer=name,
                        index=index,
                        of=of,
                        kind="estimate",
                        radius=0.0 if radius is None else radius,
                        n=len(values),
                        median=finite(float(np.median(values))),
                        mean=Measured.of(bootstrap_interval(values, seed=seed)),
                    )
                )
                if stuck:
                    notes.append(f"{name} ({of}): {stuck} of {len(values)} estimates have not converged")
    return tuple(rows), tuple(notes)


def reference_facts(
    table: pl.DataFrame, reference_table: pl.DataFrame, *, name: str, wrt: str = "input", seed: int = 0
) -> Reference:
    """Theorems 2 and 3 by layer, as means over samples, in the Jacobian reading with lambda frozen."""
    comparison = compare_with_reference(table, reference_table, reference_name=name)
    chosen = comparison.filter(
        (pl.col("wrt") == wrt) & (pl.col("reading") == "jacobian") & (pl.col("lambda") == "frozen")
    )

    def measured(figure: Any) -> Measured | None:
        return None if figure is None else Measured(**figure)

    rows = tuple(
        ReferenceRow(
            layer=row["layer"],
            index=row["index"],
            n=row["n"],
            **{
                key: measured(row[key])
                for key in (
                    "gamma",
                    "theorem2_rhs",
                    "measured_ratio",
                    "theorem3_threshold",
                    "cos_theta",
                    "more_sensitive_share",
                )
            },
        )
        for row in summarise_comparison(chosen, seed=seed)
    )
    return Reference(name, rows)
