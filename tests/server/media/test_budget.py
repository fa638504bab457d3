"""Images are refused by their headers, options only make them smaller, and the memory of all decoders is bounded."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from quire.configs.config import Config
from quire.server.errors import ApiError, BadRequest, ContextLengthExceeded
from quire.server.media import decode as decoding
from quire.server.media import service
from quire.server.media.families.qwen_vl import QwenVLProcessor
from quire.server.media.inputs import MediaInput
from quire.server.media.kinds import NUM_THREADS, ImageKind

VISION = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
HUGE = {"min_pixels": 60_000_000, "max_pixels": 66_000_000}


def png(width: int, height: int, mode: str = "RGB", seed: int = 0) -> MediaInput:
    out = io.BytesIO()
    image = Image.new(mode, (width, height), seed if mode == "L" else None)
    image.putpixel((0, 0), seed if mode == "L" else (seed % 256, seed // 256, 0))
    image.save(out, "PNG", compress_level=1)
    return MediaInput(param="messages.0", base64=base64.b64encode(out.getvalue()).decode())


def images_of(**settings) -> service.Images:
    images = service.Images(Config.from_flat(model="m", **settings))
    images.why_not = None
    images.kinds["image"] = ImageKind(QwenVLProcessor(VISION, {}), 1, images._config, images._default_options)
    return images


@pytest.fixture
def images():
    made = images_of()
    yield made
    made.close()


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """The sizes of the files that are decoded."""
    sizes, decode = [], decoding.decode
    monkeypatch.setattr(decoding, "decode", lambda data, limit: sizes.append(len(data)) or decode(data, limit))
    return sizes


def load(images, inputs, options=None, max_tokens=2048, turn="a"):
    return images.load(inputs, options, None, "messages", max_tokens, turn)


@pytest.mark.parametrize("options", [HUGE, {"size": {"shortest_edge": 60_000_000, "longest_edge": 66_000_000}}])
def test_options_may_only_make_images_smaller(images, decoded, options):
    with pytest.raises(BadRequest, match=r"at most 12\d\d of one.*--mm-processor-kwargs") as error:
        asyncio.run(load(images, [png(50, 50)], options))
    assert error.value.param == "mm_processor_kwargs" and not decoded
    small = png(900, 900)
    asyncio.run(load(images, [small], {"max_pixels": 28 * 28 * 9}))
    assert small.lease.medium.num_tokens <= 9


def test_settings_of_the_server_may_enlarge_them(decoded):
    images = images_of(mm_processor_kwargs='{"min_pixels": 2000000, "max_pixels": 3000000}')
    large = png(50, 50)
    asyncio.run(load(images, [large], {"min_pixels": 2_500_000}, max_tokens=5000))
    assert large.lease.medium.num_tokens > 2500
    images.close()


def test_images_beyond_the_context_are_not_decoded(images, decoded):
    with pytest.raises(ContextLengthExceeded, match=r"2 images that take \d+ tokens"):
        asyncio.run(load(images, [png(900, 900, seed=i) for i in range(2)], max_tokens=1500))
    assert not decoded
    asyncio.run(load(images, [png(900, 900, seed=i) for i in range(2)], max_tokens=None))  # to count tokens
    assert len(decoded) == 2


def test_an_image_on_its_side_is_not_refused_too_early(images):
    exif = Image.Exif()
    exif[274] = 6
    out = io.BytesIO()
    Image.new("RGB", (1000, 300)).save(out, "JPEG", exif=exif)
    one = MediaInput(param="m", base64=base64.b64encode(out.getvalue()).decode())
    asyncio.run(load(images, [one]))
    assert one.lease.medium.parts[0].grid[1] > one.lease.medium.parts[0].grid[2]


def test_the_first_mistake_ends_the_prompts_other_work(images, decoded, monkeypatch):
    broken = MediaInput(param="messages.0", base64="AAAA")
    with pytest.raises(BadRequest):
        asyncio.run(load(images, [broken, *(png(50, 50, seed=i) for i in range(20))]))
    assert not decoded


def test_no_work_for_clients_that_left(images, decoded, monkeypatch):
    gate, process = threading.Event(), images._process
    monkeypatch.setattr(images, "_process", lambda group: (gate.wait(10), process(group))[1])

    async def main() -> None:
        tasks = [asyncio.create_task(load(images, [png(60, 60, seed=i)])) for i in range(20)]
        turns = images.kinds["image"].turns
        while turns._free or len(turns._tenants["a"].waiting) < 20 - NUM_THREADS:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        other = png(60, 60, seed=99)
        waiting = asyncio.create_task(load(images, [other], turn="b"))
        gate.set()
        await waiting
        assert other.lease is not None and images._num_waiting == 0

    asyncio.run(main())
    assert len(decoded) <= NUM_THREADS + 1


def test_memory_of_all_decoders_is_bounded(images, monkeypatch):
    monkeypatch.setattr(images.kinds["image"].turns, "_max_bytes", 40_000_000)
    lock, now, most, process = threading.Lock(), [0], [0], images._process

    def measured(group):
        with lock:
            now[0] += group.num_bytes
            most[0] = max(most[0], now[0])
        try:
            process(group)
        finally:
            with lock:
                now[0] -= group.num_bytes

    monkeypatch.setattr(images, "_process", measured)
    options = {"max_pixels": 28 * 28 * 20}

    async def main() -> None:
        await asyncio.gather(*(load(images, [png(1500, 1000, seed=i)], options, turn=f"{i % 3}") for i in range(9)))

    asyncio.run(main())
    assert 12_000_000 < most[0] <= 40_000_000


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "I;16", "I", "F", "CMYK", "1"])
def test_the_estimate_covers_what_decoding_takes(mode):
    """As far as Python sees it: numpy's and bytes, not Pillow's own."""
    format, out = ("TIFF" if mode in ("CMYK", "F", "I") else "PNG"), io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 200, (700, 900), dtype=np.uint16)
    source = Image.fromarray(pixels) if mode == "I;16" else Image.fromarray(pixels.astype(np.uint8)).convert(mode)
    source.save(out, format)
    width, height, num_bytes = decoding.header(out.getvalue(), 1 << 26)
    assert (width, height) == (900, 700)
    tracemalloc.start()
    try:
        assert decoding.decode(out.getvalue(), 1 << 26).mode == "RGB"
        assert tracemalloc.get_traced_memory()[1] - 2 * len(out.getvalue()) < num_bytes
    finally:
        tracemalloc.stop()


def test_sixteen_bits_take_a_few_bytes_per_pixel():
    pixels = np.random.default_rng(0).integers(0, 65536, (3000, 2000), dtype=np.uint16)
    image = Image.fromarray(pixels)
    tracemalloc.start()
    try:
        found = np.asarray(decoding.to_rgb(image))
        assert tracemalloc.get_traced_memory()[1] < 8 * pixels.size
    finally:
        tracemalloc.stop()
    assert np.array_equal(found[:, :, 0], np.rint(pixels / 257).astype(np.uint8))


def test_the_same_errors_as_decoding():
    for data in (b"no image", b"\xff\xd8" + b"\xff\xda" * 200):
        messages = set()
        for function in (decoding.header, decoding.decode):
            with pytest.raises(ValueError) as error:
                function(data, 1 << 26)
            messages.add(str(error.value))
        assert len(messages) == 1


def test_errors_are_the_clients(images):
    with pytest.raises(ApiError) as error:
        asyncio.run(load(images, [png(8, 2000)]))
    assert error.value.status == 400 and "200" in error.value.message
