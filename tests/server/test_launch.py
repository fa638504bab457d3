"""Tests the server as a process: startup time, shutdown, and recovery.

The engine has the fake executor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.running import poll
from tests.server.api.test_chat import HELLO, events

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SCRIPT = """
import json, sys
from quire.configs.config import Config
from quire.server.launch import serve
code = serve(Config.from_flat(**json.loads(sys.argv[1])), {"port": "flag"})
assert not {"torch", "transformers", "quire.worker.worker"} & set(sys.modules)
sys.exit(code)
"""


class ServerProcess:
    def __init__(
        self,
        folder: str,
        tmp_path: Path,
        fake: str = "",
        script: str = SCRIPT,
        temporary: Path | None = None,
        **settings,
    ):
        self.port = free_port()
        settings = {
            "model": folder,
            "port": self.port,
            "distributed_executor_backend": BACKEND,
            "max_model_len": "512",
            "served_model_name": ["m"],
            "log_stats_interval": 0.0,
            "shutdown_timeout": 5.0,
            **settings,
        }
        self.log_path = tmp_path / f"log-{self.port}"
        self.started = time.monotonic()
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, json.dumps(settings)],
                stderr=log,
                stdout=log,
                env=os.environ | {"FAKE_EXECUTOR": fake, "TMPDIR": str(temporary or tmp_path)},
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20.0, trust_env=False, verify=False)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def status(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.HTTPError:
            return None

    def wait_ready(self) -> ServerProcess:
        """Wait until all frontends serve, because the frontend that answers may be the first one ready."""
        poll(lambda: ("ready in " in self.log and self.status("/ready") == 200) or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log
        return self

    def children(self, is_wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """The running child processes. Any may end during the scan."""

        def there(child: psutil.Process) -> bool:
            try:
                return child.status() != psutil.STATUS_ZOMBIE and is_wanted(child)
            except psutil.NoSuchProcess:
                return False

        return [child for child in psutil.Process(self.process.pid).children() if there(child)]

    def engines(self) -> list[psutil.Process]:
        return self.children(lambda child: "quire.engine.core" in child.cmdline())

    def engine(self) -> psutil.Process:
        return self.engines()[0]

    def stream(self, num_tokens: int = 400, **fields) -> httpx.Response:
        body = {"messages": HELLO, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": 1} | fields
        client = httpx.Client(timeout=20.0, trust_env=False, verify=False)
        return client.send(client.build_request("POST", f"http://127.0.0.1:{self.port}{CHAT}", json=body), stream=True)

    def wait(self, timeout: float = 15) -> int:
        return self.process.wait(timeout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server_process(*args, **settings) -> Iterator[ServerProcess]:
    server = ServerProcess(*args, **settings)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def test_the_engine_does_not_wait_for_the_imports_of_the_frontend():
    code = "import sys, quire.server.launch; sys.exit('quire.server.frontends.frontend' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_answers_before_it_has_loaded_and_ends_in_order(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="load_delay=2") as server:
        poll(lambda: server.status("/live") == 200, 10)
        first_answer = time.monotonic() - server.started
        assert server.status("/ready") == 503 and server.http.get("/ready").json()["status"] == "loading"
        server.wait_ready()
        engine = server.engine()
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
        assert answer.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and gone(engine)
        assert first_answer < 20  # 1 on an idle machine; this machine may be busy
        log = server.log
    for text in (
        "loading weights",
        "fits 16,368 tokens",
        "ready in ",
        "a page to chat at http://127.0.0.1",
        "try: curl http://127.0.0.1",
        '"POST /v1/chat/completions" 200',
        "settings: port (flag)",
        "SIGTERM",
    ):
        assert text in log
    assert "/live" not in log and "Traceback" not in log and "ready again" not in log
    assert not list(tmp_path.glob("quire-*"))


def test_requests_finish_after_a_signal(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="step_delay=0.02") as server:
        server.wait_ready()
        stream = server.stream(num_tokens=40)
        server.process.send_signal(signal.SIGINT)
        poll(lambda: server.status("/ready") == 503)
        assert server.http.post(CHAT, json={"messages": HELLO}).status_code == 503
        stream.read()
        assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_to_all_processes_loses_no_stream(model_folder, tmp_path, count):
    """Signals as systemd's KillMode=control-group does. A new engine would load too slowly for the requests."""
    with server_process(
        model_folder, tmp_path, fake="load_delay=3,step_delay=0.02", shutdown_timeout=3.0, api_server_count=count
    ) as server:
        server.wait_ready()
        streams = [server.stream(num_tokens=30) for _ in range(8)]
        for process in [
            psutil.Process(server.process.pid),
            *psutil.Process(server.process.pid).children(recursive=True),
        ]:
            process.terminate()
        for stream in streams:
            stream.read()
            assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "died" not in server.log and "disconnected" not in server.log and "Traceback" not in server.log


