"""The pages for people: `/`, a web application to chat with the model and to watch the server, and `/docs`, which shows
the OpenAPI document.

All files are static, need neither the internet nor a key, and hold no inline script or style: the policy sent with them
(`_POLICY`) allows none, no other host, and no text that becomes HTML.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

_FOLDER = Path(__file__).parent / "ui"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}
_DOCS = frozenset({"docs.css", "docs.js", "icon.svg"})  # files of /docs, which --no-ui keeps
_FILES = frozenset(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*") if path.suffix in _TYPES)
_FACTS = "/ui/page.json"
PAGES = frozenset({"/", "/docs", _FACTS} | {f"/ui/{name}" for name in _FILES})
LINKS = {
    "api": "v1/models",
    "documentation": "docs",
    "health": "health",
    "metrics": "metrics",
}  # relative: a proxy may serve us under a prefix
_POLICY = (  # {mcp}: origins of MCP servers, each after a space
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'{mcp}; "
    "manifest-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


async def _index(request: Request) -> Response:
    """Serve the application to browsers, and links to clients that name JSON. Others get the text by which
    Ollama's clients know a server.
    """
    accepted, with_page = request.headers.get("accept", ""), request.app.state.server.config.server.ui
    if "text/html" in accepted and with_page:
        # /llm under --root-path: the page's links are relative to /llm/
        if not (path := request.scope.get("raw_path", b"/")).endswith(b"/"):
            return RedirectResponse(path.decode("latin-1").rpartition("/")[2] + "/")
        return _file("index.html", request)
    if "application/json" in accepted or "text/html" in accepted:
        return JSONResponse({"message": "quire is running"} | LINKS)
    return PlainTextResponse("Ollama is running")


async def _docs(request: Request) -> Response:
    """Serve the page that shows openapi.json; it asks for an API key if the server requires one."""
    return _file("docs.html", request)


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return _file(name, request)

    return answer


def _file(name: str, request: Request) -> Response:
    return _response(_bytes(name), _TYPES[Path(name).suffix], request)


def _response(body: bytes, media_type: str, request: Request) -> Response:
    mcp = "".join(f" {origin}" for origin in request.app.state.server.config.server.ui_mcp_origins)
    headers = {"Content-Security-Policy": _POLICY.format(mcp=mcp)} | _HEADERS
    return Response(body, media_type=media_type, headers=headers)


async def _facts(request: Request) -> Response:
    """Return what the page must know of its server before it has a key."""
    facts = {"mcp_origins": request.app.state.server.config.server.ui_mcp_origins}
    return _response(json.dumps(facts).encode(), "application/json", request)


@cache
def _bytes(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def add_pages(app: Starlette, with_page: bool = True) -> None:
    """Add the routes of the pages; those of the application's files only `with_page`."""
    pages = {"/": _index, "/docs": _docs} | ({_FACTS: _facts} if with_page else {})
    pages |= {f"/ui/{name}": _static(name) for name in sorted(_FILES if with_page else _DOCS)}
    for path, page in pages.items():
        app.add_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
