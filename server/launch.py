"""`quire serve`: the composition root. Opens the port, starts the engine, loads the tokenizer, serves, and ends in
order.

The port and the engine come first, before the imports that take time: clients can read `/live` while everything else
is loading.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.configs.config import Config
from quire.configs.options import removed_settings
from quire.configs.serving import ServerConfig
from quire.configs.sources import embedded_model
from quire.engine.messages import EngineStats, Ready
from quire.server.engines.spare import SpareEngine
from quire.server.engines.supervisor import EngineFailed
from quire.server.frontends.background_log import configure_logging
from quire.server.frontends.descriptors import BACKLOG, raise_descriptor_limit
from quire.server.frontends.handle import FrontendHandle
from quire.server.heap import fix_mmap_threshold, settle
from quire.server.startup import address_file, running_servers
from quire.server.startup.checks import check_server_files
from quire.server.startup.engine_group import EngineGroup
from quire.server.startup.entry_settings import with_entry
from quire.server.startup.hints import curl_line
from quire.server.startup.model_names import served_names
from quire.server.startup.node import run_node
from quire.server.startup.progress import StartProgress

if TYPE_CHECKING:
    from quire.server.metrics.stats_log import StatsLog

logger = logging.getLogger("quire")
REPEAT_SECONDS = 2.0  # within which a repeated SIGTERM belongs to the first
_FIRST_OF_SYSTEMD = 3  # descriptor


def serve(
    config: Config,
    sources: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
    launcher: type[Launcher] | None = None,
    spare: SpareEngine | None = None,
) -> int:
    """Serve until a signal ends it; returns the exit code.

    `sources` says where each setting that is no default came from, and `warnings` which flags have no effect.
    `spare` may be the first engine's process; it is closed before a process ends that its caller cannot clean up.
    """
    started = time.monotonic() - _seconds_since_exec()
    try:
        configure_logging(config.server)
    except ValueError as error:
        logger.error("%s", error)
        return 1
    if config.server.headless:
        return _serve_node(config)
    fix_mmap_threshold()
    raise_descriptor_limit()
    try:
        listener = bind(config.server)
    except OSError as error:
        logger.error(
            "cannot listen on %s: %s",
            config.server.uds or f"{config.server.host}:{config.server.port}",
            error.strerror or error,
        )
        return 1
    if config.server.address_file:
        scheme = "https://" if config.server.ssl_certfile else ""
        _announce_address(config.server.address_file, listener, scheme)
    running_servers.record(config, listener)
    if sources:
        logger.info("settings: %s", ", ".join(f"{name} ({source})" for name, source in sources.items()))
    for warning in (*warnings, *removed_settings(config)):
        logger.warning("%s", warning)
    try:
        return asyncio.run(_run(launcher or Launcher, config, listener, started, spare))
    except ValueError as error:
        logger.error("%s", error)
        return 1
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        logger.error("cannot start: the system has no room for another thread (ulimit -u, ulimit -v, pids.max)")
        return 1
    finally:
        _close(config.server, listener)


def _serve_node(config: Config) -> int:
    try:
        config.parallel.check_nodes(headless=True)
        return run_node(config)
    except ValueError as error:
        logger.error("%s", error)
        return 1


def _close(config: ServerConfig, listener: socket.socket) -> None:
    listener.close()
    running_servers.forget()
    if config.address_file:
        address_file.remove_address(config.address_file)
    if config.uds:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def _announce_address(path: str, listener: socket.socket, scheme: str) -> None:
    """Write the file. Failures are only logged: the server is usable without it."""
    try:
        address_file.write_address(path, listener, scheme)
    except OSError as error:
        logger.warning(
            "--address-file: cannot write %s: %s; `quire health` will use QUIRE_UDS, QUIRE_HOST and QUIRE_PORT",
            path,
            error.strerror or error,
        )


async def _run(
    make: type[Launcher], config: Config, listener: socket.socket, started: float, spare: SpareEngine | None
) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal that comes while engines start waits for the launcher
        asyncio.get_running_loop().add_signal_handler(number, lambda number=number: launcher.on_signal(number))
    launcher = make(config, listener, started, spare)
    code = await launcher.run()
    if not launcher.announced:  # threads that download or import cannot be stopped, and Python would wait for them
        launcher.spare.close()
        _close(config.server, listener)
        logging.shutdown()
        os._exit(code)
    return code


def bind(config: ServerConfig) -> socket.socket:
    """Return a listening socket: connections wait in its backlog until the server accepts. Raises OSError."""
    if (given := _socket_of_systemd()) is not None:
        return given
    if config.uds:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _remove_stale_socket(config.uds)
        listener.bind(config.uds)
    else:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _socket_of_systemd() -> socket.socket | None:
    """Return the socket of a systemd socket unit, which stays open while the service restarts. Its variables are
    removed, so that no process that we start takes it for its own. Raises OSError for several sockets.
    """
    if os.environ.pop("LISTEN_PID", None) != str(os.getpid()):
        return None
    os.environ.pop("LISTEN_FDNAMES", None)
    if (count := int(os.environ.pop("LISTEN_FDS", "0"))) != 1:
        raise OSError(0, f"systemd gave {count} sockets, and the server listens on one")
    listener = socket.socket(fileno=_FIRST_OF_SYSTEMD)
    listener.set_inheritable(False)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _remove_stale_socket(path: str) -> None:
    """Delete the socket of a server that was killed. If a server still listens on it, `bind` fails."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) != 0:
            os.unlink(path)


