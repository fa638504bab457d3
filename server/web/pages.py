"""The two pages for people: `/`, which says where to go, and `/docs`, which shows the OpenAPI document.

Both are static and need neither the internet nor a key.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

PAGES = frozenset({"/", "/docs"})
LINKS = {
    "api": "v1/models",
    "documentation": "docs",
    "health": "health",
    "metrics": "metrics",
}  # relative: a proxy may serve us under a prefix
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


async def index(request: Request) -> Response:
    """Where to go from here: HTML for browsers, JSON for clients that name it. Others get the text by which Ollama's
    clients know a server.
    """
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        return JSONResponse({"message": "quire is running"} | LINKS)
    if "text/html" not in accepted:
        return PlainTextResponse("Ollama is running")
    links = " ".join(f'<a href="{target}">{name}</a>' for name, target in LINKS.items())
    return HTMLResponse(f"<!doctype html><title>quire</title><p>quire is running: {links}</p>\n", headers=_HEADERS)


async def docs(request: Request) -> Response:
    """The page that shows openapi.json; it asks for an API key if the server requires one."""
    return HTMLResponse(_docs_page(), headers=_HEADERS)


@cache
def _docs_page() -> str:
    return (Path(__file__).parent / "docs.html").read_text(encoding="utf-8")


def add_pages(app: Starlette) -> None:
    for path, page in (("/", index), ("/docs", docs)):
        app.add_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
