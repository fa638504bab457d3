"""The pages for people: `/`, a web application to chat with the model and to watch the server, and `/docs`, which shows
the OpenAPI document.

All files are static, need neither the internet nor a key, and hold no inline script or style: the policy sent with them
(`_POLICY`) allows none, no other host, and no text that becomes HTML.
"""

from __future__ import annotations

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
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
_DOCS = frozenset({"docs.css", "docs.js", "icon.svg"})  # files of /docs, which --no-ui keeps
_FILES = frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _TYPES)
PAGES = frozenset({"/", "/docs"} | {f"/ui/{name}" for name in _FILES})
LINKS = {
    "api": "v1/models",
    "documentation": "docs",
    "health": "health",
    "metrics": "metrics",
}  # relative: a proxy may serve us under a prefix
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "manifest-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


async def _index(request: Request) -> Response:
    """The application for browsers, where to go from here for clients that name JSON. Others get the text by which
    Ollama's clients know a server.
    """
    accepted, with_page = request.headers.get("accept", ""), request.app.state.server.config.server.ui
    if "text/html" in accepted and with_page:
        # /llm under --root-path: the page's links are relative to /llm/
        if not (path := request.scope.get("raw_path", b"/")).endswith(b"/"):
            return RedirectResponse(path.decode("latin-1").rpartition("/")[2] + "/")
        return _file("index.html")
    if "application/json" in accepted or "text/html" in accepted:
        return JSONResponse({"message": "quire is running"} | LINKS)
    return PlainTextResponse("Ollama is running")


async def _docs(request: Request) -> Response:
    """The page that shows openapi.json; it asks for an API key if the server requires one."""
    return _file("docs.html")


def _static(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return _file(name)

    return answer


def _file(name: str) -> Response:
    media_type = _TYPES[Path(name).suffix]
    return Response(_bytes(name), media_type=media_type, headers=_HEADERS)


@cache
def _bytes(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def add_pages(app: Starlette, with_page: bool = True) -> None:
    """Add the routes of the pages; those of the application's files only `with_page`."""
    pages = {"/": _index, "/docs": _docs}
    pages |= {f"/ui/{name}": _static(name) for name in sorted(_FILES if with_page else _DOCS)}
    for path, page in pages.items():
        app.add_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
