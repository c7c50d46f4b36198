"""Encoded images to pixels. The bytes come from anywhere: what cannot be read is refused with a short reason."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""What is opened: image formats that are decoded in this process (EPS, say, would call another program)."""

_MODES = {1: "L", 3: "RGB"}


class UnreadableImage(Exception):
    """Bytes that are no image that can be decoded; its text is the reason."""


def decode_image(content: bytes | None, *, channels: int, image_size: int | None = None) -> np.ndarray:
    """Decode an image to uint8 [channels, height, width].

    The first frame is taken, turned upright as its EXIF tag says, and converted to RGB or grey (an alpha channel
    is dropped; 16-bit grey is scaled to 8). With `image_size` an image of another size has its shorter edge
    resized to it (bicubic) and its centre cropped, as torchvision's `Resize` and `CenterCrop` do.

    Args:
        content: an encoded image, or None for a row that has no bytes.
        channels: 3, or 1 for grey.
        image_size: edge of the square result in pixels; None keeps the size.

    Raises:
        UnreadableImage: if it is no image, is truncated, or has more pixels than Pillow's limit.
    """
    if not content:
        raise UnreadableImage("no bytes (paths are never opened)")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _check_size(*image.size)
            image.load()
            upright = _convert(ImageOps.exif_transpose(image), _MODES[channels])
            if image_size is not None:
                upright = resize_and_crop(upright, image_size)
            pixels = np.array(upright, dtype=np.uint8)
    except UnreadableImage:
        raise
    except Exception as error:  # a hostile file makes the decoders raise nearly anything
        text = str(error) if not isinstance(error, Image.UnidentifiedImageError) else "no known image format"
        raise UnreadableImage(f"{text[:120] or type(error).__name__}") from error
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def resize_and_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter edge to `size` (bicubic) and crop the centre; an image of that size is left alone."""
    width, height = image.size
    if (width, height) == (size, size):
        return image
    short = min(width, height)
    width, height = int(size * width / short), int(size * height / short)
    _check_size(width, height)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _check_size(width: int, height: int) -> None:
    limit = Image.MAX_IMAGE_PIXELS or 2**27
    if width * height > limit:
        raise UnreadableImage(f"{width}x{height} is more than {limit} pixels")


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray(np.round(np.asarray(image) / 257.0).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise UnreadableImage(f"mode {image.mode!r} has no known range of values")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
