"""The same attack as torchattacks' and foolbox's: the same points, and never a weaker verdict."""

import pytest
import torch
from torch import nn

from diffattn.attacks import FGSM, PGD
from diffattn.threat_model import L2, Linf
from peers import foolbox_pgd, torchattacks_fgsm, torchattacks_pgd


@pytest.fixture(scope="module")
def trained():
    """A small network that has learnt noisy prototypes, and held-out images of them."""
    torch.manual_seed(0)
    prototypes = torch.rand(5, 3, 6, 6)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(288, 32), nn.GELU(), nn.Linear(32, 5)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def draw(n):
        labels = torch.randint(5, (n,))
        return (prototypes[labels] + 0.5 * torch.randn(n, 3, 6, 6)).clamp(0, 1), labels

    for _ in range(60):
        images, labels = draw(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = draw(96)
    model.eval()
    with torch.no_grad():
        assert (model(images).argmax(dim=1) == labels).float().mean() > 0.8
    return model, images, labels


CASES = [
    (torchattacks_pgd, Linf("32/255"), "6/255"),
    (torchattacks_pgd, L2(0.9), 0.2),
    (foolbox_pgd, Linf("32/255"), "6/255"),
    (foolbox_pgd, L2(0.9), 0.2),
]


@pytest.mark.parametrize(("peer", "threat", "step_size"), CASES)
def test_what_a_peer_breaks_is_broken(trained, peer, threat, step_size):
    model, images, labels = trained
    attack = PGD(steps=10, step_size=step_size, random_start=False)
    result = attack(model, images, labels, threat)
    theirs = peer(
        model, images, labels, norm=threat.name, eps=threat.eps, step_size=attack._step_size(threat), steps=10
    )
    wrong = (model(theirs).argmax(dim=1) != labels).numpy()
    clean_correct = result.status != "clean_wrong"
    assert 0.1 * clean_correct.sum() < (wrong & clean_correct).sum() < 0.9 * clean_correct.sum()
    # They score the last point only, we score every point: never fewer, hardly more.
    missed = wrong & (result.status == "survived")
    extra = ~wrong & (result.status == "broken")
    assert missed.sum() == 0
    assert extra.sum() <= 2


@pytest.mark.parametrize(("peer", "threat", "step_size"), CASES)
def test_survivors_end_where_a_peer_ends(trained, peer, threat, step_size):
    model, images, labels = trained
    attack = PGD(steps=3, step_size=step_size, random_start=False)
    result = attack(model, images, labels, threat)
    theirs = peer(
        model, images, labels, norm=threat.name, eps=threat.eps, step_size=attack._step_size(threat), steps=3
    )
    stands = torch.from_numpy(result.status == "survived")
    apart = (result.adversarial - theirs).abs().flatten(1).amax(dim=1)[stands]
    # The loss still rises after three steps nearly everywhere, so the last point is the one that is kept.
    assert stands.sum() > 20
    assert (apart < 1e-5).float().mean() > 0.95


def test_fgsm_is_torchattacks_fgsm(trained):
    model, images, labels = trained
    result = FGSM()(model, images, labels, Linf("8/255"))
    theirs = torchattacks_fgsm(model, images, labels, eps=8 / 255)
    attacked = torch.from_numpy(result.status != "clean_wrong")
    torch.testing.assert_close(result.adversarial[attacked], theirs[attacked], rtol=0, atol=1e-6)
    wrong = (model(theirs).argmax(dim=1) != labels).numpy()
    assert (wrong[attacked.numpy()] == (result.status == "broken")[attacked.numpy()]).all()
