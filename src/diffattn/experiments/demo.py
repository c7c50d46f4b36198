"""The demo: a softmax ViT and a differential ViT trained on scikit-learn's digits, audited and set side by side."""

from __future__ import annotations

from pathlib import Path

from diffattn.audit.record import AuditRecord
from diffattn.checks import from_mapping
from diffattn.experiments.study import Report, Study, run_study
from diffattn.presets import read_preset
from diffattn.report.html import write_report


def run_demo(
    out: str | Path, *, progress: bool = False, report: Report | None = None
) -> tuple[list[AuditRecord], Path]:
    """Run the demo, or finish one that was interrupted.

    Args:
        out: folder of the runs and of the page.
        progress: show progress bars.
        report: called with a line of text as each part begins.

    Returns:
        the two records, softmax first, and the path of the page.
    """
    study = from_mapping(Study, read_preset("demo"), what="preset demo")
    runs = run_study(study, out, command="diffattn demo", progress=progress, report=report)
    records = [record for found in runs.values() for record in found]
    return records, write_report(records, Path(out) / "report.html")
