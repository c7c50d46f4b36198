"""Frobenius Jacobians of branches against closed forms and dense Jacobians."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from diffattn.models.attention import Branches
from diffattn.models.capture import attention_layers, record
from diffattn.sensitivity import measure_sensitivity
from small_models import OneLayer, small_batch, small_vit, two_token_images, two_token_layer, two_token_maps

EXACT = 1e-10


@pytest.mark.parametrize("name", ["softmax", "differential"])
def test_two_token_jacobian_closed_form(name):
    layer = two_token_layer(name)
    images = two_token_images()
    maps = two_token_maps(layer, images)
    model = OneLayer(layer).double()
    table = measure_sensitivity(model, images, torch.tensor([1]), readings="jacobian")
    assert table["head"].to_list() == ["0", "all"] * 2
    jacobians = [one.jacobian for one in maps]
    for row in table.iter_rows(named=True):
        assert row["norm_1"] == pytest.approx(np.linalg.norm(jacobians[0]), rel=EXACT)
        assert row["probes"] is None
        assert row["norm_1_se"] is None
        if name == "softmax":
            assert row["norm_2"] is row["cos_theta"] is row["lambda_value"] is None
            assert row["norm_combined"] == pytest.approx(np.linalg.norm(jacobians[0]), rel=EXACT)
            continue
        lam = layer.lambda_value().item()
        norms = [np.linalg.norm(one) for one in jacobians]
        cosine = (jacobians[0] * jacobians[1]).sum() / (norms[0] * norms[1])
        assert row["lambda_value"] == pytest.approx(lam, rel=EXACT)
        assert row["norm_2"] == pytest.approx(norms[1], rel=EXACT)
        assert row["weighted_2"] == pytest.approx(abs(lam) * norms[1], rel=EXACT)
        assert row["rho"] == pytest.approx(norms[1] / norms[0], rel=EXACT)
        assert row["cos_theta"] == pytest.approx(cosine, rel=EXACT)
        combined = np.linalg.norm(jacobians[0] - lam * jacobians[1])
        assert row["norm_combined"] == pytest.approx(combined, rel=EXACT)
        assert row["amplification"] == pytest.approx(combined / norms[0], rel=EXACT)


def dense_jacobians(branches_at: Callable[[Tensor], Branches], x: Tensor) -> Tensor:
    """[maps..., frozen combined, combined] by reverse mode: [B + 2, heads, queries * keys, inputs]."""
    frozen = branches_at(x[None]).detach().weights

    def parts(x: Tensor) -> Tensor:
        found = branches_at(x[None])
        held = sum(weight * one for weight, one in zip(frozen, found.maps, strict=True))
        return torch.stack([*found.maps, held, found.combined])[:, 0]

    return torch.autograd.functional.jacobian(parts, x).flatten(4).flatten(2, 3)


@pytest.mark.parametrize("prefix", ["vit", "diffvit", "diffvit_v2"])
@pytest.mark.parametrize("wrt", ["input", "pixels"])
def test_equal_to_dense_jacobians(prefix, wrt):
    model = small_vit(prefix)
    images, labels = small_batch(2)
    table = measure_sensitivity(model, images, labels, readings="jacobian", wrt=wrt)
    name = list(attention_layers(model))[1]
    with torch.no_grad(), record(model) as tape:
        model(images)

    def at_model(pixels: Tensor) -> Branches:
        with record(model) as inner:
            model(pixels)
        return inner.branches[name]

    branches_at = attention_layers(model)[name].branches if wrt == "input" else at_model
    inputs = tape.inputs[name] if wrt == "input" else images
    kinds = ["frozen", "differentiated"] if prefix == "diffvit_v2" else ["frozen"]
    assert set(table["lambda"]) == set(kinds)
    for sample, x in enumerate(inputs):
        dense = dense_jacobians(branches_at, x)
        for kind, head in itertools.product(kinds, [*range(dense.shape[1]), "all"]):
            picked = dense.flatten(1) if head == "all" else dense[:, head].flatten(1)
            where = {"sample_id": str(sample), "index": 1, "head": str(head), "lambda": kind}
            row = table.filter(**where).row(0, named=True)
            assert row["norm_1"] == pytest.approx(picked[0].norm().item(), rel=EXACT)
            combined = picked[-2] if kind == "frozen" else picked[-1]
            assert row["norm_combined"] == pytest.approx(combined.norm().item(), rel=EXACT)
            if prefix != "vit":
                assert row["norm_2"] == pytest.approx(picked[1].norm().item(), rel=EXACT)
            if prefix == "diffvit":
                cosine = torch.cosine_similarity(picked[0], picked[1], dim=0).item()
                assert row["cos_theta"] == pytest.approx(cosine, rel=1e-9)
