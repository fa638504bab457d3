"""The example request in the log of a ready server."""

from __future__ import annotations

import json
from typing import Any

from quire.engine.messages import PoolingInfo

_CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]})
_COMPLETION = ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 64})
_EMBEDDING = ("/v1/embeddings", {"input": "Hello!"})
_RERANK = ("/v1/rerank", {"query": "capital of France", "documents": ["Paris", "a cat"]})
_CLASSIFY = ("/classify", {"input": "Hello!"})
_POOLING = ("/pooling", {"input": "Hello!"})


def example(pooling: PoolingInfo | None, chats: bool) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a request that the model answers. `chats`: it has a chat template."""
    if pooling is not None and "classify" in pooling.tasks:
        return _RERANK if len(pooling.labels) == 1 else _CLASSIFY
    if pooling is not None and "token_classify" in pooling.tasks:
        return _POOLING
    if pooling is not None and pooling.tasks:
        return _EMBEDDING
    return _CHAT if chats else _COMPLETION


def curl_line(
    command: str, base: str, pooling: PoolingInfo | None, chats: bool, with_key: bool, hears: bool = False
) -> str:
    """Return the request of `example` for a shell, or with `hears` one with a file. `command` is curl with its options
    for the address.
    """
    key = " -H 'Authorization: Bearer KEY'" if with_key else ""
    if hears:
        return f"{command} {base}/v1/audio/transcriptions{key} -F file=@talk.wav"
    path, body = example(pooling, chats)
    return f"{command} {base}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
