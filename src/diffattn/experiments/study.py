"""What every experiment is made of: models trained by one recipe and audited alike, each done once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffattn.attacks.base import ATTACKS, Attack
from diffattn.audit.record import RECORD, AuditRecord, read_record
from diffattn.audit.run import run_audit
from diffattn.checks import from_mapping, require
from diffattn.config import TrainConfig, train_config_from_mapping
from diffattn.data.images import ImageData, load_data
from diffattn.files import read_json, write_json_atomic
from diffattn.models.checkpoints import CONFIG
from diffattn.presets import read_preset
from diffattn.threat_model import Threat, make_threat
from diffattn.train.loop import train_model

Report = Callable[[str], None]

PLAN = "audit.json"
"""Beside the audit: the plan, the images, the weights and the reference that it was made with."""


@dataclass(frozen=True)
class AuditPlan:
    """How each model of an experiment is audited, as a preset writes it.

    Args:
        attacks: each a mapping of "name" and the attack's options.
        budgets: eps as text, such as "4/255".
        norm: of the budgets.
        sensitivity_samples: see `run_audit`.
        lipschitz_samples: see `run_audit`.
        probes: see `measure_sensitivity`.
        seed: see `run_audit`.
    """

    attacks: Sequence[Mapping[str, Any]]
    budgets: Sequence[str]
    norm: str = "Linf"
    sensitivity_samples: int = 64
    lipschitz_samples: int = 32
    probes: int | str = "auto"
    seed: int = 0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> AuditPlan:
        """From a preset's `audit` part; unknown keys are refused."""
        return from_mapping(cls, values, what="audit")

    def made_attacks(self) -> list[Attack]:
        """The attacks themselves."""
        return [make_attack(**options) for options in self.attacks]

    def made_budgets(self) -> list[Threat]:
        """The threat models themselves."""
        return [make_threat(self.norm, eps) for eps in self.budgets]


@dataclass(frozen=True)
class Study:
    """Models that differ in one thing, trained by one recipe and audited on the same images; a preset says it.

    Args:
        train: the recipe, nested as in `train_config_from_mapping`, or the name of a training preset.
        models: label -> the zoo name and overrides of each model.
        reference: label of the model that the others are compared with; it is trained and audited first.
        data: what `load_data` takes, for the audit.
        audit: see `AuditPlan`.
        depths: number of blocks, a run each; None leaves the models' own.
        seeds: a run each.
    """

    train: Mapping[str, Any] | str
    models: Mapping[str, Mapping[str, Any]]
    reference: str
    data: Mapping[str, Any]
    audit: Mapping[str, Any]
    depths: Sequence[int | None] = (None,)
    seeds: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        """Check that the reference is one of the models."""
        require(
            self.reference in self.models,
            f"reference must be one of {', '.join(self.models)}; got {self.reference!r}",
        )

    @property
    def labels(self) -> list[str]:
        """The models, the reference first."""
        return [self.reference, *(label for label in self.models if label != self.reference)]

    def train_config(self, label: str, *, depth: int | None, seed: int, root: str | None) -> TrainConfig:
        """The training run of one model."""
        recipe = read_preset(self.train) if isinstance(self.train, str) else self.train
        model = {**recipe.get("model", {}), **self.models[label], **({} if depth is None else {"depth": depth})}
        data = {**recipe.get("data", {}), **({} if root is None else {"root": root})}
        return train_config_from_mapping({**recipe, "model": model, "data": data, "seed": seed})


Runs = dict[tuple[str, int | None], list[AuditRecord]]
"""(label, depth) -> a record a seed."""


def run_study(
    study: Study,
    out: str | Path,
    *,
    command: str,
    root: str | None = None,
    progress: bool = False,
    report: Report | None = None,
) -> Runs:
    """Train and audit every (seed, depth, model) of a study in folders of its own; resumes what is there.

    Args:
        study: what to run.
        out: folder of the runs: `vit-d1-s0/model`, `vit-d1-s0/audit`, ...
        command: what the records say they were made by.
        root: folder of the data sets; DIFFATTN_DATA unless given.
        progress: show progress bars.
        report: called with a line of text as each part begins.
    """
    out, plan = Path(out), AuditPlan.from_mapping(study.audit)
    data = load_data(**study.data, root=root)
    runs: Runs = {}
    for seed in study.seeds:
        for depth in study.depths:
            reference = None
            for label in study.labels:
                shown = [f"D={depth}"] * (depth is not None) + [f"seed {seed}"] * (len(study.seeds) > 1)
                folder = [f"d{depth}"] * (depth is not None) + [f"s{seed}"] * (len(study.seeds) > 1)
                found = train_and_audit(
                    " ".join([label, *shown]),
                    study.train_config(label, depth=depth, seed=seed, root=root),
                    data,
                    plan,
                    out / "-".join([label.lower(), *folder]),
                    command=command,
                    reference=reference,
                    progress=progress,
                    report=report,
                )
                reference = reference or found
                runs.setdefault((label, depth), []).append(found)
    return runs


def make_attack(name: str, **options: Any) -> Attack:
    """An attack by its registered name.

    Raises:
        ValueError: for an unknown name or option.
    """
    try:
        return ATTACKS[name](**options)
    except TypeError as error:
        raise ValueError(f"attack {name!r} does not take these options: {error}") from error


def train_and_audit(
    label: str,
    config: TrainConfig,
    data: ImageData,
    plan: AuditPlan,
    out: str | Path,
    *,
    command: str,
    reference: AuditRecord | None = None,
    progress: bool = False,
    report: Report | None = None,
) -> AuditRecord:
    """Train a model in `out/model` and audit it into `out/audit`; what is there already is not done again.

    Args:
        label: what the record calls the model.
        config: how it is trained; a run in `out` with another one is an error.
        data: what it is audited on.
        plan: how.
        out: a folder of this model alone.
        command: what the record says it was made by.
        reference: the record that Theorems 2 and 3 compare it with.
        progress: show the training's progress bar.
        report: called with a line of text as each part begins.

    Raises:
        ValueError: as `train` and `run_audit`, or if `out/audit` was made with another plan, on other
            images, weights or reference.
    """
    out = Path(out)
    train_model(config, out / "model", progress=progress)
    done = {
        "plan": json.loads(json.dumps(asdict(plan))),
        "images": data.fingerprint,
        "weights": read_json(out / "model" / CONFIG)["sha256"],
        "reference": None if reference is None else reference.model.sha256,
    }
    if (out / PLAN).is_file() and (out / "audit" / RECORD).is_file():
        kept = read_json(out / PLAN)
        other = [key for key in done if kept.get(key) != done[key]]
        require(
            not other,
            f"{out / 'audit'} holds an audit with another {' and '.join(other)}; remove it or give another out",
        )
        return read_record(out / "audit")
    found = run_audit(
        out / "model",
        data,
        attacks=plan.made_attacks(),
        budgets=plan.made_budgets(),
        out=out / "audit",
        name=label,
        reference=reference,
        sensitivity_samples=plan.sensitivity_samples,
        lipschitz_samples=plan.lipschitz_samples,
        probes=plan.probes,
        seed=plan.seed,
        command=command,
        report=report,
    )
    write_json_atomic(out / PLAN, done)
    return found
