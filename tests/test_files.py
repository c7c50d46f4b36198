import json
import os
import stat

import pytest

from diffattn import files


def test_write_atomic_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.write_atomic(path, "first, and longer")
    files.write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["a.txt"]


def test_write_atomic_honours_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_atomic(path, b"old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_json_round_trip(tmp_path):
    value = {"name": "λ", "x": [0.1, 1e-300, None, True]}
    files.write_json_atomic(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == value
    assert json.loads((tmp_path / "a.json").read_text()) == value


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_json_is_strict_when_written(tmp_path, bad):
    with pytest.raises(ValueError, match=r"a\.json must hold finite numbers only"):
        files.write_json_atomic(tmp_path / "a.json", {"x": bad})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1', "[" * 100_000, b"\xff\xfe\xfd"])
def test_json_is_strict_when_read(tmp_path, text):
    path = tmp_path / "a.json"
    files.write_atomic(path, text)
    with pytest.raises(ValueError, match=r"a\.json must be strict JSON"):
        files.read_json(path)
