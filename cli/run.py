"""Implements `quire run [MODEL] [PROMPT]`: one answer, or a chat, with the server that has the model or with a new one
that ends with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quire.checkpoints.library.names import same_model
from quire.cli.api_client import Server, ServerError
from quire.cli.chat import add_chat_flags, add_sampling_flags, add_tls_flag, converse, default_key, guarded
from quire.cli.conversation import HELP
from quire.cli.loading import Loading
from quire.cli.main import SECTIONS, Parser, add_config_flags, read_settings
from quire.cli.prompting import PromptParser, add_flags_without_effect, one_prompt, warn_without_effect
from quire.configs import platforms
from quire.configs.config import Config
from quire.configs.sources import Settings
from quire.server.startup.model_names import accepted_names, served_names

FIND_TIMEOUT = 2.0  # seconds for a server to list its models
POLL_SECONDS = 0.1
END_TIMEOUT = 15.0  # seconds for our server to end
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_PLACE = ("host", "port")  # settings of the server's address
_USELESS = ("uds", "address_file")


def main(argv: list[str]) -> int:
    """Run `quire run ARGV...`; returns 1 if the model cannot be served or a server refuses."""
    parser = PromptParser(
        prog="quire run",
        usage="quire run [MODEL] [PROMPT ...] [flags]",
        description="Answer PROMPT once, or chat without one: with the server that already serves the model, or "
        "with one that ends with the command. Text of a pipe or file on stdin goes before PROMPT; only the answer goes "
        f"to stdout. Takes the flags of `quire serve` (--help-all). In a chat: {HELP}.",
    )
    group = parser.add_argument_group("Chat")
    group.add_argument("--url", "--base-url", metavar="URL", help="chat with this server, and start none")
    add_chat_flags(group)
    add_tls_flag(group)
    add_sampling_flags(group)
    add_flags_without_effect(group)
    add_config_flags(parser, sections=[name for name in SECTIONS if name != "models"], everyday=False)
    arguments = parser.parse_args(argv)
    _end_on_signals()
    settings = read_settings(parser, arguments)
    _refuse_useless(parser, settings, arguments.url)
    return guarded(parser, lambda: _run(arguments, settings))


def _refuse_useless(parser: Parser, settings: Settings, url: str | None) -> None:
    """End with an error if a flag cannot have an effect on this command."""
    given = [name for name, source in settings.sources.items() if source == "command line"]
    if url is not None and (names := [name for name in _PLACE if name in given]):
        parser.error(f"the server is named twice, by --url and by --{names[0].replace('_', '-')}")
    for name in _USELESS:
        if name in given:
            parser.error(f"--{name.replace('_', '-')}: this command talks to its server by TCP: omit it, or use --port")
    if settings.config().server.ssl_cert_reqs == "required":
        parser.error("--ssl-cert-reqs required: this command has no certificate to show to its server")


def _end_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that our server ends.

    Python runs a handler between two instructions. A signal that comes just before input() waits would be seen after
    the next key only, so a thread sends it to the main thread again until the handler ran.
    """
    for number in _ENDING:
        signal.signal(number, _end)
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(wakeup, threading.get_ident()), name="signals", daemon=True).start()


def _end(number: int, frame: object) -> None:
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)  # the server is ended once
    sys.exit(128 + number)


def _insist(wakeup: int, main_thread: int) -> None:
    """Send each signal that `wakeup` reports to the main thread until `_end` ran."""
    while True:
        number = os.read(wakeup, 1)[0]
        while number in _ENDING and signal.getsignal(number) is _end:
            time.sleep(POLL_SECONDS)
            signal.pthread_kill(main_thread, number)


