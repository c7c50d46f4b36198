"""Every registered model: built, run, counted; and what cannot be built is refused by name."""

from __future__ import annotations

import pytest
import torch

from diffattn.models.zoo import MODELS, apply_overrides, count_parameters, create_model, list_models

SMALL = [name for name in MODELS if "micro" in name or "tiny" in name]


@pytest.mark.parametrize("name", SMALL)
def test_pixels_in_logits_out(name: str) -> None:
    model = create_model(name, depth=1, seed=0).eval()
    config = model.config
    pixels = torch.rand(2, config.in_chans, config.image_size, config.image_size)
    logits = model(pixels)
    assert logits.shape == (2, config.num_classes)
    assert torch.isfinite(logits).all()
    assert model.name == name


@pytest.mark.parametrize("name", SMALL)
def test_gradient_penalty_hessian_product_and_jvp(name: str) -> None:
    """The default model supports what a layer cannot foresee."""
    model = create_model(name, depth=1, embed_dim=24, num_heads=2, seed=0).double()
    config = model.config
    pixels = torch.rand(2, config.in_chans, config.image_size, config.image_size, dtype=torch.float64)
    pixels.requires_grad_()
    (gradient,) = torch.autograd.grad(model(pixels).square().sum(), pixels, create_graph=True)
    direction = torch.randn_like(pixels)
    (product,) = torch.autograd.grad((gradient * direction).sum(), pixels, retain_graph=True)
    gradient.square().sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0

    def gradient_at(shift: float) -> torch.Tensor:
        moved = (pixels.detach() + shift * direction).requires_grad_()
        return torch.autograd.grad(model(moved).square().sum(), moved)[0]

    step = 1e-5
    torch.testing.assert_close(product, (gradient_at(step) - gradient_at(-step)) / (2 * step), rtol=1e-4, atol=1e-6)
    _, tangent = torch.func.jvp(model, (pixels.detach(),), (direction,))
    with torch.no_grad():
        numeric = (model(pixels + step * direction) - model(pixels - step * direction)) / (2 * step)
    torch.testing.assert_close(tangent, numeric, rtol=1e-5, atol=1e-7)


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one = create_model("diffvit_micro_patch2_8", seed=1)
    assert torch.equal(torch.rand(3), expected)
    two = create_model("diffvit_micro_patch2_8", seed=1)
    other = create_model("diffvit_micro_patch2_8", seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.pos_embed, other.pos_embed)


def test_normalisation_lives_inside() -> None:
    model = create_model("vit_micro_patch2_8", seed=0, mean=(0.2,), std=(0.4,)).double().eval()
    plain = create_model("vit_micro_patch2_8", seed=0, mean=(0.0,), std=(1.0,)).double().eval()
    pixels = torch.rand(2, 1, 8, 8).double()
    torch.testing.assert_close(model(pixels), plain((pixels - 0.2) / 0.4))


def test_differential_twin_differs_by_lambda_and_norm_only() -> None:
    softmax, differential = (
        create_model(name, depth=4) for name in ("vit_tiny_patch4_32", "diffvit_tiny_patch4_32")
    )
    assert count_parameters(differential) - count_parameters(softmax) == 4 * (4 * 32 + 64)
    rows = {row.name: row for row in list_models()}
    assert rows["vit_tiny_patch4_32"].parameters == count_parameters(create_model("vit_tiny_patch4_32"))
    assert rows["diffvit_tiny_patch4_32"].num_heads * 2 == rows["vit_tiny_patch4_32"].num_heads


def test_lambda_init_reaches_the_layers() -> None:
    fixed = create_model("diffvit_micro_patch2_8", lambda_init=0.8)
    assert [block.attn.lambda_init for block in fixed.blocks] == [0.8, 0.8]
    by_depth = create_model("diffvit_micro_patch2_8")
    assert [round(block.attn.lambda_init, 3) for block in by_depth.blocks] == [0.2, 0.356]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch4", {}, r"unknown model 'vit_tiny_patch4'; did you mean .*vit_tiny_patch4_32"),
        (
            "vit_micro_patch2_8",
            {"lambda_init": 0.8},
            r"model 'vit_micro_patch2_8' has no option lambda_init; it has",
        ),
        (
            "diffvit_micro_patch2_8",
            {"lamda_init": 0.8},
            r"no option lamda_init; .*differential attention has .*lambda",
        ),
        (
            "diffvit_micro_patch2_8",
            {"num_heads": 5},
            r"embed_dim % \(2 \* num_heads\) == 0; got embed_dim=64, num_he",
        ),
        ("diffvit_micro_patch2_8", {"lambda_init": 10**400}, "lambda_init must be a finite number or 'depth'; got"),
        ("diffvit_micro_patch2_8", {"proj_bias": "False"}, "proj_bias must be true or false; got 'False'"),
        ("vit_micro_patch2_8", {"qkv_bias": "False"}, "qkv_bias must be true or false; got 'False'"),
        ("vit_micro_patch2_8", {"attention_options": None}, "attention_options must be a mapping .*got None"),
        (
            "vit_micro_patch2_8",
            {"attention_options": {"layer_index": 3, "foo": 1}},
            r"softmax attention \(attn_dropout, proj_bias, proj_dropout\); got foo, layer_index",
        ),
        ("diffvit_v2_micro_patch2_8", {"head_dim": 10**30}, "head_dim must be an integer of at most 65536"),
        ("vit_micro_patch2_8", {"depth": 0}, "depth must be an integer of at least 1; got 0"),
        ("vit_micro_patch2_8", {"depth": "4"}, "depth must be an integer of at least 1; got '4'"),
        ("vit_micro_patch2_8", {"num_classes": 1}, "num_classes must be at least 2; got 1"),
        ("vit_micro_patch2_8", {"patch_size": 3}, "image_size must be a multiple of patch_size; got 8 and 3"),
        ("vit_micro_patch2_8", {"pool": "max"}, "pool must be 'cls' or 'mean'; got 'max'"),
        ("vit_micro_patch2_8", {"std": (0.0,)}, r"std must be above 0; got \(0.0,\)"),
        ("vit_micro_patch2_8", {"mean": (0.1, 0.2)}, r"mean must be 1 or 1 finite numbers; got \(0.1, 0.2\)"),
        ("vit_micro_patch2_8", {"dropout": 1.5}, r"dropout must be in \[0, 1\); got 1.5"),
        ("vit_micro_patch2_8", {"attention": "linear"}, "unknown attention layer 'linear'"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(name, **options)


def test_images_of_another_shape_are_refused() -> None:
    model = create_model("vit_micro_patch2_8")
    with pytest.raises(ValueError, match=r"images must be \[batch, 1, 8, 8\]; got shape \(2, 3, 8, 8\)"):
        model(torch.rand(2, 3, 8, 8))


def test_changing_the_attention_drops_the_old_layers_options() -> None:
    config = create_model("diffvit_micro_patch2_8", lambda_init=0.5).config
    changed = apply_overrides(config, {"attention": "softmax"}, what="model")
    assert changed.attention_options == {}
    assert apply_overrides(config, {"depth": 3}, what="model").attention_options == {"lambda_init": 0.5}
