from importlib.resources import files

import pytest
import yaml

from diffattn.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, train_config_from_mapping


def test_nested_mappings_make_a_config():
    config = train_config_from_mapping(
        {
            "model": {"name": "diffvit_micro_patch2_8", "depth": 1, "overrides": {"lambda_init": 0.8}},
            "data": {"name": "digits", "limit": 10},
            "optim": {"epochs": 2, "betas": [0.9, 0.95]},
            "seed": 3,
        }
    )
    assert config == TrainConfig(
        model=ModelConfig("diffvit_micro_patch2_8", {"lambda_init": 0.8, "depth": 1}),
        data=DataConfig("digits", limit=10),
        optim=OptimConfig(epochs=2, betas=(0.9, 0.95)),
        seed=3,
    )
    assert train_config_from_mapping({}) == TrainConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": {"learning_rate": 1}}, "optim has no option learning_rate; it has epochs, batch_size, lr,"),
        ({"epochs": 1}, "a training configuration has no option epochs; it has model, data, optim,"),
        ({"data": {1: 2}}, "data has no option 1; it has name,"),
        ({"data": "digits"}, "data must be a mapping; got 'digits'"),
        ({"model": {"overrides": 3}}, "model.overrides must be a mapping; got 3"),
        ({"model": {"name": ""}}, "model.name must be a name; got ''"),
        ({"data": {"limit": 0}}, "data.limit must be an integer of at least 1; got 0"),
        ({"data": {"split": None}}, "data.split must be text; got None"),
        ({"optim": {"epochs": 0}}, "optim.epochs must be an integer of at least 1; got 0"),
        ({"optim": {"batch_size": True}}, "optim.batch_size must be an integer of at least 1; got True"),
        ({"optim": {"lr": 0}}, "optim.lr must be a number above 0; got 0"),
        ({"optim": {"lr": "1e-3"}}, "optim.lr must be a number above 0; got '1e-3'"),
        ({"optim": {"lr": float("inf")}}, "optim.lr must be a number above 0; got inf"),
        (
            {"optim": {"lr": 0.1, "min_lr": 0.2}},
            "optim.min_lr must be a number at least 0 and at most 0.1; got 0.2",
        ),
        ({"optim": {"epochs": 2, "warmup_epochs": 3}}, "optim.warmup_epochs must be .* at most 2; got 3"),
        ({"optim": {"weight_decay": -1}}, "optim.weight_decay must be a number at least 0; got -1"),
        ({"optim": {"betas": [0.9, 1.0]}}, r"optim.betas must be in \[0, 1\); got 1.0"),
        ({"optim": {"betas": 0.9}}, "optim.betas must be two numbers; got 0.9"),
        ({"optim": {"label_smoothing": 1}}, r"optim.label_smoothing must be in \[0, 1\); got 1"),
        ({"optim": {"clip_norm": 0}}, "optim.clip_norm must be a number above 0; got 0"),
        ({"augment": {"crop_padding": -1}}, "augment.crop_padding must be an integer of at least 0; got -1"),
        ({"augment": {"flip": "False"}}, "augment.flip must be true or false; got 'False'"),
        ({"hardware": {"devices": 0}}, "hardware.devices must be an integer of at least 1; got 0"),
        ({"hardware": {"accelerator": 1}}, "hardware.accelerator must be a name; got 1"),
        ({"hardware": {"strategy": "fsdp"}}, "hardware.strategy must be 'auto' or 'ddp'; got 'fsdp'"),
        ({"precision": "fp16"}, "precision must be one of .*; got 'fp16'"),
        ({"seed": -1}, "seed must be an integer of at least 0; got -1"),
    ],
)
def test_every_option_is_checked(values, message):
    with pytest.raises(ValueError, match=message):
        train_config_from_mapping(values)


def test_parts_must_be_configs():
    with pytest.raises(ValueError, match=r"optim must be a OptimConfig; got \{'epochs': 1}"):
        TrainConfig(optim={"epochs": 1})


@pytest.mark.parametrize("name", ["digits", "cifar10"])
def test_presets_are_valid(name):
    text = (files("diffattn.presets") / f"{name}.yaml").read_text()
    config = train_config_from_mapping(yaml.safe_load(text))
    assert config.data.name == name
