"""Gradients of the loss through a branch against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracles
from diffattn.sensitivity import measure_sensitivity
from small_models import OneLayer, score_arrays, two_token_images, two_token_layer, two_token_maps

EXACT = 1e-10


@pytest.mark.parametrize("name", ["softmax", "differential"])
def test_two_token_loss_gradient_closed_form(name):
    layer = two_token_layer(name)
    torch.manual_seed(5)
    model = OneLayer(layer).double()
    images, label = two_token_images(), 2
    arrays, x = score_arrays(layer), images[0, 0].numpy()
    maps = two_token_maps(layer, images)
    weights = [1.0] if name == "softmax" else [1.0, -layer.lambda_value().item()]
    values = x @ arrays["value"][0].T + arrays["value_bias"][0]
    context = sum(w * one.map for w, one in zip(weights, maps, strict=True)) @ values
    out_matrix = arrays["output"][:, 0]
    after, keep = context, 1.0
    if name == "differential":
        gain, keep = layer.sub_norm.weight.detach().numpy(), 1.0 - layer.lambda_init
        after = keep * oracles.rms_norm(context, gain, 1e-5)
    bias = 0.0 if arrays["output_bias"] is None else arrays["output_bias"]
    head, head_bias = (one.detach().numpy() for one in (model.head.weight, model.head.bias))
    logits = head @ (after @ out_matrix.T + bias).mean(axis=0) + head_bias
    at_output = np.tile(head.T @ oracles.cross_entropy_slope(logits, label) / 2, (2, 1))
    at_context = at_output @ out_matrix
    if name == "differential":
        at_context = oracles.rms_norm_pullback(context, gain, 1e-5, keep * at_context)
    slot = at_context @ values.T
    gradients = [np.einsum("ij,ijtc->tc", slot, one.jacobian) for one in maps]
    table = measure_sensitivity(model, images, torch.tensor([label]), readings="loss")
    assert table.height == 4
    for row in table.iter_rows(named=True):
        assert row["norm_1"] == pytest.approx(np.linalg.norm(gradients[0]), rel=EXACT)
        if name == "differential":
            norms = [np.linalg.norm(one) for one in gradients]
            assert row["norm_2"] == pytest.approx(norms[1], rel=EXACT)
            assert row["weighted_2"] == pytest.approx(abs(weights[1]) * norms[1], rel=EXACT)
            cosine = (gradients[0] * gradients[1]).sum() / (norms[0] * norms[1])
            assert row["cos_theta"] == pytest.approx(cosine, rel=EXACT)
        total = sum(w * one for w, one in zip(weights, gradients, strict=True))
        assert row["norm_combined"] == pytest.approx(np.linalg.norm(total), rel=EXACT)


def test_a_confident_samples_gradient_is_that_of_float64():
    """With the true logit far above, float32 cross-entropy loses the true class's gradient; the figures do not."""
    from diffattn.models.zoo import create_model

    model = create_model("diffvit_micro_patch2_8", depth=1, lambda_init=0.8, seed=0).eval()
    with torch.no_grad():
        model.head.bias[3] += 30.0
    images, labels = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 3])
    single = measure_sensitivity(model, images, labels, readings=["loss"])
    double = measure_sensitivity(model.double(), images.double(), labels, readings=["loss"])
    np.testing.assert_allclose(single["norm_combined"].to_numpy(), double["norm_combined"].to_numpy(), rtol=1e-3)
    np.testing.assert_allclose(single["cos_theta"].to_numpy(), double["cos_theta"].to_numpy(), atol=1e-3)
