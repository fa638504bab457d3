"""LiteLLM's routes to every API of a running `quire serve` (the embedded model).

LiteLLM pins an older openai than the other clients need, so it has an environment of its own:
    python -m venv FOLDER && FOLDER/bin/pip install litellm mcp
    quire serve --port 8000 --pooling lasttoken &
    FOLDER/bin/python tests/clients/litellm_routes.py http://127.0.0.1:8000
Prints one line per check, and ends with status 1 if one fails.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download
import litellm

litellm.suppress_debug_info = True
NAME = "quire-tiny"
ANNA = [{"role": "user", "content": "Write a JSON object with name Anna and age 31."}]
PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}


class Routes:
    def __init__(self, url: str) -> None:
        self.url = url
        self.failed = 0

    def check(self, name: str, run: Callable[[], bool]) -> None:
        try:
            passed, what = run(), ""
        except Exception as error:
            passed, what = False, f": {type(error).__name__}: {error}"
        self.failed += not passed
        print(f"{'ok' if passed else 'FAILED'} {name}{what}", flush=True)

    def settings(self, provider: str, path: str = "") -> dict[str, object]:
        own = provider in ("anthropic", "ollama", "ollama_chat", "cohere", "jina_ai")
        return {"model": f"{provider}/{NAME}", "api_base": self.url + (path or ("" if own else "/v1")), "api_key": "x"}

    def chat(self, provider: str) -> None:
        ask = self.settings(provider) | {"max_tokens": 60, "temperature": 0}
        self.check(f"{provider}: chat", lambda: "Anna" in text(litellm.completion(messages=ANNA, **ask)))
        self.check(f"{provider}: stream", lambda: "Anna" in text(whole(messages=ANNA, **ask)))
        self.check(f"{provider}: async", lambda: "Anna" in text(asyncio.run(litellm.acompletion(messages=ANNA, **ask))))
        if provider != "ollama":
            self.check(f"{provider}: tools", lambda: called(litellm.completion(messages=PARIS, tools=TOOLS, **ask)))
            self.check(f"{provider}: tools, stream", lambda: called(whole(messages=PARIS, tools=TOOLS, **ask)))
        self.check(f"{provider}: error", lambda: refused(ask | {"temperature": 9}))

    def others(self) -> None:
        openai, anthropic = self.settings("openai"), self.settings("anthropic")
        prompt = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        self.check(
            "openai: completions", lambda: "Paris" in litellm.text_completion(**openai, **prompt).choices[0].text
        )
        schema = {"messages": ANNA, "response_format": FORMAT, "max_tokens": 60}
        self.check("openai: json_schema", lambda: '"age"' in text(litellm.completion(**openai, **schema)))
        for name, settings in (("openai", openai), ("anthropic", anthropic)):
            given = settings | {"input": "Hello!", "max_output_tokens": 30}
            self.check(f"{name}: responses", lambda given=given: bool(litellm.responses(**given).output))
            self.check(
                f"{name}: responses, stream",
                lambda given=given: (
                    [e.type for e in litellm.responses(stream=True, **given)][-1] == "response.completed"
                ),
            )
        messages = litellm.anthropic.messages.acreate
        for name in ("anthropic", "hosted_vllm"):
            given = self.settings(name) | {"messages": PARIS, "max_tokens": 30}
            self.check(f"{name}: messages", lambda given=given: bool(asyncio.run(messages(**given))["content"]))
        for name in ("openai", "ollama", "hosted_vllm"):
            given = self.settings(name) | {"input": ["a", "b"]}
            self.check(f"{name}: embeddings", lambda given=given: len(litellm.embedding(**given).data) == 2)
        for name, path in (("jina_ai", "/v1/rerank"), ("cohere", "/v2/rerank"), ("hosted_vllm", "/v1/rerank")):
            given = self.settings(name, path) | {"query": "a", "documents": ["b", "a"]}
            self.check(f"{name}: rerank", lambda given=given: litellm.rerank(**given).results[0]["index"] == 1)


def whole(**request: object):
    """The streamed answer, put together."""
    return litellm.stream_chunk_builder(list(litellm.completion(stream=True, **request)))


def text(answer) -> str:
    return answer.choices[0].message.content or ""


def called(answer) -> bool:
    call = answer.choices[0].message.tool_calls[0].function
    return call.name == "get_weather" and "Paris" in call.arguments


def refused(request: dict[str, object]) -> bool:
    try:
        litellm.completion(messages=ANNA, **request)
    except litellm.BadRequestError as error:
        return "temperature" in str(error)
    return False


if __name__ == "__main__":
    routes = Routes((sys.argv[1:] or ["http://127.0.0.1:8000"])[0])
    for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat", "ollama"):
        routes.chat(provider)
    routes.others()
    sys.exit(bool(routes.failed))
