"""Basis vectors and keyed random signs."""

from __future__ import annotations

import pytest
import torch

from diffattn.sensitivity.directions import AUTO_PROBES, EXACT_LIMIT, directions, resolve_probes


def test_auto_is_exact_up_to_its_limit():
    assert resolve_probes("auto", EXACT_LIMIT) is None
    assert resolve_probes("auto", EXACT_LIMIT + 1) == AUTO_PROBES
    assert resolve_probes("exact", 10**9) is None
    assert resolve_probes(4, 10) == 4


@pytest.mark.parametrize("probes", [3, True, 2.0, "many", None])
def test_bad_probes(probes):
    with pytest.raises(ValueError, match="probes must be 'exact', 'auto' or an integer of at least 4"):
        resolve_probes(probes, 10)


def test_basis_is_complete():
    inputs = torch.zeros(2, 3, 2)
    chunks = list(directions(None, inputs, per_pass=4, sample_ids=[0, 1], key=()))
    assert [len(chunk) for chunk in chunks] == [4, 2]
    basis = torch.cat(chunks)
    assert basis.shape == (6, 2, 3, 2)
    for sample in range(2):
        assert torch.equal(basis[:, sample].flatten(1), torch.eye(6))


def test_signs_are_keyed_by_sample_and_key():
    inputs = torch.zeros(2, 3, 2)
    signs = torch.cat(list(directions(7, inputs, per_pass=3, sample_ids=["a", "b"], key=(0, "pixels"))))
    assert signs.shape == (7, 2, 3, 2)
    assert signs.abs().eq(1).all()
    assert signs.dtype == inputs.dtype
    again = torch.cat(list(directions(7, inputs[:1], per_pass=7, sample_ids=["b"], key=(0, "pixels"))))
    assert torch.equal(signs[:, 1:], again)
    other = torch.cat(list(directions(7, inputs[:1], per_pass=7, sample_ids=["b"], key=(1, "pixels"))))
    assert not torch.equal(again, other)


def test_signs_have_no_bias():
    signs = torch.cat(list(directions(64, torch.zeros(1, 400), per_pass=64, sample_ids=[0], key=())))
    assert abs(signs.mean().item()) < 4 / (64 * 400) ** 0.5
