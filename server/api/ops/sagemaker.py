"""Amazon SageMaker's container contract: GET /ping. POST /invocations is in `server/routes.py`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs


async def ping(request: Request, state: needs.Readiness) -> Response:
    """Answer 200 when requests are served. Raises Unavailable before."""
    state.require_ready()
    return Response(status_code=200)
