"""A study trains and audits each model once, compares with its reference, and resumes."""

from __future__ import annotations

import numpy as np
import pytest

from diffattn.checks import from_mapping
from diffattn.experiments import study as module
from diffattn.experiments.findings.first_light import show, summary
from diffattn.experiments.study import AuditPlan, Study, make_attack, run_study
from diffattn.presets import preset_names, read_preset
from diffattn.statistics import mean_interval

TINY = {
    "train": {
        "model": {"embed_dim": 16, "num_heads": 1},
        "data": {"name": "digits", "limit": 64, "val_limit": 32},
        "optim": {"epochs": 1, "batch_size": 32},
    },
    "models": {"ViT": {"name": "vit_micro_patch2_8"}, "DiffViT": {"name": "diffvit_micro_patch2_8"}},
    "reference": "ViT",
    "data": {"name": "digits", "limit": 20},
    "audit": {
        "attacks": [{"name": "pgd", "steps": 2}],
        "budgets": ["8/255"],
        "sensitivity_samples": 2,
        "lipschitz_samples": 2,
        "probes": 4,
    },
    "depths": [1],
    "seeds": [0, 1],
}


def test_a_study_runs_compares_summarises_and_resumes(tmp_path, monkeypatch) -> None:
    study = from_mapping(Study, TINY, what="study")
    lines: list[str] = []
    runs = run_study(study, tmp_path, command="test", report=lines.append)
    assert {key: len(records) for key, records in runs.items()} == {("ViT", 1): 2, ("DiffViT", 1): 2}
    first, second = runs["DiffViT", 1]
    assert first.reference.model == "ViT D=1 seed 0"
    assert second.reference.model == "ViT D=1 seed 1"
    assert first.model.sha256 != second.model.sha256
    assert (tmp_path / "diffvit-d1-s1" / "audit" / "record.json").is_file()
    assert lines

    text = summary(runs, study.seeds)
    assert "| DiffViT | 1 |" in text
    gap = np.mean([r.attacks[0].asr for r in runs["DiffViT", 1]]) - np.mean(
        [r.attacks[0].asr for r in runs["ViT", 1]]
    )
    line = next(line for line in text.splitlines() if line.startswith("| DiffViT − ViT, by seed | 1 |"))
    assert float(line.split("|")[4].split()[0]) == pytest.approx(gap, abs=5e-3)
    assert text.count("| ViT | 1 |") == 2

    def never(*_: object, **__: object) -> None:
        raise RuntimeError("audited twice")

    monkeypatch.setattr(module, "run_audit", never)
    again = run_study(study, tmp_path, command="test")
    assert again["DiffViT", 1][0].findings == first.findings

    other = from_mapping(Study, TINY | {"data": {"name": "digits", "limit": 10}}, what="study")
    with pytest.raises(ValueError, match="holds an audit with another images; remove it or give another out"):
        run_study(other, tmp_path, command="test")
    other = from_mapping(Study, TINY | {"audit": TINY["audit"] | {"budgets": ["4/255"]}}, what="study")
    with pytest.raises(ValueError, match="holds an audit with another plan; remove it or give another out"):
        run_study(other, tmp_path, command="test")


@pytest.mark.parametrize("name", preset_names(studies=True))
def test_study_presets_are_valid(name: str) -> None:
    study = from_mapping(Study, read_preset(name), what=name)
    plan = AuditPlan.from_mapping(study.audit)
    assert plan.made_attacks()
    assert plan.made_budgets()
    for label in study.labels:
        for depth in study.depths:
            config = study.train_config(label, depth=depth, seed=3, root="data")
            assert config.seed == 3
            assert config.data.root == "data"
            assert config.model.overrides.get("depth") == depth


def test_bad_studies_are_refused() -> None:
    with pytest.raises(ValueError, match="reference must be one of ViT, DiffViT; got 'CNN'"):
        from_mapping(Study, TINY | {"reference": "CNN"}, what="study")
    with pytest.raises(ValueError, match="unknown attack 'pdg'; did you mean pgd"):
        make_attack("pdg")
    with pytest.raises(ValueError, match="attack 'fgsm' does not take these options: .*steps"):
        make_attack("fgsm", steps=3)
    with pytest.raises(ValueError, match="audit has no option budget; it has attacks, budgets"):
        AuditPlan.from_mapping({"budget": []})


def test_figures_are_shown_with_their_interval() -> None:
    assert show(mean_interval([0.5])) == "0.5"
    assert show(mean_interval([0.7, 1.0]), 0, 1) == "0.85 [0, 1]"
    assert show(mean_interval([0.4, 0.5, 0.6])) == "0.5 [0.252, 0.748]"


def test_presets_by_name_by_path_and_not_at_all(tmp_path) -> None:
    assert read_preset("digits")["data"]["name"] == "digits"
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 3")
    assert read_preset(path) == {"seed": 3}
    path.write_text("- a list")
    with pytest.raises(ValueError, match="must hold a YAML mapping; got list"):
        read_preset(path)
    path.write_text("a: [")
    with pytest.raises(ValueError, match="must be YAML"):
        read_preset(path)
    path.write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(ValueError, match="must be YAML"):
        read_preset(path)
    with pytest.raises(ValueError, match="'nope' is neither a YAML file nor a preset; presets: cifar10, demo"):
        read_preset("nope")
