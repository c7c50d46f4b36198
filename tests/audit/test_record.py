from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from safetensors import numpy as safetensors_numpy

from diffattn.audit import record as module
from diffattn.audit.facts import CleanFacts, Measured, finite
from diffattn.audit.record import read_record, write_record
from diffattn.statistics import Interval, mean_interval, wilson_interval
from report.synthetic import attack_facts, make_record


@pytest.fixture(scope="module")
def made():
    return make_record("diffvit", differential=True, image_size=8, examples=2, error=3)


@pytest.fixture
def directory(made, tmp_path):
    return write_record(tmp_path / "record", made)


def edit(directory, change):
    path = directory / "record.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_record_comes_back_as_it_was(made, directory):
    found = read_record(directory)
    assert found.findings == made.findings
    assert found.samples.equals(made.samples)
    assert found.sensitivity_table.equals(made.sensitivity_table)
    assert found.tensors.keys() == made.tensors.keys()
    assert all(np.array_equal(found.tensors[name], made.tensors[name]) for name in made.tensors)
    assert found.history == made.history
    assert sorted(path.name for path in directory.iterdir()) == [
        "examples.safetensors",
        "history.jsonl",
        "record.json",
        "samples.parquet",
        "sensitivity.parquet",
    ]


def test_json_uses_the_words_of_the_format(directory):
    value = json.loads((directory / "record.json").read_text())
    assert value["format_version"] == 1
    assert value["sensitivity"][0]["lambda"] == "frozen"
    assert value["sensitivity"][0]["cos_theta"].keys() == {"value", "low", "high"}
    assert value["model"].keys() == {"name", "path", "config", "parameters", "sha256"}


def test_what_may_be_absent_may_be_absent_and_leaves_nothing_stale(made, directory):
    write_record(directory, make_record("bare", bare=True))
    assert sorted(path.name for path in directory.iterdir()) == ["record.json", "samples.parquet"]
    found = read_record(directory)
    assert (found.tensors, found.history, found.sensitivity_table, found.examples) == ({}, (), None, ())


def test_a_crash_while_writing_leaves_no_mixture(made, directory, monkeypatch):
    written = module.write_atomic

    def fails(path, content):
        if path.name == "examples.safetensors":
            raise OSError("disk full")
        written(path, content)

    monkeypatch.setattr(module, "write_atomic", fails)
    with pytest.raises(OSError, match="disk full"):
        write_record(directory, made)
    with pytest.raises(ValueError, match=r"is no record directory: it has no record\.json"):
        read_record(directory)


def test_branch_maps_come_in_order(made):
    example = made.examples[0]
    maps = made.branch_maps(example, "clean")
    assert len(maps) == 2
    assert maps[0].sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert maps[1].sum(axis=1) == pytest.approx(-0.8, abs=1e-5)


def test_measured_decides_what_is_not_finite():
    assert Measured.of(mean_interval([2.0])) == Measured(2.0, None, None)
    assert Measured.of(Interval(math.nan, math.inf, -math.inf, 0)) == Measured(None, None, None)
    assert finite(math.nan) is None
    with pytest.raises(ValueError, match="low must be at most high"):
        Measured(1.0, 2.0, 0.0)
    with pytest.raises(ValueError, match="value must be at most high"):
        Measured(3.0, 0.0, 2.0)


def test_a_nan_figure_is_refused_before_anything_is_written(made, tmp_path):
    row = dataclasses.replace(made.lipschitz[0], median=math.nan)
    with pytest.raises(ValueError, match=r"record\.json\.lipschitz\[0\]\.median must be finite"):
        write_record(tmp_path / "record", dataclasses.replace(made, lipschitz=(row,)))
    assert not (tmp_path / "record").exists()


