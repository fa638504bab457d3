"""Adds the pages that are made at build time, as mkdocs' hooks. `QUIRE_DOCS_SERVER=URL` uses a running server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))  # mkdocs imports this file by its path

from tools.site import endpoints, flags, messages, model_files, other_flags, sources  # noqa: E402

START_TIMEOUT = 600.0  # seconds; the first start may compile kernels


def on_files(files: Any, config: Any) -> Any:
    """Add the pages. Imports mkdocs late: the generators work without it."""
    from mkdocs.structure.files import File, InclusionLevel

    with _server() as url:
        examples = endpoints.page(endpoints.ask_all(url))
    for name, text in (
        ("examples.md", examples),
        ("all-messages.md", messages.page(messages.messages())),
        ("all-flags.md", flags.page()),
        ("other-flags.md", other_flags.page()),
        ("model-files.md", model_files.page()),
    ):
        files.append(File.generated(config, name, content=text))
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for name, text in sources.sources(texts).items():
        files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **other: Any) -> str:
    """Let links to files outside docs/ lead to their pages."""
    name = page.file.src_uri
    return markdown if name.startswith(f"{sources.FOLDER}/") else sources.rewrite(f"docs/{name}", markdown)


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Run a server of the embedded model during the block; yields its URL."""
    if url := os.environ.get("QUIRE_DOCS_SERVER"):
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="quire-docs-") as folder:
        address, log = Path(folder, "address"), Path(folder, "log")
        variables = os.environ | {"QUIRE_ADDRESS_FILE": str(address), "QUIRE_DEVICE": "cpu"}
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--pooling", "mean"]
        command += ["--batch-dir", str(Path(folder, "batches"))]
        with log.open("wb") as output:
            server = subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=ROOT)
        try:
            yield f"http://{_wait_ready(server, address, log)}"
        finally:
            server.terminate()
            server.wait(60)


def _wait_ready(server: subprocess.Popen, address: Path, log: Path) -> str:
    probe = [sys.executable, "-I", "-S", str(ROOT / "cli" / "health.py")]
    variables = os.environ | {"QUIRE_ADDRESS_FILE": str(address)}
    deadline = time.monotonic() + START_TIMEOUT
    while subprocess.run(probe, env=variables, capture_output=True, check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server of the examples did not start:\n{log.read_text()}")
        time.sleep(0.5)
    return address.read_text().strip()
