"""Where encoded images come from: which Parquet files a name and a split mean, and the rows they hold."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("train", "val", "validation", "test")
BATCH_ROWS = 256
MAX_LABEL = 1_000_000


class Source(NamedTuple):
    """The files of one split, and the prefix of its sample ids."""

    name: str
    split: str
    prefix: str
    files: tuple[Path, ...]


class Row(NamedTuple):
    """One encoded image: its bytes, or None where the row has none."""

    content: bytes | None
    label: int


def data_root(root: str | Path | None, *, name: str) -> Path:
    """The folder of the data sets: `root`, or the environment variable DIFFATTN_DATA.

    Raises:
        ValueError: if neither is given, or the folder does not exist.
    """
    given = root if root is not None else os.environ.get("DIFFATTN_DATA") or None
    if given is None:
        raise ValueError(
            f"data {name!r} needs the folder that holds {name}/: give root, or set the environment variable "
            "DIFFATTN_DATA"
        )
    folder = Path(given)
    if not folder.is_dir():
        origin = "root" if root is not None else "DIFFATTN_DATA"
        raise ValueError(
            f"data {name!r}: {origin} must be a folder (or set DIFFATTN_DATA); there is none at {folder}"
        )
    return folder


def find_registered(name: str, split: str, root: str | Path | None, *, aliases: dict[str, str]) -> Source:
    """The file `{root}/{name}/{split}.parquet`; where it is missing, the split's alias is tried.

    Raises:
        ValueError: if no such file exists, naming the path looked at and the splits that exist.
    """
    folder = data_root(root, name=name) / name
    for one in (split, aliases.get(split)):
        path = folder / f"{one}.parquet"
        if one is not None and path.is_file():
            return Source(name, one, f"{name}/{one}", (path,))
    found = sorted(path.stem for path in folder.glob("*.parquet"))
    raise ValueError(
        f"data {name!r} has no split {split!r}: there is no {folder / f'{split}.parquet'} "
        f"(splits there: {', '.join(found) or 'none'}; the folder comes from root or DIFFATTN_DATA)"
    )


def find_path(path: Path, split: str) -> Source:
    """A `.parquet` file, or those of a folder that belong to `split`.

    A file is one split, called by the file's stem whatever `split` is. In a folder, and in its
    subfolder `data`, the files of a split are `{split}.parquet` and `{split}-*.parquet`; where no file is named
    for any split, all are read.

    Raises:
        ValueError: if there is no such file or folder, or no file of that split in it.
    """
    if path.is_file():
        return Source(str(path), path.stem, path.stem, (path,))
    if not path.is_dir():
        raise ValueError(f"there is no data at {path}")
    files = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
    if not files:
        raise ValueError(f"data folder {path} holds no .parquet file")
    chosen = [file for file in files if _split_of(file) == split]
    if not chosen and all(_split_of(file) not in SPLITS for file in files):
        chosen = files
    if not chosen:
        names = ", ".join(file.name for file in files[:8])
        raise ValueError(f"data folder {path} has no file of the split {split!r}; it holds {names}")
    return Source(str(path), split, f"{path.resolve().name}/{split}", tuple(chosen))


def _split_of(file: Path) -> str:
    return file.stem.split("-", maxsplit=1)[0]


def read_class_names(source: Source) -> list[str]:
    """The class names in the schema's Hugging Face metadata, or the class indices as text without any.

    Raises:
        ValueError: if a file is no Parquet file, has no `image` or `label` column of the convention's type, a
            label is missing, negative, beyond the names or, without names, above 1000000, the files disagree,
            or there are no rows.
    """
    named: list[list[str] | None] = []
    highest, rows = -1, 0
    for path in source.files:
        file = open_parquet(path)
        named.append(_names_in_metadata(file.schema_arrow.metadata, path))
        rows += file.metadata.num_rows
        if file.metadata.num_rows:
            highest = max(highest, int(_labels(_read(file, path, ["label"]), path).max()))
    if rows == 0:
        raise ValueError(f"data {source.name!r} is empty: {_listed(source.files)} holds no rows")
    if any(names != named[0] for names in named):
        raise ValueError(f"data {source.name!r}: {_listed(source.files)} do not have the same class names")
    if named[0] is None and highest > MAX_LABEL:
        raise ValueError(
            f"labels of {source.name!r} without class names must be at most {MAX_LABEL}; got {highest}"
        )
    names = named[0] if named[0] is not None else [str(index) for index in range(highest + 1)]
    if highest >= len(names):
        raise ValueError(f"labels must be below the {len(names)} class names of {source.name!r}; got {highest}")
    return names


def iterate_rows(source: Source, limit: int | None) -> Iterator[list[Row]]:
    """The first `limit` rows (all without one), a chunk at a time; the columns have been checked before."""
    left = limit if limit is not None else sum(open_parquet(path).metadata.num_rows for path in source.files)
    for path in source.files:
        if left <= 0:
            return
        try:
            for batch in open_parquet(path).iter_batches(batch_size=BATCH_ROWS, columns=["image", "label"]):
                chunk = batch.slice(0, left)
                left -= chunk.num_rows
                labels = chunk.column("label").to_pylist()
                yield [Row(*pair) for pair in zip(_contents(chunk.column("image")), labels, strict=True)]
                if left <= 0:
                    break
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of images and labels.

    Raises:
        ValueError: if it is none, or a column is missing or of another type.
    """
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error
    schema = file.schema_arrow
    for column in ("image", "label"):
        if schema.names.count(column) != 1:
            raise ValueError(f"{path} must have one column {column!r}; it has {', '.join(schema.names)}")
    kind = schema.field("image").type
    if pa.types.is_struct(kind):
        kind = kind.field("bytes").type if kind.get_field_index("bytes") >= 0 else kind
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise ValueError(
            f"column 'image' of {path} must be a struct with 'bytes', or binary; got {schema.field('image').type}"
        )
    if not pa.types.is_integer(schema.field("label").type):
        raise ValueError(f"column 'label' of {path} must be an integer; got {schema.field('label').type}")
    return file


def _read(file: pq.ParquetFile, path: Path, columns: list[str]) -> pa.Table:
    try:
        return file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def _labels(table: pa.Table, path: Path) -> np.ndarray:
    column = table.column("label")
    if column.null_count:
        raise ValueError(f"column 'label' of {path} must have no missing values; got {column.null_count} missing")
    labels = column.to_numpy()
    if labels.min() < 0:
        raise ValueError(
            f"column 'label' of {path} must be at least 0; got {labels.min()} in row {labels.argmin()}"
        )
    if labels.max() > np.iinfo(np.int32).max:
        raise ValueError(f"column 'label' of {path} must be class indices; got {labels.max()}")
    return labels


def _contents(column: pa.Array) -> list[bytes | None]:
    if isinstance(column, pa.StructArray):
        return [None if value is None else value["bytes"] for value in column.to_pylist()]
    return column.to_pylist()


def _names_in_metadata(metadata: dict[bytes, bytes] | None, path: Path) -> list[str] | None:
    if not metadata or b"huggingface" not in metadata:
        return None
    try:
        found: Any = json.loads(metadata[b"huggingface"])
        for key in ("info", "features", "label"):
            found = found[key]
        names = found.get("names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the 'huggingface' metadata of {path} must describe 'label'; {error!r}") from error
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the class names in the metadata of {path} must be a list of texts; got {names!r:.80}")
    return names


def _listed(files: Sequence[Path]) -> str:
    return ", ".join(str(file) for file in files[:4]) + (" ..." if len(files) > 4 else "")
