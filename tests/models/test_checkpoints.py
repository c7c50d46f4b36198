"""Checkpoints come back exactly, and anything else is refused for what it is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffattn.models.checkpoints import load_model, save_model
from diffattn.models.zoo import create_model


@pytest.fixture
def saved(tmp_path):
    model = create_model("diffvit_micro_patch2_8", lambda_init=0.3, depth=1, seed=0).eval()
    return model, save_model(model, tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit_micro_patch2_8", "diffvit_micro_patch2_8", "diffvit_v2_micro_patch2_8"])
def test_saved_and_loaded_gives_identical_logits(tmp_path, name: str, dtype: torch.dtype) -> None:
    model = create_model(name, seed=0, mean=(0.3,), norm_eps=1e-5).to(dtype).eval()
    pixels = torch.rand(2, 1, 8, 8).to(dtype)
    loaded = load_model(save_model(model, tmp_path / "m"))
    assert torch.equal(loaded(pixels), model(pixels))
    assert loaded.config == model.config
    assert loaded.name == name
    assert not loaded.training


def test_lambda_init_is_kept_though_no_tensor_holds_it(saved) -> None:
    _, path = saved
    assert load_model(path).blocks[0].attn.lambda_init == 0.3


def _rewrite(path, change) -> None:
    """Change the tensors and keep the hash right, so that names and shapes are what is refused."""
    import hashlib

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    description = json.loads((path / "config.json").read_text())
    description["sha256"] = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    (path / "config.json").write_text(json.dumps(description))


def test_missing_and_unexpected_keys_are_listed(saved) -> None:
    _, path = saved
    _rewrite(path, lambda tensors: tensors.update({"head.extra": tensors.pop("head.bias")}))
    with pytest.raises(
        ValueError, match=r"does not fit VisionTransformer: missing head.bias; unexpected head.extra"
    ):
        load_model(path)


def test_wrong_shapes_are_listed(saved) -> None:
    _, path = saved
    _rewrite(path, lambda tensors: tensors.update({"head.bias": torch.zeros(7)}))
    with pytest.raises(ValueError, match=r"head.bias has shape \(7,\), not \(10,\)"):
        load_model(path)


def test_a_truncated_file_is_refused(saved) -> None:
    _, path = saved
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is no whole safetensors file \(1000 bytes\)"):
        load_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html>404</html>", "is an HTML page, not weights"),
        (b"\n  <html lang=en>", "is an HTML page, not weights"),
        (b"PK\x03\x04rest of a zip", "is a pickle or a zip archive"),
        (b"\x80\x02}q\x00.", "is a pickle or a zip archive"),
        (b"", r"no whole safetensors file \(0 bytes\)"),
        (b"\xff" * 64, "no whole safetensors file"),
    ],
)
def test_foreign_files_are_named_for_what_they_are(saved, content: bytes, message: str) -> None:
    _, path = saved
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(path)


def test_other_weights_than_the_configuration_names_are_refused(saved) -> None:
    _, path = saved
    tensors = load_file(path / "model.safetensors")
    tensors["head.bias"] += 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors has sha256 [0-9a-f]{64}, but config.json names"):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pytorch"}, "its 'format' must be 'diffattn-model'"),
        ({"format_version": 99}, "has format_version 99; this release reads 1"),
        ({"architecture": "resnet"}, "names the architecture 'resnet'"),
        ({"config": []}, "must hold 'config', an object; got list"),
    ],
)
def test_foreign_configurations_are_refused(saved, change: dict, message: str) -> None:
    _, path = saved
    description = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_options": {"foo": 1}}, r"differential attention \(.*lambda_init.*\); got foo"),
        ({"attention_options": {"layer_index": 3}}, r"must be options of .*; got layer_index"),
        ({"attention_options": {"lambda_init": 10**400}}, "lambda_init must be a finite number"),
        ({"mlp_ratio": "x"}, "mlp_ratio must be a number above 0 and at most 64; got 'x'"),
        ({"qkv_bias": "False"}, "qkv_bias must be true or false; got 'False'"),
        ({"image_size": None}, "image_size must be an integer of at least 1; got None"),
    ],
)
def test_wild_values_of_the_configuration_are_refused(saved, changes: dict, message: str) -> None:
    _, path = saved
    description = json.loads((path / "config.json").read_text())
    description["config"] |= changes
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=message):
        load_model(path)


@pytest.mark.parametrize("key", ["embed_dims", "attention_options"])
def test_bad_fields_of_the_configuration_are_refused(saved, key: str) -> None:
    _, path = saved
    description = json.loads((path / "config.json").read_text())
    description["config"][key] = {"lambda_init": "deep"} if key == "attention_options" else 3
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"has no option embed_dims|lambda_init must be a finite number"):
        load_model(path)


def test_shapes_are_compared_before_weights_are_allocated(saved) -> None:
    _, path = saved
    description = json.loads((path / "config.json").read_text())
    description["config"] |= {"embed_dim": 65536, "depth": 20, "mlp_ratio": 64.0}  # terabytes of weights
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"does not fit VisionTransformer: missing blocks\.1\..* and \d+ more"):
        load_model(path)


def test_a_missing_required_field_is_named(saved) -> None:
    _, path = saved
    description = json.loads((path / "config.json").read_text())
    del description["config"]["image_size"]
    (path / "config.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"config.json must have image_size; got "):
        load_model(path)


def test_no_checkpoint_is_said_so(tmp_path) -> None:
    with pytest.raises(ValueError, match="is no diffattn checkpoint directory: it has no config.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="it has no config.json"):
        load_model("no/such/place")


def test_loading_leaves_the_global_generator_alone(saved) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_model(saved[1])
    assert torch.equal(torch.rand(2), expected)
