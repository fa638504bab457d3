"""Files of every container give their frames, and hostile ones are refused in time; a child process decodes them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from quire.configs.serving import MediaConfig
from quire.server.media.video import sources
from quire.server.media.video.sources import Clip, FileSource, ImageSource, Shorter, format_of
from tests.helpers.models.films import film, level, sound_only
from tests.server.media.conftest import picture

av = pytest.importorskip("av")
pytestmark = pytest.mark.slow


def opened(data: bytes, **settings) -> FileSource:
    return FileSource(data, MediaConfig(**settings))


def levels(source: FileSource, indices: list[int]) -> list[int]:
    """The brightness in the middle of the frames."""
    found = [np.asarray(image) for image in source.frames(indices)]
    assert all(one.shape == (source.facts.height, source.facts.width, 3) for one in found)
    return [int(one[one.shape[0] // 2, one.shape[1] // 2, 0]) for one in found]


@pytest.mark.parametrize(
    ("form", "codec", "pixels"),
    [
        ("mp4", "mpeg4", "yuv420p"),
        ("mp4", "libx264", "yuv420p"),
        ("mov", "mjpeg", "yuvj420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("matroska", "libx264", "yuv444p"),
        ("avi", "mpeg4", "yuv420p"),
        ("mpegts", "mpeg2video", "yuv420p"),
        ("flv", "flv", "yuv420p"),
        ("gif", "gif", "rgb8"),
    ],
)
def test_containers(form, codec, pixels):
    rate = 25 if codec == "mpeg2video" else 4
    data = film(form=form, codec=codec, pixels=pixels, fps=rate)
    assert format_of(data) is not None
    source = opened(data)
    facts = source.facts
    assert (facts.width, facts.height) == (64, 48) and abs(facts.num_frames - 12) <= 1
    assert facts.fps == pytest.approx(rate, rel=0.1)
    tolerance = 40 if pixels == "rgb8" else 6
    indices = [0, 3, 7, 10]
    assert np.abs(np.subtract(levels(source, indices), [level(i) for i in indices])).max() <= tolerance
    source.close()


def test_the_last_and_repeated_frames():
    """Of an index that comes twice the frame comes twice; decoders hold the last frames until they are flushed."""
    source = opened(film(num_frames=9, codec="libx264"))
    assert np.abs(np.subtract(levels(source, [7, 8, 8]), [level(7), level(8), level(8)])).max() <= 6


def test_one_frame():
    source = opened(film(num_frames=1))
    assert source.facts.num_frames == 1 and len(list(source.frames([0]))) == 1


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_frames_of_a_turned_phone(turn):
    """The rotation of the file is that of the frames that the model sees."""
    data = rotated(film(size=(64, 48)), turn)
    source = opened(data)
    facts = source.facts
    assert (facts.width, facts.height) == ((48, 64) if turn % 180 else (64, 48))
    (image,) = source.frames([5])
    edges = [np.asarray(image)[24, 1, 0], np.asarray(image)[1, 24, 0]]
    edges += [np.asarray(image)[24, -2, 0], np.asarray(image)[-2, 24, 0]]
    assert [edge > 200 for edge in edges].index(True) == {90: 3, 180: 2, 270: 1}[turn]


def rotated(data: bytes, turn: int) -> bytes:
    """The file with a display matrix of the track that turns the picture against the clock."""
    matrix = {90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), 270: (0, 1, -1, 0)}[turn]
    at = data.index(b"tkhd") + 4 + 40
    words = [matrix[0], matrix[1], 0, matrix[2], matrix[3], 0]
    shifted = b"".join((word << 16 & 0xFFFFFFFF).to_bytes(4, "big") for word in words)
    return data[:at] + shifted + data[at + 24 :]


def test_cut_off_files(tmp_path):
    whole = film(num_frames=40, form="matroska", codec="libx264", options={})
    assert opened(whole).facts.num_frames == 40
    part = opened(whole[: len(whole) * 3 // 4])
    assert 0 < part.facts.num_frames < 40
    assert list(part.frames(range(part.facts.num_frames - 1)))
    with pytest.raises(ValueError, match="cannot be decoded"):
        opened(film()[:300])  # the index of an mp4 is at its end
    options = {"form": "mov", "codec": "mjpeg", "pixels": "yuvj420p", "options": {"movflags": "faststart"}}
    fast = film(num_frames=40, path=str(tmp_path / "fast.mov"), **options)
    begin = fast.index(b"mdat")
    size = len(fast) - begin
    cut = opened(fast[: begin + size * 3 // 4])
    assert cut.facts.num_frames == 40  # as its header says
    with pytest.raises(Shorter) as shorter:
        list(cut.frames(range(40)))
    assert 20 <= shorter.value.facts.num_frames < 40
    with pytest.raises(ValueError, match=r"it is cut off: \d+ of its 40 frames"):
        list(opened(fast[: begin + size // 4]).frames(range(40)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\nfile:///etc/passwd\n", "known container"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "known container"),
        (picture(), "known container"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(200), "cannot be decoded"),
        (b"\x1a\x45\xdf\xa3" + b"#EXTM3U\nfile:///etc/passwd\n" * 20, "cannot be decoded"),
        (b"RIFF\x00\x00\x00\x00AVI " + bytes(range(200)), "cannot be decoded|no video stream"),
    ],
    ids=["empty", "hls", "concat", "png", "mp4", "mkv", "avi"],
)
def test_refused_files(data, says):
    with pytest.raises(ValueError, match=says):
        opened(data)


def test_refused_for_what_they_hold():
    with pytest.raises(ValueError, match="it has no video stream"):
        opened(sound_only())
    with pytest.raises(ValueError, match=r"64 x 48 pixels.*more than 1024"):
        opened(film(), max_image_pixels=1024)
    with pytest.raises(ValueError, match=r"it has 3 seconds, and 2 are the most \(--max-video-seconds\)"):
        opened(film(), max_video_seconds=2.0)
    with pytest.raises(ValueError, match="its codec, msvideo1, is not supported"):
        opened(film(form="avi", codec="msvideo1", pixels="rgb555le"))


def test_a_decoder_that_takes_too_long_is_killed(monkeypatch, tmp_path):
    slow = tmp_path / "decoder.py"
    slow.write_text("import time\ntime.sleep(60)\n")
    source = opened(film())
    source._config = MediaConfig(video_timeout=1.0)
    monkeypatch.setattr(sources, "_DECODER", slow)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"takes more than 1 seconds \(--video-timeout\)"):
        list(source.frames([0]))
    assert time.monotonic() - started < 10


def test_a_decoder_that_dies(monkeypatch, tmp_path):
    """An error in a decoder ends its process alone."""
    source = opened(film())
    dying = tmp_path / "decoder.py"
    dying.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(sources, "_DECODER", dying)
    with pytest.raises(ValueError, match="decoding it failed"):
        list(source.frames([0]))


def test_without_the_package(monkeypatch):
    data = film()
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"lacks the package av \(pip install 'quire\[video\]'\)"):
        opened(data)


def test_images_and_arrays():
    source = ImageSource([picture("red"), picture("blue")], MediaConfig())
    assert (source.facts.width, source.facts.height, source.facts.num_frames) == (20, 10, 2) and source.facts.is_sampled
    assert [image.getpixel((0, 0)) for image in source.frames([0, 1])] == [(255, 0, 0), (0, 0, 255)]
    with pytest.raises(ValueError, match="same size"):
        ImageSource([picture("red"), picture("blue", (3, 3))], MediaConfig())
    one, other = (Clip(np.full((2, 4, 6, 3), value, np.uint8), 2.0) for value in (1, 2))
    assert one.digest() != other.digest() and one.digest() != Clip(one.array, 3.0).digest()
    assert [image.size for image in one.frames([0, 1])] == [(6, 4)] * 2