def _run(arguments: argparse.Namespace, settings: Settings) -> None:
    prompt, config = one_prompt(arguments), settings.config()
    key = config.server.api_key[0] if config.server.api_key else default_key()
    if arguments.url:
        server = Server(arguments.url, key, insecure=arguments.insecure)
        _print_unused_flags(settings)
        warn_without_effect(arguments, ends=False)
        converse(server, server.first_model(), arguments, prompt)
        return
    any_model = settings.source("model").startswith("default")
    if (found := find_server(config, key, any_model, arguments.insecure)) is not None:
        print(f"using the server at {found[0].url}", file=sys.stderr)
        _print_unused_flags(settings)
        warn_without_effect(arguments, ends=False)
        converse(*found, arguments, prompt)
        return
    warn_without_effect(arguments, ends=True)
    with _started(settings) as url:
        server = Server(url, key, insecure=True)  # our own
        converse(server, server.first_model(), arguments, prompt)


def _print_unused_flags(settings: Settings) -> None:
    """Print the flags that have no effect on a server that runs already."""
    used = {"model", "served_model_name", "api_key", *_PLACE}
    names = [name for name, source in settings.sources.items() if source == "command line" and name not in used]
    if names:
        flags = ", ".join("--" + name.replace("_", "-") for name in names)
        print(f"no effect on a server that runs already: {flags}", file=sys.stderr)


def find_server(config: Config, key: str | None, any_model: bool, insecure: bool) -> tuple[Server, str] | None:
    """Return the server at host and port of the settings and its name for the model, if one runs there and has the
    model. `any_model`: the user named no model.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.server.host, config.server.host)
    has_tls = config.server.ssl_certfile is not None
    insecure = insecure or has_tls
    for scheme in ("https",) if has_tls else ("http", "https"):
        server = Server(f"{scheme}://{host}:{config.server.port}/v1", key, FIND_TIMEOUT, insecure)
        try:
            with server.request("GET", "/models") as response:
                names = [model["id"] for model in json.load(response)["data"]]
        except (ServerError, ValueError, KeyError, TypeError):
            continue  # no server there, or one that refuses us: start our own
        wanted = {*served_names(config), *accepted_names(config)}
        wanted |= {same_model(name, names) for name in wanted}
        name = next((name for name in names if any_model or name in wanted), None)
        return None if name is None else (Server(server.url, key, insecure=insecure), name)
    return None


@contextlib.contextmanager
def _started(settings: Settings) -> Iterator[str]:
    """Start a server that ends with the block, and yield its URL. It listens at the host and port of the settings, else
    on a free port. Raises ServerError if it cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-run-") as folder, tempfile.TemporaryFile() as log:
        address_file, file = Path(folder, "address"), Path(folder, "settings.yaml")
        if settings.values.get("uds"):
            where = settings.source("uds")
            print(f"uds ({where}) is not used: this command talks to its server by TCP", file=sys.stderr)
        values: dict[str, Any] = {"uds": None, "address_file": str(address_file)}
        free = {"host": "127.0.0.1", "port": 0}
        values |= {name: value for name, value in free.items() if name not in settings.sources}
        file.touch(mode=0o600)  # it may have keys
        file.write_text(json.dumps(settings.values | values))
        command = [sys.executable, "-m", "quire", "serve", "--config", str(file)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        if "QUIRE_CACHE" in os.environ:
            environment["QUIRE_CACHE"] = os.environ["QUIRE_CACHE"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C stops the answer, not the server
            preexec_fn=_end_with_parent,
        )
        try:
            address = _wait_ready(process, address_file, log)
            yield f"{'' if '://' in address else 'http://'}{address}/v1"
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _end_with_parent() -> None:
    """Have the kernel send the child SIGTERM when `quire run` is killed."""
    platforms.signal_at_parents_end(signal.SIGTERM)


def _wait_ready(process: subprocess.Popen, address_file: Path, log: IO[bytes]) -> str:
    """Return the server's address, HOST:PORT or https://HOST:PORT, once it is ready; shows its progress. Raises
    ServerError if it ends.
    """
    with Loading() as loading:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if address_file.exists() and loading.is_ready(address := address_file.read_text().strip()):
                return address
    raise ServerError(_reason(log) or f"the server ended with status {process.returncode}")


def _reason(log: IO[bytes]) -> str:
    """Return the errors in the log of a server that ended, without time and process."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(line.partition(" ERROR ")[2].partition(": ")[2] for line in lines if " ERROR " in line)
