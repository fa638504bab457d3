"""`--middleware`: ASGI middleware of the user's own modules around all routes, with vLLM's meaning."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp


def load_middleware(paths: Sequence[str]) -> list[Callable[[ASGIApp], ASGIApp]]:
    """Return what wraps an application, for each import path. Raises ValueError naming the path that cannot be used."""
    return [_load(path) for path in paths]


def add_middleware(app: ASGIApp, paths: Sequence[str]) -> ASGIApp:
    """Return `app` wrapped by each, the last outermost."""
    for wrap in load_middleware(paths):
        app = wrap(app)
    return app


def _load(path: str) -> Callable[[ASGIApp], ASGIApp]:
    module, dot, name = path.rpartition(".")
    if not dot:
        raise ValueError(f"--middleware {path}: must be an import path, as PACKAGE.MODULE.NAME")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's: anything may be raised
        raise ValueError(f"--middleware {path}: cannot be imported: {type(error).__name__}: {error}") from error
    if inspect.isclass(found):
        return found
    if inspect.iscoroutinefunction(found):
        return lambda app: BaseHTTPMiddleware(app, dispatch=found)
    raise ValueError(f"--middleware {path}: must be a class or an async function (request, call_next)")
