"""GET /tokenizer_info: what a client needs to know of the tokenizer to build prompts itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.server.http.sse import JsonResponse
from quire.server.state import ServerState


async def tokenizer_info(request: Request, state: ServerState) -> Response:
    """Special tokens and the chat template."""
    state.require_ready()
    tokenizer = state.tokenizer
    return JsonResponse(
        {"chat_template": tokenizer.chat_templates.get("default"), "vocab_size": tokenizer.vocab_size}
        | tokenizer.special_tokens
    )
