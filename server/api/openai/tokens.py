"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.server.api import needs
from quire.server.api.openai.objects import DetokenizeResponse, TokenizeResponse
from quire.server.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from quire.server.api.openai.translate import conversation
from quire.server.errors import BadRequest
from quire.server.http.caller import caller
from quire.server.http.read_body import use_body
from quire.server.http.sse import JsonResponse
from quire.server.keys.access import require_model
from quire.server.prompt.encode import encode_conversation, encode_texts
from quire.server.prompt.images import after_images
from quire.server.turns.threads import Deferred


async def tokenize(request: Request, state: needs.Tokenizing) -> Response:
    """Return the token ids of a prompt or a conversation."""
    return JsonResponse(await use_body(request, TokenizeRequest, state, lambda body: _tokenized(request, body, state)))


def _tokenized(request: Request, body: TokenizeRequest, state: needs.Tokenizing) -> bytes | Deferred[bytes]:
    state.require_ready()
    require_model(caller(request), body.model, state)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Give exactly one of prompt and messages.", param="prompt")
    if body.messages is not None:
        prompt = conversation(body)
        special = bool(body.add_special_tokens)
        tenant = caller(request).tenant
        return after_images(
            prompt, state, tenant, lambda: _answer(encode_conversation(prompt, state, special), body, state)
        )
    ids = encode_texts([body.prompt], state, body.add_special_tokens is not False, "prompt", may_truncate=True)[0]
    return _answer(ids, body, state)


def _answer(ids: list[int], body: TokenizeRequest, state: needs.Encoding) -> bytes:
    strings = [state.tokenizer.vocabulary_entry(token_id) for token_id in ids] if body.return_token_strs else None
    return msgspec.json.encode(TokenizeResponse(len(ids), state.model.max_model_len, ids, strings))


async def detokenize(request: Request, state: needs.Tokenizing) -> Response:
    """Return the text of token ids."""
    found = await use_body(request, DetokenizeRequest, state, lambda body: _detokenized(request, body, state))
    return JsonResponse(found)


def _detokenized(request: Request, body: DetokenizeRequest, state: needs.Tokenizing) -> bytes:
    model = state.require_ready()
    require_model(caller(request), body.model, state)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise BadRequest(f"tokens: ids must be below the vocabulary size of {model.vocab_size}.", param="tokens")
    return msgspec.json.encode(DetokenizeResponse(state.tokenizer.decode(body.tokens, skip_special_tokens=False)))
