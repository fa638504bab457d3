"""Request targets in absolute form, such as `GET http://host:8000/v1/models HTTP/1.1`, which some proxies and old
clients send (RFC 9112, 3.2.2).
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import Scope

_ABSOLUTE = re.compile(rb"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>.*)", re.DOTALL)
_AUTHORITY = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[^\[\]@:#\\]+)(?::[0-9]{0,5})?")  # without user information
_SCHEMES = (b"http", b"https")


def use_origin_form(scope: Scope) -> str | None:
    """Rewrite a target in absolute form to its path; its authority replaces the Host header, as RFC 9112 demands, so
    that every check of paths and hosts sees one request only. Return why the target is refused, or None.
    """
    if scope["raw_path"].startswith(b"/") or (target := _ABSOLUTE.fullmatch(scope["raw_path"])) is None:
        return None
    if target["scheme"].lower() not in _SCHEMES:
        return "A request target in absolute form must begin with http:// or https://."
    if _AUTHORITY.fullmatch(target["authority"]) is None:
        return "A request target in absolute form must name a host, with no user before it: http://HOST:PORT/PATH."
    scope["raw_path"] = target["path"] or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", target["authority"]), *headers]
    return None
