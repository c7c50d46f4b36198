"""Files that are whole or absent: atomic writes and strict JSON. Imports no torch."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_atomic(path: str | Path, content: bytes | str) -> None:
    """Write a file so that a reader, or a run resumed after a crash, sees the old content or all of the new.

    The bytes go to a temporary file beside `path`, are flushed to disk, and take its name by `os.replace`.

    Args:
        path: the file; its folder is made where it is missing.
        content: bytes, or text to be written as UTF-8.

    Raises:
        OSError: if the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json_atomic(path: str | Path, value: Any) -> None:
    """Write strict JSON (no NaN, no infinity), indented, atomically.

    Raises:
        ValueError: if `value` holds a NaN or an infinity, naming the file.
        TypeError: if it holds something that JSON has no word for.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise ValueError(f"{path} must hold finite numbers only; {error}") from error
    write_atomic(path, text + "\n")


def read_json(path: str | Path) -> Any:
    """Read strict JSON: NaN and Infinity, which Python's reader would take, are an error.

    Raises:
        ValueError: if the file is not strict JSON, naming it.
        OSError: if it cannot be read.
    """
    path = Path(path)
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be strict JSON; {error}") from error


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
