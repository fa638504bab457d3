"""Checks errors, and names the chat route, for tests of the server."""

from __future__ import annotations

import httpx

from quire.server.error_shapes import is_anthropic, is_ollama

CHAT = "/v1/chat/completions"


def is_error(answer: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> bool:
    error = answer.json()["error"]
    if is_ollama(answer.request.url.path):
        return answer.status_code == status and isinstance(error, str)
    if is_anthropic(answer.request.url.path):
        assert set(error) == {"type", "message"} and error["message"]
        return answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return (answer.status_code, error["code"], error["param"]) == (status, code, param)
