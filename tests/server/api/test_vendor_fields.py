"""No field of a vendor's request type is ignored silently: each is served, refused by name, or named in the Warning
header, except the few that change nothing here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from ollama import _types as ollama
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.conversations import conversation_create_params
from openai.types.responses import input_token_count_params, response_create_params

from quire.server.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.server.api.ollama.protocol import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest
from quire.server.api.openai.batches import BatchRequest
from quire.server.api.openai.embeddings import EmbeddingRequest
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.openai.responses.protocol import ConversationRequest, InputTokensRequest, ResponsesRequest
from quire.server.errors import BadRequest
from quire.server.http.parse_body import parse
from tests.helpers.server.vendor_fields import bodies

MESSAGES = [{"role": "user", "content": "hi"}]
# who is asking, where it is billed or cached, and how it is shown: nothing that this server's answer depends on
ASKED_BY = {"metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
CACHE = {"prompt_cache_options", "cache_control", "prompt_cache_breakpoint"}
_OPTIONS = (
    "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only "
    "num_thread num_keep penalize_newline"  # of the last, true is how it is here; false is refused
)
LOADING = {"keep_alive"} | {f"options.{name}" for name in _OPTIONS.split()}
ITEMS = ("phase", "caller", "content.annotations", "content.logprobs")  # of what a response said earlier
ANTHROPIC = CACHE | {"citations", "system.type", "tools.eager_input_streaming", "user_profile_id", "tools.input_schema"}
EFFECTLESS = {
    # response_format is any JSON to the parser: `tests/server/structured/test_fields.py`
    "/v1/chat/completions": ASKED_BY | CACHE | {"store", "include_obfuscation", "response_format"},
    "/v1/completions": {"user", "include_obfuscation"},
    "/v1/embeddings": {"user"},
    "/v1/responses": ASKED_BY
    | CACHE
    | {"access_programs", "max_tool_calls", "stream_options"}
    | {f"input.{name}" for name in ITEMS},
    "/v1/responses/input_tokens": CACHE | {f"input.{name}" for name in ITEMS},
    "/v1/conversations": CACHE | {f"items.{name}" for name in ITEMS},
    "/v1/messages": ANTHROPIC | {"metadata", "service_tier", "inference_geo"},
    "/v1/messages/count_tokens": ANTHROPIC,
    # for vectors, how to sample, too
    "/api/embed": {"options", "keep_alive"},
    "/api/embeddings": {"options", "keep_alive"},
    "/api/chat": LOADING,
    "/api/generate": LOADING,
}
KINDS: list[tuple[str, Any, type, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        chat_params.CompletionCreateParamsNonStreaming,
        ChatCompletionRequest,
        {"messages": MESSAGES, "model": "alias", "max_tokens": 2},
    ),
    (
        "/v1/completions",
        completion_create_params.CompletionCreateParamsNonStreaming,
        CompletionRequest,
        {"prompt": "a", "model": "alias", "max_tokens": 2},
    ),
    (
        "/v1/responses",
        response_create_params.ResponseCreateParamsNonStreaming,
        ResponsesRequest,
        {"input": "a", "model": "alias", "max_output_tokens": 16},
    ),
    (
        "/v1/responses/input_tokens",
        input_token_count_params.InputTokenCountParams,
        InputTokensRequest,
        {"input": "a", "model": "alias"},
    ),
    ("/v1/conversations", conversation_create_params.ConversationCreateParams, ConversationRequest, {}),
    (
        "/v1/embeddings",
        embedding_create_params.EmbeddingCreateParams,
        EmbeddingRequest,
        {"input": "a", "model": "alias"},
    ),
    (
        "/v1/batches",
        batch_create_params.BatchCreateParams,
        BatchRequest,
        {"endpoint": "/v1/embeddings", "completion_window": "24h", "input_file_id": "x"},
    ),
    (
        "/v1/messages",
        message_create_params.MessageCreateParamsNonStreaming,
        MessagesRequest,
        {"messages": MESSAGES, "model": "alias", "max_tokens": 2},
    ),
    (
        "/v1/messages/count_tokens",
        message_count_tokens_params.MessageCountTokensParams,
        CountTokensRequest,
        {"messages": MESSAGES, "model": "alias"},
    ),
    ("/api/chat", ollama.ChatRequest, ChatRequest, {"messages": MESSAGES, "model": "alias", "stream": False}),
    ("/api/generate", ollama.GenerateRequest, GenerateRequest, {"prompt": "a", "model": "alias", "stream": False}),
    ("/api/embed", ollama.EmbedRequest, EmbedRequest, {"input": "a", "model": "alias"}),
    ("/api/embeddings", ollama.EmbeddingsRequest, EmbeddingsRequest, {"prompt": "a", "model": "alias"}),
]


def is_declared(node: Any, path: list[str]) -> bool:
    """Whether a field is one of our request types', and so is read, or is inside of one that is any JSON."""
    match node:
        case inspect.StructType():
            found = [field.type for field in node.fields if path and field.encode_name == path[0]]
            return not path or any(is_declared(one, path[1:]) for one in found)
        case inspect.UnionType():
            return any(is_declared(one, path) for one in node.types)
        case inspect.ListType():
            return is_declared(node.item_type, path)
        case inspect.Metadata():
            return is_declared(node.type, path)
        case inspect.RawType():
            return True
    return not path


def outcome(body: dict[str, Any], cls: type, path: str) -> str:
    try:
        _, ignored = parse(msgspec.json.encode(body), cls)
    except BadRequest as error:
        told = f"{error.param} {error.message}"
        return "refused" if any(re.search(rf"\b{part}\b", told) for part in path.split(".")) else error.message
    return "warned" if ignored else "accepted"


@pytest.mark.slow
@pytest.mark.parametrize(("route", "vendor", "cls", "given"), KINDS, ids=[kind[0] for kind in KINDS])
def test_every_field_of_a_vendor_is_answered_for(route, vendor, cls, given):
    node, outcomes = inspect.type_info(cls), defaultdict(set)
    for path, body in bodies(vendor, given):
        outcomes[path].add(outcome(body, cls, path))
    effectless = EFFECTLESS.get(route, set())
    silent = [
        f"{path} {found}"
        for path, found in outcomes.items()
        if not found & {"refused", "warned"}
        and not is_declared(node, path.split("."))
        and not any(path == one or path.startswith(one + ".") or one in path.split(".") for one in effectless)
    ]
    assert not silent, "\n".join(silent)