def test_counts_and_shares_must_agree():
    with pytest.raises(ValueError, match=r"broken \+ survived \+ error must be n; got 5 \+ 5 \+ 0 and 11"):
        dataclasses.replace(attack_facts(10, 5, total=20), n=11)
    with pytest.raises(ValueError, match=r"asr must be 5 / 10; got 0\.4"):
        dataclasses.replace(attack_facts(10, 5, total=20), asr=0.4)
    with pytest.raises(ValueError, match="asr, asr_low and asr_high must be numbers where n is above 0"):
        dataclasses.replace(attack_facts(10, 5, total=20), asr=None)
    with pytest.raises(ValueError, match=r"accuracy and its interval must satisfy 0 <= low <= accuracy"):
        CleanFacts(10, 5, 0.5, 0.6, 0.7)
    assert attack_facts(0, 0, total=20).asr is None


def test_errors_widen_the_interval_to_both_sides():
    facts = attack_facts(100, 40, total=200, error=10)
    assert facts.asr_low == wilson_interval(40, 100).low
    assert facts.asr_high == wilson_interval(50, 100).high


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v.update(format_version=2),
            "format_version 2: a newer release wrote it; this one reads up to 1",
        ),
        (lambda v: v.update(format_version="1"), "its format_version must be an integer of at least 1; got '1'"),
        (lambda v: v.pop("format_version"), "its format_version must be an integer of at least 1; got None"),
        (lambda v: v.pop("clean"), "record must have the key 'clean'"),
        (lambda v: v.update(surprise=1), "has the unknown key 'surprise'"),
        (lambda v: v["attacks"][0].update(asr="high"), r"attacks\[0\]\.asr must be a finite number; got 'high'"),
        (lambda v: v["attacks"][1].update(broken=-1), r"attacks\[1\]: broken \+ survived \+ error must be n"),
        (lambda v: v["attacks"][0]["attack"].pop("name"), r"attacks\[0\]: attack must have a text under 'name'"),
        (lambda v: v["lipschitz"][0].update(kind="bound"), r"lipschitz\[0\]\.kind must be one of 'estimate'"),
        (lambda v: v["data"].update(n=0), r"data: n must be at least 1; got 0"),
        (lambda v: v["examples"][0].update(status="fine"), r"examples\[0\]\.status must be one of 'clean_wrong'"),
    ],
)
def test_a_wrong_record_is_refused_by_file_and_key(directory, change, message):
    edit(directory, change)
    with pytest.raises(ValueError, match=message) as caught:
        read_record(directory)
    assert "record.json" in str(caught.value)


