"""Images of requests -> preprocessed images in shared memory, off the event loop."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quire.configs.config import Config
from quire.configs.media_limits import MAX_IMAGES, read_media_limits, unused_sizes
from quire.server.errors import BadRequest, ContextLengthExceeded, NotInstalled, Unavailable
from quire.server.media import sources
from quire.server.media.inputs import ImageInput, Lease
from quire.server.media.registry import load_processor, read_config, why_no_images
from quire.server.media.store import ImageStore
from quire.server.turns.fair_queue import Turns

if TYPE_CHECKING:
    from quire.engine.messages import MediaInfo
    from quire.server.media.fetch import Fetcher
    from quire.server.media.processor import ImageProcessor
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.images")

T = TypeVar("T")

MAX_WAITING = 256  # prompts whose images wait or are being preprocessed
MAX_NAMES = 2**14  # uuids that are remembered
NUM_THREADS = min(4, os.cpu_count() or 1)
MAX_BYTES = 2**30  # for images while they are decoded and preprocessed, all together
# for an image while it becomes features: Qwen's 28 x 28 pixels, Gemma's 56 x 56, as bytes and twice as floats
_BYTES_PER_TOKEN = 56 * 56 * 3 * 9
_SIDES = (28, 112, 336, 512, 896, 1024, 1536, 2048, 3072, 4096, 8192)  # for images, to find the most tokens of one


@dataclass(slots=True)
class _Group:
    """Images of a prompt that are preprocessed together."""

    images: list[ImageInput]
    options: dict[str, Any]
    enlarges: bool  # whether the request has options of its own
    content: list[bytes | None] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    done: bool = False  # they have their leases
    num_hits: int = 0
    num_tokens: int = 0
    num_bytes: int = 0  # that preprocessing takes
    seconds: float = 0.0


class Images:
    """Belongs to one event loop. Loads Pillow and numpy only for models that read images."""

    def __init__(self, config: Config):
        self._config = config.media
        self._text_only = config.model.language_model_only
        self._on_cluster = config.parallel.distributed_executor_backend == "ray"
        # why the model takes no images, as the end of a sentence; None if it does
        self.why_not: str | None = "it is loading"
        self._is_complete = True  # False: a package is missing
        self.max_images = MAX_IMAGES
        self._default_options: dict[str, Any] = json.loads(self._config.mm_processor_kwargs or "{}")
        self._processor: ImageProcessor | None = None
        self.image_token_id = -1
        size = self._config.mm_processor_cache_gb
        self._store = ImageStore(int((size or 1.0) * 2**30), keeps=size > 0)
        self._threads: ThreadPoolExecutor | None = None
        self._fetcher: Fetcher | None = None
        self._turns = Turns(NUM_THREADS, max_bytes=MAX_BYTES)
        self._num_waiting = 0
        self.may_enlarge = False  # whether options of a request may make images larger: offline they are our own
        self._most: int | None = None  # tokens of an image by the server's settings
        self._mutex = threading.Lock()  # guards the fields below
        self._contents: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()  # (tenant, uuid) -> digest
        self.num_images = self.num_hits = 0

    @property
    def placeholder(self) -> str:
        """The placeholder of an image in the chat template."""
        return self._processor.placeholder

    @property
    def image_token(self) -> str:
        """The text of the token that embeddings replace."""
        return self._processor.image_token

    def open(self, folder: str, tokenizer: Tokenizer) -> None:
        """Read what the model in `folder` does with images; may take a second. Raises ValueError for a wrong setting,
        such as options that the model does not know.
        """
        try:
            self.max_images = read_media_limits(self._config.limit_mm_per_prompt)
        except ValueError as error:
            raise ValueError(f"--limit-mm-per-prompt: {error}") from None
        self._open(folder, tokenizer)
        unused = [f"--limit-mm-per-prompt {name}" for name in unused_sizes(self._config.limit_mm_per_prompt)]
        if unused:
            logger.warning("%s: no effect, because memory for images is planned by the largest ones", ", ".join(unused))
        if self.why_not is not None and self._default_options:
            names = ", ".join(self._default_options)
            logger.warning("--mm-processor-kwargs %s: no effect, because images are refused: %s", names, self.why_not)

    def _open(self, folder: str, tokenizer: Tokenizer) -> None:
        self.why_not = why_no_images(read_config(folder))
        if self.why_not is None and self._text_only:
            self.why_not = "the server was started with --language-model-only"
        if self.why_not is None and self._on_cluster:
            self.why_not = "ranks on a Ray cluster do not share the memory in which images are handed over"
        if self.why_not is None and not _is_installed("PIL"):
            self.why_not, self._is_complete = "it lacks the package pillow (pip install 'quire[files]')", False
        if self.why_not is not None:
            return
        try:
            processor = load_processor(folder)
        except ValueError as error:
            self.why_not = str(error)
            logger.warning("images are refused: %s", error)
            return
        token_id = tokenizer.token_to_id(processor.image_token)
        if token_id is None:
            self.why_not = f"its tokenizer has no token {processor.image_token}"
            return
        if self._config.allowed_media_domains and not _is_installed("httpcore"):
            raise ValueError("--allowed-media-domains needs the package httpcore: pip install 'quire[files]'")
        if unknown := sorted(set(self._default_options) - processor.options):
            raise ValueError(f"--mm-processor-kwargs: {_unknown(unknown[0], processor)}")
        self._processor, self.image_token_id = processor, token_id

    def check_worker(self, media: MediaInfo | None) -> None:
        """Refuse images that the engine would refuse. `media` are the limits of its workers."""
        if self.why_not is None and media is None:
            self.why_not = "the engine reads none with this model"
        elif self.why_not is None and media.image_token_id != self.image_token_id:
            self.why_not = f"its image token is {media.image_token_id}, but {self.image_token_id} in its tokenizer"

    async def load(
        self,
        images: Sequence[ImageInput],
        options: dict[str, Any] | None,
        tenant: str | None,
        param: str,
        max_tokens: int | None,
        turn: str,
    ) -> None:
        """Give every image of a prompt its `lease`. `options` are the request's mm_processor_kwargs, checked; `param`
        is the field that holds the prompt; the images must have fewer tokens than `max_tokens`. Images are
        shared by content; the uuids of different tenants are different. `turn` is the tenant whose turns this takes.

        Sizes and tokens are known from the headers of the images: images that are too large are refused before they are
        decoded. If the caller is cancelled, images that have not begun are dropped.

        Raises BadRequest naming the image, ContextLengthExceeded, Unavailable if too much is under way.
        """
        self._check(images, param)
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("Too many images are being preprocessed.", retry_after=1)
        self._num_waiting += 1
        try:
            fetched = await _all(self._fetch(image) for image in images)
            settings = self._default_options | (options or {})
            by_number = getattr(self._processor, "sized_by_number", False)
            together = [list(images)] if by_number else [[image] for image in images]
            sources = [fetched] if by_number else [[one] for one in fetched]
            groups = [_Group(some, dict(settings), bool(options)) for some in together]
            self._threads = self._threads or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")
            looks = (
                self._turns.run(self._threads, turn, functools.partial(self._look, group, data, tenant))
                for group, data in zip(groups, sources, strict=True)
            )
            await _all(looks)
            self._check_tokens(groups, param, max_tokens)
            await _all(
                self._turns.run(self._threads, turn, functools.partial(self._process, group), group.num_bytes)
                for group in groups
                if not group.done
            )
        finally:
            self._num_waiting -= 1

    def _check_tokens(self, groups: list[_Group], param: str, max_tokens: int | None) -> None:
        num_tokens = sum(group.num_tokens for group in groups)
        if max_tokens is not None and num_tokens >= max_tokens:
            num_images = sum(len(group.images) for group in groups)
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_tokens} tokens. However, your {param} has {num_images} "
                f"images that take {num_tokens} tokens.",
                num_tokens,
                max_tokens,
                param=param,
            )

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: whether images are taken or why not, their limits and options, and how many
        came.
        """
        if self.why_not is not None:
            return {"accepted": False, "reason": self.why_not}
        return {
            "accepted": True,
            "max_per_prompt": self.max_images,
            "placeholder": self.placeholder,
            "mm_processor_kwargs": sorted(self._processor.options),
            "num_images": self.num_images,
            "num_found": self.num_hits,
            "num_bytes_kept": self._store.num_bytes,
        }

    def close(self) -> None:
        """Remove the files. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _check(self, images: Sequence[ImageInput], param: str) -> None:
        if self.why_not is not None:
            self._refuse(images[0].param)
        if len(images) > self.max_images:
            raise BadRequest(
                f"{param}: the prompt has {len(images)} images, and this server's limit is {self.max_images} "
                "(--limit-mm-per-prompt).",
                param=param,
            )

    def _refuse(self, param: str) -> NoReturn:
        if not self._is_complete:
            raise NotInstalled(f"{param}: this server reads no images: {self.why_not}.", param=param)
        raise BadRequest(
            f"{param}: this model takes no images: {self.why_not}.", param=param, code="unsupported_parameter"
        )

    def check_options(self, options: dict[str, Any]) -> None:
        """Raises BadRequest for a request's mm_processor_kwargs that the model does not know."""
        param = "mm_processor_kwargs"
        if self.why_not is not None and options:
            self._refuse(param)
        if unknown := sorted(set(options) - self._processor.options if options else ()):
            raise BadRequest(f"{param}: {_unknown(unknown[0], self._processor)}.", param=param)

    async def _fetch(self, image: ImageInput) -> bytes | None:
        """Return the bytes of an image that has to be loaded by URL."""
        if image.url is None or not image.url[:8].lower().startswith(("http:", "https:")):
            return None
        if not self._config.allowed_media_domains:
            raise _refused(image, "images by http(s) URL need a server with --allowed-media-domains; send a data: URL")
        from quire.server.media.fetch import Fetcher, Refused

        config = self._config
        self._fetcher = self._fetcher or Fetcher(
            config.allowed_media_domains, config.max_image_bytes, config.media_timeout
        )
        try:
            return await self._fetcher.fetch(image.url)
        except Refused as error:
            raise _refused(image, str(error)) from None

    # ---- in a thread

    def _look(self, group: _Group, fetched: list[bytes | None], tenant: str | None) -> None:
        """Find the images of a group, or the inputs for preprocessing them."""
        started = time.perf_counter()
        images = group.images
        group.content = [self._content(image, data) for image, data in zip(images, fetched, strict=True)]
        digests = [self._digest(image, data, tenant) for image, data in zip(images, group.content, strict=True)]
        group.options |= self._detail(images)
        group.keys = _keys(digests, group.options)
        leases = [self._store.lease(key) for key in group.keys]
        if None not in leases:
            self._give(group, leases, len(leases))
        else:
            group.num_hits = sum(lease is not None for lease in leases)
            headers = [self._header(image, data) for image, data in zip(images, group.content, strict=True)]
            sizes = [(width, height) for width, height, _ in headers]
            group.num_tokens = self._count(group, sizes)
            group.num_bytes = sum(num_bytes for _, _, num_bytes in headers) + group.num_tokens * _BYTES_PER_TOKEN
        group.seconds = time.perf_counter() - started

    def _count(self, group: _Group, sizes: list[tuple[int, int]]) -> int:
        """Image tokens of a group. Raises BadRequest if options of the request make an image larger than the server's
        settings make any.
        """
        turned = [(height, width) for width, height in sizes]  # as EXIF may say, which may come after the pixels
        try:
            counts = [self._processor.num_tokens(one, group.options) for one in (sizes, turned)]
            if group.enlarges and not self.may_enlarge:
                usual = self._processor.num_tokens(sizes, self._default_options | self._detail(group.images))
                most = max(*usual, self._most_tokens())
                if (found := max(counts[0])) > most:
                    raise BadRequest(
                        f"mm_processor_kwargs: an image would take {found} tokens, and the server's settings make at "
                        f"most {most} of one: options of a request may only make images smaller "
                        "(--mm-processor-kwargs makes them larger).",
                        param="mm_processor_kwargs",
                    )
        except ValueError as error:
            raise _refused(group.images[0], str(error)) from None
        return min(sum(one) for one in counts)

    def _most_tokens(self) -> int:
        """Return the most tokens of an image by the server's settings: those of the largest of many sizes."""
        if self._most is None:
            pairs = [(width, height) for width in _SIDES for height in _SIDES]
            sizes = [(width, height) for width, height in pairs if max(width, height) <= 100 * min(width, height)]
            self._most = max(self._processor.num_tokens([size], self._default_options)[0] for size in sizes)
        return self._most

    def _process(self, group: _Group) -> None:
        started = time.perf_counter()
        pictures = [self._decode(image, data) for image, data in zip(group.images, group.content, strict=True)]
        try:
            processed = self._processor(pictures, group.options)
        except ValueError as error:
            raise _refused(group.images[0], str(error)) from None
        leases = [self._store.add(key, one) for key, one in zip(group.keys, processed, strict=True)]
        for lease in leases:
            lease.found = False
            lease.seconds = (group.seconds + time.perf_counter() - started) / len(leases)
        self._give(group, leases, group.num_hits)

    def _give(self, group: _Group, leases: list[Lease], num_hits: int) -> None:
        group.done, group.content = True, []
        group.num_tokens = sum(lease.image.num_tokens for lease in leases)
        for image, lease in zip(group.images, leases, strict=True):
            image.lease = lease
        with self._mutex:
            self.num_images += len(leases)
            self.num_hits += num_hits

    def _header(self, image: ImageInput, content: bytes | None) -> tuple[int, int, int]:
        """Width, height, and bytes that decoding takes."""
        from quire.server.media.decode import header

        if image.picture is not None:
            width, height = image.picture.size
            return width, height, 16 * width * height
        try:
            return header(self._present(image, content), self._config.max_image_pixels)
        except ValueError as error:
            raise _refused(image, str(error)) from None

    def _present(self, image: ImageInput, content: bytes | None) -> bytes:
        if content is None:
            raise _refused(
                image, f"the image with the uuid '{image.uuid[:100]}' is no longer cached: send it with its data"
            )
        return content

    def _content(self, image: ImageInput, fetched: bytes | None) -> bytes | None:
        """Return the encoded image; None for a picture, and for a uuid alone."""
        limit, url = self._config.max_image_bytes, image.url
        try:
            if fetched is not None:
                return fetched
            if image.base64 is not None:
                return sources.from_base64(image.base64, limit)
            if url is None:
                return None
            scheme = url[:8].partition(":")[0].lower()
            if scheme == "data":
                return sources.from_data_url(url, limit)
            if scheme == "file":
                return sources.from_file(url, self._config.allowed_local_media_path, limit)
        except ValueError as error:
            raise _refused(image, str(error)) from None
        raise _refused(image, "its URL begins with none of data:, http:, https: and file:")

    def _digest(self, image: ImageInput, content: bytes | None, tenant: str | None) -> bytes:
        """Return the key of the content, under which `image.uuid` is found from now on."""
        name = tenant, image.uuid
        if image.picture is not None:
            digest = _digest_of_picture(image.picture)
        elif content is not None:
            digest = hashlib.blake2b(content, digest_size=32).digest()
        elif (digest := self._contents.get(name)) is None:
            raise _refused(
                image, f"no image with the uuid '{image.uuid[:100]}' is cached: send it again, with its data"
            )
        if image.uuid is not None:
            with self._mutex:
                self._contents[name] = digest
                if len(self._contents) > MAX_NAMES:
                    self._contents.popitem(last=False)
        return digest

    def _decode(self, image: ImageInput, content: bytes | None) -> Any:
        from quire.server.media.decode import decode, to_rgb

        try:
            if image.picture is not None:
                return to_rgb(image.picture)
            return decode(self._present(image, content), self._config.max_image_pixels)
        except ValueError as error:
            raise _refused(image, str(error)) from None

    def _detail(self, images: list[ImageInput]) -> dict[str, Any]:
        """Return the option that stands for `detail`, for models that have one."""
        given = {image.detail for image in images if image.detail not in (None, "auto")}
        if not given or "detail" not in self._processor.options:
            return {}
        if len(given) > 1:
            raise _refused(images[0], "the images of a prompt must have the same detail for this model")
        return {"detail": given.pop()}


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _keys(digests: list[bytes], options: dict[str, Any]) -> list[str]:
    """Equal keys stand for equal features. `digests` are of images that are preprocessed together."""
    settings = json.dumps([options, len(digests)], sort_keys=True).encode()
    return [hashlib.blake2b(digest + settings, digest_size=16).hexdigest() for digest in digests]


def _digest_of_picture(picture: object) -> bytes:
    about = json.dumps([picture.mode, picture.size, picture.getexif().get(274)]).encode()
    state = hashlib.blake2b(about, digest_size=32)
    if picture.palette is not None:
        state.update(picture.palette.tobytes())
    state.update(repr(picture.info.get("transparency")).encode())
    state.update(picture.tobytes())
    return state.digest()


def _unknown(name: str, processor: ImageProcessor) -> str:
    known = ", ".join(sorted(processor.options)) or "none"
    return f"this model's image processor has no option '{name[:100]}'; it has: {known}"


def _refused(image: ImageInput, why: str) -> BadRequest:
    return BadRequest(f"{image.param}: the image cannot be used: {why}.", param=image.param)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules maps it to None
        return False
