"""Six models with memory for two: 500 requests, a fifth of which leave, while engines are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal

import httpx
import pytest

from quire.server.models import manager
from tests.helpers.server.running import write_model_folder
from tests.server.models.test_serving import Plans, several

NUM_MODELS, NUM_REQUESTS, NUM_CLIENTS, NUM_KILLS = 6, 500, 24, 6
SIZE = 4 << 20  # of a model, as `Plans` says
TOKENS = 12


class Crowd:
    """Clients that send requests to random models; `texts` are the answers by model and prompt."""

    def __init__(self, server, names):
        self.models, self.names = server.launcher.frontend.models, names
        self.http = httpx.AsyncClient(base_url=server.url, timeout=120.0)
        self.random = random.Random(56)
        self.left = NUM_REQUESTS
        self.texts: dict[tuple[str, int], set[str]] = {}
        self.wrong: list[str] = []
        self.most = 0  # bytes taken at once

    async def client(self) -> None:
        while self.left:
            self.left -= 1
            name, prompt = self.random.choice(self.names), self.random.randrange(4)
            await self._ask(name, prompt, leaves=self.random.random() < 0.2)

    async def _ask(self, name: str, prompt: int, leaves: bool) -> None:
        body = {"model": name, "prompt": f"prompt {prompt}", "max_tokens": TOKENS, "seed": 1}
        body |= {"stream": True, "ignore_eos": True}
        text, reason = "", None
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.wrong.append(f"{name}: {answer.status_code} {(await answer.aread()).decode()[:200]}")
                return
            async for line in answer.aiter_lines():
                if leaves and self.random.random() < 0.3:
                    return
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.wrong.append(f"{name}: {line[:200]}")
                    return
                text, reason = text + event["choices"][0]["text"], event["choices"][0]["finish_reason"]
        if reason != "length":
            self.wrong.append(f"{name}: the stream ended with {reason}")
        self.texts.setdefault((name, prompt), set()).add(text)

    async def kill_engines(self) -> None:
        """Kill each model's engine once: a request that ran at two deaths would be taken for their cause."""
        kills = dict.fromkeys(self.names, 0)
        for _ in range(NUM_KILLS):
            await asyncio.sleep(0.7)
            loaded = [one for one in self.models.models.values() if one.status == "loaded" and not kills[one.name]]
            if loaded:
                model = self.random.choice(loaded)
                kills[model.name] += 1
                with contextlib.suppress(ProcessLookupError):  # it was killed before
                    os.kill(model._engines._current()[0].pid, signal.SIGKILL)

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, sum(one.size for one in self.models.models.values()))
            await asyncio.sleep(0.005)

    async def run(self) -> None:
        watch = asyncio.create_task(self.watch())
        async with self.http:
            await asyncio.gather(self.kill_engines(), *(self.client() for _ in range(NUM_CLIENTS)))
        watch.cancel()


@pytest.mark.slow
def test_no_stream_is_cut_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "Planner", Plans)
    names = [f"m{i}" for i in range(NUM_MODELS)]
    for name in names:
        (tmp_path / name).mkdir()
        write_model_folder(tmp_path / name)
    folders = [str(tmp_path / name) for name in names]
    with several(folders, fake="step_delay=0.005", models_memory_bytes=2 * SIZE + 1) as server:
        server.wait_ready()
        crowd = Crowd(server, names)
        asyncio.run(crowd.run())
        assert crowd.wrong == [] and 0 < crowd.most <= 2 * SIZE
        assert len(crowd.texts) == 4 * NUM_MODELS
        for prompt in range(4):  # the fake executor's tokens depend on the prompt alone
            assert len(set.union(*(crowd.texts[name, prompt] for name in names))) == 1
