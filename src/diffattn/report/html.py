"""One self-contained HTML page that compares any number of audit records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from diffattn.audit.record import AuditRecord, read_record
from diffattn.files import write_atomic
from diffattn.report import comparison, panels, view
from diffattn.report.style import looks
from diffattn.report.text import distinct, number, percent, percent_interval, shorten, visible

Source = AuditRecord | str | os.PathLike[str]

MOST_ROWS = 400
DEFAULT_TITLE = "How sensitive is this attention?"


def write_report(records: Sequence[Source] | Source, out_path: str | Path, *, title: str | None = None) -> Path:
    """Write one HTML page that compares the records; it asks the network for nothing and runs no script.

    Args:
        records: records or record directories, one or more; the others are compared with the first.
        out_path: the page, such as "report.html"; its folder is made where it is missing.
        title: of the page.

    Returns:
        the page's path.

    Raises:
        ValueError: if there is no record, or one cannot be read; naming it.
    """
    sources = [records] if isinstance(records, AuditRecord | str | os.PathLike) else list(records)
    loaded = [one if isinstance(one, AuditRecord) else read_record(Path(one)) for one in sources]
    path = Path(out_path)
    write_atomic(path, render_report(loaded, title=title))
    return path


def render_report(records: Sequence[AuditRecord], *, title: str | None = None) -> str:
    """The page of `write_report` as text; the same records give the same text."""
    if not records:
        raise ValueError("records must hold at least one record; got none")
    names = distinct([record.model.name for record in records])
    look = looks(names)
    rows = comparison.settings(records)
    if len(records) == 1:
        sentences = [comparison.alone(rows, names[0])]
    else:
        sentences = [
            comparison.compare(0, place, rows, names, brief=len(records) > 3) for place in range(1, len(records))
        ]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=title or DEFAULT_TITLE,
            sentences=sentences,
            warnings=view.warnings(records, rows, names),
            models=view.model_views(records, look),
            settings=rows,
            galleries=view.galleries(records, look),
            **_sections(records, rows, look),
        )
    )


def _sections(records: Sequence[AuditRecord], rows: Sequence[comparison.Setting], look: Any) -> dict[str, Any]:
    pen = panels.Pen()
    readings = panels.readings(records)
    sensitivity = []
    for reading in readings:
        sensitivity.append(
            {
                "words": panels.reading_words(reading),
                "by": panels.reading_by(reading),
                "alignment": panels.alignment_panels(pen, records, look, reading),
                "gradients": panels.gradient_panels(pen, records, look, reading),
            }
        )
    return {
        "asr_panels": panels.asr_panels(pen, rows, look),
        "sensitivity": sensitivity,
        "lipschitz_panels": panels.lipschitz_panels(pen, records, look),
        "history_panels": panels.history_panels(pen, records, look),
    }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("diffattn.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=percent,
        interval=percent_interval,
        number=number,
        shorten=shorten,
        options=view.options_text,
        share=view.share_text,
    )
    environment.globals["most_rows"] = MOST_ROWS
    return environment


def _finalize(value: Any) -> Any:
    """What a template prints: text from a record loses its control characters; Markup is ours already."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
