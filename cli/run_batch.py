"""Implements `quire run-batch -i in.jsonl -o out.jsonl`, which answers the requests of a file as /v1/batches does.

State is kept in a folder next to the output until the output is complete: after an interruption, kill -9 included, the
same command goes on with the requests that have no answer yet.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.cli.bench.process import ServerProcess, free_port
from quire.cli.loading import Loading
from quire.cli.main import Parser
from quire.server.batches.lines import read_lines
from quire.server.batches.store import OPEN, Batch, Store
from quire.server.startup.bar import Bar

WINDOW = 10 * 365 * 86400  # seconds
MAX_BYTES = 1 << 50
POLL_SECONDS = 0.2


class _Key(msgspec.Struct):
    custom_id: str
    url: str = ""


class Failure(Exception):
    """Raised when the run cannot continue. The message says why."""


def main(argv: list[str]) -> int:
    """Run `quire run-batch ARGV...`."""
    parser = Parser(
        prog="quire run-batch",
        usage="quire run-batch -i IN.jsonl -o OUT.jsonl [MODEL] [flags of quire serve]",
        description="Answer the requests of a file in the format of OpenAI's batches: one line for each, "
        "{custom_id, method, url, body}. The same command continues an interrupted run.",
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", type=Path, help="requests, one per line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", type=Path, help="answers, one per line")
    parser.add_argument(
        "--batch-dir", metavar="DIR", type=Path, help="folder for the state (default: the output's name with .batch)"
    )
    arguments, serve_arguments = parser.parse_known_args(argv)
    folder = arguments.batch_dir or arguments.output_file.with_name(arguments.output_file.name + ".batch")
    try:
        arguments.output_file.parent.mkdir(parents=True, exist_ok=True)
        store = Store(folder, MAX_BYTES)
        batches = _batches(store, arguments)
        _answer_all(store, batches, folder, serve_arguments)
        num_failed = _write(store, batches, arguments)
    except (Failure, OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted; the same command goes on from here\n")
    store.close()
    if arguments.batch_dir is None:
        shutil.rmtree(folder)
    print(f"{sum(batch.total for batch in batches)} requests, {num_failed} failed: {arguments.output_file}")
    return 0


def _batches(store: Store, arguments: argparse.Namespace) -> list[Batch]:
    """Return one batch per endpoint: those of an earlier run over the same input, or new ones."""
    with open(arguments.input_file, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    earlier = [
        batch for batch in store.batches(digest, None, 100) if batch.status in OPEN or batch.status == "completed"
    ]
    if earlier:
        return earlier
    parts: dict[str, io.BytesIO] = {}
    for key, text in _keys(arguments.input_file):
        parts.setdefault(key.url, io.BytesIO()).write(text.rstrip(b"\n") + b"\n")
    if not parts:
        raise Failure(f"{arguments.input_file} has no requests")
    batches = []
    for url, content in parts.items():
        file = store.add_file(content, digest, "batch", arguments.input_file.name, None)
        _, errors = read_lines(store.path(file.id), url)
        if errors:
            raise Failure(f"{arguments.input_file}: {errors[0]['message']} (request {errors[0]['line']} to {url})")
        batches.append(store.add_batch(digest, None, url, file.id, "", WINDOW, None))
    return batches


def _keys(path: Path) -> Iterator[tuple[_Key, bytes]]:
    """Yield the requests of a file, in order."""
    decode = msgspec.json.Decoder(_Key).decode
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                try:
                    yield decode(text), text
                except (msgspec.DecodeError, UnicodeError) as error:
                    raise Failure(f"{path}, line {number}: {error}") from None


def _answer_all(store: Store, batches: list[Batch], folder: Path, serve_arguments: list[str]) -> None:
    """Run a server over the state until every batch has ended."""
    if not any(batch.status in OPEN for batch in batches):
        return
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", *serve_arguments, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--batch-dir", str(folder), "--batch-disk", str(MAX_BYTES)]
    with ServerProcess(command, port) as server:
        with Loading() as loading:
            while not loading.is_ready(f"127.0.0.1:{port}") and not any(_num_done(batch) for batch in batches):
                _pause(server)
                batches[:] = [store.batch(batch.id) for batch in batches]  # with TLS there is no /health for us
        with Bar(desc="requests", unit="request") as bar:
            while any(batch.status in OPEN for batch in batches):
                _pause(server)
                batches[:] = [store.batch(batch.id) for batch in batches]
                bar.total = sum(batch.total for batch in batches)
                bar.update(sum(map(_num_done, batches)) - bar.n)
    if failed := [batch for batch in batches if batch.status != "completed"]:
        raise Failure(f"{failed[0].id} is {failed[0].status}: {(failed[0].errors or b'').decode()}")


def _num_done(batch: Batch) -> int:
    return batch.completed + batch.failed


def _pause(server: ServerProcess) -> None:
    """Wait a little. Raises Failure if the server has ended."""
    time.sleep(POLL_SECONDS)
    if server.process.poll() is not None:
        raise Failure(f"the server ended with status {server.process.returncode}:\n{server.log_tail()}")


def _write(store: Store, batches: list[Batch], arguments: argparse.Namespace) -> int:
    """Write the answers in the order of the input; returns the number of failed requests."""
    places: dict[tuple[str, str], tuple[Path, int, int]] = {}
    for batch in batches:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                start = 0
                for key, text in _keys(store.path(file_id)):
                    places[batch.endpoint, key.custom_id] = store.path(file_id), start, len(text)
                    start += len(text)
    partial = arguments.output_file.with_name(arguments.output_file.name + ".partial")
    with open(partial, "wb") as out:
        for key, _ in _keys(arguments.input_file):
            path, start, length = places[key.url, key.custom_id]
            with open(path, "rb") as file:
                file.seek(start)
                out.write(file.read(length))
    partial.replace(arguments.output_file)
    return sum(batch.failed for batch in batches)
