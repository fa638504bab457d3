"""Errors in the shape of the API that a path belongs to: Anthropic's, Ollama's, else OpenAI's."""

from __future__ import annotations

import msgspec

from quire.server.errors import ApiError, ContextLengthExceeded, error_body

INTERNAL = "The server failed to process the request; its log says why."
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def is_ollama(path: str) -> bool:
    return path.startswith("/api/")


def body_of(error: ApiError, path: str) -> bytes:
    message = error.message
    if is_anthropic(path) and isinstance(error, ContextLengthExceeded):
        # Anthropic's words, from which its clients learn by how much to shorten a conversation
        message = f"prompt is too long: {error.num_tokens} tokens > {min(error.limit, error.num_tokens - 1)} maximum"
    return dialect_body(path, error.status, message, error.type, error.param, error.code)


def dialect_body(
    path: str, status: int, message: str, type: str, param: str | None = None, code: str | None = None
) -> bytes:
    if is_anthropic(path):
        return anthropic_body(status, message)
    if is_ollama(path):
        return msgspec.json.encode({"error": message})
    return error_body(message, type, param, code)


def anthropic_body(status: int, message: str) -> bytes:
    default = "invalid_request_error" if status < 500 else "api_error"
    return msgspec.json.encode(
        {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(status, default), "message": message}}
    )


def internal_body(path: str) -> bytes:
    """Answer an unexpected exception; the traceback goes to the log, not to the client."""
    return dialect_body(path, 500, INTERNAL, "server_error", None, "internal_error")
