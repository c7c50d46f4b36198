from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from diffattn.report.pictures import as_grid, colored_uri, image_uri, magnified, map_columns
from report.synthetic import make_record


def decoded(uri):
    head, _, content = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_an_image_keeps_its_pixels():
    image = np.random.default_rng(0).integers(0, 256, size=(3, 5, 4)).astype(np.float32) / 255
    assert np.array_equal(decoded(image_uri(image)), np.rint(image * 255).astype(np.uint8).transpose(1, 2, 0))
    assert decoded(image_uri(image, most=3)).shape == (3, 2, 3)
    assert np.array_equal(decoded(image_uri(image, most=9)), decoded(image_uri(image)))
    assert np.array_equal(decoded(image_uri(image[:1])), np.rint(image[0] * 255).astype(np.uint8))


def test_a_perturbation_of_eps_fills_the_range_around_grey():
    clean = np.full((1, 1, 3), 0.5, np.float32)
    adversarial = clean + np.array([[[0.1, -0.1, 0.0]]], np.float32)
    picture, factor = magnified(clean, adversarial, 0.1)
    assert factor == pytest.approx(5.0)
    assert picture.ravel() == pytest.approx([1.0, 0.0, 0.5], abs=1e-6)
    _, without = magnified(clean, adversarial, None)
    assert without == pytest.approx(5.0)


def test_no_change_is_grey_without_a_factor():
    clean = np.zeros((3, 2, 2), np.float32)
    picture, factor = magnified(clean, clean, 0.1)
    assert factor is None
    assert (picture == 0.5).all()


def test_a_map_with_a_class_token_shows_its_row():
    attention = np.arange(25, dtype=np.float32).reshape(5, 5)
    grid, what = as_grid(attention)
    assert np.array_equal(grid, [[1, 2], [3, 4]])
    assert what.startswith("class token")


def test_a_map_without_a_class_token_shows_the_mean_over_queries():
    attention = np.arange(16, dtype=np.float32).reshape(4, 4)
    grid, what = as_grid(attention)
    assert np.array_equal(grid.ravel(), attention.mean(axis=0))
    assert what.startswith("mean over queries")


def test_other_maps_are_shown_whole_and_large_ones_by_block_means():
    assert as_grid(np.ones((3, 3), np.float32))[0].shape == (3, 3)
    attention = np.random.default_rng(0).random((7, 1000), dtype=np.float32)
    grid, what = as_grid(attention)
    assert grid.shape == (7, 128)
    assert what.startswith("whole matrix")
    assert grid.min() >= attention.min()
    assert grid.mean() == pytest.approx(attention.mean(), abs=0.01)


def test_columns_of_a_softmax_and_of_a_differential_record():
    softmax, differential = make_record(examples=1), make_record(differential=True, examples=1)
    columns, _ = map_columns(softmax, softmax.examples[0])
    assert [column.title for column in columns] == ["A"]
    columns, shown = map_columns(differential, differential.examples[0])
    assert [column.title for column in columns] == ["A₁", "λ·A₂", "A₁ − λ·A₂"]
    assert columns[0].scale == columns[1].scale
    assert columns[2].scale.startswith("±")
    assert shown.startswith("class token")
    tensors = differential.tensors
    combined = tensors["example-0.clean_map_1"] + tensors["example-0.clean_map_2"]
    attacked = tensors["example-0.adversarial_map_1"] + tensors["example-0.adversarial_map_2"]
    most = max(np.abs(combined[0, 1:]).max(), np.abs(attacked[0, 1:]).max())
    assert columns[2].clean.uri == colored_uri(combined[0, 1:].reshape(8, 8), -most, most, "RdBu_r")


def test_zero_of_the_diverging_scale_is_its_neutral_middle():
    middle = decoded(colored_uri(np.zeros((1, 1)), -2.0, 2.0, "RdBu_r")).ravel()
    assert middle.min() > 235


def test_a_record_without_maps_has_no_columns():
    record = make_record(examples=1)
    record.tensors.pop("example-0.clean_map_1")
    assert map_columns(record, record.examples[0]) == ([], "")
