import io

import numpy as np
import pytest
import torchvision.transforms as T
from PIL import Image

from diffattn.data.decode import UnreadableImage, decode_image, resize_and_crop


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(height, width, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def test_rgb_pixels_come_back_channels_first():
    pixels = noise(5, 7)
    assert np.array_equal(decode_image(encode(Image.fromarray(pixels)), channels=3), pixels.transpose(2, 0, 1))


def test_grey_is_one_channel_or_repeated():
    pixels = noise(4, 6, 1)
    content = encode(Image.fromarray(pixels))
    assert np.array_equal(decode_image(content, channels=1), pixels[None])
    assert np.array_equal(decode_image(content, channels=3), np.stack([pixels] * 3))


def test_sixteen_bit_grey_is_scaled_not_clipped():
    values = np.array([[0, 257, 65535, 32896]], dtype=np.uint16)
    assert decode_image(encode(Image.fromarray(values)), channels=1).tolist() == [[[0, 1, 255, 128]]]


@pytest.mark.parametrize("mode", ["1", "LA", "RGBA", "P", "CMYK"])
def test_other_modes_become_rgb(mode):
    content = encode(Image.fromarray(noise(4, 4)).convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    assert decode_image(content, channels=3).shape == (3, 4, 4)


def test_a_palette_with_transparency_warns_of_nothing():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255] + [0] * 762)
    image.putpixel((1, 0), 1)
    content = encode(image, transparency=b"\x80\xff")
    assert decode_image(content, channels=3)[:, 0].T.tolist() == [[255, 0, 0], [0, 0, 255]]


def test_exif_rotation_is_honoured():
    pixels = noise(3, 5)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown rotated by 90 degrees clockwise
    decoded = decode_image(encode(Image.fromarray(pixels), exif=exif), channels=3)
    assert np.array_equal(decoded, np.rot90(pixels, -1).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("height", "width", "size"), [(20, 33, 8), (33, 20, 9), (5, 7, 16), (8, 8, 12), (11, 10, 10)]
)
def test_resize_and_crop_is_torchvisions(height, width, size):
    image = Image.fromarray(noise(height, width))
    theirs = T.Compose([T.Resize(size, T.InterpolationMode.BICUBIC), T.CenterCrop(size)])(image)
    assert np.array_equal(np.asarray(resize_and_crop(image, size)), np.asarray(theirs))


def test_an_image_of_the_size_is_not_resampled():
    pixels = noise(6, 6)
    assert np.array_equal(
        decode_image(encode(Image.fromarray(pixels)), channels=3, image_size=6), pixels.transpose(2, 0, 1)
    )


JPEG = encode(Image.fromarray(noise(40, 40)), "JPEG")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no bytes"),
        (b"", "no bytes"),
        (b"<!doctype html><html></html>", "no known image format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no known image format"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (encode(Image.fromarray(noise(9, 9)))[:60], "."),
        (encode(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"), "mode 'F' has no known range"),
    ],
)
def test_what_is_no_image_is_refused_with_a_reason(content, reason):
    with pytest.raises(UnreadableImage, match=reason):
        decode_image(content, channels=3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused(monkeypatch):
    content = encode(Image.fromarray(noise(40, 40, 1)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)  # beyond twice the limit Pillow itself raises
    with pytest.raises(UnreadableImage, match="exceeds limit"):
        decode_image(content, channels=3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # up to twice it only warns
    with pytest.raises(UnreadableImage, match="40x40 is more than 1000 pixels"):
        decode_image(content, channels=3)


def test_a_thin_strip_does_not_blow_up_when_resized():
    content = encode(Image.new("L", (60_000, 1)))
    with pytest.raises(UnreadableImage, match=r"13440000x224 is more than \d+ pixels"):
        decode_image(content, channels=3, image_size=224)
