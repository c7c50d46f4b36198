"""Verdicts: errors are never robust, claims never overstate, flags say what not to trust, bad input is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from diffattn.attacks import FGSM, PGD
from diffattn.threat_model import L2, Linf


def problem(n=12, classes=3, seed=0):
    """A linear classifier whose last class never wins, and images away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, 12, generator=generator)
    weight[2:] = 0
    images = 0.4 + 0.2 * torch.rand(n, 3, 2, 2, generator=generator)
    bias = -(weight @ torch.full((12,), 0.5))
    bias[2:] = -8 - torch.arange(max(0, classes - 2))

    def model(x):
        return x.flatten(1) @ weight.to(x).T + bias.to(x)

    return model, images, model(images).argmax(dim=1)


def nan_off_the_clean_point(model, images, only=None):
    def wrapped(x):
        logits = model(x)
        known = (x.flatten(1)[:, None] == images.flatten(1)[None]).all(dim=2)
        rows = ~known.any(dim=1) if only is None else only(x)
        return torch.where(rows[:, None], torch.nan, logits)

    return wrapped


@pytest.mark.parametrize("attack", [FGSM(), PGD(steps=3, restarts=2), PGD(steps=3, precision="bfloat16")])
def test_nan_off_the_clean_point_with_label_0_is_an_error(attack):
    model, images, _ = problem()
    images = images[model(images).argmax(dim=1) == 0]
    labels = torch.zeros(len(images), dtype=torch.int64)
    result = attack(nan_off_the_clean_point(model, images), images, labels, Linf("1/255"))
    assert (result.status == "error").all()
    assert (result.errors, result.survived, result.broken) == (len(images), 0, 0)
    assert (result.n_clean_correct, result.robust_accuracy) == (len(images), 0.0)
    assert (result.prediction == -1).all()
    assert (result.distance > 0).all()  # the point that gave NaN is there to look at
    n = len(images)
    assert f"non_finite: {n} of {n} samples met non-finite logits or gradients" in result.flags


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_clean_logit_is_an_error(value):
    model, images, labels = problem()
    images[0] = 0.4

    def wrapped(x):
        corner = (x == images[0]).flatten(1).all(dim=1)
        return torch.where(corner[:, None], torch.tensor([value, 0.0, 0.0]), model(x))

    labels[0] = 0
    result = PGD(steps=2)(wrapped, images, labels, Linf("1e-6"))
    assert (result.status == ["error"] + ["survived"] * 11).all()
    assert result.clean_prediction[0] == -1
    assert result.n_clean_correct == 11
    assert result.robust_accuracy == 11 / 12
    assert result.backwards[0] == 0


def test_an_error_at_one_point_gives_way_to_a_break_at_another():
    model, images, labels = problem()
    seen = []

    def wrapped(x):  # the first random start gives NaN, everything later is fine
        seen.append(len(x))
        return model(x) * (torch.nan if len(seen) == 4 else 1.0)

    result = PGD(steps=3, restarts=2)(wrapped, images, labels, Linf(0.4))
    assert len(seen) > 4
    assert (result.status == "broken").all()
    assert (model(result.adversarial).argmax(dim=1) != labels).all()


@pytest.mark.parametrize(("small", "large"), [(Linf("1e-6"), Linf(0.4)), (L2("1e-6"), L2(2))])
def test_a_non_finite_gradient_is_an_error_unless_the_rest_breaks_it(small, large):
    model, images, labels = problem()

    class BadGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            gradient[:, 0, 0, 0] = torch.nan
            return gradient

    def wrapped(x):
        return model(BadGradient.apply(x))

    stuck = PGD(steps=3)(wrapped, images, labels, small)
    assert (stuck.status == "error").all()
    result = PGD(steps=3, random_start=False)(wrapped, images, labels, large)
    assert (result.status == "broken").all()
    assert result.adversarial.isfinite().all()
    assert "non_finite: 12 of 12 samples met non-finite logits or gradients" in result.flags


def test_what_lies_outside_the_budget_never_counts():
    model, images, labels = problem()

    class Leaky(Linf):
        def project(self, points, center):
            return points

    assert (PGD()(model, images, labels, Linf(0.4)).status == "broken").all()
    for leaky, step_size in ((Leaky("1e-6"), 0.3), (Leaky(0.999), 0.9)):  # beyond the ball, beyond the box
        result = PGD(steps=1, step_size=step_size, random_start=False)(model, images, labels, leaky)
        assert (model(result.adversarial).argmax(dim=1) != labels).all()
        assert (result.status == "survived").all()


def test_the_prediction_of_a_refuted_claim_is_the_recomputed_one():
    model, images, labels = problem(n=8)
    calls = []

    def moody(x):  # the clean images and their probe, then one bad answer, then the truth
        calls.append(len(x))
        return model(x).flip(1) if len(calls) == 3 else model(x)

    result = PGD(steps=1)(moody, images, labels, Linf("1e-6"))
    assert (result.status == "survived").all()
    assert (result.prediction == labels.numpy()).all()


