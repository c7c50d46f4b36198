"""Randomness keyed by what it is for, never by its place in a batch; scoped global seeds; the environment."""

from __future__ import annotations

import hashlib
import os
import platform
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata

import numpy as np
import torch
from torch import Tensor


def keyed_generator(*key: int | str) -> np.random.Generator:
    """A counter-based generator (Philox) whose stream depends on the key's parts alone.

    `keyed_generator(seed, "pgd", sample_id, restart)` gives the same numbers on every machine, in every
    batch and in every order of calls.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))


def keyed_uniform(sample_ids: Sequence[int | str], shape: Sequence[int], *key: int | str) -> Tensor:
    """Uniform noise in [-1, 1): one float64 tensor [len(sample_ids), *shape], each row keyed by its sample."""
    rows = [keyed_generator(*key, sample).uniform(-1.0, 1.0, size=tuple(shape)) for sample in sample_ids]
    return torch.from_numpy(np.stack(rows))


def keyed_normal(sample_ids: Sequence[int | str], shape: Sequence[int], *key: int | str) -> Tensor:
    """Standard normal noise: one float64 tensor [len(sample_ids), *shape], each row keyed by its sample."""
    rows = [keyed_generator(*key, sample).standard_normal(size=tuple(shape)) for sample in sample_ids]
    return torch.from_numpy(np.stack(rows))


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed torch's, numpy's and random's global generators by the key inside the block, and put them back."""
    seed = int(keyed_generator(*key).integers(2**32))
    states = (random.getstate(), np.random.get_state())  # noqa: NPY002 - libraries read the global state
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def environment() -> dict[str, str | int]:
    """The versions and hardware that a result depends on, for the record."""
    packages = ("diffattn", "torch", "timm", "numpy", "lightning-fabric")
    found: dict[str, str | int] = {name: metadata.version(name) for name in packages if _is_installed(name)}
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    )
    return found | {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count() or 1,
    }


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
