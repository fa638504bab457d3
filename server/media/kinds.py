"""The kinds of media: how a medium is measured from its header, and preprocessed. `service.py` loads all in one way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.configs.serving import MediaConfig
from quire.server.errors import BadRequest
from quire.server.media.inputs import MediaInput, MediaKind
from quire.server.media.loading.contents import Content, present, refused
from quire.server.turns.fair_queue import Turns

if TYPE_CHECKING:
    from quire.server.media.processor import ImageProcessor, ProcessedImage, ProcessedVideo

NUM_THREADS = min(4, os.cpu_count() or 1)  # for images
MAX_BYTES = 2**30  # for images while they are decoded and preprocessed, all together
# for an image while it becomes features: Qwen's 28 x 28 pixels, Gemma's 56 x 56, as bytes and twice as floats
_BYTES_PER_TOKEN = 56 * 56 * 3 * 9
_SIDES = (28, 112, 336, 512, 896, 1024, 1536, 2048, 3072, 4096, 8192)  # for images, to find the most tokens of one


@dataclass(slots=True)
class Group:
    """Media of one kind in a prompt that are preprocessed together."""

    kind: Kind
    inputs: list[MediaInput]
    options: dict[str, Any]  # of the server and the request
    enlarges: bool  # whether the request has options of its own
    content: list[Content | None] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    done: bool = False  # the media have their leases
    num_hits: int = 0
    num_tokens: int = 0
    num_bytes: int = 0  # that preprocessing takes
    seconds: float = 0.0
    param: str = "mm_processor_kwargs"  # the field of the request that has the options


class Kind(Protocol):
    """A kind of media of the served model. Its methods run in threads of `pool`, in `turns`, and raise BadRequest."""

    name: MediaKind
    max_number: int  # in a prompt
    placeholder: str  # in the chat template
    token: str  # that embeddings replace
    token_id: int
    options: frozenset[str]  # names of mm_processor_kwargs
    turns: Turns
    defaults: dict[str, Any]  # of these options, by the server's settings
    may_enlarge: bool  # whether options of a request may make more tokens than the server's settings

    @property
    def pool(self) -> ThreadPoolExecutor: ...

    def groups(self, inputs: list[MediaInput]) -> list[list[MediaInput]]:
        """Return the media of one prompt by what is preprocessed together."""

    def detail(self, inputs: Sequence[MediaInput]) -> dict[str, Any]:
        """Return the option that stands for the media's `detail`."""

    def measure(self, group: Group) -> None:
        """Set the group's `num_tokens` and `num_bytes`, from headers alone."""

    def process(self, group: Group) -> Sequence[ProcessedImage | ProcessedVideo]:
        """Return the group's media, decoded and preprocessed."""

    def check_defaults(self) -> None:
        """Raise ValueError for options of the server's settings that no medium can be preprocessed with."""

    def close(self) -> None: ...


class KindBase:
    """The parts that all kinds share."""

    name: MediaKind

    def __init__(self, turns: Turns, num_threads: int):
        self.turns, self.may_enlarge = turns, False
        self._num_threads, self._pool = num_threads, None

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Return the threads, which start with the first medium."""
        self._pool = self._pool or ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"{self.name}s")
        return self._pool

    def check_defaults(self) -> None:
        pass

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def check_most(self, num_tokens: int, most: int, param: str) -> None:
        """Raise BadRequest if options of a request make a medium larger than the server's settings make any."""
        if num_tokens > most:
            name = f"{'an' if self.name == 'image' else 'a'} {self.name}"
            raise BadRequest(
                f"{param}: {name} would take {num_tokens} tokens, and the server's settings make at most "
                f"{most} of one: options of a request may only make {self.name}s smaller (--{param.replace('_', '-')} "
                "makes them larger).",
                param=param,
            )


class ImageKind(KindBase):
    """Images, by the model's `processor`."""

    name = "image"

    def __init__(self, processor: ImageProcessor, token_id: int, config: MediaConfig, defaults: dict[str, Any]):
        """Keep `defaults`, the server's mm_processor_kwargs."""
        super().__init__(Turns(NUM_THREADS, max_bytes=MAX_BYTES), NUM_THREADS)
        self._processor, self.token_id, self._config = processor, token_id, config
        self.placeholder, self.token, self.options = processor.placeholder, processor.image_token, processor.options
        self.defaults = {name: value for name, value in defaults.items() if name in self.options}
        self._most: int | None = None  # tokens of an image by the server's settings

    def groups(self, inputs: list[MediaInput]) -> list[list[MediaInput]]:
        return [inputs] if getattr(self._processor, "sized_by_number", False) else [[one] for one in inputs]

    def detail(self, inputs: Sequence[MediaInput]) -> dict[str, Any]:
        given = {image.detail for image in inputs if image.detail not in (None, "auto")}
        if not given or "detail" not in self.options:
            return {}
        if len(given) > 1:
            raise refused(inputs[0], "the images of a prompt must have the same detail for this model")
        return {"detail": given.pop()}

    def measure(self, group: Group) -> None:
        headers = [self._header(image, data) for image, data in zip(group.inputs, group.content, strict=True)]
        group.num_tokens = self._count(group, [(width, height) for width, height, _ in headers])
        group.num_bytes = sum(num_bytes for _, _, num_bytes in headers) + group.num_tokens * _BYTES_PER_TOKEN

    def _count(self, group: Group, sizes: list[tuple[int, int]]) -> int:
        turned = [(height, width) for width, height in sizes]  # as EXIF may say, which may come after the pixels
        try:
            counts = [self._processor.num_tokens(one, group.options) for one in (sizes, turned)]
            if group.enlarges and not self.may_enlarge:
                usual = self._processor.num_tokens(sizes, self.defaults | self.detail(group.inputs))
                self.check_most(max(counts[0]), max(*usual, self._most_tokens()), group.param)
        except ValueError as error:
            raise refused(group.inputs[0], str(error)) from None
        return min(sum(one) for one in counts)

    def _most_tokens(self) -> int:
        """Return the most tokens of an image under the server's settings, tried over many sizes."""
        if self._most is None:
            pairs = [(width, height) for width in _SIDES for height in _SIDES]
            sizes = [(width, height) for width, height in pairs if max(width, height) <= 100 * min(width, height)]
            self._most = max(self._processor.num_tokens([size], self.defaults)[0] for size in sizes)
        return self._most

    def _header(self, image: MediaInput, content: Content | None) -> tuple[int, int, int]:
        """Return (width, height, bytes of memory for decoding)."""
        from quire.server.media.decode import header

        if image.picture is not None:
            width, height = image.picture.size
            return width, height, 16 * width * height
        try:
            return header(present(image, content), self._config.max_image_pixels)
        except ValueError as error:
            raise refused(image, str(error)) from None

    def process(self, group: Group) -> list[ProcessedImage]:
        pictures = [self._decode(image, data) for image, data in zip(group.inputs, group.content, strict=True)]
        try:
            return self._processor(pictures, group.options)
        except ValueError as error:
            raise refused(group.inputs[0], str(error)) from None

    def _decode(self, image: MediaInput, content: Content | None) -> Any:
        from quire.server.media.decode import decode, to_rgb

        try:
            if image.picture is not None:
                return to_rgb(image.picture)
            return decode(present(image, content), self._config.max_image_pixels)
        except ValueError as error:
            raise refused(image, str(error)) from None
