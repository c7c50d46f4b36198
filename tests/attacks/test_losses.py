import math

import pytest
import torch

from diffattn.attacks.losses import LOSSES, MIN_CLASSES, choose_loss

LOGITS = torch.tensor([[2.0, 5.0, 1.0, -3.0], [-1.0, -9.0, -4.0, -2.0]])
LABELS = torch.tensor([0, 0])
TARGETS = torch.tensor([1, 3])


def test_cross_entropy_is_the_log_of_the_softmax():
    log_p = LOGITS.double().log_softmax(dim=1).tolist()
    expected = [-log_p[0][0], -log_p[1][0]]
    assert LOSSES["cross_entropy"](LOGITS, LABELS, None).tolist() == pytest.approx(expected, rel=1e-6)
    expected = [log_p[0][1], log_p[1][3]]
    assert LOSSES["cross_entropy"](LOGITS, LABELS, TARGETS).tolist() == pytest.approx(expected, rel=1e-6)


def test_margin_masks_by_minus_infinity():
    # All logits of the second row are negative: a mask of 0 would call it broken by 1.
    assert LOSSES["margin"](LOGITS, LABELS, None).tolist() == [3.0, -1.0]
    assert LOSSES["margin"](LOGITS, LABELS, TARGETS).tolist() == [3.0, -1.0]


def test_dlr_in_closed_form():
    # Sorted: 5, 2, 1, -3 and -1, -2, -4, -9.
    assert LOSSES["dlr"](LOGITS, LABELS, None).tolist() == pytest.approx([3 / 4, -1 / 3])
    expected = [3 / (5 - (1 - 3) / 2), -1 / (-1 - (-4 - 9) / 2)]
    assert LOSSES["dlr"](LOGITS, LABELS, TARGETS).tolist() == pytest.approx(expected)


def test_dlr_does_not_see_a_shift_or_a_scale():
    logits = LOGITS.double()
    for targets in (None, TARGETS):
        before = LOSSES["dlr"](logits, LABELS, targets)
        torch.testing.assert_close(LOSSES["dlr"](1000 * logits + 1000, LABELS, targets), before)


def test_dlr_counts_its_classes():
    with pytest.raises(ValueError, match="the untargeted dlr loss needs at least 3 classes; got 2"):
        LOSSES["dlr"](LOGITS[:, :2], LABELS, None)
    with pytest.raises(ValueError, match="the targeted dlr loss needs at least 4 classes; got 3"):
        LOSSES["dlr"](LOGITS[:, :3], LABELS, torch.tensor([1, 1]))


@pytest.mark.parametrize("classes", [2, 3, 4, 1000])
@pytest.mark.parametrize("targeted", [False, True])
def test_dlr_is_replaced_only_where_it_lacks_classes(classes, targeted):
    loss, flag = choose_loss("dlr", num_classes=classes, targeted=targeted)
    needed = 4 if targeted else 3
    assert loss is LOSSES["dlr" if classes >= needed else "margin"]
    assert (flag is None) == (classes >= needed)
    if flag:
        kind = "targeted" if targeted else "untargeted"
        assert flag == f"loss_replaced: {kind} dlr needs {needed} classes, the model has {classes}; margin was used"


def test_an_unknown_loss_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown loss 'marjin'; did you mean margin"):
        choose_loss("marjin", num_classes=3, targeted=False)


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("targeted", [False, True])
def test_every_loss_gives_one_differentiable_value_a_sample(name, targeted):
    classes = max(2, MIN_CLASSES.get(name, (2, 2))[targeted])
    logits = torch.randn(6, classes, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(6) % classes
    targets = (labels + 1) % classes if targeted else None
    values = LOSSES[name](logits, labels, targets)
    assert values.shape == (6,)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name](z, labels, targets), logits)
    # It grows as the sample moves towards the attacker's goal, and a sample does not see its batch-mates.
    towards = logits.detach().clone()
    goal, sign = (labels, -1) if targets is None else (targets, 1)
    towards[torch.arange(6), goal] += sign * 0.01
    assert (LOSSES[name](towards, labels, targets) > values).sum() >= 5
    alone = LOSSES[name](logits[2:3], labels[2:3], None if targets is None else targets[2:3])
    torch.testing.assert_close(alone[0], values[2], rtol=0, atol=0)


def test_cross_entropy_saturates_where_margin_does_not():
    logits = (1000 * LOGITS).requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES["cross_entropy"](logits, torch.tensor([1, 0]), None).sum(), logits)
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(LOSSES["margin"](logits, torch.tensor([1, 0]), None).sum(), logits)
    assert gradient.abs().sum() == 4
    assert math.isfinite(float(gradient.sum()))


def test_cross_entropy_keeps_the_true_classs_gradient_of_a_confident_sample():
    """At logits (20, 0, 0) the gradient is p_j off the class and minus their sum in it; float32 alone gives 0."""
    logits = torch.tensor([[20.0, 0.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(LOSSES["cross_entropy"](logits, torch.tensor([0]), None).sum(), logits)
    p = math.exp(-20) / (1 + 2 * math.exp(-20))
    torch.testing.assert_close(gradient, torch.tensor([[-2 * p, p, p]]), rtol=1e-5, atol=0)
