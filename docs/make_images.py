"""Draw the README's picture from the demo's records: `make demo`, then `python docs/make_images.py runs/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from diffattn.audit.record import read_record
from diffattn.report.figures import asr_figure
from diffattn.report.style import looks


def main() -> None:
    """Write `docs/images/demo.png` beside this script."""
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    records = [read_record(runs / name / "audit") for name in ("vit", "diffvit")]
    look = looks([record.model.name for record in records])
    figure = asr_figure(
        [(one, record.attacks) for one, record in zip(look, records, strict=True)],
        title="PGD-20 on digits: attack success rate",
    )
    path = Path(__file__).parent / "images" / "demo.png"
    figure.savefig(path, dpi=160)
    print(path)


if __name__ == "__main__":
    main()
