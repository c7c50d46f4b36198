import math

import pytest
import torch
from torch import nn

from diffattn.config import OptimConfig
from diffattn.models.zoo import create_model
from diffattn.train.optim import build_optimizer, is_decayed, learning_rate, parameter_groups, set_learning_rate


@pytest.mark.parametrize("name", ["vit_micro_patch2_8", "diffvit_micro_patch2_8", "diffvit_v2_micro_patch2_8"])
def test_only_matrices_are_decayed(name):
    model = create_model(name, depth=1)
    decayed = {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}
    assert {"patch_embed.proj.weight", "blocks.0.mlp.fc1.weight", "head.weight"} <= decayed
    rest = {name for name, _ in model.named_parameters()} - decayed
    assert {"cls_token", "pos_embed", "norm.weight", "head.bias"} <= rest
    assert all("norm" not in name and "bias" not in name for name in decayed)
    if name == "diffvit_micro_patch2_8":
        assert {f"blocks.0.attn.lambda_{name}" for name in ("q1", "k1", "q2", "k2")} <= rest
    groups = parameter_groups(model, weight_decay=0.3)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [len(group["params"]) for group in groups] == [len(decayed), len(rest)]


def test_a_lambda_of_several_axes_is_not_decayed_and_frozen_parameters_are_left_out():
    module = nn.Module()
    module.lambda_q1 = nn.Parameter(torch.ones(2, 3))
    module.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    (group,) = parameter_groups(module, weight_decay=0.3)
    assert group["weight_decay"] == 0.0
    assert group["params"][0] is module.lambda_q1


def test_one_step_is_adamw_by_hand():
    config = OptimConfig(lr=0.1, weight_decay=0.5, betas=(0.9, 0.99))
    module = nn.Linear(1, 1).double()
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(2.0)
    optimizer = build_optimizer(module, config)
    set_learning_rate(optimizer, 0.01)
    (3.0 * module.weight + 3.0 * module.bias).sum().backward()
    optimizer.step()
    move = 0.01 * 3.0 / (3.0 + 1e-8)  # the first step has m / sqrt(v) = sign of the gradient
    assert module.weight.item() == pytest.approx(2.0 * (1 - 0.01 * 0.5) - move, rel=1e-12)
    assert module.bias.item() == pytest.approx(2.0 - move, rel=1e-12)


def test_the_schedule_warms_up_linearly_and_falls_as_a_cosine():
    config = OptimConfig(epochs=10, lr=1.0, min_lr=0.2, warmup_epochs=2)
    rates = [learning_rate(step, config, steps_per_epoch=4) for step in range(41)]
    assert rates[:8] == pytest.approx([(step + 1) / 8 for step in range(8)])
    assert rates[8] == pytest.approx(1.0)
    assert rates[24] == pytest.approx(0.6)
    assert rates[40] == pytest.approx(0.2)
    assert rates[16] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[8:] == sorted(rates[8:], reverse=True)


def test_a_schedule_of_nothing_but_warm_up_and_one_without_any():
    only = OptimConfig(epochs=2, lr=1.0, warmup_epochs=2)
    assert [learning_rate(step, only, steps_per_epoch=2) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    none = OptimConfig(epochs=1, lr=1.0)
    assert learning_rate(0, none, steps_per_epoch=1) == 1.0
