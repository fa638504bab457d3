"""The encoded bytes of an image or a video: from a data URL or base64, from a file of this machine, or loaded by
`fetch.py`.
"""

from __future__ import annotations

import binascii
import os
import stat
from urllib.parse import unquote, urlsplit

_SLICE = 2**20  # characters that are decoded at once: decoding holds the GIL
IMAGE_FLAG = "--max-image-bytes"  # names the limit in errors
_EXAMPLES = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
_WITH_ARTICLE = {"image": "an image", "audio": "audio", "video": "a video"}
_SPACES = str.maketrans("", "", " \t\r\n")


def from_base64(text: str, max_bytes: int, flag: str = IMAGE_FLAG) -> bytes:
    """Return the decoded bytes. Raises ValueError, for the client."""
    if len(text) * 3 // 4 > max_bytes + 3:
        raise too_large(max_bytes, flag)
    if any(space in text for space in " \t\r\n"):
        text = text.translate(_SPACES)
    text = text.rstrip("=")
    text += "=" * (-len(text) % 4)
    try:
        return b"".join(
            binascii.a2b_base64(text[i : i + _SLICE], strict_mode=True) for i in range(0, len(text), _SLICE)
        )
    except ValueError:  # binascii.Error is one
        raise ValueError("it is not valid base64") from None


def from_data_url(url: str, max_bytes: int, kinds: tuple[str, ...] = ("image",), flag: str = IMAGE_FLAG) -> bytes:
    """Return the content of "data:image/png;base64,...", of a media type of one of `kinds`. Raises ValueError, for the
    client.
    """
    head, comma, data = url.partition(",")
    kind, *parameters = head.partition(":")[2].split(";")
    if not comma or "base64" not in (one.strip().lower() for one in parameters):
        raise ValueError(f"its data URL has not the form data:{_EXAMPLES[kinds[0]]};base64,...")
    allowed = *(f"{one}/" for one in kinds), "application/octet-stream"
    if kind and not kind.strip().lower().startswith(allowed):
        raise ValueError(f"its data URL holds {kind[:100]}, not {' or '.join(map(_WITH_ARTICLE.get, kinds))}")
    return from_base64(data, max_bytes, flag)


def from_file(url: str, root: str | None, max_bytes: int, flag: str = IMAGE_FLAG) -> bytes:
    """Return the content of the file that a file:// URL names, which must lie below `root`. Raises ValueError, for the
    client; the text does not tell whether other files exist.
    """
    if root is None:
        raise ValueError("media by file:// URL need a server with --allowed-local-media-path")
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ValueError("its file:// URL names a host")
    refused = ValueError("there is no such file below --allowed-local-media-path")
    root = os.path.realpath(root)
    try:
        path = os.path.realpath(unquote(parts.path))
        if not _is_below(path, root):
            raise refused
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise refused from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _is_below(_opened(descriptor, path), root):
            raise refused
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise too_large(max_bytes, flag)
    return data


def _is_below(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root and path != root


def _opened(descriptor: int, path: str) -> str:
    """Return the real path of the open file: a parent folder may have become a link since resolution."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no /proc
        return os.path.realpath(path)


def too_large(max_bytes: int, flag: str) -> ValueError:
    return ValueError(f"it has more than {max_bytes} bytes ({flag})")
