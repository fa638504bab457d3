"""Fakes an OpenAI-like server with canned answers, for tests of our clients. It records requests, and can be slow,
refuse, or fail inside a stream.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake-model"


class FakeOpenAI:
    """Listens on 127.0.0.1:`server.port`: `with FakeOpenAI() as server:`.

    Every answer is `max_tokens` words (3 if absent).
    """

    def __init__(self, first_delay: float = 0.0, token_delay: float = 0.0, api_key: str | None = None):
        self.first_delay, self.token_delay, self.api_key = first_delay, token_delay, api_key
        self.requests: list[dict] = []
        self.forms: list[dict] = []  # of transcriptions
        self.fail: str | None = None  # "status", "stream" or "cut": the kind of failure of the next requests
        self.num_running = self.max_running = self.num_cancelled = 0
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/audio/transcriptions", self._transcribe, methods=["POST"]),
            Route("/health", lambda request: Response()),
            *(Route(f"/v1/{path}", self._generate, methods=["POST"]) for path in ("completions", "chat/completions")),
        ]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=lambda: self._server.run([self._socket]), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self._socket.close()

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "root": "/nowhere"}]}
        )

    async def _transcribe(self, request: Request) -> Response:
        async with request.form() as form:
            fields = {
                key: await value.read() if isinstance(value, UploadFile) else value for key, value in form.items()
            }
        self.forms.append(fields)
        await asyncio.sleep(self.first_delay)
        if fields.get("language") not in (None, "en"):
            return JSONResponse({"error": {"message": "no such language"}}, 400)
        return JSONResponse({"text": "seven words", "usage": {"type": "duration", "seconds": 7}})

    def _refusal(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse(
                {
                    "error": {
                        "message": "wrong key",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "invalid_api_key",
                    }
                },
                401,
            )
        return None

    async def _generate(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        self.requests.append(body)
        if self.fail == "status":
            return PlainTextResponse("out of order", 500)
        assert body["stream"] is True
        return StreamingResponse(self._events(body, chat="messages" in body), media_type="text/event-stream")

    async def _events(self, body: dict, chat: bool) -> AsyncIterator[bytes]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            num_tokens = body.get("max_tokens") or 3
            if chat:
                yield self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(self.first_delay)
            for i in range(num_tokens):
                if i:
                    await asyncio.sleep(self.token_delay)
                if self.fail and i == 1:
                    if self.fail == "stream":
                        yield self._event({"error": {"message": "the engine failed"}})
                    return
                word = f" wörd{i}"
                choice = {"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}
                if i == num_tokens - 1:
                    choice["finish_reason"] = "length" if body.get("max_tokens") else "stop"
                yield self._event({"choices": [choice]})
                yield b": keep-alive\n\n"
            if body.get("stream_options", {}).get("include_usage"):
                prompt = body.get("prompt") or body["messages"][-1]["content"]
                if isinstance(prompt, list):
                    prompt = " ".join(part.get("text", "") for part in prompt)
                yield self._event(
                    {
                        "choices": [],
                        "usage": {
                            "prompt_tokens": len(prompt.split()),
                            "completion_tokens": num_tokens,
                            "total_tokens": 0,
                        },
                    }
                )
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    @staticmethod
    def _event(data: dict) -> bytes:
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
