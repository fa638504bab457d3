"""Runs a real server on a random port: uvicorn, the launcher's own composition, and an engine process with the fake
executor. Only the signals are missing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.configs.config import Config
from quire.server.launch import Launcher, bind
from quire.server.models.launch import ModelsLauncher
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.models.checkpoints import CHAT_TEMPLATE, VOCAB_SIZE, _byte_level

MODEL = "org/test-model"


def write_model_folder(folder: Path) -> Path:
    """Write the model files that a server with the fake executor needs: tokenizer, chat template, vocabulary size."""
    _byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE, "model_max_length": 2048})
    )
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.7, "top_k": 20, "eos_token_id": [2, 0]})
    )
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


def make_config(folder: str, **settings: Any) -> Config:
    defaults = {
        "model": folder,
        "port": 0,
        "served_model_name": [MODEL, "alias"],
        "distributed_executor_backend": BACKEND,
        "max_model_len": "512",
        "shutdown_timeout": 5.0,
        "log_stats_interval": 0.0,
    }
    return Config.from_flat(**defaults | settings)


class RunningServer:
    """Runs a server in a thread of the test process: HTTP works as usual, and tests can access its state."""

    def __init__(self, config: Config):
        self.config = config
        self.listener = bind(config.server)
        self.url = "http://{}:{}".format(*self.listener.getsockname()[:2])
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        async def main() -> int:
            self.loop = asyncio.get_running_loop()
            make = ModelsLauncher if self.config.models.are_several else Launcher
            self.launcher = make(self.config, self.listener, time.monotonic())
            return await self.launcher.run()

        self.exit_code = asyncio.run(main())

    @property
    def state(self):
        return self.launcher.frontend.state

    def wait_ready(self, timeout: float = 30.0) -> RunningServer:
        poll(lambda: hasattr(self, "launcher") or not self.thread.is_alive(), timeout)
        poll(lambda: self.state.status == "ready" or not self.thread.is_alive(), timeout)
        assert self.thread.is_alive(), self.state.failure
        return self

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0, trust_env=False, verify=False)

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30.0)

    def openai_with(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30.0)

    def aopenai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30.0)

    def signal(self) -> None:
        """Shut down as on SIGTERM."""
        self.loop.call_soon_threadsafe(self.launcher.on_signal, signal.SIGTERM)

    def stop(self) -> int:
        if self.thread.is_alive():
            if not self.launcher.stop.is_set():
                self.signal()
            self.thread.join(60)
        assert not self.thread.is_alive()
        return self.exit_code


def poll(condition: Callable[[], Any], timeout: float = 30.0) -> Any:
    """Return the first true value of `condition`. Fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
    return value


@contextmanager
def running_server(
    folder: str, monkeypatch: pytest.MonkeyPatch | None = None, fake: str = "", **settings: Any
) -> Iterator[RunningServer]:
    """Run a server for one test. `fake` are the FakeOptions of its engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_EXECUTOR", fake)
        server = RunningServer(make_config(folder, **settings))
        poll(lambda: hasattr(server, "launcher"), 60)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(model_folder) -> Iterator[RunningServer]:
    """Run the server that most tests share."""
    with running_server(model_folder) as running:
        yield running.wait_ready()


@pytest.fixture(scope="session")
def slow_server(model_folder) -> Iterator[RunningServer]:
    """Run a server with 10 ms per step and room for 4 requests, for tests of events during generation."""
    with running_server(
        model_folder, fake="step_delay=0.01", max_num_seqs=4, max_num_queued_reqs=8, sse_keep_alive_interval=0.1
    ) as running:
        yield running.wait_ready()
