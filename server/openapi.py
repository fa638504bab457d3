"""The OpenAPI document: bodies and answers are msgspec types, which FastAPI does not know."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from quire.server.api.anthropic.protocol import AnthropicErrorResponse
from quire.server.api.ollama.protocol import OllamaErrorResponse
from quire.server.api.openai.objects import ErrorResponse
from quire.server.error_shapes import is_anthropic, is_ollama
from quire.server.http.route import EMPTY, EVENTS, NDJSON, Route
from quire.server.http.time_limit import TimeLimit

_REF = "#/components/schemas/{name}"
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds", "required": True, "schema": {"type": "integer", "minimum": 1}}
}
_IN_EVERY_BODY = msgspec.json.schema_components([TimeLimit])[1]["TimeLimit"]["properties"]
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
_RAISES = re.compile(r"\s*\bRaises\b.*?\.(?=\s|$)", re.DOTALL)  # in docstrings: for readers of the code
_SENTENCE = re.compile(r".+?\.(?=\s|$)", re.DOTALL)
EXAMPLES = Path(__file__).with_name("examples.json")  # tools/api_examples.py writes them
_PARAMETERS = {
    "action": "The operation: save, restore or erase.",
    "after": "List what follows this id.",
    "after_id": "List what follows this id.",
    "batch_id": "The id of the batch.",
    "conversation_id": "The id of the conversation, which begins with conv_.",
    "file_id": "The id of the file.",
    "id": "The number of the slot.",
    "item_id": "The id of the item.",
    "key": "The `prompt_cache_key` of the requests.",
    "level": "The level of vLLM: each unloads the model.",
    "limit": "The most entries of the list.",
    "model": "A name of the model (default: the first).",
    "model_id": "A name of the model, or of an adapter.",
    "order": "Whether the list begins with the oldest (asc) or the newest (desc).",
    "purpose": "List files with this purpose only.",
    "response_id": "The id of the response, which begins with resp_.",
    "starting_after": "With `stream`: the number of the last event that was seen.",
    "stream": "Whether the answer is a stream of events.",
    "stream_id": "The name that the client gave the stream (header X-Resumable-Stream).",
}
Json = dict[str, Any]


def document(title: str, version: str, routes: list[Route], with_key: bool = False, root_path: str = "") -> Json:
    """Return the OpenAPI 3.1 document. `with_key`: routes need an API key. `root_path`: a proxy's, without outer
    slashes.
    """
    types = {id(cls): cls for route in routes for cls in [*route.types, _error_type(route.path)]}
    described, components = msgspec.json.schema_components(types.values(), ref_template=_REF)
    schemas = dict(zip(types, described, strict=True))
    for route in routes:
        if isinstance(route.body, type):
            components[route.body.__name__]["properties"] |= _IN_EVERY_BODY
    paths: dict[str, Json] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if root_path:
        found["servers"] = [{"url": f"/{root_path}"}]
    if with_key:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _operation(route: Route, path: str, schemas: dict[int, Json]) -> Json:
    name, example = route.handler.__name__, _examples().get(f"{route.method} {path}", {})
    text = _RAISES.sub("", " ".join(inspect.cleandoc(route.handler.__doc__ or "").split())).strip()
    sentence = _SENTENCE.match(text)
    found: Json = {
        "summary": sentence[0] if sentence else text,
        "description": text,
        "operationId": re.sub(r"\W+", "_", f"{name}_{path}_{route.method.lower()}"),
        "responses": _responses(route, schemas, example),
    }
    parameters: list[Json] = [
        {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for one in _PARAMETER.findall(route.path)
    ]
    parameters += [{"name": one, "in": "query", "schema": schema} for one, schema in route.query.items()]
    if parameters:
        found["parameters"] = [one | {"description": _PARAMETERS[one["name"]]} for one in parameters]
    if isinstance(route.body, dict):
        found["requestBody"] = route.body
    elif route.body is not None:
        found["requestBody"] = {"required": True, "content": _json(schemas[id(route.body)])}
    if "requestBody" in found and "request" in example:
        body = found["requestBody"]
        content = {kind: part | {"example": example["request"]} for kind, part in body["content"].items()}
        found["requestBody"] = body | {"content": content}
    return found


@cache
def _examples() -> dict[str, Json]:
    """Return by route a request and the server's answer."""
    return json.loads(EXAMPLES.read_bytes())


def _responses(route: Route, schemas: dict[int, Json], example: Json) -> Json:
    found: Json = {}
    if route.answer is not None:
        found[str(route.status)] = {"description": "The answer" if route.answer != EMPTY else "Done; there is no body"}
        content: Json = {route.answer: _text(route.answer)} if isinstance(route.answer, str) else {}
        if answers := [schemas[id(cls)] for cls in route.answers]:
            content = _json(answers[0] if len(answers) == 1 else {"anyOf": answers})
        if route.stream is not None:
            content[route.stream] = _text(route.stream)
        if content:
            found[str(route.status)]["content"] = content
    error = _json(schemas[id(_error_type(route.path))])
    unavailable = {"description": "Loading, full or shutting down", "headers": _RETRY_AFTER, "content": error}
    found |= {"503": unavailable, "default": {"description": "Error", "content": error}}
    for status, cls in route.others.items():
        found[status] = {"description": cls.__name__, "content": _json(schemas[id(cls)])}
    if "answer" in example:
        answer = found.setdefault(str(example["status"]), {"description": "Not served", "content": error})
        kind = example["type"]
        answer["content"] = answer["content"] | {kind: answer["content"][kind] | {"example": example["answer"]}}
    return found


def _text(media_type: str) -> Json:
    """Describe a text. A stream has no schema: OpenAPI 3.1 describes bodies that are read whole."""
    return {} if media_type in (EVENTS, NDJSON) else {"schema": {"type": "string"}}


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _error_type(path: str) -> type:
    if is_anthropic(path):
        return AnthropicErrorResponse
    return OllamaErrorResponse if is_ollama(path) else ErrorResponse
