import pytest
import torch

from diffattn.validation import check_images, check_labels, check_logits


def test_good_input_passes():
    check_images(torch.tensor([[0.0, 1.0 + 9e-7]]))
    check_images(torch.tensor([[-9e-7, 1.0]], dtype=torch.float64))
    check_labels(torch.tensor([0, 2]), batch=2, num_classes=3)
    check_logits(torch.zeros(2, 2), batch=2)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.tensor([[0.0, 2.5]]), r"pixels in \[0, 1\]; got minimum 0 and maximum 2.5 .*inside the model"),
        (torch.tensor([[-1.0, 1.0]]), "got minimum -1 and maximum 1"),
        (torch.tensor([[0.0, 1.00001]]), "got minimum 0 and maximum 1"),
        (torch.tensor([[0.0, torch.nan]]), "got NaN pixels"),
        (torch.tensor([[0.0, torch.inf]]), "maximum inf"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "got dtype torch.uint8; divide by 255"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.int64), "got dtype torch.int64$"),
        (torch.zeros(4), r"got shape \(4,\)"),
        (torch.zeros(0, 3, 4, 4), r"got an empty batch of shape \(0, 3, 4, 4\)"),
        ([[0.0, 1.0]], "got list"),
    ],
)
def test_images_that_are_none_are_refused(images, message):
    with pytest.raises(ValueError, match="images must be a float tensor.*" + message):
        check_images(images)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.0]), "got dtype torch.float32"),
        (torch.tensor([0, 1], dtype=torch.int32), "got dtype torch.int32"),
        (torch.tensor([[1, 0], [0, 1]]), r"got shape \(2, 2\): one-hot rows\? pass labels.argmax\(dim=1\)"),
        (torch.tensor([0, 1, 2]), r"got shape \(3,\)"),
        (torch.tensor([0, 3]), r"in 0..2; got minimum 0 and maximum 3"),
        (torch.tensor([-1, 1]), r"in 0..2; got minimum -1 and maximum 1"),
        ([0, 1], "got list"),
    ],
)
def test_labels_that_are_none_are_refused(labels, message):
    with pytest.raises(ValueError, match=r"labels must be an int64 tensor \[2\].*" + message):
        check_labels(labels, batch=2, num_classes=3)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3, 2), r"got shape \(3, 2\)"),
        (torch.zeros(2, 1), r"got shape \(2, 1\)"),
        (torch.zeros(2), r"got shape \(2,\)"),
        (torch.zeros(2, 3, dtype=torch.int64), "got dtype torch.int64"),
        ({"logits": 1}, "got dict"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(logits, message):
    with pytest.raises(ValueError, match=r"the model must return float logits \[2, classes\].*" + message):
        check_logits(logits, batch=2)
