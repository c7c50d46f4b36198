import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from diffattn.data.images import DATA, ImageData, load_data

SHARED = Path(os.environ.get("DIFFATTN_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_shared = pytest.mark.skipif(not (SHARED / "cifar10").is_dir(), reason="needs the data packs (DIFFATTN_DATA)")
FEATURES = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}


def png(seed, size=(4, 4)):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, contents, labels=None, *, features=FEATURES, label_type=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = [index % 2 for index in range(len(contents))] if labels is None else labels
    images = pa.array(
        [{"bytes": content, "path": "/etc/passwd"} for content in contents],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    table = pa.table({"image": images, "label": pa.array(labels, label_type or pa.int64())})
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, path, **options)
    return str(path)


def test_digits_are_scikit_learns_rescaled_to_bytes():
    bunch = load_digits()
    parts = {split: load_data("digits", split=split) for split in ("train", "test")}
    rows = {split: [int(name.split("/")[1]) for name in data.sample_ids] for split, data in parts.items()}
    assert sorted(rows["train"] + rows["test"]) == list(range(1797))
    for split, data in parts.items():
        expected = bunch.images[rows[split]] * 255 / 16
        assert data.images.shape[1:] == (1, 8, 8)
        assert np.abs(data.images[:, 0].numpy() - expected).max() <= 0.5
        assert data.labels.tolist() == bunch.target[rows[split]].tolist()
    assert (len(parts["train"]), len(parts["test"])) == (1352, 445)
    shares = parts["test"].labels.bincount() / torch.from_numpy(bunch.target).bincount()
    assert (shares - 0.25).abs().max() < 0.005


def test_digits_take_size_channels_and_limit():
    data = load_data("digits", split="test", limit=3, image_size=16, in_chans=3)
    assert data.images.shape == (3, 3, 16, 16)
    assert data.sample_ids == load_data("digits", split="test").sample_ids[:3]
    assert torch.equal(data.images[:, 0], data.images[:, 2])


def test_pixels_select_and_fingerprint():
    data = load_data("digits", limit=6)
    assert data.pixels().dtype == torch.float32
    assert torch.equal(data.pixels([4, 1]) * 255, data.images[[4, 1]].float())
    part = data.select([4, 1])
    assert part.sample_ids == [data.sample_ids[4], data.sample_ids[1]]
    assert torch.equal(part.labels, data.labels[[4, 1]])
    changed = data.images.clone()
    changed[0, 0, 0, 0] += 1
    prints = {
        data.fingerprint,
        part.fingerprint,
        data.select([1, 4]).fingerprint,
        ImageData("digits", "test", changed, data.labels, data.sample_ids, data.class_names).fingerprint,
        ImageData(
            "digits", "test", data.images, data.labels.flip(0), data.sample_ids, data.class_names
        ).fingerprint,
    }
    assert len(prints) == 5
    assert load_data("digits", limit=6).fingerprint == data.fingerprint


def test_parquet_gives_pixels_labels_names_and_ids(tmp_path):
    contents = [png(seed) for seed in range(5)]
    data = load_data(write(tmp_path / "pets.parquet", contents, [0, 1, 1, 0, 1], row_group_size=2))
    expected = [np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1) for content in contents]
    assert np.array_equal(data.images.numpy(), np.stack(expected))
    assert data.labels.tolist() == [0, 1, 1, 0, 1]
    assert data.class_names == ["cat", "dog"]
    assert data.sample_ids == [f"pets/{row}" for row in range(5)]
    assert data.split == "pets"
    assert load_data(str(tmp_path / "pets.parquet"), limit=3).sample_ids == data.sample_ids[:3]
    assert load_data(str(tmp_path / "pets.parquet"), in_chans=1).images.shape == (5, 1, 4, 4)


def test_without_metadata_classes_are_called_by_their_index(tmp_path):
    path = write(tmp_path / "a.parquet", [png(0)] * 3, [0, 2, 1], features=None, label_type=pa.uint8())
    assert load_data(path, limit=1).class_names == ["0", "1", "2"]
    path = write(tmp_path / "b.parquet", [png(0)] * 2, [0, 1_000_001], features=None, label_type=pa.int64())
    with pytest.raises(ValueError, match=r"without class names must be at most 1000000; got 1000001"):
        load_data(path)


