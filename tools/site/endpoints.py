"""Makes the page of endpoints: each route with a request and a running server's answer."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_LINES = 40  # per answer
MAX_TEXT = 400  # characters of a text or list inside an answer
TIMEOUT = 60.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine

HELLO = [{"role": "user", "content": "Hello!"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
RANKED = {"query": "a city", "documents": ["Paris", "a loaf of bread"]}
BATCH_LINE = {"custom_id": "1", "params": {"model": "quire-tiny", "max_tokens": 8, "messages": HELLO}}


@dataclass(frozen=True)
class Example:
    """Describes a request. `{name}` in its path stands for the value that an earlier answer had at `keep[name]`."""

    method: str
    path: str
    about: str
    body: Any = None
    keep: dict[str, str] = field(default_factory=dict)  # name -> key of the answer
    status: int = 200


def _post(path: str, about: str, body: Any, **other: Any) -> Example:
    return Example("POST", path, about, body, **other)


def _get(path: str, about: str, **other: Any) -> Example:
    return Example("GET", path, about, **other)


SECTIONS: dict[str, list[Example]] = {
    "OpenAI: text": [
        _post("/v1/chat/completions", "An answer as a whole.", {"messages": HELLO, "max_tokens": 16}),
        _post("/v1/chat/completions", "Streamed.", {"messages": HELLO, "max_tokens": 3, "stream": True}),
        _post(
            "/v1/chat/completions", "With log-probabilities.", {"messages": HELLO, "max_tokens": 1, "logprobs": True}
        ),
        _post(
            "/v1/chat/completions",
            "JSON of a schema.",
            {
                "messages": HELLO,
                "max_tokens": 24,
                "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
            },
        ),
        _post(
            "/v1/chat/completions",
            "With a tool that the model has to call.",
            {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
        ),
        _post(
            "/v1/completions", "The continuation of a text.", {"prompt": "The capital of France is", "max_tokens": 8}
        ),
        _post("/v1/chat/completions/render", "The prompt that the chat template makes.", {"messages": HELLO}),
    ],
    "OpenAI: responses": [
        _post(
            "/v1/responses",
            "An answer that is stored.",
            {"input": "Hello!", "max_output_tokens": 16},
            keep={"response": "id"},
        ),
        _get("/v1/responses/{response}", "The stored answer."),
        _get("/v1/responses/{response}/input_items", "What it answered."),
        _post("/v1/responses/input_tokens", "The number of tokens of an input.", {"input": "Hello!"}),
        _post(
            "/v1/responses/compact", "Not served: `truncation` leaves out old turns.", {"input": "Hello!"}, status=404
        ),
        _post("/v1/responses", "In the background.", {"input": "Hello!", "background": True}, keep={"waiting": "id"}),
        _post("/v1/responses/{waiting}/cancel", "Cancels a running response.", {}),
        Example("DELETE", "/v1/responses/{response}", "Forgets it."),
        _post("/v1/conversations", "A conversation.", {"metadata": {"topic": "trial"}}, keep={"conversation": "id"}),
        _post("/v1/conversations/{conversation}", "Changes its metadata.", {"metadata": {"topic": "other"}}),
        _get("/v1/conversations/{conversation}", "The conversation."),
        _post(
            "/v1/conversations/{conversation}/items",
            "Adds to it.",
            {"items": [{"type": "message", "role": "user", "content": "Hello!"}]},
            keep={"item": "data.0.id"},
        ),
        _get("/v1/conversations/{conversation}/items", "Its items."),
        _get("/v1/conversations/{conversation}/items/{item}", "One item."),
        Example("DELETE", "/v1/conversations/{conversation}/items/{item}", "Removes an item."),
        Example("DELETE", "/v1/conversations/{conversation}", "Forgets the conversation."),
    ],
    "Vectors, scores and classes": [
        _post(
            "/v1/embeddings",
            "Vectors of texts (first with `--pooling`, for a model that makes text).",
            {"input": ["Hello!"]},
        ),
        _post("/pooling", "vLLM's name for them.", {"input": "Hello!"}),
        _post("/v1/score", "The similarity of two texts.", {"text_1": "a city", "text_2": "Paris"}),
        _post("/score", "The same.", {"text_1": "a city", "text_2": "Paris"}),
        _post("/v1/rerank", "Documents by relevance.", RANKED),
        _post("/v2/rerank", "The same.", RANKED),
        _post("/rerank", "TEI's and Cohere's older form.", {"query": "a city", "texts": ["Paris", "a loaf of bread"]}),
        _post("/embed", "TEI's vectors.", {"inputs": "Hello!"}),
    ],
    "Tokens and the model": [
        _post("/tokenize", "The tokens of a text.", {"prompt": "Hello!"}),
        _post("/detokenize", "The text of tokens.", {"tokens": [40, 41]}),
        _post("/apply-template", "llama.cpp's name for the chat template.", {"messages": HELLO}),
        _get("/v1/models", "The names of the model and its adapters.", keep={"model": "data.0.id"}),
        _get("/v1/models/{model}", "One of them."),
    ],
    "Anthropic": [
        _post("/v1/messages", "An answer.", {"model": "quire-tiny", "max_tokens": 16, "messages": HELLO}),
        _post(
            "/v1/messages/count_tokens", "The tokens of a prompt, counted.", {"model": "quire-tiny", "messages": HELLO}
        ),
        _post("/v1/messages/batches", "Many at once.", {"requests": [BATCH_LINE]}, keep={"many": "id"}),
        _get("/v1/messages/batches", "All of them."),
        _get("/v1/messages/batches/{many}", "One of them."),
    ],
    "Ollama": [
        _post(
            "/api/chat",
            "An answer.",
            {"model": "quire-tiny", "messages": HELLO, "stream": False, "options": {"num_predict": 8}},
        ),
        _post(
            "/api/generate",
            "A continuation, streamed.",
            {"model": "quire-tiny", "prompt": "Hello", "options": {"num_predict": 3}},
        ),
        _post("/api/embed", "Vectors.", {"model": "quire-tiny", "input": "Hello!"}),
        _post("/api/embeddings", "A vector, the older form.", {"model": "quire-tiny", "prompt": "Hello!"}),
        _post("/api/show", "About the model.", {"model": "quire-tiny"}),
        _get("/api/tags", "Models on this machine."),
        _get("/api/ps", "Models that are loaded."),
        _get("/api/version", "The version."),
    ],
    "Other servers' routes": [
        _post(
            "/generate", "TGI's (and SGLang's, with `text`).", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}
        ),
        _post("/generate_stream", "TGI's stream.", {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
        _get("/props", "llama.cpp's settings."),
        _get("/slots", "llama.cpp's slots: the running requests."),
        _get("/lora-adapters", "llama.cpp's adapters."),
        _get("/ping", "SageMaker's probe."),
        _post("/invocations", "SageMaker's request: any of the bodies above.", {"prompt": "Hello", "max_tokens": 4}),
    ],
    "The server": [
        _get("/live", "The process runs."),
        _get("/ready", "The model answers (503 before)."),
        _get("/health", "The same, with phase and percentage."),
        _get("/version", "The version."),
        _get("/load", "The running and waiting requests."),
        _get("/requests", "The requests that run."),
        _post("/abort_requests", "Ends requests.", {"request_ids": ["none-such"]}),
        _get("/server_info", "The choices made at the start."),
        _get("/metrics", "For Prometheus."),
        _get("/metrics/history", "The last hour of the page's charts."),
        _post("/reset_prefix_cache", "Forgets cached prefixes.", None),
        Example("DELETE", "/v1/cache/{key}", "Forgets the blocks of a `prompt_cache_key`.", status=404),
    ],
}
# page with the examples -> routes without an example here
ELSEWHERE = {
    "audio.md": ("/v1/audio/transcriptions", "/v1/audio/translations"),
    "batches.md": ("/v1/files", "/v1/batches"),
    "messages.md": ("/v1/messages/batches/{batch_id}",),
    "lora.md": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "ollama.md": ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"),
    "other-apis.md": ("/infill", "/tokenizer_info"),
    "api.md": ("/classify", "/v1/streams/"),
    "kv-cache.md": ("/slots/",),
    "fleet.md": (
        "/get_server_info",
        "/health_generate",
        "/kv_event_sources",
        "/v1/completions/render",
        "/is_sleeping",
        "/is_scaling_elastic_ep",
        "/scale_elastic_ep",
    ),
    "operations.md": ("/start_profile", "/stop_profile"),
}


@dataclass
class Answered:
    example: Example
    path: str
    status: int
    answer: str


def ask_all(url: str, headers: dict[str, str] | None = None) -> Iterator[tuple[str, Answered]]:
    """Ask the server at `url` all examples in order; yields (section, answer) of each."""
    kept = {"key": "none-such"}
    for section, examples in SECTIONS.items():
        for example in examples:
            path = example.path.format(**kept)
            status, text = _ask(url, example, path, headers or {})
            for name, key in example.keep.items():
                kept[name] = lookup(json.loads(text), key)
            yield section, Answered(example, path, status, text)


def _ask(url: str, example: Example, path: str, headers: dict[str, str]) -> tuple[int, str]:
    body = None if example.body is None else json.dumps(example.body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url + path, body, headers, method=example.method)
    try:
        with _OPENER.open(request, timeout=TIMEOUT) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def lookup(value: Any, key: str) -> str:
    for part in key.split("."):
        value = value[int(part) if part.isdigit() else part]
    return value


def page(answers: Iterator[tuple[str, Answered]]) -> str:
    """Return the page, in Markdown."""
    parts = ["# Endpoints by example\n\nEach answer was given by a running server when this page was built.\n"]
    shown = ""
    for section, one in answers:
        if section != shown:
            parts.append(f"\n## {section}\n")
            shown = section
        example = one.example
        parts.append(f"\n### {example.method} {example.path}\n\n{example.about}\n")
        parts.append(f"\n```sh\n{_curl(example, one.path)}\n```\n")
        status = "" if one.status == 200 else f"status {one.status}\n"
        parts.append(f"\n```\n{status}{_shortened(one.answer)}\n```\n")
    return "".join(parts)


def _curl(example: Example, path: str) -> str:
    implied = "GET" if example.body is None else "POST"
    method = "" if example.method == implied else f" -X {example.method}"
    command = f"curl{method} http://127.0.0.1:8000{path}"
    if example.body is None:
        return command
    body = json.dumps(example.body, ensure_ascii=False).replace("'", "'\\''")
    return f"{command} -H 'Content-Type: application/json' \\\n  -d '{body}'"


def _shortened(text: str) -> str:
    with contextlib.suppress(ValueError):  # a stream, or text
        text = json.dumps(_pruned(json.loads(text)), indent=2, ensure_ascii=False)
    lines = text.strip().splitlines()
    return "\n".join([*lines[:MAX_LINES], *(["..."] if len(lines) > MAX_LINES else [])])


def _pruned(value: Any) -> Any:
    match value:
        case str() if len(value) > MAX_TEXT:
            return value[:MAX_TEXT] + "..."
        case list() if len(value) > 8 and not isinstance(value[0], dict | list):
            return [*value[:4], "..."]
        case list():
            return [_pruned(one) for one in value]
        case dict():
            return {name: _pruned(one) for name, one in value.items()}
    return value
