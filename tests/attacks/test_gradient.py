"""The search: closed forms on linear classifiers, independence of the batch, precision, restarts, options."""

import numpy as np
import pytest
import torch
from torch import nn

from diffattn.attacks import FGSM, PGD
from diffattn.threat_model import L2, Linf
from linear_models import dividing_eps, linear_problem, thresholds


@pytest.mark.parametrize(("threat", "order"), [(Linf, 1), (L2, 2)])
@pytest.mark.parametrize("attack", [FGSM(), PGD(), PGD(loss="margin", restarts=2), PGD(random_start=False)])
def test_a_linear_classifier_breaks_exactly_beyond_its_margin(threat, order, attack):
    model, images, labels = linear_problem()
    least = thresholds(model, images, labels, order)
    eps = dividing_eps(least)
    result = attack(model, images, labels, threat(eps))
    assert (result.status == np.where(least < eps, "broken", "survived")).all()
    assert (result.broken, result.survived) == (int((least < eps).sum()), int((least > eps).sum()))
    assert result.asr == pytest.approx(1 - result.robust_accuracy)
    assert (result.distance <= eps).all()
    assert (result.distance[result.status == "broken"] >= least[result.status == "broken"].numpy()).all()
    assert result.flags == ()


@pytest.mark.parametrize(("threat", "order"), [(Linf, 1), (L2, 2)])
@pytest.mark.parametrize("loss", ["cross_entropy", "margin", "dlr"])
def test_a_targeted_attack_reaches_its_target_or_nothing(threat, order, loss):
    model, images, labels = linear_problem(classes=4)
    least = thresholds(model, images, labels, order)
    eps = dividing_eps(least)
    result = PGD(loss=loss)(model, images, labels, threat(eps), targets=1 - labels)
    assert (result.status == np.where(least < eps, "broken", "survived")).all()
    # Class 2 cannot be reached, however often the label is left on the way.
    out_of_reach = PGD(loss=loss)(model, images, labels, threat(eps), targets=torch.full_like(labels, 2))
    assert (out_of_reach.status == "survived").all()


def test_clean_wrong_samples_are_left_alone():
    model, images, labels = linear_problem()
    given = labels.clone()
    given[:10] = 1 - given[:10]
    for targets in (None, 1 - given):  # of the wrong ones, the clean prediction is the target already
        result = PGD()(model, images, given, Linf(0.2), targets=targets)
        assert (result.status[:10] == "clean_wrong").all()
        assert torch.equal(result.adversarial[:10], images[:10])
        assert (result.backwards[:10] == 0).all()
        assert (result.status[10:] == "broken").all()
        assert (result.n_clean_correct, result.asr, result.robust_accuracy) == (30, 1.0, 0.0)


@pytest.mark.parametrize("threat", [Linf(0), L2(0)])
@pytest.mark.parametrize("attack", [FGSM(), PGD(steps=3)])
def test_an_empty_budget_changes_nothing(threat, attack):
    model, images, labels = linear_problem(dtype=torch.float32)
    result = attack(model, images, labels, threat)
    assert torch.equal(result.adversarial, images)
    assert (result.status == "survived").all()
    assert (result.distance == 0).all()


def test_passes_are_counted_by_hand():
    model, images, labels = linear_problem(n=20)
    survivors = PGD(steps=5, restarts=3)(model, images, labels, Linf("1e-6"))
    # Clean 1, two probes of the first four, 3 restarts of 6 points and 5 gradients.
    assert (survivors.forwards == np.array([1 + 2 + 18] * 4 + [1 + 18] * 16)).all()
    assert (survivors.backwards == 15).all()
    broken = FGSM()(model, images, labels, Linf(0.3))
    # Clean 1, the start, the end, its confirmation.
    assert (broken.forwards == np.array([1 + 2 + 3] * 4 + [4] * 16)).all()
    assert (broken.backwards == 1).all()


def test_only_survivors_go_on():
    model, images, labels = linear_problem()
    eps = dividing_eps(thresholds(model, images, labels, 1))
    sizes = []

    def counting(x):
        sizes.append(len(x))
        return model(x)

    result = PGD(steps=10, restarts=2, step_size=0.01)(counting, images, labels, Linf(eps))
    assert 0 < result.survived < 40
    assert sizes[-1] == result.survived
    assert sum(sizes) == result.forwards.sum()
    # What the first restart broke takes no further pass.
    first = PGD(steps=10, step_size=0.01)(model, images, labels, Linf(eps))
    early = first.status == "broken"
    assert early.any()
    assert (result.forwards[early] == first.forwards[early]).all()
    assert (result.backwards[early] == first.backwards[early]).all()


