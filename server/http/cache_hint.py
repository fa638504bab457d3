"""The conversation of a request, and how long its cached prefix is wanted: `prompt_cache_key` of any body,
else `session_id`, else the header X-Session-ID; `prompt_cache_retention`, or `ttl` of `prompt_cache_options`. Some
dialects have hints of their own, without a name: `with_retention`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from quire.server.errors import BadRequest
from quire.server.request.hints import IN_MEMORY_SECONDS, CacheHint
from quire.server.values import Json

MAX_KEY_BYTES = 1024
MAX_SECONDS = 86400.0
RETENTION = {"in_memory": IN_MEMORY_SECONDS, "in-memory": IN_MEMORY_SECONDS, "24h": 86400.0}  # seconds
_TTL = {"30m": 1800.0, "12h": 43200.0}


class _Options(msgspec.Struct):
    ttl: Json = None


class _Fields(msgspec.Struct):
    prompt_cache_key: Json = None
    prompt_cache_retention: Json = None
    prompt_cache_options: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    session_id: Json = None


_fields = msgspec.json.Decoder(_Fields).decode
_options = msgspec.json.Decoder(_Options).decode


def read_hint(request: Request, body: bytes) -> CacheHint | None:
    """Return the hint of a request with a valid body. Raises BadRequest."""
    given = _fields(body) if b'"prompt_cache_' in body or b'"session_id"' in body else _Fields()
    key, retention = given.prompt_cache_key, given.prompt_cache_retention
    if key is not None:
        check_key(key, "prompt_cache_key")
    if retention is not None and (not isinstance(retention, str) or retention not in RETENTION):
        raise BadRequest("prompt_cache_retention must be 'in_memory' or '24h'.", param="prompt_cache_retention")
    if given.session_id is not None:
        check_key(given.session_id, "session_id")
        key = key or given.session_id
    if not key and (session := request.headers.get("x-session-id")):
        check_key(session, "X-Session-ID")
        key = session
    seconds = RETENTION[retention] if retention else _ttl(given.prompt_cache_options)
    return CacheHint(key or "", seconds) if key or seconds > RETENTION["in_memory"] else None


def _ttl(options: msgspec.Raw | msgspec.UnsetType) -> float:
    """Return the seconds in `prompt_cache_options` of a body, if it has OpenAI's meaning."""
    try:
        ttl = None if options is msgspec.UNSET else _options(options).ttl
    except msgspec.ValidationError:
        ttl = None
    return _TTL.get(ttl, RETENTION["in_memory"]) if isinstance(ttl, str) else RETENTION["in_memory"]


def with_retention(identity: dict[str, Any], seconds: float, name: str = "") -> dict[str, Any]:
    """Return spec fields with the dialect's own hint: the cached prefix is wanted for `seconds`. A conversation name
    of the client takes precedence over `name`; without any, the beginning of the prompt stands for it.
    """
    if seconds <= 0:
        return identity
    seconds = min(max(seconds, identity.get("cache_seconds", 0.0)), MAX_SECONDS)
    key = identity.get("cache_key") or ""
    if not key.partition("/")[2]:
        key = f"{identity.get('tenant') or ''}/{name}"
    return identity | {"cache_key": key, "cache_seconds": seconds}


def check_key(key: Json, param: str) -> None:
    """Raise BadRequest if the key is no valid conversation name."""
    if not isinstance(key, str):
        raise BadRequest(f"{param}: expected str, got {type(key).__name__}.", param=param)
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise BadRequest(f"{param} has more than {MAX_KEY_BYTES} bytes.", param=param)
