"""Noise depends on its key alone; global generators are put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from diffattn.seeding import environment, keyed_generator, keyed_normal, keyed_uniform, seeded


def test_a_samples_noise_does_not_depend_on_its_batch() -> None:
    whole = keyed_uniform(["a", "b", "c"], (2, 3), 0, "pgd", 1)
    assert torch.equal(keyed_uniform(["c"], (2, 3), 0, "pgd", 1)[0], whole[2])
    assert torch.equal(keyed_uniform(["b", "a"], (2, 3), 0, "pgd", 1)[1], whole[0])
    assert whole.dtype == torch.float64


@pytest.mark.parametrize("other", [(1, "pgd", 1), (0, "fgsm", 1), (0, "pgd", 2), (0, "pgd", "1"), (0, "pg", "d1")])
def test_every_part_of_the_key_counts(other: tuple) -> None:
    assert not torch.equal(keyed_uniform(["a"], (8,), 0, "pgd", 1), keyed_uniform(["a"], (8,), *other))


def test_ids_of_another_type_are_other_samples() -> None:
    assert not torch.equal(keyed_uniform([1], (8,), 0), keyed_uniform(["1"], (8,), 0))


def test_the_stream_is_the_same_on_every_machine() -> None:
    """Golden numbers: a change here changes every published result."""
    assert keyed_generator(0, "pgd", "digits/17", 0).integers(2**32, size=3).tolist() == [
        3683508298,
        244145666,
        3523000765,
    ]


def test_distributions() -> None:
    uniform = keyed_uniform(range(200), (50,), 3)
    assert -1 <= uniform.min() < -0.99
    assert 0.99 < uniform.max() < 1
    assert abs(uniform.mean()) < 0.02
    normal = keyed_normal(range(200), (50,), 3)
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03


def test_seeded_is_reproducible_and_puts_everything_back() -> None:
    def draw() -> tuple:
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    expected = draw()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    with seeded(0, "a"):
        inside = draw()
    assert draw() == expected
    with seeded(0, "a"):
        assert draw() == inside
    with seeded(0, "b"):
        assert draw() != inside
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="stop"), seeded(0):
        raise RuntimeError("stop")
    assert torch.equal(torch.get_rng_state(), state)


def test_environment_names_versions_and_threads() -> None:
    found = environment()
    assert torch.__version__.startswith(found["torch"])
    assert found["threads"] == torch.get_num_threads()
    assert {"diffattn", "python", "numpy", "device"} <= set(found)