def test_no_record_directory(tmp_path):
    with pytest.raises(ValueError, match=r"is no record directory: it has no record\.json"):
        read_record(tmp_path)
    with pytest.raises(ValueError, match=r"there is no such directory with a record\.json"):
        read_record(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("record.json", b'{"format_version": 1, "clean": {', r"record\.json must be strict JSON"),
        ("record.json", b'{"format_version": NaN}', "it holds NaN"),
        ("record.json", b"[1]", r"record\.json must hold an object; got list"),
        ("record.json", b"[" * 100_000, r"record\.json must be strict JSON"),
        ("samples.parquet", b"PAR1 no more", r"samples\.parquet is no whole Parquet file"),
        ("sensitivity.parquet", b"", r"sensitivity\.parquet is no whole Parquet file"),
        ("examples.safetensors", b"<!DOCTYPE html><p>404", r"examples\.safetensors is an HTML page, not tensors"),
        ("examples.safetensors", b"\xff" * 64, r"examples\.safetensors is no whole safetensors file \(64 bytes\)"),
        ("history.jsonl", b'{"epoch": 1}\n{"epoch"', r"history\.jsonl line 2 must be strict JSON"),
        ("history.jsonl", b'{"epoch": Infinity}', r"history\.jsonl line 1 must be strict JSON; it holds Infinity"),
        ("history.jsonl", b'{"epoch": [1]}', r"history\.jsonl line 1: 'epoch' must be a number, text or null"),
        ("history.jsonl", b"\xff\xfe", r"history\.jsonl must be UTF-8"),
    ],
)
def test_a_damaged_file_is_named(directory, name, content, message):
    (directory / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_record(directory)


def test_a_truncated_safetensors_is_named(directory):
    path = directory / "examples.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"examples\.safetensors is no whole safetensors file"):
        read_record(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("example-0.adversarial"), r"must hold the tensor 'example-0\.adversarial'"),
        (lambda t: t.pop("example-1.clean_map_2"), r"must hold the tensor 'example-1\.clean_map_2'"),
        (lambda t: t.update(stray=np.zeros(3, np.float32)), "holds 'stray', which belongs to no example"),
        (
            lambda t: t.update({"example-0.adversarial": np.zeros((3, 9, 8), np.float32)}),
            r"must have the clean image's shape \(3, 8, 8\); got \(3, 9, 8\)",
        ),
        (
            lambda t: t.update({"example-0.clean_map_2": np.zeros((2, 2), np.float32)}),
            r"example-0\.clean_map_2 must have the other maps' shape \(5, 5\); got \(2, 2\)",
        ),
        (
            lambda t: t.update({"example-0.clean": np.full((3, 8, 8), 1.5, np.float32)}),
            r"example-0\.clean must be in \[0, 1\]; got minimum 1\.5",
        ),
        (
            lambda t: t.update({"example-0.clean": np.full((3, 8, 8), np.nan, np.float32)}),
            r"example-0\.clean must be finite; 192 values are not",
        ),
        (lambda t: t.update({"example-0.clean": np.zeros((3, 8, 8))}), "must be float32; got float64"),
        (lambda t: t.update({"example-0.clean": np.zeros((3, 8), np.float32)}), "must have 3 axes"),
        (lambda t: t.update({"example-0.clean": np.zeros((2, 8, 8), np.float32)}), r"\[1 or 3, height, width\]"),
        (lambda t: t.update({"example-0.clean": np.zeros((3, 0, 8), np.float32)}), "axes of 1 to 8192"),
    ],
)
def test_tensors_that_do_not_fit_the_examples_are_named(directory, change, message):
    path = directory / "examples.safetensors"
    tensors = safetensors_numpy.load_file(path)
    change(tensors)
    path.write_bytes(safetensors_numpy.save(tensors))
    with pytest.raises(ValueError, match=message):
        read_record(directory)


def test_examples_without_their_file_are_refused(directory):
    (directory / "examples.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold the tensor 'example-0\.clean'"):
        read_record(directory)


def test_an_example_key_is_used_once(made, tmp_path):
    twice = dataclasses.replace(made, examples=(made.examples[0], made.examples[0]))
    with pytest.raises(ValueError, match="'example-0' comes twice"):
        write_record(tmp_path, twice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop("status", "eps"), "it lacks eps, status"),
        (lambda f: f.with_columns(status=pl.lit("fine")), "in the column status; got 'fine'"),
        (lambda f: f.with_columns(status=pl.lit(None, pl.String)), "in the column status; got None"),
        (lambda f: f.with_columns(sample_id=pl.lit(3)), "must hold text in the column sample_id; got Int32"),
    ],
)
def test_samples_are_checked(made, directory, change, message):
    frame = change(made.samples)
    with pytest.raises(ValueError, match=message):
        write_record(directory, dataclasses.replace(made, samples=frame))
    frame.write_parquet(directory / "samples.parquet")
    with pytest.raises(ValueError, match=message):
        read_record(directory)


def test_a_file_that_is_too_large_is_not_read(directory, monkeypatch):
    monkeypatch.setitem(module._LARGEST_FILE, "history.jsonl", 10)
    with pytest.raises(ValueError, match=r"history\.jsonl must be at most 10 bytes; it has"):
        read_record(directory)


def test_neither_the_record_nor_the_report_imports_torch():
    script = "import sys, diffattn.audit.record, diffattn.report.html; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", ["history.jsonl", "examples.safetensors", "sensitivity.parquet"])
def test_a_folder_in_a_files_place_is_refused(tmp_path, name):
    write_record(tmp_path, make_record("vit"))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} must be a file"):
        read_record(tmp_path)
