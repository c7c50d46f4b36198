"""What the attacks take and what their results say: options, names, losses of one's own, progress."""

import pytest

from diffattn.attacks import ATTACKS, FGSM, PGD
from diffattn.threat_model import L2, Linf
from linear_models import linear_problem


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
