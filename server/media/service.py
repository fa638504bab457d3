"""Images and videos of requests -> preprocessed media in shared memory, off the event loop."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from quire.configs.config import Config
from quire.configs.media_limits import MAX_IMAGES, MAX_VIDEOS, read_media_io, read_media_limits, unused_sizes
from quire.server.errors import BadRequest, ContextLengthExceeded, NotInstalled, Unavailable
from quire.server.media.inputs import Lease, MediaInput, counted
from quire.server.media.kinds import Group, ImageKind, Kind
from quire.server.media.loading.contents import Contents, refused
from quire.server.media.registry import load_processor, load_video_processor, read_config, why_no_images, why_no_videos
from quire.server.media.store import MediaStore

if TYPE_CHECKING:
    from quire.engine.messages import MediaInfo
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.images")

T = TypeVar("T")

MAX_WAITING = 256  # prompts whose images wait or are being preprocessed


class Images:
    """The service of one event loop for images and videos. Loads Pillow and numpy only for models that read images."""

    def __init__(self, config: Config):
        self._config = config.media
        self._text_only = config.model.language_model_only
        self._on_cluster = config.parallel.spans_machines
        # why the model takes no images or videos, as the end of a sentence; None if it does
        self.why_not: str | None = "it is loading"
        self.why_no_videos: str | None = "it is loading"
        self._is_complete = True  # False: a package is missing
        self._most = {"image": MAX_IMAGES, "video": MAX_VIDEOS}
        self._default_options: dict[str, Any] = json.loads(self._config.mm_processor_kwargs or "{}")
        self.kinds: dict[str, Kind] = {}  # by name
        size = self._config.mm_processor_cache_gb
        self._store = MediaStore(int((size or 1.0) * 2**30), keeps=size > 0)
        self._contents = Contents(self._config)
        self._num_waiting = 0
        self._mutex = threading.Lock()  # guards the fields below
        self.num_images = self.num_hits = 0

    @property
    def max_images(self) -> int:
        """Return the most images of a prompt."""
        return self._most["image"]

    def enlarge(self) -> None:
        """Let options of a request make media larger than the server's settings do: offline, they are our own."""
        for kind in self.kinds.values():
            kind.may_enlarge = True

    # ---- the model

    def open(self, folder: str, tokenizer: Tokenizer) -> None:
        """Read what the model in `folder` does with images; may take a second. Raises ValueError for a wrong setting,
        such as options that the model does not know.
        """
        try:
            self._most = read_media_limits(self._config.limit_mm_per_prompt)
        except ValueError as error:
            raise ValueError(f"--limit-mm-per-prompt: {error}") from None
        self._open(folder, tokenizer)
        unused = [f"--limit-mm-per-prompt {name}" for name in unused_sizes(self._config.limit_mm_per_prompt)]
        if unused:
            logger.warning("%s: no effect, because memory for images is planned by the largest ones", ", ".join(unused))
        if self.why_not is not None and self._default_options:
            names = ", ".join(self._default_options)
            logger.warning("--mm-processor-kwargs %s: no effect, because images are refused: %s", names, self.why_not)
        if self.why_no_videos is not None and self._config.media_io_kwargs:
            logger.warning("--media-io-kwargs: no effect, because videos are refused: %s", self.why_no_videos)

    def _open(self, folder: str, tokenizer: Tokenizer) -> None:
        config = read_config(folder)
        self.why_not = self._why_not(config)
        self.why_no_videos = self.why_not or why_no_videos(config)
        if self.why_not is not None:
            return
        try:
            self._add_images(folder, tokenizer)
        except ValueError as error:
            self.why_not = self.why_no_videos = str(error)
            logger.warning("images are refused: %s", error)
            return
        if self.why_no_videos is None:
            try:
                self._add_videos(folder, tokenizer)
            except ValueError as error:
                self.why_no_videos = str(error)
                logger.warning("videos are refused: %s", error)
        if self._config.allowed_media_domains and not _is_installed("httpcore"):
            raise ValueError("--allowed-media-domains needs the package httpcore: pip install 'quire[files]'")
        if unknown := self._unknown(self._default_options):
            raise ValueError(f"--mm-processor-kwargs: {unknown}")
        for kind in self.kinds.values():
            kind.check_defaults()

    def _why_not(self, config: dict[str, Any]) -> str | None:
        if (why := why_no_images(config)) is not None:
            return why
        if self._text_only:
            return "the server was started with --language-model-only"
        if self._on_cluster:
            return "ranks on other machines do not share the memory in which images are handed over"
        if not _is_installed("PIL"):
            self._is_complete = False
            return "it lacks the package pillow (pip install 'quire[files]')"
        return None

    def _add_images(self, folder: str, tokenizer: Tokenizer) -> None:
        processor = load_processor(folder)
        token_id = _token_id(tokenizer, processor.image_token)
        self.kinds["image"] = ImageKind(processor, token_id, self._config, self._default_options)

    def _add_videos(self, folder: str, tokenizer: Tokenizer) -> None:
        from quire.server.media.video.kind import VideoKind

        processor = load_video_processor(folder)
        token_id = _token_id(tokenizer, processor.token)
        defaults = read_media_io(self._config.media_io_kwargs) | self._default_options
        self.kinds["video"] = VideoKind(processor, token_id, self._config, defaults)

    def check_worker(self, media: MediaInfo | None) -> None:
        """Refuse media that the engine would refuse. `media` are the limits of its workers."""
        if self.why_not is None and media is None:
            self.why_not = self.why_no_videos = "the engine reads none with this model"
        elif self.why_not is None and media.image_token_id != (found := self.kinds["image"].token_id):
            self.why_not = f"its image token is {media.image_token_id}, but {found} in its tokenizer"
        elif self.why_no_videos is None and (found := self.kinds["video"].token_id) not in (
            media.image_token_id,
            media.video_token_id,
        ):
            self.why_no_videos = f"its video token is {media.video_token_id}, but {found} in its tokenizer"

    def describe(self) -> dict[str, Any]:
        """Return facts for /server_info: whether images and videos are taken or why not, their limits and options, and
        how many came.
        """
        if self.why_not is not None:
            return {"accepted": False, "reason": self.why_not}
        no_videos = self.why_no_videos
        videos = {"accepted": False, "reason": no_videos} if no_videos is not None else self._describe("video")
        counts = {"num_images": self.num_images, "num_found": self.num_hits, "num_bytes_kept": self._store.num_bytes}
        return self._describe("image") | counts | {"video": videos}

    def _describe(self, name: str) -> dict[str, Any]:
        kind = self.kinds[name]
        return {
            "accepted": True,
            "max_per_prompt": self._most[name],
            "placeholder": kind.placeholder,
            "mm_processor_kwargs": sorted(kind.options),
        }

    def close(self) -> None:
        """Remove the files. Idempotent."""
        for kind in self.kinds.values():
            kind.close()
        self._store.close()

    # ---- requests

    async def load(
        self,
        media: Sequence[MediaInput],
        options: dict[str, Any] | None,
        tenant: str | None,
        param: str,
        max_tokens: int | None,
        turn: str,
        frames: dict[str, Any] | None = None,
    ) -> None:
        """Give every medium of a prompt its `lease`. `options` are the request's mm_processor_kwargs, checked, `frames`
        those of its media_io_kwargs; `param` is the field that holds the prompt; the media must have fewer tokens than
        `max_tokens`. Media are shared by content; the uuids of different tenants are different. `turn` is the tenant
        whose turns this takes.

        Sizes and tokens are known from headers: media that are too large are refused before they are decoded. If the
        caller is cancelled, media that have not begun are dropped.

        Raises BadRequest naming the medium, ContextLengthExceeded, Unavailable if too much is under way.
        """
        self._check(media, param)
        if self._num_waiting >= MAX_WAITING:
            raise Unavailable("Too many images are being preprocessed.", retry_after=1)
        self._num_waiting += 1
        try:
            fetched = dict(zip(media, await _all(self._contents.fetch(one) for one in media), strict=True))
            groups = self._groups(media, options or {}, frames or {})
            look = functools.partial(self._look, fetched=fetched, tenant=tenant)
            await _all(self._run(group, look, turn) for group in groups)
            self._check_tokens(groups, param, max_tokens)
            missing = [group for group in groups if not group.done]
            await _all(self._run(group, self._process, turn, group.num_bytes) for group in missing)
        finally:
            self._num_waiting -= 1

    def _groups(self, media: Sequence[MediaInput], options: dict[str, Any], frames: dict[str, Any]) -> list[Group]:
        groups: list[Group] = []
        for kind in self.kinds.values():
            mine = [one for one in media if one.kind == kind.name]
            chosen = {name: value for name, value in options.items() if name in kind.options}
            param = "mm_processor_kwargs" if chosen or kind.name != "video" else "media_io_kwargs"
            chosen = frames | chosen if kind.name == "video" else chosen
            for some in kind.groups(mine) if mine else ():
                groups.append(Group(kind, some, kind.defaults | chosen, bool(chosen), param=param))
        return groups

    async def _run(self, group: Group, work: Callable[[Group], None], turn: str, num_bytes: int = 0) -> None:
        await group.kind.turns.run(group.kind.pool, turn, lambda: work(group), num_bytes)

    def _check_tokens(self, groups: list[Group], param: str, max_tokens: int | None) -> None:
        num_tokens = sum(group.num_tokens for group in groups)
        if max_tokens is not None and num_tokens >= max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_tokens} tokens. However, your {param} has "
                f"{counted([one for group in groups for one in group.inputs])} that take {num_tokens} tokens.",
                num_tokens,
                max_tokens,
                param=param,
            )

    def _check(self, media: Sequence[MediaInput], param: str) -> None:
        for name, most in self._most.items():
            mine = [one for one in media if one.kind == name]
            if mine and self.reason(name) is not None:
                self._refuse(mine[0].param, name)
            if len(mine) > most:
                raise BadRequest(
                    f"{param}: the prompt has {len(mine)} {name}s, and this server's limit is {most} "
                    "(--limit-mm-per-prompt).",
                    param=param,
                )

    def reason(self, name: str) -> str | None:
        """Return why the model takes no media of a kind, as the end of a sentence; None if it does."""
        return self.why_not if name == "image" else self.why_no_videos

    def _refuse(self, param: str, name: str = "image") -> NoReturn:
        why = self.reason(name)
        if not self._is_complete:
            raise NotInstalled(f"{param}: this server reads no {name}s: {why}.", param=param)
        raise BadRequest(f"{param}: this model takes no {name}s: {why}.", param=param, code="unsupported_parameter")

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise BadRequest for a request's mm_processor_kwargs that the model does not know."""
        param = "mm_processor_kwargs"
        if self.why_not is not None and options:
            self._refuse(param)
        if unknown := self._unknown(options):
            raise BadRequest(f"{param}: {unknown}.", param=param)

    def _unknown(self, options: dict[str, Any]) -> str | None:
        known = frozenset().union(*(kind.options for kind in self.kinds.values()))
        if not (unknown := sorted(set(options) - known)):
            return None
        names = ", ".join(sorted(known)) or "none"
        return f"this model's image processor has no option '{unknown[0][:100]}'; it has: {names}"

    # ---- in a thread

    def _look(self, group: Group, fetched: dict[MediaInput, bytes | None], tenant: str | None) -> None:
        """Find the media of a group, or the inputs for preprocessing them."""
        started = time.perf_counter()
        contents, inputs = self._contents, group.inputs
        group.content = [contents.read(one, fetched[one]) for one in inputs]
        digests = [contents.digest(one, data, tenant) for one, data in zip(inputs, group.content, strict=True)]
        group.options |= group.kind.detail(inputs)
        group.keys = _keys(digests, group.kind.name, group.options)
        leases = [self._store.lease(key) for key in group.keys]
        if None not in leases:
            self._give(group, leases, len(leases))
        else:
            group.num_hits = sum(lease is not None for lease in leases)
            group.kind.measure(group)
        group.seconds = time.perf_counter() - started

    def _process(self, group: Group) -> None:
        started = time.perf_counter()
        processed = group.kind.process(group)
        try:
            leases = [self._store.add(key, one) for key, one in zip(group.keys, processed, strict=True)]
        except ValueError as error:
            raise refused(group.inputs[0], str(error)) from None
        for lease in leases:
            lease.found = False
            lease.seconds = (group.seconds + time.perf_counter() - started) / len(leases)
        self._give(group, leases, group.num_hits)

    def _give(self, group: Group, leases: list[Lease], num_hits: int) -> None:
        group.done, group.content = True, []
        group.num_tokens = sum(lease.medium.num_tokens for lease in leases)
        for one, lease in zip(group.inputs, leases, strict=True):
            one.lease = lease
        with self._mutex:
            self.num_images += len(leases)
            self.num_hits += num_hits


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _keys(digests: list[bytes], name: str, options: dict[str, Any]) -> list[str]:
    """Return keys that are equal for equal features. `digests` belong to media preprocessed together."""
    settings = json.dumps([name, options, len(digests)], sort_keys=True).encode()
    return [hashlib.blake2b(digest + settings, digest_size=16).hexdigest() for digest in digests]


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"its tokenizer has no token {token}")
    return token_id


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules maps it to None
        return False
