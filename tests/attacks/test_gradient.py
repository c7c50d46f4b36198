"""The search: closed forms on linear classifiers, independence of the batch, precision, restarts, options."""

import numpy as np
import pytest
import torch
from torch import nn

from diffattn.attacks import ATTACKS, FGSM, PGD
from diffattn.threat_model import L2, Linf

PIXELS = 12


class Linear(nn.Module):
    """logits = W x + b on flattened images."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        return x.flatten(1) @ self.weight.T + self.bias


def linear_problem(classes=2, n=40, dtype=torch.float64, seed=0):
    """A linear classifier and images far from 0 and 1, all labelled as predicted; classes above 1 never win."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, PIXELS, generator=generator, dtype=torch.float64)
    bias = torch.zeros(classes, dtype=torch.float64)
    weight[2:], bias[2:] = 0, -100
    images = 0.45 + 0.1 * torch.rand(n, 3, 2, 2, generator=generator, dtype=torch.float64)
    bias[:2] = -(weight[:2] * 0.5).sum(dim=1)
    model = Linear(weight.to(dtype), bias.to(dtype)).eval()
    images = images.to(dtype)
    return model, images, model(images).argmax(dim=1)


def thresholds(model, images, labels, order):
    """The least distance that flips each image: m / ||w_0 - w_1||_q, with q dual to the norm."""
    logits = model(images).detach()
    margin = (logits[:, 0] - logits[:, 1]).abs()
    return margin / torch.linalg.vector_norm(model.weight[0] - model.weight[1], ord=order).detach()


def dividing_eps(least):
    """A budget in the widest gap (as a ratio) between the middle thresholds, so that no sample is a close call."""
    ordered = least.sort().values[len(least) // 4 : -len(least) // 4]
    widest = int((ordered[1:] / ordered[:-1]).argmax())
    return float(ordered[widest] * ordered[widest + 1]) ** 0.5


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1; got 0"),
        ({"steps": 2.0}, "steps must be an integer of at least 1; got 2.0"),
        ({"restarts": True}, "restarts must be an integer of at least 1; got True"),
        ({"step_size": 0}, "step_size must be above 0, in pixel units; got 0"),
        ({"step_size": "fast"}, "step_size must be a number or a fraction such as '4/255', at least 0; got 'fast'"),
        ({"loss": "ce"}, "unknown loss 'ce'"),
        ({"random_start": "False"}, "random_start must be a bool; got 'False'"),
        ({"random_start": False, "restarts": 2}, "restarts must be 1 without random_start, all of them .* got 2"),
        ({"precision": "fp16"}, "precision must be 'float32' or 'bfloat16'; got 'fp16'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PGD(**options)


def test_the_registry_builds_what_the_names_say():
    assert set(ATTACKS) >= {"pgd", "fgsm"}
    assert ATTACKS["pgd"](steps=3) == PGD(steps=3)
    assert ATTACKS["fgsm"]() == FGSM()
    with pytest.raises(ValueError, match="unknown attack 'pdg'; did you mean pgd"):
        ATTACKS["pdg"]


def test_the_result_says_what_was_done():
    model, images, labels = linear_problem(n=4)
    result = PGD(steps=4, step_size="1/255")(model, images, labels, Linf("4/255"), seed=7, sample_ids="abcd")
    assert result.attack == {
        "name": "pgd",
        "steps": 4,
        "restarts": 1,
        "step_size": 1 / 255,
        "loss": "cross_entropy",
        "random_start": True,
        "precision": "float32",
        "seed": 7,
    }
    assert (result.norm, result.eps, result.eps_value) == ("Linf", "4/255", 4 / 255)
    assert result.sample_ids == tuple("abcd")
    assert len(result) == 4
    assert PGD(steps=4)(model, images, labels, L2("1/2")).attack["step_size"] == 2.5 * 0.5 / 4
    assert FGSM()(model, images, labels, L2("1/2")).attack["step_size"] == 0.5


def test_a_loss_of_ones_own_and_one_that_is_none():
    model, images, labels = linear_problem()

    def gap(logits, labels, targets):
        return -logits.gather(1, labels[:, None])[:, 0] + logits.sum(dim=1)

    result = PGD(loss=gap)(model, images, labels, Linf(0.2))
    assert (result.attack["loss"], result.asr) == ("gap", 1.0)
    with pytest.raises(ValueError, match=r"loss must return one value for each of the 40 samples; got \(\)"):
        PGD(loss=lambda z, y, t: z.sum())(model, images, labels, Linf(0.2))


def test_progress_counts_up_to_its_total():
    model, images, labels = linear_problem()
    for threat in (Linf("1e-6"), Linf(0.3)):
        seen = []

        def note(done, total, seen=seen):
            seen.append((done, total))

        PGD(steps=2, restarts=2)(model, images, labels, threat, batch_size=16, progress=note)
        assert seen == sorted(seen)
        assert seen[-1] == (80, 80)


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