@pytest.mark.parametrize("threat", [Linf("4/255"), L2(0.05)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_broken_breaks_when_scored_again_inside_the_budget(threat, precision):
    model, images, labels = problem(n=64)
    result = PGD(precision=precision, steps=5)(model, images, labels, threat)
    broken = torch.from_numpy(result.status == "broken")
    assert 0 < result.broken < 64
    assert (model(result.adversarial).argmax(dim=1) != labels)[broken].all()
    assert (model(result.adversarial).argmax(dim=1) == labels)[~broken].all()
    assert (threat.distance(result.adversarial, images) <= threat.eps).all()
    np.testing.assert_array_equal(threat.distance(result.adversarial, images).numpy(), result.distance)
    assert result.adversarial.min() >= 0
    assert result.adversarial.max() <= 1


@pytest.mark.parametrize(
    "spoil",
    [lambda z: 1000 * z, lambda z: 1000 * z + 1000, lambda z: (1000 * z + 1000).half()],
    ids=["scale", "shift", "half"],
)
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_saturated_logits_are_flagged_and_a_scale_invariant_loss_breaks_them(spoil, classes):
    model, images, labels = problem(classes=classes)
    gap = (model(images)[:, 0] - model(images)[:, 1]).abs()
    images, labels = images[gap > 0.3], labels[gap > 0.3]

    def saturated(x):
        return spoil(model(x))

    plain = FGSM()(saturated, images, labels, Linf(0.3))
    n = len(images)
    assert (plain.status == "survived").all()
    assert plain.flags == (
        f"zero_gradient: the input gradient was exactly 0 at some point for {n} of {n} attacked samples; "
        "saturated or masked logits? try loss='dlr' or 'margin'",
    )
    robust = FGSM(loss="dlr")(saturated, images, labels, Linf(0.3))
    assert (robust.status == "broken").all()
    replaced = "loss_replaced: untargeted dlr needs 3 classes, the model has 2; margin was used"
    assert robust.flags == ((replaced,) if classes == 2 else ())


def test_targeted_dlr_with_three_classes_is_replaced():
    model, images, labels = problem(classes=3)
    result = PGD(loss="dlr")(model, images, labels, Linf(0.4), targets=1 - labels)
    assert result.flags == ("loss_replaced: targeted dlr needs 4 classes, the model has 3; margin was used",)
    assert (result.status == "broken").all()
    assert (result.prediction == result.targets).all()


def test_all_negative_logits_are_no_special_case_of_the_margin():
    model, images, labels = problem()
    shifted = PGD(loss="margin")(lambda x: model(x) - 100, images, labels, Linf(0.4))
    assert (shifted.status == "broken").all()


def test_a_randomised_model_is_flagged():
    model, images, labels = problem()
    flag = "randomised: two forward passes of the same clean images gave different logits"

    def noisy(x):
        return model(x) + 0.01 * torch.randn(len(x), 1) * torch.tensor([0.0, 0.0, 1.0])

    first, second = (PGD(steps=2)(noisy, images, labels, Linf("1e-6")) for _ in range(2))
    assert first.flags == (flag,)
    assert torch.equal(first.adversarial, second.adversarial)  # its own dice are seeded for the while
    layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Dropout(0.1))
    labels = layers.eval()(images).argmax(dim=1)
    assert PGD(steps=2)(layers, images, labels, Linf("1e-6")).flags == ()
    result = PGD(steps=2)(layers.train(), images, labels, Linf("1e-6"))
    assert (
        "randomised: 4 of 4 modules are in train mode (dropout, batch statistics); call model.eval()"
        in result.flags
    )


def test_probabilities_in_place_of_logits_are_flagged():
    model, images, labels = problem()
    result = PGD(steps=1)(lambda x: model(x).softmax(dim=1), images, labels, Linf("1e-6"))
    assert result.flags == (
        "probabilities: every row of the model's output is non-negative and sums to 1; "
        "attack the logits, before softmax",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.full((12, 3, 2, 2), 2.0)}, "got minimum 2 and maximum 2"),
        ({"images": torch.zeros(12, 3, 2, 2, dtype=torch.uint8)}, "got dtype torch.uint8; divide by 255"),
        ({"images": torch.full((12, 3, 2, 2), torch.nan)}, "got NaN pixels"),
        ({"images": torch.rand(12, 3, 2, 2).half()}, "must be float32 or float64; got torch.float16, too coarse"),
        ({"labels": torch.full((12,), 3)}, "labels must be .* in 0..2; got minimum 3 and maximum 3"),
        ({"labels": torch.zeros(12)}, "labels must be an int64 .* got dtype torch.float32"),
        ({"labels": torch.eye(3)[[0] * 12]}, "one-hot rows"),
        ({"targets": torch.full((12,), 7)}, "targets must be .* in 0..2; got minimum 7"),
        ({"targets": torch.zeros(11, dtype=torch.int64)}, r"targets must be .* got shape \(11,\)"),
        ({"sample_ids": ["a"] * 12}, "sample_ids must be unique; got 'a' more than once"),
        ({"sample_ids": range(11)}, "sample_ids must hold one id for each of the 12 images; got 11"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"seed": 1.5}, "seed must be an integer; got 1.5"),
    ],
)
def test_input_that_makes_no_sense_is_refused(change, message):
    model, images, labels = problem()
    arguments = {"images": images, "labels": labels, "threat": Linf("4/255")} | change
    with pytest.raises(ValueError, match=message):
        PGD(steps=1)(model, **arguments)


def test_a_target_that_is_the_label_is_refused():
    model, images, labels = problem()
    targets = 1 - labels
    targets[[3, 5]] = labels[[3, 5]]
    message = (
        "targets must differ from labels; got the true class as target of 2 of 12 samples, the first at index 3"
    )
    with pytest.raises(ValueError, match=message):
        PGD(steps=1)(model, images, labels, Linf("4/255"), targets=targets)


def test_ids_may_be_numpy_integers_or_text():
    model, images, labels = problem()
    attack = PGD(steps=1)
    plain = attack(model, images, labels, Linf("1/255"), sample_ids=list(range(5, 17)))
    arrays = attack(model, images, labels, Linf("1/255"), sample_ids=np.arange(5, 17))
    assert torch.equal(plain.adversarial, arrays.adversarial)
    text = attack(model, images, labels, Linf("1/255"), sample_ids=[f"digits/{i}" for i in range(12)])
    assert text.sample_ids[3] == "digits/3"
