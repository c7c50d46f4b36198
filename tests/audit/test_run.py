"""An audit of a real model: its figures agree with what they are made of, and bad input is refused."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from diffattn.attacks.gradient import FGSM, PGD
from diffattn.audit.measure import lipschitz_facts
from diffattn.audit.record import read_record
from diffattn.audit.run import predict, run_audit
from diffattn.data.images import load_data
from diffattn.models.capture import capture
from diffattn.models.checkpoints import load_model
from diffattn.threat_model import L2, Linf


@pytest.fixture(scope="module")
def data():
    return load_data("digits", limit=60)


@pytest.fixture(scope="module")
def records(digit_models, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("audits")
    found = {}
    for name, path in digit_models.items():
        found[name] = run_audit(
            path,
            data,
            attacks=[PGD(steps=5), FGSM()],
            budgets=[Linf("16/255"), L2(1.0)],
            out=out / name,
            reference=found.get("vit"),
            sensitivity_samples=4,
            lipschitz_samples=3,
            radii=[0.01],
            probes=4,
            command="test",
        )
    return found, out


def test_the_record_comes_back_from_disk(records) -> None:
    found, out = records
    for name, record in found.items():
        read = read_record(out / name)
        assert read.findings == record.findings
        assert read.samples.equals(record.samples)
        assert read.sensitivity_table is not None
        assert read.sensitivity_table.equals(record.sensitivity_table)
        assert sorted(read.tensors) == sorted(record.tensors)
        assert len(read.history) == 4


def test_shares_are_counts_of_the_samples(records, data) -> None:
    found, _ = records
    record = found["diffvit"]
    assert record.model.name == "diffvit"
    assert record.clean.n == 60
    assert record.clean.correct == int((record.samples["clean_prediction"] == record.samples["label"]).sum()) // 4
    assert [(facts.name, facts.norm, facts.eps) for facts in record.attacks] == [
        ("pgd", "Linf", "16/255"),
        ("pgd", "L2", "1"),
        ("fgsm", "Linf", "16/255"),
        ("fgsm", "L2", "1"),
    ]
    for facts in record.attacks:
        rows = record.samples.filter(
            (pl.col("attack") == facts.name) & (pl.col("norm") == facts.norm) & (pl.col("eps") == facts.eps)
        )
        assert rows.height == len(data)
        counts = dict(rows["status"].value_counts().iter_rows())
        assert facts.broken == counts.get("broken", 0)
        assert facts.survived == counts.get("survived", 0)
        assert facts.n == record.clean.correct
        assert facts.asr == facts.broken / facts.n
        assert facts.robust_accuracy == facts.survived / 60
        assert (rows["distance"] <= facts.eps_value).all()
        assert facts.forwards == rows["forwards"].sum()


def test_sensitivity_speaks_of_every_layer_and_the_theorems_of_the_reference(records) -> None:
    found, _ = records
    softmax, differential = found["vit"], found["diffvit"]
    places = {(row.layer, row.head, row.wrt, row.reading) for row in differential.sensitivity}
    assert len(places) == 2 * 3 * 2 * 2  # layers, heads and all, input and pixels, Jacobian and loss
    assert all(row.cos_theta is None for row in softmax.sensitivity)
    assert all(row.cos_theta is not None for row in differential.sensitivity)
    assert softmax.reference is None
    assert differential.reference is not None
    assert differential.reference.model == "vit"
    assert [row.index for row in differential.reference.rows] == [0, 1]
    for row in differential.reference.rows:
        assert row.gamma.value > 0
        assert row.measured_ratio.value > 0


def test_lipschitz_rows_and_the_ball_is_never_below_the_point(records) -> None:
    found, _ = records
    for record in found.values():
        rows = {(row.layer, row.of, row.radius > 0): row for row in record.lipschitz}
        assert len(rows) == 2 * 2 * 2
        for (layer, of, in_ball), row in rows.items():
            assert row.n == 3
            assert row.kind == "estimate"
            if in_ball:
                assert row.mean.value >= rows[layer, of, False].mean.value - 1e-6


def test_lipschitz_facts_do_not_depend_on_the_batch(digit_models, data) -> None:
    model, pixels = load_model(digit_models["diffvit"]).double(), data.pixels().double()[:3]
    whole, _ = lipschitz_facts(model, pixels, sample_ids=data.sample_ids[:3], batch_size=3)
    single, _ = lipschitz_facts(model, pixels, sample_ids=data.sample_ids[:3], batch_size=1)
    for one, other in zip(whole, single, strict=True):
        assert one.mean.value == pytest.approx(other.mean.value, rel=1e-3)


def test_examples_hold_the_maps_of_their_own_images(records, digit_models) -> None:
    found, _ = records
    record = found["diffvit"]
    model = load_model(digit_models["diffvit"])
    assert {example.status for example in record.examples} >= {"broken"}
    example = next(example for example in record.examples if example.status == "broken")
    image = record.tensors[f"{example.key}.adversarial"]
    assert not np.array_equal(image, record.tensors[f"{example.key}.clean"])
    branches = capture(model, torch.from_numpy(image)[None])[example.layer]
    expected = branches.combined[0].mean(0).numpy()
    np.testing.assert_allclose(sum(record.branch_maps(example, "adversarial")), expected, atol=1e-6)
    with torch.no_grad():
        assert model(torch.from_numpy(image)[None]).argmax().item() == example.attacked_prediction


def test_the_same_seed_gives_the_same_record(digit_models, data) -> None:
    def audit():
        return run_audit(
            digit_models["diffvit"],
            data,
            attacks=[PGD(steps=3)],
            budgets=[Linf("16/255")],
            sensitivity_samples=2,
            lipschitz_samples=2,
            probes=4,
            command="test",
        )

    one, two = audit(), audit()
    assert one.samples.equals(two.samples)
    assert one.sensitivity == two.sensitivity
    assert one.lipschitz == two.lipschitz


class NaNModel(nn.Module):
    """Right on the clean images and NaN elsewhere; class 0 is what argmax of NaN says."""

    def __init__(self, clean: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__()
        self.clean, self.labels = clean, labels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        distance = (images[:, None] - self.clean).flatten(2).abs().amax(2)
        near, index = distance.min(1)
        logits = torch.nn.functional.one_hot(self.labels[index], 10).float() + images.flatten(1).sum(1)[:, None]
        return torch.where(near[:, None] < 1e-7, logits, torch.nan)


def test_a_model_that_returns_nan_is_an_error_and_never_robust(data) -> None:
    model = NaNModel(data.pixels(), data.labels).eval()
    record = run_audit(model, data, attacks=[PGD(steps=2)], budgets=[Linf("4/255")], command="test")
    facts = record.attacks[0]
    assert (facts.broken, facts.survived, facts.error, facts.n) == (0, 0, 60, 60)
    assert facts.robust_accuracy == 0
    assert facts.asr == 0
    assert facts.asr_high > 0.99
    assert any("non_finite" in flag or "non-finite" in flag for flag in facts.flags)
    assert record.sensitivity == ()  # no attention layer that we know


def test_predictions_mark_what_is_not_finite() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    assert predict(lambda x: logits[: len(x)], torch.rand(3, 1, 2, 2)).tolist() == [1, -1, -1]


def test_bad_requests_are_refused(digit_models, data, records) -> None:
    budgets, attacks = [Linf("4/255")], [PGD(steps=1)]
    path = digit_models["vit"]
    with pytest.raises(ValueError, match="attacks must name at least one attack; got none"):
        run_audit(path, data, attacks=[], budgets=budgets)
    with pytest.raises(ValueError, match="budgets must name at least one budget; got none"):
        run_audit(path, data, attacks=attacks, budgets=[])
    with pytest.raises(ValueError, match=r"model must be in eval mode to be audited; call model.eval\(\)"):
        run_audit(load_model(path).train(), data, attacks=attacks, budgets=budgets)
    with pytest.raises(ValueError, match="reference must be a record on the same data; vit was audited on other"):
        run_audit(path, load_data("digits", limit=5), attacks=attacks, budgets=budgets, reference=records[0]["vit"])


def test_a_measurement_that_fails_is_noted_and_the_verdicts_are_kept(digit_models, data) -> None:
    model = load_model(digit_models["diffvit"])
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    record = run_audit(model, data, attacks=[PGD(steps=1)], budgets=[Linf("4/255")], probes=4, command="test")
    assert record.clean.correct == 0
    assert (record.samples["status"] == "error").all()
    assert "no sensitivity" in record.environment["notes"]