class Launcher:
    """Runs the server: starts the engines and the frontend, and shuts both down.

    `frontend` serves clients, in this process or in several others.
    """

    def __init__(self, config: Config, listener: socket.socket, started: float, spare: SpareEngine | None = None):
        """Raise ValueError for files that cannot be used, or a folder that holds no model, OSError when the port
        cannot be shared.
        """
        self.config, self.listener, self.started, self.spare = config, listener, started, spare or SpareEngine()
        self.stats_logs: list[StatsLog] = []  # one per engine, once clients are served
        self.announced = False
        self.bar = StartProgress()
        self.stop = asyncio.Event()
        self._interrupted, self._signalled = False, 0.0  # whether SIGINT came, and when the first signal did
        check_server_files(config.server)
        config.parallel.check_nodes(headless=False)
        if config.parallel.has_own_balancer:
            self.config = replace(config, parallel=config.parallel.on_this_machine())
        self._begin()

    def _begin(self) -> None:
        """Start the engines if their models are on this machine, and make the frontend."""
        self.config = with_entry(self.config)
        self.engines = EngineGroup(self.config, self.spare.take)
        self.engines.start_if_local()
        self.frontend = self._make_frontend()

    def _make_frontend(self) -> FrontendHandle:
        if self.config.server.api_server_count == 1:
            from quire.server.frontends.frontend import Frontend

            return Frontend(self.config, self.listener, self._on_open)
        from quire.server.frontends.parent import FrontendGroup

        return FrontendGroup(self.config, self.listener, self._on_open)

    async def run(self) -> int:
        """Serve until stopped; the exit code."""
        serving = asyncio.create_task(self.frontend.serve())
        running = asyncio.create_task(self._run_engines())
        stopping = asyncio.create_task(self.stop.wait())
        await asyncio.wait({serving, running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() and not self.announced:
            # processes and threads that load or import do not notice requests to end, and have no clients
            self.engines.kill()
            self.frontend.kill()
            logger.info("shutdown complete")
            return 0
        if stopping.done():
            code = await self._drain()
        else:
            code = await self._fail((running if running.done() else serving).exception())
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        await self.engines.terminate()
        await self.frontend.end()
        await asyncio.gather(serving, return_exceptions=True)
        if code == 0:
            logger.info("shutdown complete")
        return code

    # ---- start

    async def _run_engines(self) -> None:
        """Run the engines until ValueError or EngineFailed is raised."""
        try:
            await self.engines.run(self.frontend, self._on_ready, self._on_stats, self._progress)
        finally:
            self.bar.close()

    def _progress(self, phase: str, fraction: float) -> None:
        self.frontend.progress(phase, fraction)
        self.bar.update(phase, fraction)

    def _on_ready(self, again: bool) -> None:
        """Called when an engine becomes ready, for the first time or `again` after a restart."""
        self.frontend.open()
        if again:
            logger.info("the engine is ready again")

    def _on_open(self, ready: Ready) -> None:
        """Called when requests are served for the first time."""
        from quire.server.startup.plan_table import plan_table

        self.bar.close()
        logger.info("%s", plan_table(ready.worker))
        for warning in ready.worker.warnings:
            logger.warning("%s", warning)
        self._start_logging(ready.worker.plan.device)
        self._announce(ready)

    def _start_logging(self, device: str) -> None:
        """Log the throughput lines of each engine."""
        from quire.server.metrics.stats_log import StatsLog

        self.stats_logs = [
            StatsLog(self.config.server.log_stats_interval, device, engine.index) for engine in self.engines.processes
        ]
        self.logging = [asyncio.create_task(log.run()) for log in self.stats_logs]

    def _announce(self, ready: Ready) -> None:
        curl, base = self._say_ready(", ".join(served_names(self.config)))
        with_key = bool(self.config.server.api_key or self.config.server.api_key_file)
        hears = ready.worker.media is not None and ready.worker.media.audio
        logger.info("try: %s", curl_line(curl, base, ready.worker.pooling, self.frontend.chats, with_key, hears))
        if self.engines.folder == embedded_model():
            logger.info(
                "this is the small model included with quire, for trials; to serve another model: quire "
                "serve Qwen/Qwen3-0.6B (a Hub id, a folder or a GGUF file)"
            )

    def _say_ready(self, models: str) -> tuple[str, str]:
        """Log that the server is ready. Returns the command and the address by which curl reaches it."""
        self.announced = True
        settle()
        scheme = "https" if self.config.server.ssl_certfile else "http"
        name = self.listener.getsockname()
        where = name if isinstance(name, str) else "{}://{}:{}".format(scheme, *name[:2])
        curl, base = ("curl", where) if "://" in where else ("curl --unix-socket " + where, "http://localhost")
        logger.info(
            "ready in %.1f s: %s serves %s (API at %s/v1, documentation at %s/docs%s)",
            time.monotonic() - self.started,
            where,
            models,
            base,
            base,
            f", a page to chat at {base}/" if self.config.server.ui else "",
        )
        return curl, base

    # ---- life

    def _on_stats(self, engine: int, stats: EngineStats) -> None:
        self.frontend.observe_stats(engine, stats)
        if self.stats_logs:
            self.stats_logs[engine].observe(stats)

    # ---- end

    def on_signal(self, number: int) -> None:
        """Drain on the first signal; exit immediately on the second SIGINT, or on any signal REPEAT_SECONDS after the
        first. Supervisors send SIGTERM more than once in a moment, to a group of processes and to one of them.
        """
        name, twice = signal.Signals(number).name, number == signal.SIGINT and self._interrupted
        self._interrupted |= number == signal.SIGINT
        if self.stop.is_set():
            if not twice and time.monotonic() - self._signalled < REPEAT_SECONDS:
                logger.info("%s again within %g s: draining goes on", name, REPEAT_SECONDS)
                return
            logger.warning("%s again: exiting immediately", name)
            self.engines.kill()
            self.frontend.kill()
            self.spare.close()
            logging.shutdown()
            os._exit(128 + number)
        self._signalled = time.monotonic()
        self.frontend.refuse()
        self.stop.set()
        if not self.announced:
            self.bar.close()  # or the line would follow the bar
            logger.info("%s: stopping before the model is loaded", name)
            return
        logger.info(
            "%s: draining: %d requests in flight have %g s to finish; %s exits immediately",
            name,
            self.frontend.num_in_flight,
            self.config.server.shutdown_timeout,
            "Ctrl-C again" if number == signal.SIGINT else f"SIGTERM again after {REPEAT_SECONDS:g} s",
        )

    async def _drain(self) -> int:
        await self.frontend.drain()
        return 0

    async def _fail(self, error: BaseException | None) -> int:
        """Shut down: the engine keeps dying or the model cannot be loaded."""
        reason = str(error) or type(error).__name__
        logger.error(
            "cannot %s: %s",
            "continue" if self.announced else "start",
            reason,
            exc_info=None if isinstance(error, (ValueError, OSError, EngineFailed)) else error,
        )
        await self.frontend.fail(reason)
        return 1


def _seconds_since_exec() -> float:
    """Return the age of this process, Python's own start included; 0 on systems without /proc."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, AttributeError):
        return 0.0
