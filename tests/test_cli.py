"""The command, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys

import polars as pl
import pytest
from safetensors.torch import load_file

from diffattn import __version__
from diffattn.audit.record import read_record
from diffattn.cli import COMMANDS, _distinct_names, main
from diffattn.data.images import load_data
from diffattn.models.checkpoints import load_model


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_command(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in out
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].strip() == f"diffattn {__version__}"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(capsys, command: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "usage: diffattn" in capsys.readouterr().out


def test_train_changes_single_options_and_resumes(capsys, tmp_path) -> None:
    words = ["train", "digits", "--out", tmp_path / "a", "--model.depth", 1, "--model.embed_dim=16"]
    words += ["--model.num_heads", 2, "--model.name", "diffvit_micro_patch2_8", "--model.lambda_init", "0.5"]
    words += ["--optim.epochs", 2, "--optim.warmup_epochs", 0, "--data.limit", 64, "--optim.lr", "1e-3"]
    code, out, err = run(capsys, *words)
    assert code == 0
    assert f"Model: {tmp_path / 'a'}" in out
    assert "epoch 1: training loss" in err
    model = load_model(tmp_path / "a")
    assert (model.config.depth, model.config.embed_dim) == (1, 16)
    assert model.blocks[0].attn.lambda_init == 0.5
    code, _, err = run(capsys, *words)
    assert code == 0
    assert "epoch 1" not in err
    code, _, err = run(capsys, *words, "--seed", 5)
    assert code == 2
    assert "holds a run with another configuration: seed" in err
    code, _, err = run(capsys, *words, "--seed", 5, "--restart")
    assert code == 0


def test_attack_keeps_images_samples_and_summary(capsys, tmp_path, digit_models) -> None:
    words = ["attack", digit_models["vit"], "--data", "digits", "--limit", 30, "--eps", "16/255", "32/255"]
    code, out, _ = run(capsys, *words, "--steps", 5, "--out", tmp_path / "out")
    assert code == 0
    assert "16/255" in out
    assert "robust accuracy" in out
    tensors = load_file(tmp_path / "out" / "adversarial.safetensors")
    samples = pl.read_parquet(tmp_path / "out" / "samples.parquet")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    clean = load_data("digits", limit=30)
    model = load_model(digit_models["vit"])
    for facts in summary["attacks"]:
        points = tensors[f"Linf {facts['eps']}"]
        rows = samples.filter(pl.col("eps") == facts["eps"])
        assert (points.double() - clean.pixels().double()).abs().max() <= facts["eps_value"]
        broken = (rows["status"] == "broken").to_torch().bool()
        assert facts["broken"] == int(broken.sum())
        assert (model(points).argmax(1) != clean.labels)[broken].all()


def test_audit_and_report(capsys, tmp_path, digit_models) -> None:
    out = tmp_path / "audit"
    words = ["audit", digit_models["vit"], digit_models["diffvit"], "--data", "digits", "--limit", 20, "--out", out]
    words += ["--eps", "16/255", "--steps", 2, "--sensitivity-samples", 2, "--lipschitz-samples", 2, "--probes", 4]
    code, printed, err = run(capsys, *words)
    assert code == 0
    assert "diffvit" in printed
    assert "Lipschitz" in err
    record = read_record(out / "diffvit")
    assert record.reference.model == "vit"
    assert (out / "report.html").read_text().startswith("<!doctype html>") or (out / "report.html").stat().st_size
    code, printed, _ = run(capsys, "report", out / "vit", out / "diffvit", "--out", tmp_path / "again.html")
    assert code == 0
    assert (tmp_path / "again.html").is_file()


@pytest.mark.parametrize("what", ["models", "attacks", "data", "presets", "findings"])
def test_lists(capsys, what: str) -> None:
    code, out, _ = run(capsys, "list", what)
    assert code == 0
    known = {
        "models": "5,362,762",
        "attacks": "pgd",
        "data": "cifar10",
        "presets": "digits",
        "findings": "first-light",
    }
    assert known[what] in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lits"], "unknown command 'lits'; did you mean list"),
        (["list", "modles"], "list shows models, attacks, data, presets, findings; got 'modles'"),
        (["train", "nope", "--out", "x"], "'nope' is neither a YAML file nor a preset"),
        (["train", "demo", "--out", "x"], "a training configuration has no option audit, models, reference"),
        (["train", "digits", "--out", "x", "--model.name", "vit"], "unknown model 'vit'"),
        (["train", "digits", "--out", "x", "--model.num_heads", "5"], "embed_dim % num_heads == 0"),
        (["train", "digits", "--out", "x", "--data.name", "cifar11"], "unknown data set 'cifar11'"),
        (["attack", "nowhere", "--data", "digits"], "nowhere is no diffattn checkpoint directory"),
        (["attack", "nowhere", "--data", "digits", "--eps", "4"], "eps must be at most 1 for Linf.*write '4/255'"),
        (["attack", "nowhere", "--data", "digits", "--norm", "L1"], "unknown norm 'L1'"),
        (["attack", "nowhere", "--data", "digits", "--attack", "pdg"], "unknown attack 'pdg'; did you mean pgd"),
        (["report", "nowhere"], "nowhere is no record directory"),
        (["finding", "f99", "--out", "x"], "unknown finding 'f99'"),
    ],
)
def test_wrong_words_get_one_line_and_exit_two(capsys, tmp_path, monkeypatch, words: list, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert err.count("\n") == 1
    import re

    assert re.search(message, err)


def test_missing_arguments_are_named(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["attack"])
    assert stop.value.code == 2
    assert "model" in capsys.readouterr().err


def test_interruption_is_said_and_not_a_traceback(capsys, monkeypatch) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS._entries, "report", interrupted)
    code, _, err = run(capsys, "report", "x")
    assert code == 130
    assert err == "diffattn: interrupted\n"
    monkeypatch.setitem(COMMANDS._entries, "train", interrupted)
    assert "goes on where it stopped" in run(capsys, "train", "x")[2]


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diffattn", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == f"diffattn {__version__}"


def test_options_that_no_model_takes_are_refused_wherever_they_stand(capsys, tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {name: diffvit_micro_patch2_8, lamda_init: 0.8}")
    code, _, err = run(capsys, "train", path, "--out", tmp_path / "a")
    assert code == 2
    assert "has no option lamda_init" in err
    path.write_text(
        "model: {name: diffvit_micro_patch2_8, depth: 1, attention_options: {lambda_init: 0.7}}\n"
        "data: {limit: 32, val_limit: 16}\noptim: {epochs: 1}"
    )
    assert run(capsys, "train", path, "--out", tmp_path / "b")[0] == 0
    assert load_model(tmp_path / "b").blocks[0].attn.lambda_init == 0.7


@pytest.mark.parametrize("command", ["train", "attack", "audit", "demo"])
def test_an_out_that_cannot_be_written_is_refused_before_any_work(capsys, tmp_path, digit_models, command) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    words = {
        "train": ["train", "digits"],
        "attack": ["attack", digit_models["vit"], "--data", "digits"],
        "audit": ["audit", digit_models["vit"], "--data", "digits"],
        "demo": ["demo"],
    }[command]
    code, _, err = run(capsys, *words, "--out", taken)
    assert code == 2
    assert "--out must be a folder that can be written to" in err
    assert "attack" not in err


def test_audit_checks_everything_before_it_works(capsys, tmp_path, digit_models) -> None:
    vit = digit_models["vit"]
    for words, message in (
        ([vit, "nowhere"], "nowhere is no diffattn checkpoint directory"),
        ([vit, "--probes", "abc"], "probes must be 'exact', 'auto' or an integer"),
        ([vit, "--probes", "2"], "probes must be 'exact', 'auto' or an integer of at least 4"),
        ([vit, "--radius", "0"], "radii must be a number above 0; got 0"),
        ([vit, "--seed", "-1"], "seed must be an integer of at least 0; got -1"),
        ([vit, "--sensitivity-samples", "-3"], "sensitivity_samples must be an integer of at least 0; got -3"),
    ):
        code, _, err = run(capsys, "audit", *words, "--data", "digits", "--limit", 8, "--out", tmp_path / "o")
        assert code == 2
        assert message in err
        assert "clean accuracy" not in err
    code, _, err = run(capsys, "audit", vit, "--data", "digits", "--out", vit.parent)
    assert code == 2
    assert "--out must be a folder of its own" in err


def test_names_of_audited_models_are_distinct() -> None:
    assert _distinct_names(["x/a", "y/a", "a-2"]) == ["a", "a-3", "a-2"]
    assert _distinct_names(["x/a", "b"]) == ["a", "b"]
