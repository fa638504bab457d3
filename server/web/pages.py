"""The two pages for people: `/`, which says where to go, and `/docs`, which shows the OpenAPI document.

Both are static and need neither the internet nor a key.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

PAGES = frozenset({"/", "/docs"})
LINKS = {
    "api": "v1/models",
    "documentation": "docs",
    "health": "health",
    "metrics": "metrics",
}  # relative: a proxy may serve us under a prefix
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


async def index(request: Request) -> Response:
    """Where to go from here: HTML for browsers, JSON for everyone else."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"message": "quire is running"} | LINKS)
    links = " ".join(f'<a href="{target}">{name}</a>' for name, target in LINKS.items())
    return HTMLResponse(f"<!doctype html><title>quire</title><p>quire is running: {links}</p>\n", headers=_HEADERS)


async def docs(request: Request) -> Response:
    """The page that shows openapi.json, for which it asks the reader's key where one is needed."""
    return HTMLResponse(_docs_page(), headers=_HEADERS)


@cache
def _docs_page() -> str:
    return (Path(__file__).parent / "docs.html").read_text(encoding="utf-8")


def add_pages(app: Starlette) -> None:
    for path, page in (("/", index), ("/docs", docs)):
        app.add_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
