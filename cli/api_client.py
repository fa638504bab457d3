"""Implements a small client of OpenAI's API over http.client, for commands that talk to a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.checkpoints.library.names import same_model


class ServerError(Exception):
    """Raised when the server cannot be reached or refuses a request. The message is for the terminal."""


def tls_context(insecure: bool) -> ssl.SSLContext:
    """Return the SSL context of a client; `insecure` accepts every certificate."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def explain(error: Exception, url: str) -> str:
    """Return why a server was not reached, with the remedy if it has TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}: --insecure accepts the certificate"
    broken = isinstance(error, (http.client.BadStatusLine, ConnectionResetError, EOFError))
    if broken and not url.startswith("https://"):
        why = "the server closed the connection" if isinstance(error, EOFError) else str(error)
        return f"{why}; if it has TLS, name it as https://{url.rpartition('://')[2]}"
    return str(error)


class Server:
    """Sends requests to the server at a base URL, such as http://127.0.0.1:8000/v1.

    `insecure` accepts every certificate.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float | None = None, insecure: bool = False):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"--url: expected http://HOST:PORT/v1, got {url!r}")
        self.url, self.parts, self.timeout = url, parts, timeout  # seconds without data; None: no limit
        self.insecure, self.path = insecure, parts.path.rstrip("/") or "/v1"
        self.headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )

    @contextlib.contextmanager
    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Return a response with status 200. Closing it before its end aborts the request on the server.

        Raises ServerError.
        """
        connection = self._connection()
        try:
            connection.request(method, self.path + path, json.dumps(body) if body is not None else None, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {error_message(response.read())}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {explain(error, self.url)}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.parts.hostname, self.parts.port
        if self.parts.scheme == "https":
            context = tls_context(self.insecure)
            return http.client.HTTPSConnection(host, port, timeout=self.timeout, context=context)
        return http.client.HTTPConnection(host, port, timeout=self.timeout)

    def first_model(self) -> str:
        with self.request("GET", "/models") as response:
            return json.load(response)["data"][0]["id"]

    def name_of(self, model: str | None) -> str:
        """Return the server's name for `model`, in any of its spellings; for None, the first listed name."""
        with self.request("GET", "/models") as response:
            listed = [card["id"] for card in json.load(response)["data"]]
        return listed[0] if model is None else same_model(model, listed)

    def makes_no_text(self, model: str) -> bool:
        """Return whether the server reports that a model makes no text; only quire and Ollama do, in Ollama's route."""
        root = Server(f"{self.parts.scheme}://{self.parts.netloc}/api", None, self.timeout, self.insecure)
        root.headers = self.headers
        try:
            with root.request("POST", "/show", {"model": model}) as response:
                return "completion" not in json.load(response).get("capabilities", ["completion"])
        except (ServerError, ValueError):
            return False

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Raises ServerError, also for an error event in the stream."""
        with self.request("POST", path, body | {"stream": True}) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise ServerError(error_message(line[5:]))
                yield chunk


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error body, else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
