"""Audio of requests -> windows with features in shared memory, off the event loop. Loads numpy with the first audio."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar

from quire.server.errors import BadRequest, NotInstalled, PayloadTooLarge, Unavailable
from quire.server.media.audio.model import SpeechModel, read_whisper
from quire.server.media.audio.prompted import PromptedSpeechModel, read_prompted_model
from quire.server.media.inputs import Lease
from quire.server.media.registry import read_config
from quire.server.media.store import MediaStore
from quire.server.turns.fair_queue import Turns

if TYPE_CHECKING:
    import numpy as np

    from quire.engine.messages import MediaInfo
    from quire.server.media.audio.windows import Cutting, Window
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.audio")

T = TypeVar("T")
Recognizer = SpeechModel | PromptedSpeechModel
# architecture in config.json -> what reads the files
_READERS: dict[str, Callable[[str, Tokenizer], Recognizer]] = {
    "Qwen3ASRForConditionalGeneration": read_prompted_model,
    "WhisperForConditionalGeneration": read_whisper,
}

MAX_FILE_BYTES = 200 << 20
MAX_SECONDS = 4 * 3600.0
MAX_STORED = 512 << 20  # bytes of features of running requests
MAX_UPLOADS = 2 << 30  # bytes of files that are being received or transcribed, in temporary files
NUM_THREADS = min(2, os.cpu_count() or 1)
_BUSY_BYTES = 64 << 20  # of one window while it is cut and becomes features, at most


@dataclass(frozen=True, slots=True)
class _Features:
    """The features of a window, as `MediaStore` takes them."""

    features: dict[str, np.ndarray]
    text: str
    counts: list[int]
    grid: None = None
    time: None = None

    @property
    def parts(self) -> list[_Features]:
        return [self]


@dataclass(frozen=True, slots=True)
class Piece:
    """A window of the audio, whose features the lease keeps; None for one in which nothing can be heard."""

    start: float
    seconds: float
    lease: Lease | None


class Speech:
    """The audio service of one event loop."""

    def __init__(self, on_cluster: bool = False):
        self._on_cluster = on_cluster
        self.why_not: str | None = "it is loading"  # why the model cannot transcribe; None if it can
        self.model: Recognizer | None = None
        self.max_bytes, self.max_seconds = MAX_FILE_BYTES, MAX_SECONDS
        self._store = MediaStore(MAX_STORED, keeps=False)
        self._threads: ThreadPoolExecutor | None = None
        self._num_bytes = 0  # of uploads
        self._turns = Turns(NUM_THREADS, max_bytes=NUM_THREADS * _BUSY_BYTES)

    def open(self, folder: str, tokenizer: Tokenizer) -> None:
        """Load the recognizer of the model in `folder`, if there is one."""
        config = read_config(folder)
        names = config.get("architectures") or []
        read = next((_READERS[name] for name in names if name in _READERS), None)
        self.why_not = "its architecture reads no audio" if read is None else None
        if self.why_not is None and self._on_cluster:
            self.why_not = "ranks on other machines do not share the memory in which audio is handed over"
        if self.why_not is not None:
            return
        try:
            self.model = read(folder, tokenizer)
        except ValueError as error:
            self.why_not = str(error)
            logger.warning("audio is refused: %s", error)

    def check_worker(self, media: MediaInfo | None) -> None:
        """Refuse audio that the engine would refuse."""
        if self.why_not is None and not self.model.reads(media):
            self.why_not = "the engine reads none with this model"

    def require(self) -> Recognizer:
        """Return the recognizer. Raises BadRequest if the model cannot transcribe."""
        if self.why_not is not None:
            raise BadRequest(f"The model transcribes no audio: {self.why_not}.", param="model")
        return self.model

    def hold(self, num_bytes: int) -> Room:
        """Hold room for an upload. Raises Unavailable if others leave none."""
        if self._num_bytes + num_bytes > MAX_UPLOADS:
            raise Unavailable("Too many audio files are being transcribed.", retry_after=2)
        return Room(self, num_bytes)

    async def open_file(self, file: BinaryIO, num_bytes: int, cutting: Cutting, turn: str) -> Pieces:
        """Read the header of an upload. Raises BadRequest, NotInstalled, PayloadTooLarge; cancelling it drops it."""
        if num_bytes > self.max_bytes:
            raise too_large(self.max_bytes)
        self._threads = self._threads or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="audio")

        def look() -> Pieces:
            from quire.server.media.audio.decode import open_audio
            from quire.server.media.audio.windows import windows

            audio = open_audio(file, num_bytes)
            if audio.seconds is not None and audio.seconds > self.max_seconds:
                _refuse(f"it has {audio.seconds:.0f} seconds, and {self.max_seconds:.0f} are the most")
            return Pieces(self, windows(audio.blocks, cutting, self.max_seconds), turn)

        return await self.run(look, turn)

    async def run(self, work: Callable[[], T], turn: str) -> T:
        """Return the result of `work` in a thread, in turns of the tenant. Raises BadRequest for a ValueError."""
        return await self._turns.run(self._threads, turn, lambda: _explained(work), _BUSY_BYTES)

    def add(self, window: Window) -> Piece:
        """Return the piece of a window. Runs in a thread. Raises Unavailable if running requests leave no room."""
        if window.is_silent:
            return Piece(window.start, window.seconds, None)
        mel, num_embeds = self.model.features(window.samples)
        key = hashlib.blake2b(window.samples.tobytes(), digest_size=16).hexdigest()
        kept = _Features({"input_features": mel}, "", [num_embeds])
        return Piece(window.start, window.seconds, self._store.add(key, kept))

    def lease(self, piece: Piece) -> Lease:
        """Return another lease of a held piece."""
        return self._store.lease(piece.lease.medium.key)

    def close(self) -> None:
        """Remove the files. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()


class Room:
    """Room for an upload until `release`, or until it is collected."""

    def __init__(self, speech: Speech, num_bytes: int):
        self._speech, self._num_bytes = speech, num_bytes
        speech._num_bytes += num_bytes

    def release(self) -> None:
        """Give the room back. Idempotent."""
        self._speech._num_bytes -= self._num_bytes
        self._num_bytes = 0

    def __del__(self) -> None:
        self.release()


class Pieces:
    """The windows of one file, in order. `seconds` is the length read so far."""

    def __init__(self, speech: Speech, windows: Iterator[Window], turn: str):
        self._speech, self._windows, self.turn = speech, windows, turn
        self.seconds = 0.0

    async def next(self) -> Piece | None:
        """Return the next piece; None at the end. Raises BadRequest for a damaged part."""

        def work() -> Piece | None:
            window = next(self._windows, None)
            return None if window is None else self._speech.add(window)

        piece = await self._speech.run(work, self.turn)
        if piece is not None:
            self.seconds = piece.start + piece.seconds
        return piece


def too_large(max_bytes: int) -> PayloadTooLarge:
    """Return the error for a file of more than `max_bytes`."""
    return PayloadTooLarge(f"An audio file may have at most {max_bytes} bytes; split it, or compress it.")


def _refuse(why: str) -> NoReturn:
    raise BadRequest(f"file: the audio cannot be used: {why}.", param="file")


def _explained(work: Callable[[], T]) -> T:
    try:
        return work()
    except ModuleNotFoundError as error:
        raise NotInstalled(f"file: {error.msg}.", param="file") from None
    except ValueError as error:
        _refuse(str(error))