def test_every_restart_starts_elsewhere():
    model, images, labels = linear_problem()
    seen = []

    def watched(x):
        seen.append(x.detach().clone())
        return model(x)

    PGD(steps=1, restarts=3)(watched, images, labels, Linf("1e-6"))
    starts = seen[-6::2]  # a start and an end each
    assert all(len(start) == 40 for start in starts)
    assert not any(torch.equal(starts[a], starts[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def small_network(dtype=torch.float32):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 5))
    images = torch.rand(64, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = layers.to(dtype).eval()
    return model, images, model(images).argmax(dim=1)


@pytest.mark.parametrize("threat", [Linf("12/255"), L2(0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_does_not_see_its_batch(threat, dtype):
    model, images, labels = (part[:24] if torch.is_tensor(part) else part for part in small_network(dtype))
    attack = PGD(steps=6, restarts=2)
    results = [attack(model, images, labels, threat, batch_size=size) for size in (1, 3, 64)]
    assert 0 < results[0].survived < 24
    for other in results[1:]:
        assert (other.status == results[0].status).all()
        if dtype == torch.float64:
            torch.testing.assert_close(other.adversarial, results[0].adversarial, rtol=0, atol=1e-12)
            assert (other.forwards[4:] == results[0].forwards[4:]).all()
    again = attack(model, images, labels, threat, batch_size=64)
    assert torch.equal(again.adversarial, results[2].adversarial)
    # Noise follows the sample's id, not its place.
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    moved = attack(model, images[order], labels[order], threat, sample_ids=order.tolist())
    assert (moved.status == results[2].status[order.numpy()]).all()
    assert torch.allclose(
        moved.adversarial, results[2].adversarial[order], atol=1e-12 if dtype == torch.float64 else 1
    )


def test_the_seed_decides_the_start_and_the_global_generator_is_left_alone():
    model, images, labels = small_network()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, second = (PGD(steps=1)(model, images, labels, Linf("2/255"), seed=seed) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first.adversarial, second.adversarial)


def test_more_restarts_never_break_fewer():
    model, images, labels = small_network()
    one = PGD(steps=2)(model, images, labels, Linf("12/255"))
    many = PGD(steps=2, restarts=5)(model, images, labels, Linf("12/255"))
    assert (many.status[one.status == "broken"] == "broken").all()
    assert many.broken >= one.broken


def test_a_survivor_keeps_its_point_of_highest_loss():
    model, images, labels = small_network(torch.float64)
    result = PGD(steps=6, restarts=2)(model, images, labels, Linf("4/255"))
    stands = torch.from_numpy(result.status == "survived")
    loss = nn.functional.cross_entropy(model(result.adversarial), labels, reduction="none")
    clean = nn.functional.cross_entropy(model(images), labels, reduction="none")
    assert stands.any()
    assert (loss > clean)[stands].all()
    assert (result.prediction[stands.numpy()] == labels[stands].numpy()).all()


def test_the_highest_loss_counts_not_the_last():
    model, images, labels = linear_problem(dtype=torch.float32)
    calls = []

    def falling(logits, labels, targets):  # lower at every call, whatever the point
        calls.append(len(labels))
        return nn.functional.cross_entropy(logits, labels, reduction="none") - len(calls)

    result = PGD(loss=falling, steps=3, random_start=False)(model, images, labels, Linf("1e-6"))
    assert torch.equal(result.adversarial, images)


def test_bfloat16_search_claims_nothing_that_float32_denies():
    model, images, labels = small_network()
    threat = Linf("12/255")
    full, half = (PGD(precision=name)(model, images, labels, threat) for name in ("float32", "bfloat16"))
    for result in (full, half):
        prediction = torch.cat([model(image[None]).argmax(dim=1) for image in result.adversarial])
        wrong = (prediction != labels).numpy()
        assert (wrong == (result.status == "broken")).all()
        assert (prediction.numpy() == result.prediction).all()
    assert abs(full.broken - half.broken) <= 2


def test_a_claim_that_fails_its_confirmation_is_no_break():
    model, images, labels = linear_problem(dtype=torch.float32)

    def coarse(x):  # under autocast it predicts the wrong class everywhere
        logits = model(x)
        return -logits if torch.is_autocast_enabled("cpu") else logits

    result = PGD(precision="bfloat16", steps=3)(coarse, images, labels, Linf("1e-6"))
    assert (result.status == "survived").all()
    assert (result.prediction == labels.numpy()).all()


def test_the_last_word_is_float32_for_survivors_too():
    model, images, labels = linear_problem(dtype=torch.float32)

    def blind(x):  # under autocast it never predicts the wrong class, but its gradient is right
        logits = model(x)
        if torch.is_autocast_enabled("cpu"):
            return logits + 1000 * nn.functional.one_hot(model(images)[: len(x)].argmax(dim=1), 2)
        return logits

    result = PGD(precision="bfloat16", steps=3, loss="margin")(blind, images, labels, Linf(0.2))
    assert (result.status == "broken").all()


def test_autocast_of_the_caller_does_not_reach_the_verdict():
    model, images, labels = small_network()
    alone = PGD(steps=4)(model, images, labels, Linf("12/255"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = PGD(steps=4)(model, images, labels, Linf("12/255"))
    assert torch.equal(alone.adversarial, inside.adversarial)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_the_loss_is_summed_so_that_a_large_batch_does_not_underflow(batch_size):
    model, images, labels = small_network()
    received = []

    def watched(logits, labels, targets):
        values = nn.functional.cross_entropy(logits, labels, reduction="none")
        if values.requires_grad:
            values.register_hook(lambda gradient: received.append(gradient.clone()))
        return values

    PGD(steps=1, loss=watched)(model, images, labels, Linf("1e-6"), batch_size=batch_size)
    assert torch.equal(torch.cat(received), torch.ones(64))
