"""GET /tokenizer_info: the properties of the tokenizer that a client needs to build prompts."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.http.caller import caller
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import require_model


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Facts about the tokenizer and the special tokens, by their names in tokenizer_config.json."""

    chat_template: str | None
    vocab_size: int


async def tokenizer_info(request: Request, state: needs.Tokenizing) -> Response:
    """Return the special tokens and the chat template."""
    state.require_ready()
    require_model(caller(request), None, state)
    tokenizer = state.tokenizer
    return JsonResponse(
        {"chat_template": tokenizer.chat_templates.get("default"), "vocab_size": tokenizer.vocab_size}
        | tokenizer.special_tokens
    )
