"""ViT against DiffViT on CIFAR-10, shallow and deeper: does differential attention break more often?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diffattn.audit.record import AuditRecord
from diffattn.checks import from_mapping
from diffattn.experiments.findings.base import FINDINGS
from diffattn.experiments.study import Report, Runs, Study, run_study
from diffattn.files import write_atomic
from diffattn.presets import read_preset
from diffattn.report.html import write_report
from diffattn.statistics import Interval, mean_interval

COMMAND = "diffattn finding first-light"
_LIMITS = {"cos_theta": (-1, 1), "negative_share": (0, 1), "norm_combined": (0,)}


@FINDINGS.register("first-light")
def first_light(
    out: str | Path, *, root: str | None = None, progress: bool = False, report: Report | None = None
) -> Path:
    """Train and audit every (model, depth, seed) of the preset, then write `summary.md` and a page.

    Args:
        out: folder of the runs; what is there already is not done again.
        root: folder of the data sets; DIFFATTN_DATA unless given.
        progress: show progress bars.
        report: called with a line of text as each part begins.

    Returns:
        the path of the summary.
    """
    study = from_mapping(Study, read_preset("first_light"), what="preset first_light")
    runs = run_study(study, out, command=COMMAND, root=root, progress=progress, report=report)
    write_report([records[0] for records in runs.values()], Path(out) / "report.html")
    path = Path(out) / "summary.md"
    write_atomic(path, summary(runs, study.seeds))
    return path


def summary(runs: Runs, seeds: Sequence[int]) -> str:
    """The tables as Markdown: means over seeds with 95 % t intervals, one line a model and depth."""
    return "\n".join(
        [
            f"Made by `{COMMAND}`; seeds {', '.join(map(str, seeds))}. Every figure is a mean over seeds with its "
            "95 % t interval.",
            "",
            *_attack_table(runs),
            "",
            *_layer_table(runs),
            "",
        ]
    )


def _attack_table(runs: Runs) -> list[str]:
    first = next(iter(runs.values()))[0]
    lines = [
        "| model | D | clean accuracy | "
        + " | ".join(f"ASR at {facts.eps}" for facts in first.attacks)
        + " | clean-correct |",
        "|---|---|---|" + "---|" * (len(first.attacks) + 1),
    ]
    reference: dict[int | None, list[AuditRecord]] = {}
    for (label, depth), records in _by_depth(runs):
        shares = [show(mean_interval(values), 0, 1) for values in _columns(records)]
        counts = ", ".join(str(record.clean.correct) for record in records)
        lines.append(f"| {label} | {depth} | {' | '.join(shares)} | {counts} of {records[0].clean.n} |")
        base = reference.setdefault(depth, records)
        if base is not records:
            pairs = zip(_columns(records), _columns(base), strict=True)
            gaps = [show(mean_interval(np.subtract(own, other)), -1, 1) for own, other in pairs]
            name = next(one for (one, at), found in runs.items() if at == depth and found is base)
            lines.append(f"| {label} − {name}, by seed | {depth} | {' | '.join(gaps)} | |")
    return lines


def _columns(records: Sequence[AuditRecord]) -> list[list[float]]:
    """Clean accuracy, then the ASR of each attack: a value a seed."""
    clean = [record.clean.accuracy for record in records]
    return [
        clean,
        *([_number(one.asr) for one in column] for column in zip(*(r.attacks for r in records), strict=True)),
    ]


def _layer_table(runs: Runs) -> list[str]:
    lines = [
        "| model | D | layer | cos θ | share cos θ < 0 | λρ | Jacobian norm of the combined map "
        "| loss gradient through it, to the pixels | Lipschitz estimate, map | Lipschitz estimate, output |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (label, depth), records in _by_depth(runs):
        for index in range(depth or 0):
            cells = [_over_seeds(records, index, name) for name in ("cos_theta", "negative_share", "lambda_rho")]
            cells.append(_over_seeds(records, index, "norm_combined"))
            cells.append(_over_seeds(records, index, "norm_combined", wrt="pixels", reading="loss"))
            cells += [_lipschitz_over_seeds(records, index, of) for of in ("map", "output")]
            lines.append(f"| {label} | {depth} | {index} | {' | '.join(cells)} |")
    return lines


def _by_depth(runs: Runs) -> list[tuple[tuple[str, int | None], list[AuditRecord]]]:
    return sorted(runs.items(), key=lambda item: item[0][1] or 0)


def _over_seeds(
    records: Sequence[AuditRecord], index: int, name: str, *, wrt: str = "input", reading: str = "jacobian"
) -> str:
    found = [
        getattr(row, name)
        for record in records
        for row in record.sensitivity
        if (row.index, row.head, row.wrt, row.reading, row.lambda_) == (index, "all", wrt, reading, "frozen")
    ]
    values = [figure.value for figure in found if figure is not None and figure.value is not None]
    return show(mean_interval(values), *_LIMITS.get(name, ())) if values else "–"


def _lipschitz_over_seeds(records: Sequence[AuditRecord], index: int, of: str) -> str:
    values = [
        _number(row.mean.value)
        for record in records
        for row in record.lipschitz
        if (row.index, row.of, row.radius) == (index, of, 0.0)
    ]
    return show(mean_interval(values), 0) if values else "–"


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def show(interval: Interval, low: float = -np.inf, high: float = np.inf) -> str:
    """`0.512 [0.490, 0.534]`, cut to what is possible; the bare number where one seed gives no interval."""
    if np.isnan(interval.low):
        return f"{interval.value:.3g}"
    return f"{interval.value:.3g} [{max(low, interval.low):.3g}, {min(high, interval.high):.3g}]"
