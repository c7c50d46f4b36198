"""The record directory of an audit: written atomically, read as data from anywhere. Imports no torch.

It holds

- `record.json`: the figures, as the dataclass `Findings` says, in strict JSON with a format version;
- `samples.parquet`: what became of every sample under every attack;
- `sensitivity.parquet`: the figures that the sensitivity's summaries come from (may be absent);
- `examples.safetensors`: images and attention maps of the examples (absent when there is none);
- `history.jsonl`: the training history, one JSON object a line (absent when the model came without).
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
from safetensors import numpy as safetensors_numpy

from diffattn.audit.facts import FORMAT_VERSION, STATUSES, Example, Findings
from diffattn.audit.plain import from_plain, to_plain
from diffattn.audit.tensors import check_examples, read_tensors
from diffattn.files import read_json, write_atomic, write_json_atomic

RECORD = "record.json"
SAMPLES = "samples.parquet"
SENSITIVITY = "sensitivity.parquet"
EXAMPLES = "examples.safetensors"
HISTORY = "history.jsonl"

_MIB = 2**20
_LARGEST_FILE = {
    RECORD: 64 * _MIB,
    SAMPLES: 1024 * _MIB,
    SENSITIVITY: 1024 * _MIB,
    EXAMPLES: 512 * _MIB,
    HISTORY: 64 * _MIB,
}
_MOST_ROWS = 50_000_000
SAMPLE_COLUMNS = (
    "sample_id",
    "label",
    "clean_prediction",
    "attack",
    "norm",
    "eps",
    "status",
    "prediction",
    "distance",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditRecord(Findings):
    """The findings with the tables and tensors beside them.

    Args:
        samples: a row per sample and attack, with at least the columns of `SAMPLE_COLUMNS`.
        sensitivity_table: the figures that the summaries in `sensitivity` come from; any columns.
        tensors: float32 arrays by name: `{key}.clean` and `{key}.adversarial` [c, h, w] in [0, 1],
            `{key}.clean_map_{b}` and `{key}.adversarial_map_{b}` [queries, keys], b = 1..B: the branches' maps,
            each times its signed weight, mean over heads. Their sum over b is the combined map.
        history: a dict per epoch of training: "epoch" and whatever was logged.
    """

    samples: pl.DataFrame
    sensitivity_table: pl.DataFrame | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    history: tuple[dict[str, Any], ...] = ()

    @property
    def findings(self) -> Findings:
        """What goes into `record.json`."""
        return Findings(**{item.name: getattr(self, item.name) for item in fields(Findings)})

    def branch_maps(self, example: Example, which: Literal["clean", "adversarial"]) -> list[np.ndarray]:
        """The weighted branch maps of an example, in order; empty where none was kept."""
        found = []
        while (name := f"{example.key}.{which}_map_{len(found) + 1}") in self.tensors:
            found.append(self.tensors[name])
        return found


def write_record(directory: str | Path, record: AuditRecord) -> Path:
    """Write a record directory; `record.json` goes first and comes back last, so that no crash leaves a mixture.

    Args:
        directory: made where it is missing; a record in it is replaced.
        record: all of it is checked as `read_record` checks it, before anything is written.

    Returns:
        the directory.

    Raises:
        ValueError: naming the file and the key that does not hold, such as a figure that is not finite.
    """
    directory = Path(directory)
    plain = to_plain(record.findings, where=RECORD)
    findings = _findings(plain, directory / RECORD)
    tensors = {name: np.ascontiguousarray(value) for name, value in record.tensors.items()}
    _check_samples(record.samples, directory / SAMPLES)
    check_examples(findings.examples, tensors, directory / EXAMPLES)
    lines = [to_plain(entry, where=f"{HISTORY} line {number}") for number, entry in enumerate(record.history, 1)]
    for number, entry in enumerate(lines, 1):
        _check_history(entry, f"{directory / HISTORY} line {number}")

    (directory / RECORD).unlink(missing_ok=True)
    write_atomic(directory / SAMPLES, _parquet(record.samples))
    _write_or_remove(
        directory / SENSITIVITY, None if record.sensitivity_table is None else _parquet(record.sensitivity_table)
    )
    _write_or_remove(directory / EXAMPLES, safetensors_numpy.save(tensors) if tensors else None)
    history = "".join(json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n" for entry in lines)
    _write_or_remove(directory / HISTORY, history or None)
    write_json_atomic(directory / RECORD, plain)
    return directory


def read_record(directory: str | Path) -> AuditRecord:
    """Read a record directory; its content is taken as data from anywhere and checked throughout.

    Raises:
        ValueError: if it is no record directory, a newer release wrote it, or a file is damaged, foreign or does
            not fit the others; naming the file and the key.
    """
    directory = Path(directory)
    if not (directory / RECORD).is_file():
        what = "it has no" if directory.is_dir() else "there is no such directory with a"
        raise ValueError(f"{directory} is no record directory: {what} {RECORD}")
    _check_size(directory / RECORD)
    findings = _findings(read_json(directory / RECORD), directory / RECORD)
    if not (directory / SAMPLES).is_file():
        raise ValueError(f"{directory} is no whole record directory: it has no {SAMPLES}")
    samples = _read_parquet(directory / SAMPLES)
    _check_samples(samples, directory / SAMPLES)
    tensors = {}
    if (directory / EXAMPLES).exists():
        _check_size(directory / EXAMPLES)
        tensors = read_tensors(directory / EXAMPLES)
    check_examples(findings.examples, tensors, directory / EXAMPLES)
    return AuditRecord(
        **{name: getattr(findings, name) for name in Findings.__dataclass_fields__},
        samples=samples,
        sensitivity_table=_read_parquet(directory / SENSITIVITY) if (directory / SENSITIVITY).exists() else None,
        tensors=tensors,
        history=read_history(directory / HISTORY) if (directory / HISTORY).exists() else (),
    )


def _findings(plain: Any, path: Path) -> Findings:
    if not isinstance(plain, dict):
        raise ValueError(f"{path} must hold an object; got {type(plain).__name__}")
    version = plain.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"{path} is no audit record: its format_version must be an integer of at least 1; got {version!r}"
        )
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {version}: a newer release wrote it; this one reads up to {FORMAT_VERSION}"
        )
    return from_plain(Findings, plain, where=f"{path}: record")


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} must be a file; it is something else, such as a folder")
    size, largest = path.stat().st_size, _LARGEST_FILE[path.name]
    if size > largest:
        raise ValueError(f"{path} must be at most {largest} bytes; it has {size}")


def _check_samples(samples: pl.DataFrame, path: Path) -> None:
    missing = [name for name in SAMPLE_COLUMNS if name not in samples.columns]
    if missing:
        raise ValueError(f"{path} must have the columns {', '.join(SAMPLE_COLUMNS)}; it lacks {', '.join(missing)}")
    for name in ("sample_id", "attack", "norm", "eps", "status"):
        if samples[name].dtype != pl.String:
            raise ValueError(f"{path} must hold text in the column {name}; got {samples[name].dtype}")
    strange = samples.filter(~pl.col("status").is_in(STATUSES) | pl.col("status").is_null())["status"]
    if len(strange):
        raise ValueError(f"{path} must hold {', '.join(STATUSES)} in the column status; got {strange[0]!r:.60}")


def _check_history(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object; got {type(entry).__name__}")
    for key, value in entry.items():
        if not (value is None or isinstance(value, str | bool | int | float)):
            raise ValueError(f"{where}: {key!r:.60} must be a number, text or null; got {type(value).__name__}")
        if isinstance(value, int) and abs(value) > 2**63:
            raise ValueError(f"{where}: {key!r:.60} must be a number of at most 64 bits")


def _parquet(frame: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def _write_or_remove(path: Path, content: bytes | str | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        write_atomic(path, content)


def _read_parquet(path: Path) -> pl.DataFrame:
    _check_size(path)
    try:
        rows = pl.scan_parquet(path, glob=False).select(pl.len()).collect().item()
        if rows > _MOST_ROWS:
            raise ValueError(f"{path} must have at most {_MOST_ROWS} rows; it has {rows}")
        return pl.read_parquet(path, glob=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {error!s:.200}") from error


def read_history(path: Path) -> tuple[dict[str, Any], ...]:
    """The lines of a history file, each checked; an error names the line."""
    _check_size(path)
    entries = []
    try:
        lines = path.read_bytes().decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text; {error}") from error
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        try:
            entry = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} must be strict JSON; {error}") from error
        _check_history(entry, where)
        entries.append(entry)
    return tuple(entries)


def _refuse(text: str) -> Any:
    raise ValueError(f"it holds {text}")