def test_sigterm_twice_in_a_moment_loses_no_stream(model_folder, tmp_path):
    """As supervisors send it: to the group, and to the main process."""
    with server_process(model_folder, tmp_path, fake="step_delay=0.05", shutdown_timeout=30.0) as server:
        server.wait_ready()
        stream = server.stream(num_tokens=30)
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: "SIGTERM: draining" in server.log)
        server.process.send_signal(signal.SIGTERM)
        poll(lambda: "SIGTERM again within 2 s: draining goes on" in server.log)
        stream.read()
        assert events(stream)[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_a_second_ctrl_c_ends_at_once(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="step_delay=0.1", shutdown_timeout=30.0) as server:
        server.wait_ready()
        engine = server.engine()
        server.stream()
        server.process.send_signal(signal.SIGINT)
        poll(lambda: server.status("/ready") == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.wait(3) == 128 + signal.SIGINT
        poll(lambda: gone(engine), 3)


@pytest.mark.parametrize("frontends", [1, 2])
def test_a_signal_while_loading_ends_at_once(model_folder, tmp_path, frontends):
    with server_process(model_folder, tmp_path, fake="load_delay=60", api_server_count=frontends) as server:
        poll(lambda: server.status("/ready") == 503)
        engine = server.engine()
        server.process.send_signal(signal.SIGINT)
        assert server.wait(3) == 0
        poll(lambda: gone(engine), 3)
        log = server.log
        assert "SIGINT: stopping before the model is loaded" in log and "draining" not in log
        assert log.rstrip().endswith("shutdown complete") and "Traceback" not in log and "ERROR" not in log


def test_clients_that_do_not_read_are_not_waited_for_twice(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, shutdown_timeout=2.0) as server:
        server.wait_ready()
        body = json.dumps(
            {
                "messages": HELLO,
                "n": 16,
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": True,
                "logprobs": True,
                "top_logprobs": 20,
            }
        ).encode()
        readers = [socket.socket() for _ in range(2)]
        for reader in readers:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(
                (
                    f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                    f"{len(body)}\r\n\r\n"
                ).encode()
                + body
            )
        time.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.wait(30) == 0
        assert (
            "did not finish in time" in server.log and "Traceback" not in server.log and time.monotonic() - started < 15
        )


def test_a_signal_while_loading(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="load_delay=20") as server:
        poll(lambda: server.status("/live") == 200)
        poll(lambda: "loading weights" in server.http.get("/ready").text)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_killed_server_leaves_no_engine(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="step_delay=0.05") as server:
        engine = server.wait_ready().engine()
        assert engine.name() == "quire-engine" and list(tmp_path.glob("quire-*"))
        server.stream()
        server.process.kill()
        poll(lambda: gone(engine), 5)
        assert not list(tmp_path.glob("quire-*"))


# ---- the engine dies


def test_streams_go_on_behind_a_new_engine(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="step_delay=0.02") as server:
        server.wait_ready()
        whole = server.http.post(
            CHAT, json={"messages": HELLO, "max_tokens": 80, "ignore_eos": True, "seed": 1}
        ).json()["choices"][0]["message"]["content"]
        stream = server.stream(num_tokens=80)
        lines = stream.iter_lines()
        received = [next(lines) for _ in range(20)]
        first = server.engine()
        first.kill()
        poll(lambda: server.status("/ready") == 503)
        received += list(lines)
        chunks = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
        assert received[-2] == "data: [DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_ready()
        assert server.engine().pid != first.pid and "engine 0 died" in server.log


def test_an_engine_that_keeps_dying_ends_the_server(model_folder, tmp_path):
    with server_process(model_folder, tmp_path) as server:
        for _ in range(3):
            server.wait_ready().engine().kill()
            poll(lambda: server.status("/ready") != 200)
        assert server.wait() == 1
        assert "cannot continue" in server.log and "3 times" in server.log


NO_ROOM = """
import errno, subprocess
# the first engine starts, the second only at the third attempt
popen, failures = subprocess.Popen, [False, True, True, False]

def fail_at_times(*args, **kwargs):
    if failures and failures.pop(0):
        raise OSError(errno.EMFILE, "Too many open files")
    return popen(*args, **kwargs)

subprocess.Popen = fail_at_times
from quire.server.engines import supervisor
supervisor.START_RETRY = 0.3
"""


def test_a_start_for_which_the_system_has_no_room_is_tried_again(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="step_delay=0.02", script=NO_ROOM + SCRIPT) as server:
        server.wait_ready()
        stream = server.stream(num_tokens=100)
        server.engine().kill()
        assert "[DONE]" in stream.read().decode()
        assert server.log.count("engine 0 cannot be started (Too many open files); retrying") == 2
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and not list(tmp_path.glob("quire-*"))


def test_a_first_start_for_which_the_system_has_no_room(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, script=NO_ROOM.replace("[False", "[True") + SCRIPT) as server:
        assert (
            server.wait() == 1
            and "engine 0 cannot be started: Too many open files" in server.log
            and "Traceback" not in server.log
        )
        assert not list(tmp_path.glob("quire-*"))


def test_an_engine_that_cannot_start_gives_its_reason(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="nonsense=1") as server:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(server.wait(20)))
        thread.start()
        thread.join()
        assert (
            answers == [1]
            and "cannot start: FAKE_EXECUTOR: unknown option nonsense" in server.log
            and "ready in" not in server.log
        )


def test_a_tokenizer_that_cannot_be_loaded(model_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with server_process(model_folder, tmp_path, tokenizer=str(tmp_path)) as server:
        assert server.wait(20) == 1 and "cannot start: " in server.log and "tokenizer" in server.log


@pytest.mark.parametrize(
    "settings,reason",
    [
        ({"model": "./nowhere"}, "there is no folder ./nowhere"),
        ({"model": "org/none"}, "not in the Hugging Face cache"),
        ({"generation_config": "/nowhere"}, "generation_config"),
        ({"chat_template": "{% if"}, "chat template"),
    ],
)
def test_settings_that_name_nothing(model_folder, tmp_path, settings, reason):
    with server_process(settings.pop("model", model_folder), tmp_path, **settings) as server:
        assert server.wait(20) == 1 and reason in server.log and "Traceback" not in server.log


# ---- an engine that stalls


@pytest.mark.parametrize("count", [1, 2])
def test_health_tells_that_no_step_ends(model_folder, tmp_path, count):
    """Only while requests wait; with several frontends, at each of them."""
    with server_process(
        model_folder, tmp_path, fake="step_delay=0.05", health_stall_timeout=0.5, api_server_count=count
    ) as server:
        engine = server.wait_ready().engine()

        def answers() -> list[httpx.Response]:
            return [
                server.http.get(path, headers={"Connection": "close"})  # each of a frontend of its own
                for path in ("/health", "/ready")
                for _ in range(4 * count)
            ]

        engine.suspend()
        time.sleep(0.8)
        assert all(answer.status_code == 200 for answer in answers())
        stream = server.stream(num_tokens=20)
        poll(lambda: all(answer.status_code == 503 for answer in answers()), 5)
        assert answers()[0].json()["status"] == "stalled" and "no step has ended for" in answers()[0].json()["reason"]
        assert server.status("/live") == 200
        engine.resume()
        poll(lambda: all(answer.status_code == 200 for answer in answers()), 5)
        assert "[DONE]" in stream.read().decode()


def test_health_during_a_long_prefill(model_folder, tmp_path):
    with server_process(
        model_folder, tmp_path, fake="step_delay=0.4", health_stall_timeout=1.0, max_num_batched_tokens=64
    ) as server:
        server.wait_ready()
        answers, end = [], threading.Event()

        def watch() -> None:
            while not end.wait(0.1):
                answers.append(server.status("/health"))

        thread = threading.Thread(target=watch)
        thread.start()
        answer = httpx.post(
            f"http://127.0.0.1:{server.port}/v1/completions",
            json={"prompt": list(range(100, 500)), "max_tokens": 2},
            timeout=30,
            trust_env=False,
        )
        end.set()
        thread.join()
        assert answer.status_code == 200 and answer.elapsed.total_seconds() > 2 and set(answers) == {200}


# ---- where it listens


def test_a_port_in_use(model_folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with server_process(model_folder, tmp_path, port=taken.getsockname()[1]) as server:
            assert server.wait(20) == 1 and "cannot listen on 127.0.0.1" in server.log and "in use" in server.log


def test_unix_socket(model_folder, tmp_path):
    path = str(tmp_path / "s")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    with (
        server_process(model_folder, tmp_path, uds=path) as server,
        httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http,
    ):

        def ready() -> bool:
            try:
                return http.get("/ready").status_code == 200
            except httpx.HTTPError:
                return False

        poll(ready, 20)
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        with server_process(model_folder, tmp_path, uds=path) as second:
            assert second.wait(20) == 1 and "cannot listen" in second.log
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0 and not os.path.exists(path) and "--unix-socket" in server.log


def test_works_from_any_folder_without_being_installed(model_folder, tmp_path):
    """Modules of the current folder must not shadow ours."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('the wrong engine')")
    root = str(Path(__file__).parents[2])
    script = f"import os, sys; sys.path.insert(0, {root!r}); os.chdir({str(tmp_path)!r})\n" + SCRIPT
    with server_process(model_folder, tmp_path, script=script) as server:
        server.wait_ready()


LISTENING = """
import json, os, socket, sys
settings = json.loads(sys.argv[1])
listener = socket.socket({family})
listener.bind({address})
listener.listen()
os.dup2(listener.fileno(), 3)
os.environ |= {{"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "quire.socket"}}
sys.argv[1] = json.dumps(settings | {{"port": 1}})  # what the service says is not used
"""


@pytest.mark.parametrize("kind", ["port", "path"])
def test_a_socket_of_systemd(model_folder, tmp_path, kind):
    address = '("127.0.0.1", settings["port"])' if kind == "port" else repr(str(tmp_path / "s"))
    family = "socket.AF_INET" if kind == "port" else "socket.AF_UNIX"
    script = LISTENING.format(family=family, address=address) + SCRIPT
    with server_process(model_folder, tmp_path, script=script) as server:
        if kind == "path":
            server.http = httpx.Client(
                transport=httpx.HTTPTransport(uds=str(tmp_path / "s")), base_url="http://localhost"
            )
        server.wait_ready()
        assert server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        assert b"LISTEN_" not in Path(f"/proc/{server.engine().pid}/environ").read_bytes()


def test_a_model_of_the_hub(model_folder, tmp_path, monkeypatch):
    """From a cache in the Hub's layout, offline; the name in responses is the id."""
    root = tmp_path / "models--org--model"
    commit = "a" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots").mkdir()
    os.symlink(model_folder, root / "snapshots" / commit)
    with server_process("org/model", tmp_path, download_dir=str(tmp_path), served_model_name=[]) as server:
        server.wait_ready()
        assert (
            server.http.post(CHAT, json={"model": "org/model", "messages": HELLO, "max_tokens": 1}).json()["model"]
            == "org/model"
        )


def test_a_removed_setting_is_one_warning(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, cache_reuse=16, api_server_count=2, data_parallel_size=2) as server:
        server.wait_ready()
        (line,) = [line for line in server.log.splitlines() if "--cache-reuse" in line]
        assert "WARNING" in line and "--cache-reuse 16: no effect" in line


def test_a_signal_during_a_download(model_folder, tmp_path):
    """The library's threads cannot be stopped: the process ends without them."""
    download = """
from concurrent.futures import ThreadPoolExecutor
from quire.checkpoints import hub
import time
def resolve(model, progress, **options):
    progress("downloading", 0.25)
    ThreadPoolExecutor().submit(time.sleep, 60).result()
hub.resolve = resolve
"""
    with server_process("org/model", tmp_path, script=download + SCRIPT) as server:
        poll(lambda: server.status("/live") == 200)
        poll(lambda: server.http.get("/ready").json() == {"status": "loading", "phase": "downloading", "percent": 25})
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 0


def test_idle_costs_next_to_nothing(model_folder, tmp_path):
    with server_process(model_folder, tmp_path) as server:
        server.wait_ready()
        processes = [psutil.Process(server.process.pid), server.engine()]

        def used() -> list[float]:
            """Return the CPU seconds of each process in two seconds."""
            before = [sum(process.cpu_times()[:2]) for process in processes]
            time.sleep(2)
            return [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before)]

        # 1 % of a core, in units of 0.01 s; work that belongs to the start may still run in the first seconds
        poll(lambda: all(seconds < 0.025 for seconds in used()), 30)
