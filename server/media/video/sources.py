"""Sources of a video's frames: a file, which a process of its own decodes, images, or an array."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from PIL import Image

from quire.configs.serving import MediaConfig
from quire.server.media.decode import decode, header
from quire.server.media.video.processor import VideoFacts

_DECODER = Path(__file__).parent / "decoder.py"
_MEMORY = 4 << 30  # bytes of address space of a decoder, beside the frames that it holds
_FRAMES_HELD = 64  # frames of a decoder's reference lists and queues, at most
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
FORMATS = "mp4, mov, webm, mkv, avi, flv, mpeg, mpegts, ogg and gif"


class Source(Protocol):
    """The frames of one video. Methods raise ValueError, for the client."""

    facts: VideoFacts

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the frames at ascending `indices`, in RGB and upright. Raises Shorter."""


class Shorter(Exception):
    """Raised if fewer frames can be decoded than the header says: `facts` has their number."""

    def __init__(self, facts: VideoFacts):
        super().__init__(facts)
        self.facts = facts


def format_of(head: bytes) -> str | None:
    """Return FFmpeg's name of the container of a file that begins with `head`; None for an unknown one."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    found = {b"OggS": "ogg", b"FLV\x01": "flv", b"GIF8": "gif", b"\x00\x00\x01\xba": "mpeg"}.get(head[:4])
    if found is None and head[:4] == b"\x00\x00\x01\xb3":
        return "mpegvideo"
    if found is None and len(head) > 188 and head[0] == head[188] == 0x47:
        return "mpegts"
    return found


class FileSource:
    """A video file. Every method starts a process, which a time limit ends."""

    def __init__(self, data: bytes, config: MediaConfig):
        """Read the header. Raises ValueError, ModuleNotFoundError without PyAV."""
        if importlib.util.find_spec("av") is None:
            raise ModuleNotFoundError(
                "this server decodes no video files: it lacks the package av (pip install 'quire[video]')"
            )
        self._config, self._format = config, format_of(data[:200])
        if not data or self._format is None:
            raise ValueError(f"it is not a video of a known container ({FORMATS})" if data else "it is empty")
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the source)
        self._file.write(data)
        self._file.flush()
        with self._decoder(None, 0) as out:
            self._found = self._header(out)
        found, is_turned = self._found, self._found["turn"] in (90, 270)
        sides = (found["height"], found["width"]) if is_turned else (found["width"], found["height"])
        self.facts = VideoFacts(*sides, found["num_frames"], found["fps"])
        self._check_length()

    def _check_length(self) -> None:
        facts, most = self.facts, self._config.max_video_seconds
        if facts.fps and facts.num_frames / facts.fps > most:
            seconds = facts.num_frames / facts.fps
            raise ValueError(f"it has {seconds:.0f} seconds, and {most:g} are the most (--max-video-seconds)")

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        found = self._found
        width, height, turn = found["width"], found["height"], _TURNS.get(found["turn"])
        size = 3 * width * height
        with self._decoder(list(indices), size) as out:
            self._header(out)
            for i in range(len(indices)):
                data = out.read(size)
                if len(data) < size:
                    raise self._shorter(data, i)
                image = Image.frombuffer("RGB", (width, height), data, "raw", "RGB", 0, 1)
                yield image if turn is None else image.transpose(turn)

    def _shorter(self, rest: bytes, num_read: int) -> Exception:
        _, line, text = rest.rpartition(b"\n")
        try:
            num_frames = json.loads(text)["num_frames"]
        except (ValueError, TypeError, KeyError):
            return ValueError(f"decoding it failed after {num_read} of its frames")
        if not line or not num_frames or 2 * num_frames < self.facts.num_frames:
            return ValueError(f"it is cut off: {num_frames} of its {self.facts.num_frames} frames can be decoded")
        return Shorter(replace(self.facts, num_frames=num_frames))

    def _header(self, out: IO[bytes]) -> dict[str, Any]:
        line = out.readline(10_000)
        if not line:
            raise ValueError("decoding it failed")
        found = json.loads(line)
        if "error" in found:
            raise ValueError(found["error"])
        return found

    @contextmanager
    def _decoder(self, indices: list[int] | None, frame_bytes: int) -> Iterator[IO[bytes]]:
        """Run the decoder, and yield its output. Raises ValueError if it takes too long."""
        limit = self._config.video_timeout
        order = {
            "format": self._format,
            "indices": indices,
            "max_pixels": self._config.max_image_pixels,
            "memory": _MEMORY + _FRAMES_HELD * frame_bytes,
            "seconds": int(2 * limit) + 1,
        }
        self._file.seek(0)
        command = [sys.executable, "-P", str(_DECODER), json.dumps(order)]
        pipes = {"stdin": self._file, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        late = threading.Event()
        with subprocess.Popen(command, **pipes) as process:

            def end() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(limit, end)
            timer.start()
            try:
                yield process.stdout
            except ValueError:
                if late.is_set():
                    raise ValueError(f"decoding it takes more than {limit:g} seconds (--video-timeout)") from None
                raise
            finally:
                timer.cancel()
                process.kill()

    def close(self) -> None:
        self._file.close()


class ImageSource:
    """Frames that the client sent as images."""

    def __init__(self, images: list[bytes], config: MediaConfig, fps: float | None = None):
        self._images, self._max_pixels = images, config.max_image_pixels
        sizes = {header(image, self._max_pixels)[:2] for image in images}
        if len(sizes) > 1:
            raise ValueError("its frames must have the same size")
        self.facts = VideoFacts(*sizes.pop(), len(images), fps, is_sampled=True)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for i in indices:
            yield decode(self._images[i], self._max_pixels)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """Frames in memory, offline: uint8 `[frames, height, width, 3]`, and their rate if it is known."""

    array: np.ndarray
    fps: float | None = None

    @property
    def facts(self) -> VideoFacts:
        num_frames, height, width, _ = self.array.shape
        return VideoFacts(width, height, num_frames, self.fps, is_sampled=True)

    def digest(self) -> bytes:
        """Return the key of the content."""
        state = hashlib.blake2b(json.dumps([self.array.shape, self.fps]).encode(), digest_size=32)
        state.update(np.ascontiguousarray(self.array))
        return state.digest()

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for i in indices:
            yield Image.fromarray(self.array[i])

    def close(self) -> None:
        pass


def clip_of(frames: object, fps: float | None) -> Clip:
    """Return frames in memory: an array, or a list of arrays or pictures. Raises ValueError, with the end of a
    sentence, for other values.
    """
    if isinstance(frames, list | tuple):
        frames = np.stack([np.asarray(frame) for frame in frames]) if frames else None
    array = None if frames is None or isinstance(frames, str | bytes) else np.asarray(frames)
    if array is None or array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8 or not array.size:
        raise ValueError(" must be frames as an array of uint8 [frames, height, width, 3], or a list of them")
    return Clip(array, fps)
