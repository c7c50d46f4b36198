"""What a finding is: a name, and a function that leaves its runs, records, page and table in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from diffattn.experiments.study import Report
from diffattn.registry import Registry


class Finding(Protocol):
    """Runs a study, resuming what is there; returns the path of its summary."""

    def __call__(
        self,
        out: str | Path,
        *,
        root: str | None = None,
        progress: bool = False,
        report: Report | None = None,
    ) -> Path:
        """Run it in the folder `out`, with the data sets under `root`."""
        ...


FINDINGS: Registry[Finding] = Registry("finding")
