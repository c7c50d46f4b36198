import json
import math

import pytest
import torch
from safetensors.torch import load_file

from diffattn.config import train_config_from_mapping
from diffattn.data.images import load_data
from diffattn.models.checkpoints import load_model, save_model
from diffattn.models.zoo import create_model
from diffattn.seeding import keyed_generator
from diffattn.train import setup
from diffattn.train.epoch import has_randomness, shard
from diffattn.train.loop import train_model
from diffattn.train.state import STATE


def config(**changes):
    values = {
        "model": {
            "name": "diffvit_micro_patch2_8",
            "depth": 1,
            "embed_dim": 16,
            "num_heads": 1,
            "lambda_init": 0.8,
        },
        "data": {"name": "digits", "limit": 150, "val_limit": 40},
        "optim": {"epochs": 3, "batch_size": 64, "lr": 0.01, "warmup_epochs": 0.5, "label_smoothing": 0.1},
        "augment": {"crop_padding": 1, "flip": True},
        "hardware": {"accelerator": "cpu"},
        "seed": 1,
    }
    for path, value in changes.items():
        part, _, name = path.partition("__")
        values[part] = {**values[part], name: value} if name else value
    return train_config_from_mapping(values)


def weights(out):
    return load_file(out / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def history(out):
    entries = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def interrupt_after(epoch):
    def callback(entry):
        if entry["epoch"] == epoch:
            raise KeyboardInterrupt

    return callback


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    train_model(config(), out)
    return out


def test_a_run_leaves_a_checkpoint_and_a_history(finished):
    entries = history(finished)
    assert [entry["epoch"] for entry in entries] == [1, 2, 3]
    assert [entry["step"] for entry in entries] == [3, 6, 9]  # 150 images, 64 a step: the short batch counts
    model = load_model(finished)
    assert not model.training
    data = load_data("digits", split="test", limit=40)
    with torch.no_grad():
        logits = model(data.pixels())
    accuracy = (logits.argmax(dim=1) == data.labels).double().mean().item()
    assert entries[-1]["val_accuracy"] == pytest.approx(accuracy)
    assert entries[-1]["val_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, data.labels).item())
    assert entries[-1]["val_low"] < accuracy < entries[-1]["val_high"]
    assert entries[-1]["val_n"] == 40
    assert json.loads((finished / "train.json").read_text())["optim"]["lr"] == 0.01


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_an_interrupted_run_ends_with_the_same_bits(finished, tmp_path, epoch):
    with pytest.raises(KeyboardInterrupt):
        train_model(config(), tmp_path, on_epoch=interrupt_after(epoch))
    assert not (tmp_path / "model.safetensors").exists()
    assert len(history(tmp_path)) == epoch
    model = train_model(config(), tmp_path)
    assert not model.training
    assert same(weights(tmp_path), weights(finished))
    assert same(load_file(tmp_path / STATE), load_file(finished / STATE))
    assert history(tmp_path) == history(finished)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_history_line_without_its_state_is_dropped(finished, tmp_path, epoch):
    with pytest.raises(KeyboardInterrupt):
        train_model(config(), tmp_path, on_epoch=interrupt_after(epoch))
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"epoch": 4, "step"')
    train_model(config(), tmp_path)
    assert history(tmp_path) == history(finished)


def test_dropout_is_resumed_too_and_leaves_the_global_generator_alone(tmp_path):
    changed = config(model__dropout=0.2, optim__epochs=2)
    states = []
    train_model(changed, tmp_path / "whole", on_epoch=lambda entry: states.append(torch.get_rng_state()))
    assert torch.equal(states[0], states[1])
    with pytest.raises(KeyboardInterrupt):
        train_model(changed, tmp_path / "parts", on_epoch=interrupt_after(1))
    torch.rand(3)
    train_model(changed, tmp_path / "parts")
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    train_model(config(optim__epochs=2), tmp_path / "none")
    assert not same(weights(tmp_path / "none"), weights(tmp_path / "whole"))


def test_a_finished_run_is_only_loaded(finished, monkeypatch):
    def refuse(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr("diffattn.train.loop.set_up", refuse)
    before = (finished / "history.jsonl").stat().st_mtime_ns
    model = train_model(config(), finished)
    assert same(dict(model.state_dict()), weights(finished))
    assert (finished / "history.jsonl").stat().st_mtime_ns == before


def test_another_configuration_is_refused_unless_started_over(finished, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train_model(config(), tmp_path, on_epoch=interrupt_after(1))
    message = r"another configuration: optim\.lr was 0\.01 and is 0\.02; seed was 1 and is 2; start it over"
    with pytest.raises(ValueError, match=message):
        train_model(config(optim__lr=0.02, seed=2), tmp_path)
    train_model(config(optim__epochs=1, seed=2), tmp_path, resume=False)
    assert len(history(tmp_path)) == 1
    assert not same(weights(tmp_path), weights(finished))


def test_other_images_and_a_model_without_a_run_are_refused(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train_model(config(), tmp_path, on_epoch=interrupt_after(1))
    real = setup.load_data

    def changed(name, **options):
        data = real(name, **options)
        data.images[0] = 255 - data.images[0]
        return data

    monkeypatch.setattr(setup, "load_data", changed)
    with pytest.raises(ValueError, match=r"a run on other training images \(data 'digits' has changed\)"):
        train_model(config(), tmp_path)
    save_model(create_model("vit_micro_patch2_8", depth=1), tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds a model but no training state \(state/last\.safetensors\)"):
        train_model(config(), tmp_path / "model")


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path, monkeypatch):
    real = setup.create_model

    def broken(*args, **options):
        model = real(*args, **options)
        model.register_forward_hook(
            lambda module, inputs, logits: logits * next(factors) if module.training else None
        )
        return model

    factors = iter([1.0, 1.0, 1.0, 1.0, math.nan, 1.0])
    monkeypatch.setattr(setup, "create_model", broken)
    message = r"training loss must be finite; got nan in epoch 2, step 5, at lr 0\.0\d+ \(lower optim\.lr"
    with pytest.raises(ValueError, match=message):
        train_model(config(optim__epochs=2), tmp_path)
    assert len(history(tmp_path)) == 1


def test_weights_that_broke_in_the_last_step_are_not_saved(tmp_path, monkeypatch):
    real = setup.create_model

    def broken(*args, **options):
        model = real(*args, **options)
        model.register_forward_hook(lambda module, inputs, logits: None if module.training else logits * math.inf)
        return model

    monkeypatch.setattr(setup, "create_model", broken)
    with pytest.raises(ValueError, match=r"validation loss must be finite; got \S+ after epoch 1"):
        train_model(config(), tmp_path)
    assert not (tmp_path / STATE).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__name": "mnist"}, "unknown data set 'mnist'"),
        (
            {"data__image_size": 16},
            r"takes images of shape \(1, 8, 8\), but data 'digits' has \(1, 16, 16\); set data",
        ),
        ({"model__name": "vit_micro"}, "unknown model 'vit_micro'"),
        ({"model__lamda_init": 0.8}, "has no option lamda_init"),
        ({"model__num_classes": 5}, "num_classes must be at least the data's 10; got 5"),
        ({"data__val_name": "cifar10", "data__root": "/nowhere"}, "none at /nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train_model(config(**changes), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_trains_and_keeps_float32_weights(tmp_path):
    model = train_model(config(precision="bfloat16", optim__epochs=1), tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert math.isfinite(history(tmp_path)[0]["train_loss"])


def test_training_on_the_validation_images_is_said(tmp_path, caplog):
    train_model(config(data__val_split="train", optim__epochs=1), tmp_path)
    assert "validation images are training images too" in caplog.text


def test_progress_shows_the_model_and_the_epoch(tmp_path, capsys):
    train_model(config(optim__epochs=1), tmp_path, progress=True)
    assert "diffvit_micro_patch2_8 epoch 1/1" in capsys.readouterr().out
    train_model(config(optim__epochs=1), tmp_path, resume=False)
    assert capsys.readouterr().out == ""


def test_clipping_bounds_the_update(tmp_path):
    train_model(config(optim__epochs=1, optim__clip_norm=1e-12), tmp_path / "clipped")
    moved = load_file(tmp_path / "clipped" / STATE)["optimizer.head.weight.exp_avg"].abs().max().item()
    assert 0 < moved < 1e-11


def test_it_learns_the_digits(tmp_path):
    changes = {"data": {"name": "digits", "limit": 500, "val_limit": 100}, "augment": {}}
    train_model(config(**changes, optim__epochs=8, optim__batch_size=32, optim__lr=0.005), tmp_path)
    entries = history(tmp_path)
    assert entries[-1]["val_low"] > 0.25
    assert entries[-1]["train_loss"] < entries[0]["train_loss"] - 0.4


def test_shards_make_the_mean_over_devices_the_mean_over_the_batch():
    values = torch.from_numpy(keyed_generator(0, "values").standard_normal(11))
    for size, devices in ((8, 4), (7, 3), (2, 3), (1, 4)):
        rows = torch.arange(11)[:size]
        parts = [shard(rows, rank=rank, devices=devices) for rank in range(devices)]
        assert sum(values[local].mean() * weight for local, weight in parts) / devices == pytest.approx(
            values[:size].mean().item()
        )
        seen = torch.cat([local for local, weight in parts if weight])
        assert seen.sort().values.tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("overrides", "random"),
    [({}, False), ({"dropout": 0.1}, True), ({"drop_path": 0.1}, True), ({"attn_dropout": 0.1}, True)],
)
def test_randomness_is_seen(overrides, random):
    assert has_randomness(create_model("diffvit_micro_patch2_8", **overrides)) is random
