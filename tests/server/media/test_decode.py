"""Decoding of files as people and attackers send them, written by Pillow or byte by byte."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from quire.server.media.decode import FORMATS, MAX_SCANS, decode
from tests.server.media.conftest import encoded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about damaged files
MAX_PIXELS = 1 << 16
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
CORNERS = np.array([[RED, GREEN, WHITE], [BLUE, (0, 0, 0), (128, 64, 32)]], np.uint8)  # 3 wide, 2 high


def decoded(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    image = decode(data, max_pixels)
    assert image.mode == "RGB"
    return np.asarray(image)


def picture() -> Image.Image:
    return Image.fromarray(CORNERS)


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_formats_without_loss(format):
    options = {"lossless": True} if format == "WEBP" else {}
    assert (decoded(encoded(picture(), format, **options)) == CORNERS).all()


def test_jpeg():
    smooth = Image.new("RGB", (16, 16), (200, 100, 50))
    assert np.abs(decoded(encoded(smooth, "JPEG")).astype(int) - (200, 100, 50)).max() <= 3
    assert np.abs(decoded(encoded(smooth, "JPEG", progressive=True)).astype(int) - (200, 100, 50)).max() <= 3


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, format):
    """The stored rows and columns are those of the upright picture, as the standard's figure has them."""
    stored = {
        1: CORNERS,
        2: CORNERS[:, ::-1],
        3: CORNERS[::-1, ::-1],
        4: CORNERS[::-1],
        5: CORNERS.transpose(1, 0, 2),
        6: np.rot90(CORNERS),  # to be turned clockwise
        7: np.rot90(CORNERS, 2).transpose(1, 0, 2),
        8: np.rot90(CORNERS, -1),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), format, exif=exif.tobytes(), **options)
    assert (decoded(data) == CORNERS).all()


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_orientations_that_are_none(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    assert (decoded(encoded(picture(), "PNG", exif=exif.tobytes())) == CORNERS).all()


def test_alpha_is_on_white():
    pixels = np.array([[(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128)]], np.uint8)
    expected = [RED, WHITE, (127, 127, 127)]
    for format, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("TIFF", {})):
        found = decoded(encoded(Image.fromarray(pixels, "RGBA"), format, **options))
        assert np.abs(found[0].astype(int) - expected).max() <= 1, format
    gray = Image.fromarray(np.array([[(0, 0), (0, 255)]], np.uint8), "LA")
    assert decoded(encoded(gray))[0].tolist() == [[255] * 3, [0] * 3]


def test_palettes_with_and_without_transparency():
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    image.putdata([0, 1, 2])
    assert decoded(encoded(image))[0].tolist() == [list(RED), list(GREEN), list(BLUE)]
    assert decoded(encoded(image, transparency=1))[0].tolist() == [list(RED), [255] * 3, list(BLUE)]
    assert decoded(encoded(image, transparency=bytes([0, 255, 255])))[0][0].tolist() == [255] * 3
    assert decoded(encoded(image, "GIF", transparency=2))[0].tolist() == [list(RED), list(GREEN), [255] * 3]


def test_one_color_is_transparent():
    """A tRNS chunk of an image without a palette."""
    assert decoded(encoded(picture(), transparency=BLUE))[1, 0].tolist() == [255] * 3
    assert decoded(encoded(Image.new("L", (1, 1), 7), transparency=7))[0, 0].tolist() == [255] * 3


def test_black_and_white_and_gray():
    assert decoded(encoded(Image.new("1", (2, 1), 1)))[0].tolist() == [[255] * 3] * 2
    assert decoded(encoded(Image.new("L", (1, 1), 77)))[0].tolist() == [[77] * 3]


def test_sixteen_bits():
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    for format in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(values), format)
        assert decoded(data)[0, :, 0].tolist() == [0, 1, 128, 255], format
    dark = encoded(Image.fromarray(np.array([[0, 200]], np.uint16)), "PNG")
    assert decoded(dark)[0, :, 0].tolist() == [0, 1]  # of 65,535, however dark the picture is
    color = np.array([[[0, 32768, 65535]]], ">u2")
    assert decoded(png(1, 1, 16, 2, b"\0" + color.tobytes()))[0].tolist() == [[0, 128, 255]]


