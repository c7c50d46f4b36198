import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffattn.config import HardwareConfig, OptimConfig, TrainConfig
from diffattn.train.optim import build_optimizer
from diffattn.train.state import (
    STATE,
    RunState,
    collect_tensors,
    comparable,
    differences,
    load_state,
    restore_tensors,
    save_state,
)


def stepped(steps, model=None, optimizer=None):
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        optimizer = build_optimizer(model, OptimConfig())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 0.1 * (step + 1))).pow(3).sum().backward()
        optimizer.step()
    return model, optimizer


def run_state(tensors):
    return RunState(2, comparable(TrainConfig()), "abc", [{"epoch": 1}, {"epoch": 2}], tensors)


def test_a_restored_optimiser_goes_on_as_the_one_that_was_saved(tmp_path):
    model, optimizer = stepped(3)
    save_state(tmp_path, run_state(collect_tensors(model, optimizer)))
    stepped(3, model, optimizer)
    other, others = stepped(1)
    loaded = load_state(tmp_path)
    assert loaded[:4] == run_state({})[:4]
    kept = {name: value.clone() for name, value in loaded.tensors.items()}
    restore_tensors(loaded.tensors, other, others)
    stepped(3, other, others)
    assert all(torch.equal(value, kept[name]) for name, value in loaded.tensors.items())
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state[mine]["step"] == others.state[theirs]["step"] == 6
    assert os.listdir(tmp_path / STATE.parent) == [STATE.name]


def test_a_failed_write_leaves_the_last_state(tmp_path, monkeypatch):
    model, optimizer = stepped(1)
    save_state(tmp_path, run_state(collect_tensors(model, optimizer)))

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        save_state(tmp_path, run_state({})._replace(epoch=3))
    assert load_state(tmp_path).epoch == 2


def test_no_state_is_none(tmp_path):
    assert load_state(tmp_path) is None


def test_damaged_and_foreign_states_are_named(tmp_path):
    save_state(tmp_path, run_state({"model.weight": torch.ones(100)}))
    path = tmp_path / STATE
    whole = path.read_bytes()
    message = r"last\.safetensors is no training state that this release can resume"
    for content in (whole[:-50], b"", b"<!doctype html><html></html>"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_state(tmp_path)
    for metadata in (
        None,
        {"state": "no json"},
        {"state": json.dumps({"format": "diffattn-training-state", "format_version": 99})},
        {"state": json.dumps({"format": "diffattn-training-state", "format_version": 1, "epoch": 1})},
        {"state": "[]"},
    ):
        save_file({"a": torch.ones(1)}, path, metadata=metadata)
        with pytest.raises(ValueError, match=message):
            load_state(tmp_path)


def test_tensors_of_another_model_are_refused():
    model, optimizer = stepped(1)
    tensors = collect_tensors(model, optimizer)
    with pytest.raises(ValueError, match=r"(?s)does not fit the model: .*Missing key"):
        restore_tensors({}, model, optimizer)
    del tensors["optimizer.1.bias.exp_avg"]
    with pytest.raises(ValueError, match=r"lacks exp_avg of the optimiser for 1\.bias"):
        restore_tensors(tensors, model, optimizer)


def test_differences_name_the_nested_fields_and_ignore_the_hardware():
    old = TrainConfig(seed=1, hardware=HardwareConfig(accelerator="cpu"))
    new = TrainConfig(seed=2, optim=OptimConfig(lr=0.5, betas=(0.9, 0.95)))
    assert differences(comparable(old), comparable(new)) == [
        "optim.betas was [0.9, 0.999] and is [0.9, 0.95]",
        "optim.lr was 0.001 and is 0.5",
        "seed was 1 and is 2",
    ]
    assert differences(comparable(old), comparable(TrainConfig(seed=1))) == []