def test_a_folder_gives_the_files_of_the_split_in_order(tmp_path):
    write(tmp_path / "pets" / "data" / "train-00001-of-00002.parquet", [png(3)])
    write(tmp_path / "pets" / "data" / "train-00000-of-00002.parquet", [png(1), png(2)])
    write(tmp_path / "pets" / "data" / "test-00000-of-00001.parquet", [png(4)])
    folder = str(tmp_path / "pets")
    train = load_data(folder, split="train")
    assert train.sample_ids == ["pets/train/0", "pets/train/1", "pets/train/2"]
    expected = np.asarray(Image.open(io.BytesIO(png(3)))).transpose(2, 0, 1)
    assert np.array_equal(train.images[2].numpy(), expected)
    assert len(load_data(folder, split="train", limit=1)) == 1
    assert len(load_data(folder, split="test")) == 1
    with pytest.raises(ValueError, match=r"has no file of the split 'val'; it holds test-00000"):
        load_data(folder, split="val")


def test_registered_names_look_under_the_root(tmp_path, monkeypatch):
    write(tmp_path / "cifar10" / "train.parquet", [png(0)])
    write(tmp_path / "tiny_imagenet" / "val.parquet", [png(0), png(1)])
    monkeypatch.setenv("DIFFATTN_DATA", str(tmp_path))
    assert load_data("cifar10", split="train").sample_ids == ["cifar10/train/0"]
    assert load_data("tiny_imagenet", split="test").split == "val"
    with pytest.raises(
        ValueError, match=r"no split 'test': there is no .*cifar10/test.parquet \(splits there: train;"
    ):
        load_data("cifar10", split="test")
    with pytest.raises(ValueError, match=r"root must be a folder .*; there is none at .*nowhere"):
        load_data("cifar10", root=tmp_path / "nowhere")
    monkeypatch.delenv("DIFFATTN_DATA")
    with pytest.raises(ValueError, match=r"'cifar10' needs the folder .*DIFFATTN_DATA"):
        load_data("cifar10")
    assert len(load_data("cifar10", split="train", root=tmp_path)) == 1


def test_an_unreadable_image_is_counted_named_and_skipped(tmp_path, caplog):
    contents = [png(seed) for seed in range(200)]
    contents[7] = png(7)[:40]
    contents[9] = None
    path = write(tmp_path / "a.parquet", contents)
    with caplog.at_level(logging.WARNING):
        data = load_data(path)
    assert len(data) == 198
    assert [name for name, _ in data.skipped] == ["a/7", "a/9"]
    assert data.skipped[1][1] == "no bytes (paths are never opened)"
    assert data.sample_ids[6:9] == ["a/6", "a/8", "a/10"]
    assert data.labels[:8].tolist() == [0, 1, 0, 1, 0, 1, 0, 0]
    (record,) = caplog.records
    assert "skipped 2 of 200 images" in record.getMessage()
    assert "a/7: " in record.getMessage()


def test_more_than_one_percent_unreadable_is_an_error(tmp_path):
    contents = [png(0)] * 197 + [b"<html>", None, b"no image"]
    path = write(tmp_path / "a.parquet", contents)
    assert len(load_data(path, limit=198).skipped) == 1
    with pytest.raises(
        ValueError, match=r"at most 1% of the images .* got 3 of 200: a/197: no known image format; a/198"
    ):
        load_data(path)


def test_no_rows_and_no_readable_image_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"is empty: .*a\.parquet holds no rows"):
        load_data(write(tmp_path / "a.parquet", []))
    with pytest.raises(ValueError, match="got 1 of 1: b/0: no known image format"):
        load_data(write(tmp_path / "b.parquet", [b"text"]))


