"""The encoded bytes of media, from anywhere, and the names under which clients refer to them again."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire.configs.serving import MediaConfig
from quire.server.errors import BadRequest
from quire.server.media.inputs import MediaInput
from quire.server.media.loading import sources

if TYPE_CHECKING:
    from quire.server.media.loading.fetch import Fetcher

MAX_NAMES = 2**14  # uuids that are remembered
_JPEGS = "data:video/jpeg"  # vLLM's: the frames, each in base64, separated by commas

Content = bytes | list[bytes]  # a file, or the frames of a video as images


class Contents:
    """Loads contents and remembers their digests by uuid. The methods but `fetch` run in threads."""

    def __init__(self, config: MediaConfig):
        self._config = config
        self._limits = {
            "image": (config.max_image_bytes, sources.IMAGE_FLAG),
            "video": (config.max_video_bytes, "--max-video-bytes"),
        }
        self._fetchers: dict[str, Fetcher] = {}
        self._mutex = threading.Lock()
        self._names: OrderedDict[tuple[str | None, str, str], bytes] = OrderedDict()  # (tenant, kind, uuid) -> digest

    async def fetch(self, media: MediaInput) -> bytes | None:
        """Return the bytes of a medium that has to be loaded by URL. Raises BadRequest."""
        if media.url is None or not media.url[:8].lower().startswith(("http:", "https:")):
            return None
        config, kind = self._config, media.kind
        if not config.allowed_media_domains:
            raise refused(
                media, f"{kind}s by http(s) URL need a server with --allowed-media-domains; send a data: URL"
            )
        from quire.server.media.loading.fetch import Fetcher, Refused

        if kind not in self._fetchers:
            max_bytes, flag = self._limits[kind]
            self._fetchers[kind] = Fetcher(
                config.allowed_media_domains, max_bytes, config.media_timeout, flag=flag
            )
        try:
            return await self._fetchers[kind].fetch(media.url)
        except Refused as error:
            raise refused(media, str(error)) from None

    def read(self, media: MediaInput, fetched: bytes | None) -> Content | None:
        """Return the encoded medium; None for one that is in memory, and for a uuid alone. Raises BadRequest."""
        try:
            return fetched if fetched is not None else self._read(media)
        except ValueError as error:
            raise refused(media, str(error)) from None

    def _read(self, media: MediaInput) -> Content | None:
        (max_bytes, flag), url = self._limits[media.kind], media.url
        if media.base64 is not None:
            return sources.from_base64(media.base64, max_bytes, flag)
        if url is None:
            return None
        scheme = url[:8].partition(":")[0].lower()
        if media.kind == "video" and url[: len(_JPEGS)].lower() == _JPEGS:
            return _frames(url, max_bytes, flag)
        if scheme == "data":
            kinds = ("video", "image") if media.kind == "video" else (media.kind,)
            return sources.from_data_url(url, max_bytes, kinds, flag)
        if scheme == "file":
            return sources.from_file(url, self._config.allowed_local_media_path, max_bytes, flag)
        raise ValueError("its URL begins with none of data:, http:, https: and file:")

    def digest(self, media: MediaInput, content: Content | None, tenant: str | None) -> bytes:
        """Return the key of the content, and remember it for `media.uuid`. Raises BadRequest for an unknown uuid."""
        name = tenant, media.kind, media.uuid or ""
        if media.picture is not None:
            digest = media.picture.digest() if media.kind == "video" else _digest_of_picture(media.picture)
        elif content is not None:
            digest = _digest_of(content)
        elif (digest := self._names.get(name)) is None:
            raise refused(
                media, f"no {media.kind} with the uuid '{name[2][:100]}' is cached: send it again, with its data"
            )
        if media.uuid is not None:
            with self._mutex:
                self._names[name] = digest
                if len(self._names) > MAX_NAMES:
                    self._names.popitem(last=False)
        return digest


def refused(media: MediaInput, why: str) -> BadRequest:
    """Return the error for a medium that cannot be used; `why` is the end of a sentence."""
    return BadRequest(f"{media.param}: the {media.kind} cannot be used: {why}.", param=media.param)


def present(media: MediaInput, content: Content | None) -> Content:
    """Return the content. Raises BadRequest for a uuid alone, whose features are needed again."""
    if content is None:
        raise refused(
            media, f"the {media.kind} with the uuid '{media.uuid[:100]}' is no longer cached: send it with its data"
        )
    return content


def _frames(url: str, max_bytes: int, flag: str) -> list[bytes]:
    head, _, data = url.partition(",")
    if "base64" not in (one.strip().lower() for one in head.split(";")[1:]) or not data:
        raise ValueError("its data URL has not the form data:video/jpeg;base64,FRAME,FRAME,...")
    if len(data) * 3 // 4 > max_bytes + 3:
        raise sources.too_large(max_bytes, flag)
    return [sources.from_base64(frame, max_bytes, flag) for frame in data.split(",")]


def _digest_of(content: Content) -> bytes:
    if isinstance(content, bytes):
        return hashlib.blake2b(content, digest_size=32).digest()
    state = hashlib.blake2b(b"frames", digest_size=32)
    for frame in content:
        state.update(_digest_of(frame))
    return state.digest()


def _digest_of_picture(picture: object) -> bytes:
    about = json.dumps([picture.mode, picture.size, picture.getexif().get(274)]).encode()
    state = hashlib.blake2b(about, digest_size=32)
    if picture.palette is not None:
        state.update(picture.palette.tobytes())
    state.update(repr(picture.info.get("transparency")).encode())
    state.update(picture.tobytes())
    return state.digest()
