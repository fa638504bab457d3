"""Video files of a few frames, whose colors say which frame it is."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np


def level(i: int) -> int:
    """The brightness of frame `i`."""
    return 10 + 7 * i % 240


def film(
    num_frames: int = 12,
    fps: float = 4,
    form: str = "mp4",
    codec: str = "mpeg4",
    size: tuple[int, int] = (64, 48),
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    path: str | None = None,
) -> bytes:
    """A file by PyAV: gray frames, each brighter than the one before, with a white left edge. `path` is where it is
    written, for options that read it again.
    """
    import av

    file = io.BytesIO()
    with av.open(path or file, "w", format=form, options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        for i in range(num_frames):
            array = np.full((size[1], size[0], 3), level(i), np.uint8)
            array[:, : size[0] // 8] = 255
            frame = av.VideoFrame.from_ndarray(array)
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Path(path).read_bytes() if path else file.getvalue()


def sound_only() -> bytes:
    """An mp4 without a picture."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="flt", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
