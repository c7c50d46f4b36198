"""An audit: attack a model, measure its attention, and write one record of it all."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from diffattn.attacks.base import Attack, AttackResult, logits_of
from diffattn.audit.examples import collect_examples
from diffattn.audit.facts import DataFacts, ModelFacts, Reference, Skipped
from diffattn.audit.measure import (
    attack_facts,
    clean_facts,
    lipschitz_facts,
    reference_facts,
    sample_rows,
    sensitivity_facts,
)
from diffattn.audit.record import HISTORY, AuditRecord, read_history, read_record, write_record
from diffattn.checks import is_positive_integer, require, require_number
from diffattn.data.images import ImageData
from diffattn.files import read_json
from diffattn.models.capture import attention_layers
from diffattn.models.checkpoints import CONFIG, load_model
from diffattn.models.zoo import count_parameters
from diffattn.seeding import environment
from diffattn.sensitivity.directions import resolve_probes
from diffattn.sensitivity.gradients import measure_sensitivity
from diffattn.threat_model import Threat

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Subject:
    """The audited model with what is known of where it came from."""

    model: nn.Module
    facts: ModelFacts
    history: tuple[dict[str, Any], ...]


def run_audit(
    model: nn.Module | str | Path,
    data: ImageData,
    *,
    attacks: Sequence[Attack],
    budgets: Sequence[Threat],
    out: str | Path | None = None,
    name: str | None = None,
    reference: AuditRecord | str | Path | None = None,
    sensitivity_samples: int = 64,
    lipschitz_samples: int = 32,
    radii: Sequence[float] = (),
    probes: int | str = "auto",
    seed: int = 0,
    batch_size: int = 128,
    command: str | None = None,
    report: Report | None = None,
) -> AuditRecord:
    """Audit one model: every attack at every budget, sensitivity and local Lipschitz estimates by layer.

    Sensitivity and Lipschitz figures are of the first images of `data`, whatever the model makes of them, so that
    two models audited on the same data are measured at the same samples.

    Args:
        model: a module from [0, 1] pixels to logits in eval mode, or a checkpoint directory.
        data: labelled images, the same for every model that is to be compared.
        attacks: such as `[PGD(steps=20)]`.
        budgets: such as `[Linf("1/255"), Linf("4/255")]`.
        out: where the record directory is written; None writes nothing.
        name: what the record calls the model; its checkpoint's folder or registered name unless given.
        reference: a record of the model that Theorems 2 and 3 compare this one with, on the same data.
        sensitivity_samples: images that gradients are measured at, 0 for none.
        lipschitz_samples: images that Lipschitz estimates are made at, 0 for none.
        radii: see `lipschitz_facts`; the point is always measured.
        probes: see `measure_sensitivity`.
        seed: keys every random number.
        batch_size: images at once in the attacks.
        command: what the record says it was made by; the process's command line unless given.
        report: called with a line of text as each part begins.

    Returns:
        the record.

    Raises:
        ValueError: for a model in training mode, an empty list of attacks or budgets, data that do not fit the
            model, or a reference made on other data. A measurement that meets values that are not finite is left
            out and noted in the record's environment.
    """
    require(len(attacks) > 0, "attacks must name at least one attack; got none")
    require(len(budgets) > 0, "budgets must name at least one budget; got none")
    for given, value in (("sensitivity_samples", sensitivity_samples), ("lipschitz_samples", lipschitz_samples)):
        require(
            value == 0 or is_positive_integer(value), f"{given} must be an integer of at least 0; got {value!r}"
        )
    require(seed == 0 or is_positive_integer(seed), f"seed must be an integer of at least 0; got {seed!r}")
    for radius in radii:
        require_number("radii", radius, open_low=True)
    resolve_probes(probes, 1)
    subject = _subject(model, name)
    require(not subject.model.training, "model must be in eval mode to be audited; call model.eval()")
    tell = report or (lambda line: None)
    images = data.pixels()
    base = None if reference is None else _reference(reference, data)

    tell(f"{subject.facts.name}: clean accuracy on {len(data)} images")
    predictions = predict(subject.model, images, batch_size=batch_size)
    results: list[AttackResult] = []
    facts = []
    for attack in attacks:
        for budget in budgets:
            tell(
                f"{subject.facts.name}: attack {len(results) + 1} of {len(attacks) * len(budgets)}, "
                f"{budget.name} eps {budget.label}"
            )
            start = time.perf_counter()
            result = attack(
                subject.model,
                images,
                data.labels,
                budget,
                seed=seed,
                sample_ids=data.sample_ids,
                batch_size=batch_size,
            )
            facts.append(attack_facts(result, seconds=time.perf_counter() - start))
            results.append(result)
    table, lipschitz, notes = None, (), []
    known = bool(attention_layers(subject.model))
    if known and sensitivity_samples > 0:
        tell(f"{subject.facts.name}: sensitivity by layer and head")
        with _kept_going("sensitivity", notes):
            table = _sensitivity(subject.model, data, images, sensitivity_samples, probes=probes, seed=seed)
    if known and lipschitz_samples > 0:
        tell(f"{subject.facts.name}: local Lipschitz estimates")
        with _kept_going("Lipschitz estimates", notes):
            lipschitz, unsettled = lipschitz_facts(
                subject.model,
                images[:lipschitz_samples],
                sample_ids=data.sample_ids[:lipschitz_samples],
                radii=radii,
                seed=seed,
            )
            notes.extend(unsettled)
    examples, tensors = collect_examples(subject.model, images, results)
    found = AuditRecord(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["diffattn", *sys.argv[1:]]) if command is None else command,
        seed=seed,
        environment=environment() | ({"notes": "; ".join(notes)} if notes else {}),
        model=subject.facts,
        data=_data_facts(data),
        clean=clean_facts(predictions, data.labels.numpy()),
        attacks=tuple(facts),
        sensitivity=() if table is None else sensitivity_facts(table, seed=seed),
        lipschitz=lipschitz,
        reference=_compare(table, base, seed=seed),
        examples=examples,
        samples=pl.concat([sample_rows(result) for result in results]),
        sensitivity_table=table,
        tensors=tensors,
        history=subject.history,
    )
    if out is not None:
        write_record(out, found)
    return found


@contextmanager
def _kept_going(what: str, notes: list[str]) -> Iterator[None]:
    """A measurement that a model makes impossible (values that are not finite) is noted; the rest is kept."""
    try:
        yield
    except ValueError as error:
        notes.append(f"no {what}: {error}")


def predict(model: nn.Module, images: Tensor, *, batch_size: int = 128) -> np.ndarray:
    """The class of each image, -1 where a logit is not finite: [n] int64."""
    found = []
    with torch.no_grad():
        for part in torch.split(images, batch_size):
            logits = logits_of(model, part)
            classes = logits.argmax(dim=1)
            found.append(torch.where(torch.isfinite(logits).all(dim=1), classes, -1))
    return torch.cat(found).cpu().numpy()


def _subject(model: nn.Module | str | Path, name: str | None) -> _Subject:
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        plain = _plain(config) if is_dataclass(config) else {}
        label = name or getattr(model, "name", "") or type(model).__name__
        return _Subject(model, ModelFacts(label, None, plain, count_parameters(model), None), ())
    path = Path(model)
    loaded = load_model(path)
    facts = ModelFacts(
        name or path.name or loaded.name,
        str(model),
        _plain(loaded.config) | {"registered_name": loaded.name},
        count_parameters(loaded),
        read_json(path / CONFIG)["sha256"],
    )
    history = path / HISTORY
    return _Subject(loaded, facts, read_history(history) if history.is_file() else ())


def _plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON holds it, so that a record equals what is read back."""
    return json.loads(json.dumps(asdict(config)))


def _data_facts(data: ImageData) -> DataFacts:
    skipped = tuple(Skipped(sample, reason) for sample, reason in data.skipped)
    return DataFacts(data.name, data.split, len(data), skipped, data.fingerprint, tuple(data.class_names))


def _sensitivity(
    model: nn.Module, data: ImageData, images: Tensor, samples: int, *, probes: int | str, seed: int
) -> pl.DataFrame:
    return measure_sensitivity(
        model,
        images[:samples],
        data.labels[:samples],
        probes=probes,
        seed=seed,
        sample_ids=data.sample_ids[:samples],
    )


def _reference(reference: AuditRecord | str | Path, data: ImageData) -> AuditRecord:
    found = reference if isinstance(reference, AuditRecord) else read_record(reference)
    require(
        found.data.fingerprint == data.fingerprint,
        f"reference must be a record on the same data; {found.model.name} was audited on other images",
    )
    return found


def _compare(table: pl.DataFrame | None, base: AuditRecord | None, *, seed: int) -> Reference | None:
    if table is None or base is None or base.sensitivity_table is None:
        return None
    return reference_facts(table, base.sensitivity_table, name=base.model.name, seed=seed)