def test_sizes_that_differ_need_image_size(tmp_path):
    path = write(tmp_path / "a.parquet", [png(0), png(1, (6, 5))])
    with pytest.raises(ValueError, match="give image_size to resize them; got 4x4 in a/0 and 5x6 in a/1"):
        load_data(path)
    assert load_data(path, image_size=4).images.shape == (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, None], {}, "no missing values; got 1 missing"),
        ([0, -1], {}, "must be at least 0; got -1 in row 1"),
        ([0.0, 1.0], {"label_type": pa.float32()}, "must be an integer; got float"),
        ([True, False], {"label_type": pa.bool_()}, "must be an integer; got bool"),
        (["0", "1"], {"label_type": pa.string()}, "must be an integer; got string"),
        ([0, 2], {}, "must be below the 2 class names .*; got 2"),
        ([0, 2**63], {"label_type": pa.uint64()}, "must be class indices; got 9223372036854775808"),
        ([0, 1], {"features": {"info": 3}}, "metadata .* must describe 'label'"),
        ([0, 1], {"features": {"info": {"features": {"label": {"names": [1, 2]}}}}}, "must be a list of texts"),
    ],
)
def test_labels_are_checked(tmp_path, labels, options, message):
    with pytest.raises(ValueError, match=message):
        load_data(write(tmp_path / "a.parquet", [png(0)] * 2, labels, **options))


def test_files_that_are_not_of_the_convention_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"<!doctype html>")
    with pytest.raises(ValueError, match=r"a\.parquet is no whole Parquet file"):
        load_data(str(path))
    whole = Path(write(tmp_path / "b.parquet", [png(seed) for seed in range(9)])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.parquet is no whole Parquet file"):
        load_data(str(path))
    start = whole.index(b"PNG")
    path.write_bytes(whole[: start + 10] + bytes(50) + whole[start + 60 :])
    with pytest.raises(ValueError, match=r"a\.parquet is no whole Parquet file"):
        load_data(str(path))
    pq.write_table(pa.table({"img": [b""], "label": [0]}), path)
    with pytest.raises(ValueError, match="must have one column 'image'; it has img, label"):
        load_data(str(path))
    pq.write_table(pa.table({"image": ["a.png"], "label": [0]}), path)
    with pytest.raises(ValueError, match="must be a struct with 'bytes', or binary; got string"):
        load_data(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "cifar"},
            r"unknown data set 'cifar'; did you mean cifar10\? Known: cifar10, digits, tiny_imagenet",
        ),
        ({"name": "no/such.parquet"}, r"there is no data at no/such\.parquet"),
        ({"name": "digits", "split": "val"}, "'digits' has the splits train and test; got 'val'"),
        ({"name": "digits", "limit": 0}, "limit must be an integer of at least 1; got 0"),
        ({"name": "digits", "limit": True}, "limit must be an integer of at least 1; got True"),
        ({"name": "digits", "image_size": 2.5}, "image_size must be an integer of at least 1; got 2.5"),
        ({"name": "digits", "in_chans": 2}, "in_chans must be 1 or 3; got 2"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_data(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": torch.zeros(2, 1, 2, 2)},
            r"images must be uint8 \[2, channels, height, width\]; got torch.float32",
        ),
        ({"labels": torch.zeros(2)}, r"labels must be int64 \[2\]; got torch.float32"),
        ({"labels": torch.tensor([0, 2])}, r"labels must be in 0\.\.1; got 2"),
        ({"sample_ids": ["a", "a"]}, "sample_ids must be distinct; got 'a' more than once"),
        ({"sample_ids": []}, "holds no images"),
    ],
)
def test_image_data_checks_its_fields(changes, message):
    fields = {
        "images": torch.zeros(2, 1, 2, 2, dtype=torch.uint8),
        "labels": torch.tensor([0, 1]),
        "sample_ids": ["a", "b"],
        "class_names": ["x", "y"],
    }
    with pytest.raises(ValueError, match=message):
        ImageData(name="mine", split="test", **(fields | changes))


@needs_shared
@pytest.mark.parametrize(("name", "size", "classes"), [("cifar10", 32, 10), ("tiny_imagenet", 64, 200)])
def test_real_data(name, size, classes):
    assert name in DATA
    data = load_data(name, split="test", limit=300, root=SHARED)
    assert data.images.shape == (300, 3, size, size)
    assert len(data.class_names) == classes
    assert data.skipped == []
    assert data.labels[: 2 * 10].tolist() == [row % classes for row in range(20)]
    assert 0.2 < data.pixels().mean().item() < 0.7
