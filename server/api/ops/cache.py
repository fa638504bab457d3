"""DELETE /v1/cache/{key}: the client of a conversation needs its cached prefix no more."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import EngineCalls
from quire.server.api import needs
from quire.server.errors import EngineError, NotFound, Unavailable
from quire.server.http.cache_hint import check_key
from quire.server.http.caller import caller


async def free(request: Request, state: needs.Engine) -> Response:
    """Free what is kept for a `prompt_cache_key`. Raises NotFound if no engine keeps anything for it."""
    state.require_ready()
    key = request.path_params["key"]
    check_key(key, "key")
    try:
        freed = await state.client.call_each(EngineCalls.free_cache, caller(request).engine_key(key))
    except TimeoutError:
        raise Unavailable("The engine did not answer in time.", code="engine_busy") from None
    except RuntimeError as error:
        raise EngineError(f"The engine could not free the cache: {error}") from error
    if not any(freed):
        raise NotFound(f"Nothing is kept for the prompt_cache_key {key[:100]!r}.", param="key")
    return Response(status_code=204)
