"""Ray Serve: `serve run quire.server.ray_serve:app model=MODEL`. Each replica starts a server and passes requests to
it; the number of replicas follows the requests that wait.

Arguments are the settings of `quire serve`, with underscores, and those of `_OWN`.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.server.engines.spawn import python_environment

try:
    import aiohttp
    from ray import serve
    from ray.serve.config import AutoscalingContext
except ImportError as error:
    message = f"quire.server.ray_serve needs Ray Serve ({error}): pip install 'ray[serve]'"
    raise ImportError(message, name=error.name) from error

_OWN = {"min_replicas": 1, "max_replicas": 8, "target_num_requests_waiting": 4, "ray_actor_options": {}}
_WAITING = "num_requests_waiting"
_LINE = re.compile(r"^vllm:num_requests_waiting(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "host"})  # between two hosts only
START_TIMEOUT = 3600  # seconds that a model may take to load


class Replica:
    """One server, in a process of its own."""

    def __init__(self, settings: dict[str, Any]):
        self._folder = tempfile.TemporaryDirectory(prefix="quire-")
        self._address = str(Path(self._folder.name, "http"))
        flags = [word for name, value in settings.items() for word in _flag(name, value)]
        command = [sys.executable, "-m", "quire", "serve", *flags, "--uds", self._address]
        self._server = subprocess.Popen(command, env=python_environment())
        self._http: aiohttp.ClientSession | None = None
        self._wait_ready()

    def _wait_ready(self) -> None:
        for _ in range(START_TIMEOUT):
            try:
                code = self._server.wait(1.0)
            except subprocess.TimeoutExpired:
                if _is_ready(self._address):
                    return
            else:
                raise RuntimeError(f"quire serve ended at its start with exit code {code}: its log says why")
        raise RuntimeError(f"quire serve was not ready within {START_TIMEOUT} s")

    def _session(self) -> aiohttp.ClientSession:
        """Return the session, made in the event loop that uses it. Streams have no time limit here: the server has."""
        if self._http is None:
            connector = aiohttp.UnixConnector(self._address, limit=0)
            self._http = aiohttp.ClientSession(
                "http://quire", connector=connector, timeout=aiohttp.ClientTimeout(None), auto_decompress=False
            )
        return self._http

    async def __call__(self, request: Request) -> Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        answer = await self._session().request(
            request.method, target, headers=headers, data=body or None, allow_redirects=False
        )
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        return StreamingResponse(_chunks(answer), answer.status, kept)

    async def check_health(self) -> None:
        """Raise RuntimeError if the server has ended or is not well: Ray Serve replaces the replica then."""
        if self._server.poll() is not None:
            raise RuntimeError(f"quire serve ended with exit code {self._server.returncode}")
        async with self._session().get("/health") as answer:
            if answer.status != 200:
                raise RuntimeError(f"/health answers {answer.status}: {(await answer.text())[:200]}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figure by which the number of replicas is chosen."""
        async with self._session().get("/metrics") as answer:
            return {_WAITING: num_waiting(await answer.text())}

    async def __del__(self) -> None:
        """Let running requests end within --shutdown-timeout, and remove the socket."""
        if self._http is not None:
            await self._http.close()
        self._server.terminate()
        await asyncio.to_thread(self._server.wait)
        self._folder.cleanup()


class _UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.host)


def _is_ready(address: str) -> bool:
    connection = _UnixConnection(address, timeout=20)
    try:
        connection.request("GET", "/ready", headers={"Host": "quire"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body as it comes. Its connection closes if the client leaves, which ends the request."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    finally:
        answer.close()


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if name == "model":
        return [str(value)]
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, list):
        return [word for one in value for word in (flag, str(one))]
    return [flag, str(value)]


def num_waiting(metrics: str) -> float:
    """Return the waiting requests of all engines of a server from its metrics."""
    return sum(float(value) for value in _LINE.findall(metrics))


def replicas_for(current: int, waiting: dict[Any, float], target: float) -> int:
    """Return the number of replicas for the requests that wait at each: one more for each `target` of them together,
    one less while none waits.
    """
    total = sum(waiting.values())
    if total >= target:
        return current + math.floor(total / target)
    return current if total else max(current - 1, 0)


class Policy:
    """A policy of Ray Serve, whose delays apply."""

    def __init__(self, target: float):
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        waiting = dict(context.aggregated_metrics.get(_WAITING, {}))
        return replicas_for(context.current_num_replicas, waiting, self._target), {}


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application. Raises ValueError without a model."""
    own = {name: args.get(name, default) for name, default in _OWN.items()}
    settings = {name: value for name, value in args.items() if name not in _OWN}
    if not settings.get("model"):
        raise ValueError("quire.server.ray_serve:app needs the argument model")
    deployment = serve.deployment(
        name="quire",
        ray_actor_options=own["ray_actor_options"],
        max_ongoing_requests=10_000,  # the server has its own queue
        autoscaling_config={
            "min_replicas": int(own["min_replicas"]),
            "max_replicas": int(own["max_replicas"]),
            "policy": {
                "policy_function": "quire.server.ray_serve:Policy",
                "policy_kwargs": {"target": float(own["target_num_requests_waiting"])},
            },
        },
    )(Replica)
    return deployment.bind(settings)
