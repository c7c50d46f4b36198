"""Labelled images in memory: scikit-learn's digits, and Parquet in the Hugging Face image convention."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffattn.checks import require_positive_integer
from diffattn.data.decode import UnreadableImage, decode_image, resize_and_crop
from diffattn.data.sources import Row, Source, find_path, find_registered, iterate_rows, read_class_names
from diffattn.registry import Registry

log = logging.getLogger(__name__)

MAX_UNREADABLE = 0.01
DECODING_THREADS = 2
_TEST_EVERY = 4


@dataclass(frozen=True, eq=False)
class ImageData:
    """Labelled images of one size, whole in memory.

    Args:
        name: what they were asked for by.
        split: the split that was read; of a single file, its stem.
        images: uint8 [n, channels, height, width].
        labels: int64 [n], indices into `class_names`.
        sample_ids: n distinct ids that do not depend on `limit` or on which images were skipped.
        class_names: one text per class.
        skipped: (sample id, reason) of every unreadable image.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    sample_ids: list[str]
    class_names: list[str]
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check that the fields belong together."""
        n = len(self.sample_ids)
        if n == 0:
            raise ValueError(f"data {self.name!r} (split {self.split!r}) holds no images")
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[0] != n:
            raise ValueError(
                f"images must be uint8 [{n}, channels, height, width]; got {self.images.dtype} "
                f"{tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or tuple(self.labels.shape) != (n,):
            raise ValueError(f"labels must be int64 [{n}]; got {self.labels.dtype} {tuple(self.labels.shape)}")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.class_names):
            raise ValueError(f"labels must be in 0..{len(self.class_names) - 1}; got {low if low < 0 else high}")
        if len(set(self.sample_ids)) != n:
            twice = next(name for name, count in Counter(self.sample_ids).items() if count > 1)
            raise ValueError(f"sample_ids must be distinct; got {twice!r} more than once")

    def __len__(self) -> int:
        """Number of readable images."""
        return len(self.sample_ids)

    def pixels(self, indices: Tensor | Sequence[int] | slice | None = None) -> Tensor:
        """The images, or those at `indices`, as float32 in [0, 1]: [n, channels, height, width]."""
        chosen = self.images if indices is None else self.images[indices]
        return chosen.float().div_(255)

    def select(self, indices: Tensor | Sequence[int]) -> ImageData:
        """The images at `indices`, in that order; `skipped` stays with the whole."""
        rows = [int(index) for index in indices]
        return replace(
            self,
            images=self.images[rows],
            labels=self.labels[rows],
            sample_ids=[self.sample_ids[row] for row in rows],
            skipped=[],
        )

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 over sample ids, shape, pixels and labels, as hex."""
        digest = hashlib.sha256()
        for part in ("\n".join(self.sample_ids), str(tuple(self.images.shape))):
            digest.update(part.encode() + b"\0")
        digest.update(self.images.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


class Request(NamedTuple):
    """What `load_data` was asked for, checked."""

    split: str
    limit: int | None
    image_size: int | None
    in_chans: int | None
    root: str | Path | None


DATA: Registry[Callable[[Request], ImageData]] = Registry("data set")
"""Name -> a function that loads it."""


def load_data(
    name: str,
    *,
    split: str = "test",
    limit: int | None = None,
    image_size: int | None = None,
    in_chans: int | None = None,
    root: str | Path | None = None,
) -> ImageData:
    """Load labelled images into memory.

    Args:
        name: "digits" (scikit-learn's 8x8 digits, splits train and test), "cifar10", "tiny_imagenet" (whose
            "test" is its val split where it has no test file), or a path to a `.parquet` file or a folder of
            them, in the Hugging Face image convention: `image` struct{bytes, path} and `label`.
        split: which part; of a folder the files named for it; a single file is taken whole and called by its stem.
        limit: only the first so many rows, at least 1.
        image_size: resize the shorter edge (bicubic) and crop the centre to this many pixels; without it all
            images must have one size.
        in_chans: 1 (grey) or 3 (RGB); None takes 1 for digits and 3 elsewhere.
        root: folder that holds `cifar10/train.parquet` and the like; None reads DIFFATTN_DATA.

    Returns:
        the images; unreadable ones are left out, listed in `skipped`, and logged in one warning.

    Raises:
        ValueError: for an unknown name, a missing file, no rows or no readable image, more than 1 % unreadable
            images, labels that are missing, negative or no integers, or images of different sizes.
    """
    for argument, value in (("limit", limit), ("image_size", image_size)):
        if value is not None:
            require_positive_integer(argument, value)
    if in_chans not in (None, 1, 3):
        raise ValueError(f"in_chans must be 1 or 3; got {in_chans!r}")
    request = Request(split, limit, image_size, in_chans, root)
    if name not in DATA and _is_path(name):
        return load_parquet(find_path(Path(name), split), limit, image_size, in_chans)
    return DATA[name](request)


@DATA.register("digits")
def _load_digits(request: Request) -> ImageData:
    """1797 digits of 8x8 that come with scikit-learn; of each class the 4th, 8th, ... row is a test image."""
    if request.split not in ("train", "test"):
        raise ValueError(f"data 'digits' has the splits train and test; got {request.split!r}")
    from PIL import Image
    from sklearn.datasets import load_digits

    flat, targets = load_digits(return_X_y=True)
    labels = np.asarray(targets, dtype=np.int64)
    rank = np.zeros(len(labels), dtype=np.int64)
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    is_test = rank % _TEST_EVERY == _TEST_EVERY - 1
    rows = np.flatnonzero(is_test if request.split == "test" else ~is_test)[: request.limit]
    pixels = np.round(np.asarray(flat)[rows].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    if request.image_size is not None:
        size = request.image_size
        pixels = np.stack([np.asarray(resize_and_crop(Image.fromarray(one), size)) for one in pixels])
    return ImageData(
        name="digits",
        split=request.split,
        images=torch.from_numpy(pixels)[:, None].repeat(1, request.in_chans or 1, 1, 1),
        labels=torch.from_numpy(labels[rows]),
        sample_ids=[f"digits/{row}" for row in rows],
        class_names=[str(digit) for digit in range(10)],
    )


@DATA.register("cifar10")
def _load_cifar10(request: Request) -> ImageData:
    source = find_registered("cifar10", request.split, request.root, aliases={})
    return load_parquet(source, request.limit, request.image_size, request.in_chans)


@DATA.register("tiny_imagenet")
def _load_tiny_imagenet(request: Request) -> ImageData:
    """Its labelled test images are those of its val split."""
    source = find_registered("tiny_imagenet", request.split, request.root, aliases={"test": "val"})
    return load_parquet(source, request.limit, request.image_size, request.in_chans)


def load_parquet(
    source: Source, limit: int | None = None, image_size: int | None = None, in_chans: int | None = None
) -> ImageData:
    """Decode the first `limit` rows of a source; see `load_data`."""
    class_names = read_class_names(source)
    decode = partial(_decode_row, channels=in_chans or 3, image_size=image_size)
    images: list[np.ndarray] = []
    labels: list[int] = []
    sample_ids: list[str] = []
    skipped: list[tuple[str, str]] = []
    row = 0
    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        for chunk in iterate_rows(source, limit):
            for one, decoded in zip(chunk, pool.map(decode, chunk), strict=True):
                name = f"{source.prefix}/{row}"
                row += 1
                if isinstance(decoded, str):
                    skipped.append((name, decoded))
                    continue
                images.append(decoded)
                labels.append(one.label)
                sample_ids.append(name)
                if decoded.shape != images[0].shape:
                    raise ValueError(
                        f"images of {source.name!r} must have one size, or give image_size to resize them; "
                        f"got {_size(images[0])} in {sample_ids[0]} and {_size(decoded)} in {name}"
                    )
    _report_skipped(source, skipped, rows=row)
    return ImageData(
        name=source.name,
        split=source.split,
        images=torch.from_numpy(np.stack(images)),
        labels=torch.tensor(labels, dtype=torch.int64),
        sample_ids=sample_ids,
        class_names=class_names,
        skipped=skipped,
    )


def _decode_row(row: Row, *, channels: int, image_size: int | None) -> np.ndarray | str:
    try:
        return decode_image(row.content, channels=channels, image_size=image_size)
    except UnreadableImage as error:
        return str(error)


def _report_skipped(source: Source, skipped: list[tuple[str, str]], *, rows: int) -> None:
    if not skipped:
        return
    first = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
    if len(skipped) > MAX_UNREADABLE * rows:
        raise ValueError(
            f"at most {MAX_UNREADABLE:.0%} of the images of {source.name!r} may be unreadable; "
            f"got {len(skipped)} of {rows}: {first}"
        )
    log.warning("skipped %d of %d images of %r: %s", len(skipped), rows, source.name, first)


def _is_path(name: str) -> bool:
    return name.endswith(".parquet") or "/" in name or "\\" in name or Path(name).exists()


def _size(image: np.ndarray) -> str:
    return f"{image.shape[2]}x{image.shape[1]}"
