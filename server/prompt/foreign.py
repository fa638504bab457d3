"""Results of tools that another server ran, which a conversation brings along, as text that the model can read."""

from __future__ import annotations

import msgspec

from quire.server.errors import BadRequest
from quire.server.values import Json

MAX_DEPTH = 64  # levels of objects and lists


def is_given(raw: msgspec.Raw | msgspec.UnsetType) -> bool:
    """Return whether a field of any JSON type is present and not null."""
    return raw is not msgspec.UNSET and bytes(raw) != b"null"


def readable(raw: msgspec.Raw, path: str) -> str:
    """Return a string unchanged, the texts of a list of text parts, and other JSON as JSON, without encrypted parts and
    base64 files, which only the other server can read. Raises BadRequest naming `path`.
    """
    try:
        value = _readable(msgspec.json.decode(raw), MAX_DEPTH)
    except (RecursionError, ValueError) as error:
        raise BadRequest(f"{path}: {error}.", param=path) from None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_text(part) for part in value):
        return "\n".join(part["text"] for part in value)
    return msgspec.json.encode(value).decode()


def _is_text(part: Json) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _readable(value: Json, levels: int) -> Json:
    if levels == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    match value:
        case dict():
            kept = {name: one for name, one in value.items() if not _is_opaque(name, one, value)}
            return {name: _readable(one, levels - 1) for name, one in kept.items()}
        case list():
            return [_readable(one, levels - 1) for one in value]
    return value


def _is_opaque(name: str, value: Json, siblings: dict[str, Json]) -> bool:
    """Return whether a member of an object is encrypted, or is a file in base64."""
    if name.startswith("encrypted_") or (name == "data" and siblings.get("type") == "base64"):
        return True
    return isinstance(value, str) and value.startswith("data:") and ";base64," in value[:256]
