"""Random crop and flip of a batch of uint8 images, and the order of an epoch; keyed, so that a run can resume."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffattn.config import AugmentConfig
from diffattn.seeding import keyed_generator


class Offsets(NamedTuple):
    """What happens to each image of the data set in one epoch.

    Args:
        top: int64 [n], first row of the crop in the padded image, 0..2 * padding.
        left: int64 [n], its first column.
        flip: bool [n].
    """

    top: Tensor
    left: Tensor
    flip: Tensor


def epoch_order(n: int, *, seed: int, epoch: int) -> Tensor:
    """A permutation of range(n), keyed by (seed, epoch)."""
    return torch.from_numpy(keyed_generator(seed, "order", epoch).permutation(n))


def epoch_offsets(n: int, config: AugmentConfig, *, seed: int, epoch: int) -> Offsets:
    """The crops and flips of an epoch; entry i depends on (seed, epoch, i) alone, not on n."""
    draws = torch.from_numpy(keyed_generator(seed, "augment", epoch).random((n, 3)))
    corner = (draws[:, :2] * (2 * config.crop_padding + 1)).long()
    return Offsets(corner[:, 0], corner[:, 1], (draws[:, 2] < 0.5) & config.flip)


def augment(images: Tensor, offsets: Offsets, *, crop_padding: int) -> Tensor:
    """Pad with black, crop back to the size, mirror left to right.

    Args:
        images: [batch, channels, height, width] of any dtype; not changed.
        offsets: three tensors [batch].
        crop_padding: pixels added on each side; 0 crops nothing.

    Returns:
        a tensor of the same shape and dtype.
    """
    batch, _, height, width = images.shape
    if crop_padding:
        windows = F.pad(images, [crop_padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
        images = windows[torch.arange(batch), :, offsets.top, offsets.left]
    if offsets.flip.any():
        images = torch.where(offsets.flip[:, None, None, None], images.flip(3), images)
    return images