def test_numbers():
    as_bytes = Image.fromarray(np.array([[0, 100, 255]], np.int32))
    assert decoded(encoded(as_bytes, "TIFF"))[0, :, 0].tolist() == [0, 100, 255]
    floats = Image.fromarray(np.array([[0.0, 127.6, 255.0]], np.float32))
    assert decoded(encoded(floats, "TIFF"))[0, :, 0].tolist() == [0, 128, 255]
    for wrong in (-1.0, 70000.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="below 0 or above 65535"):
            decode(encoded(Image.fromarray(np.array([[wrong]], np.float32)), "TIFF"), MAX_PIXELS)


def test_cmyk_and_other_colors():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    for format in ("JPEG", "TIFF"):
        assert np.abs(decoded(encoded(image, format)).astype(int) - RED).max() <= 3, format
    assert np.abs(decoded(encoded(Image.new("YCbCr", (8, 8), (76, 85, 255)), "JPEG")).astype(int) - RED).max() <= 3
    assert decoded(encoded(Image.new("LAB", (2, 2), (255, 128, 128)), "TIFF")).min() >= 250


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_several(format):
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, GREEN, BLUE)]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (decoded(data) == RED).all()


# ---- damaged


FILES = {
    "PNG": encoded(picture()),
    "JPEG": encoded(picture().resize((32, 24)), "JPEG"),
    "JPEG-2": encoded(picture().resize((32, 24)), "JPEG", progressive=True),
    "GIF": encoded(picture(), "GIF", save_all=True, append_images=[Image.new("RGB", (3, 2))]),
    "WEBP": encoded(picture(), "WEBP"),
    "BMP": encoded(picture(), "BMP"),
    "TIFF": encoded(picture(), "TIFF", compression="tiff_lzw"),
    "TIFF-2": encoded(picture(), "TIFF", compression="tiff_adobe_deflate"),
}


def damaged(data: bytes) -> Image.Image | None:
    """The image, or None if it is refused; nothing else may happen."""
    try:
        image = decode(data, MAX_PIXELS)
    except ValueError as error:
        assert str(error)
        return None
    assert image.mode == "RGB" and 0 < image.width * image.height <= MAX_PIXELS
    return image


@pytest.mark.parametrize("name", FILES)
def test_truncated_files(name):
    data = FILES[name]
    found = [damaged(data[:length]) for length in range(len(data))]
    assert found[0] is None and found[len(data) // 2] is None
    assert damaged(data) is not None


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FILES)), places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=9)
)
def test_changed_bytes(name, places):
    data = bytearray(FILES[name])
    for where, value in places:
        data[int(where * (len(data) - 1))] = value
    damaged(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",  # Pillow would start Ghostscript
        b"P6 1 1 255\n\0\0\0",
        b"PK\x03\x04" + bytes(60),
        b"\0\0\x01\0\x01\0" + bytes(60),
        bytes(4096),
    ],
)
def test_other_files(data):
    with pytest.raises(ValueError, match=r"known format|cannot be decoded"):
        decode(data, MAX_PIXELS)


def test_formats_are_those_that_were_chosen():
    assert FORMATS == ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    for format in ("PPM", "TGA", "ICO", "SGI", "PCX", "JPEG2000"):
        with pytest.raises(ValueError, match="known format"):
            decode(encoded(Image.new("RGB", (16, 16)), format), MAX_PIXELS)


# ---- bombs


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, bits: int, color: int, rows: bytes, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    )


def refused(data: bytes, max_pixels: int = 1 << 26) -> str:
    """Why it is refused, within little time and memory."""
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ValueError) as error:
        decode(data, max_pixels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20 and time.perf_counter() - started < 5
    return str(error.value)


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (8193, 8192)])
def test_huge_sizes_are_refused_before_decoding(size):
    """A few bytes that say they are gigabytes of pixels."""
    assert "--max-image-pixels" in refused(png(*size, 8, 2, b""))


