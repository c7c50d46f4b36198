"""Shared fixtures: one thread, the real data's folder, browser-free by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(max(1, min(2, os.cpu_count() or 1)))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of real data sets; tests that need it skip where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("DIFFATTN_DATA", beside))
    if not (root / "cifar10" / "test.parquet").is_file():
        pytest.skip("no real data: set DIFFATTN_DATA to a folder that holds cifar10/test.parquet")
    return root
