"""Recording changes nothing, sees everything, and looks through wrappers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffattn.models.attention import ATTENTION
from diffattn.models.capture import attention_layers, capture, record
from diffattn.models.zoo import create_model

NAMES = ("vit_micro_patch2_8", "diffvit_micro_patch2_8", "diffvit_v2_micro_patch2_8")


def images(n: int = 3) -> torch.Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grad", [False, True])
def test_recording_changes_no_logit_and_leaves_no_hook(name: str, grad: bool) -> None:
    model = create_model(name, seed=0).eval()
    backends = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    with torch.set_grad_enabled(grad):
        before = model(images())
        with record(model) as tape:
            during = model(images())
        after = model(images())
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert list(tape.branches) == ["blocks.0.attn", "blocks.1.attn"]
    for layer in attention_layers(model).values():
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
        assert not layer._listeners
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == backends


@pytest.mark.parametrize("name", NAMES)
def test_the_tape_holds_what_the_layer_did(name: str) -> None:
    model = create_model(name, seed=0).double().eval()
    with record(model) as tape:
        model(images().double())
    for key, layer in attention_layers(model).items():
        assert tape.masks[key] is None
        torch.testing.assert_close(layer(tape.inputs[key]), tape.outputs[key], rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.output(tape.branches[key].context), tape.outputs[key], rtol=0, atol=1e-12)


def test_gradients_reach_the_pixels_through_the_recorded_maps() -> None:
    model = create_model("diffvit_micro_patch2_8", seed=0).eval()
    pixels = images().requires_grad_()
    with record(model) as tape:
        model(pixels)
    (gradient,) = torch.autograd.grad(tape.branches["blocks.1.attn"].combined.square().sum(), pixels)
    assert gradient.abs().sum() > 0


def test_capture_is_detached_and_chooses_layers() -> None:
    model = create_model("diffvit_micro_patch2_8", depth=3, seed=0).eval()
    found = capture(model, images(), layers=["blocks.2.attn"])
    assert list(found) == ["blocks.2.attn"]
    branches = found["blocks.2.attn"]
    assert branches.combined.shape == (3, 2, 17, 17)
    assert not branches.combined.requires_grad
    assert branches.values[0] is branches.values[1]
    torch.testing.assert_close(branches.maps[0].sum(-1), torch.ones(3, 2, 17))


def test_masks_given_by_keyword_or_by_place_are_recorded() -> None:
    layer = ATTENTION["softmax"](8, 2)
    x, mask = torch.randn(1, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    for call in (lambda: layer(x, attn_mask=mask), lambda: layer(x, mask)):
        with record(layer) as tape:
            call()
        assert torch.equal(tape.masks["attention"], mask)
        assert (tape.branches["attention"].maps[0].triu(1) == 0).all()


def test_nested_recordings_both_hear() -> None:
    model = create_model("vit_micro_patch2_8", seed=0).eval()
    with record(model) as outer, record(model, layers=["blocks.0.attn"]) as inner:
        model(images())
    assert len(outer.branches) == 2
    assert len(inner.branches) == 1


def test_an_exception_inside_leaves_no_hook_behind() -> None:
    model = create_model("vit_micro_patch2_8", seed=0).eval()
    with pytest.raises(ValueError, match="images must be"), record(model):
        model(torch.rand(1, 3, 8, 8))
    assert not any(layer._listeners or layer._forward_hooks for layer in attention_layers(model).values())


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_wrappers_are_looked_through() -> None:
    model = create_model("vit_micro_patch2_8", seed=0).eval()
    assert list(attention_layers(Wrapper(model))) == list(attention_layers(model))
    assert list(capture(Wrapper(model), images())) == list(attention_layers(model))


def test_models_without_attention_and_unknown_layers_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="Linear has no attention layer that diffattn knows"),
        record(nn.Linear(2, 2)),
    ):
        pass
    model = create_model("vit_micro_patch2_8", seed=0)
    with pytest.raises(
        ValueError, match=r"no attention layer named blocks.9.attn; there are blocks.0.attn, blocks.1"
    ):
        capture(model, images(), layers=["blocks.9.attn"])
    with pytest.raises(ValueError, match="images must be a float tensor .* got minimum 0 and maximum 255"):
        capture(model, torch.tensor([0.0, 255.0]).repeat(32).view(1, 1, 8, 8))


def test_recording_works_under_distributed_data_parallel(tmp_path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = create_model("diffvit_micro_patch2_8", seed=0)
        parallel = nn.parallel.DistributedDataParallel(model)
        before = parallel(images())
        with record(parallel) as tape:
            during = parallel(images())
        assert torch.equal(before, during)
        (during.sum() + sum(b.combined.square().sum() for b in tape.branches.values())).backward()
        assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    finally:
        torch.distributed.destroy_process_group()