def test_huge_sizes_in_other_formats():
    gif = bytearray(encoded(Image.new("P", (1, 1)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    assert "--max-image-pixels" in refused(bytes(gif))
    bmp = bytearray(encoded(Image.new("RGB", (1, 1)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 100_000, 100_000)
    assert "--max-image-pixels" in refused(bytes(bmp))
    jpeg = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 65500, 65500)
    assert "--max-image-pixels" in refused(bytes(jpeg))
    tiff = bytearray(encoded(Image.new("L", (1, 1)), "TIFF"))
    for tag in (256, 257):  # width and height
        place = tiff.index(struct.pack("<HHI", tag, 4, 1)) if struct.pack("<HHI", tag, 4, 1) in tiff else -1
        place = place if place >= 0 else tiff.index(struct.pack("<HHI", tag, 3, 1))
        tiff[place : place + 12] = struct.pack("<HHII", tag, 4, 1, 60_000)
    assert "--max-image-pixels" in refused(bytes(tiff))


def test_frames_larger_than_the_canvas():
    """The canvas has one pixel; the first frame says that it has many."""
    gif = bytearray(encoded(Image.new("P", (1, 1)), "GIF"))
    place = gif.index(b",\0\0\0\0")
    gif[place + 5 : place + 9] = struct.pack("<HH", 65535, 65535)
    assert damaged(bytes(gif)) is None


def test_compressed_texts_and_profiles():
    """Small chunks that become large: texts, and a color profile."""
    large = zlib.compress(bytes(64 << 20), 9)
    for kind, head in ((b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")):
        tracemalloc.start()
        damaged(png(1, 1, 8, 2, bytes(4), chunk(kind, head + large)))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20, kind
        tracemalloc.stop()
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * 1000, zip=True)
    assert (decoded(encoded(picture(), pnginfo=info)) == CORNERS).all()


def test_rows_after_the_last():
    """More pixels in the data than the header says are not decoded."""
    data = png(1, 1, 8, 2, bytes(4) + bytes(96 << 20))
    assert len(data) < 200_000
    tracemalloc.start()
    started = time.perf_counter()
    damaged(data)
    assert time.perf_counter() - started < 5
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_many_scans_of_a_jpeg():
    data = encoded(Image.new("RGB", (64, 64), RED), "JPEG", progressive=True)
    scan = data.index(b"\xff\xda")
    body, end = data[scan:-2], data[-2:]
    last = body[body.rindex(b"\xff\xda") :]
    bomb = data[:-2] + last * (2 * MAX_SCANS) + end
    assert f"more than {MAX_SCANS} scans" in refused(bomb)


def test_limits_follow_the_setting():
    image = encoded(Image.new("RGB", (100, 50)))
    assert decoded(image, 5000).shape == (50, 100, 3)
    assert "100 x 50 pixels, which is more than 4999 in all" in refused(image, 4999)


def test_many_frames_cost_no_more_than_one():
    frames = [Image.new("L", (64, 64), i % 256) for i in range(400)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=10)
    started = time.perf_counter()
    decode(data, MAX_PIXELS)
    assert time.perf_counter() - started < 2


def test_files_that_hold_others():
    """A TIFF may hold a JPEG, whose size is another."""
    out = io.BytesIO()
    Image.new("RGB", (32, 32), GREEN).save(out, "TIFF", compression="jpeg")
    assert np.abs(decoded(out.getvalue()).astype(int) - GREEN).max() <= 4


OPAQUE = {"1": "PNG", "L": "PNG", "P": "PNG", "RGB": "PNG", "CMYK": "TIFF", "YCbCr": "TIFF"}


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(sorted(OPAQUE)), width=st.integers(1, 70), height=st.integers(1, 70), seed=st.integers(0, 99)
)
def test_opaque_modes_are_those_of_transformers(mode, width, height, seed):
    """transformers' processors convert with Pillow alone."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise).convert(mode), OPAQUE[mode])
    with Image.open(io.BytesIO(data)) as stored:
        assert (decoded(data) == np.asarray(stored.convert("RGB"))).all()


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(["RGBA", "LA"]), width=st.integers(1, 40), height=st.integers(1, 40), seed=st.integers(0, 99)
)
def test_alpha_is_a_mixture_with_white(mode, width, height, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA").convert(mode)
    colors, alpha = np.split(np.asarray(image.convert("RGBA"), float), [3], -1)
    expected = (colors * alpha + 255 * (255 - alpha)) / 255
    assert np.abs(decoded(encoded(image)) - expected).max() <= 1
