"""Fakes a Hugging Face Hub: serves the files of folders, by ranges, and counts the bytes of each."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `repositories`, a map from ids ("org/name") to folders; `refused` maps ids to (status, error code).
    `cut` are names of files whose first download ends in its middle, `checksums` their SHA-256, as of large files.
    The second half of a file of `held` waits for its event.
    """

    def __init__(
        self, repositories: dict[str, str], ranges: bool = True, refused: dict[str, tuple[int, str]] | None = None
    ):
        self.repositories, self.ranges, self.refused = repositories, ranges, refused or {}
        self.cut: set[str] = set()
        self.held: dict[str, threading.Event] = {}
        self.checksums: dict[str, str] = {}
        self.sent: Counter[str] = Counter()  # bytes of each file
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def environment(self, cache: Path) -> dict[str, str]:
        """Return variables that make huggingface_hub talk to this server."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def lfs(self, name: str, path: Path) -> dict[str, dict]:
        """Return the Hub's facts about a large file."""
        if name not in self.checksums:
            return {}
        return {"lfs": {"oid": self.checksums[name], "size": path.stat().st_size, "pointerSize": 134}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = re.sub("^http://[^/]+", "", self.path).partition("?")[0]  # a proxy is asked for the whole URL
                for repository, (status, code) in hub.refused.items():
                    if path.startswith((f"/api/models/{repository}", f"/{repository}/")):
                        return self.send_whole(status, b"", {"X-Error-Code": code} if code else None)
                if match := re.fullmatch(r"/api/models/([\w-]+/[\w.-]+)(/revision/\w+)?(/tree/\w+)?", path):
                    return self.information(match[1], bool(match[3]))
                match = re.fullmatch(r"/([\w-]+/[\w.-]+)/resolve/\w+/(.+)", path)
                folder = hub.repositories.get(match[1]) if match else None
                if folder is None or not Path(folder, match[2]).is_file():
                    return self.send_whole(404, b"", {"X-Error-Code": "EntryNotFound"})
                self.file(match[2], Path(folder, match[2]).read_bytes(), body)

            def information(self, repository: str, tree: bool) -> None:
                if repository not in hub.repositories:
                    return self.send_whole(404, b"", {"X-Error-Code": "RepoNotFound"})
                folder = Path(hub.repositories[repository])
                paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                names = [path.relative_to(folder).as_posix() for path in paths]
                if tree:
                    found = [
                        {"type": "file", "path": name, "size": path.stat().st_size, "oid": COMMIT} | hub.lfs(name, path)
                        for name, path in zip(names, paths)
                    ]
                    return self.send_whole(200, json.dumps(found).encode())
                siblings = [{"rfilename": name} for name in names]
                info = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "tags": []}
                self.send_whole(200, json.dumps(info).encode())

            def file(self, name: str, data: bytes, body: bool) -> None:
                etag = hub.checksums.get(name) or hashlib.sha1(data).hexdigest()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                status, part = 200, data
                if wanted and hub.ranges:
                    start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
                    status, part = 206, data[start : end + 1]
                    headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
                cut = body and name in hub.cut
                hub.cut.discard(name if cut else "")
                if body:
                    hub.sent[name] += len(part) // 2 if cut else len(part)
                self.send_whole(status, part, headers, body, cut, hub.held.get(name))

            def send_whole(
                self,
                status: int,
                data: bytes,
                headers: dict | None = None,
                body: bool = True,
                cut: bool = False,
                held: threading.Event | None = None,
            ) -> None:
                self.send_response(status)
                for key, value in (headers or {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.close_connection = self.close_connection or cut
                try:
                    if body:
                        self.wfile.write(data[: len(data) // 2])
                    if body and held is not None:
                        held.wait(60)
                    if body and not cut:
                        self.wfile.write(data[len(data) // 2 :])
                except OSError:  # the client was killed
                    self.close_connection = True

        return Handler
