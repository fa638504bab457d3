"""Tests `deterministic` through the whole server with the embedded model.

Seeded and greedy texts are the same alone, in a batch of many, and after the engine was killed."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.configs.sources import EMBEDDED_MODEL
from quire.worker.cpu import build
from tests.end_to_end.test_recovery import SCRIPT, TINY, ask, crowd
from tests.server.test_launch import server_process

pytestmark = pytest.mark.slow

QUESTIONS = [
    "Tell me a story about a fox.",
    "Write a paragraph about the sea.",
    "What can you do?",
    "Tell me about tea.",
    "Spell these words: zebra, lumox, candle, thirteen",
    "Repeat: The quick wolf draws a golden map of every island.",
    "What does quire do?",
    "Sort these numbers: 61, 7, 45, 19",
    "Write a JSON object with name Anna, age 31 and city Oslo.",
    "Count from 3 to 21.",
    "Hello, what is your name?",
]
STREAMS = 64  # every second one is greedy


def body(number: int) -> dict:
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    if number % 3:
        hello = f"Hello, Number{number}! How can I help you?"
        before = [{"role": "user", "content": f"My name is Number{number}."}, {"role": "assistant", "content": hello}]
        messages = [*before, *messages]
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "top_p": 0.98, "seed": number}
    return {"messages": messages, "max_tokens": 60, "ignore_eos": True, "stream": True} | sampling


def check_crowds(server) -> None:
    """Run each request alone, then all at once, then all at once while the engine is killed; compare the texts."""
    bodies = [body(number) for number in range(STREAMS)]

    async def one_by_one() -> list:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as http:
            return [await ask(http, body) for body in bodies]

    alone = asyncio.run(one_by_one())
    assert len({choices[0].text for choices in alone}) > 2 * len(QUESTIONS)
    together, seconds = crowd(server, bodies)
    killed, _ = crowd(server, bodies, lambda: server.engine().kill(), after=seconds / 2)
    assert "engine 0 died (signal SIGKILL)" in server.log
    for how, answers in (("in a crowd", together), ("after a kill", killed)):
        changed = [number for number in range(STREAMS) if answers[number][0].text != alone[number][0].text]
        assert not changed, f"{how}: {changed}"


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Build the kernels before the server starts, because it does not wait for them."""
    level = build.cpu_level()
    if level is None or (build.compiler() is None and build.find_library(level) is None):
        pytest.skip("no native kernels here")
    if build.find_library(level) is None:
        build.build(level, build.cache_folder())


@pytest.mark.parametrize("asked", [None, True], ids=["by default", "as asked"])
def test_texts_do_not_depend_on_the_crowd(tmp_path, asked):
    settings = TINY | {"dtype": "auto", "max_num_seqs": STREAMS, "max_num_batched_tokens": 512, "deterministic": asked}
    with server_process(str(EMBEDDED_MODEL), tmp_path, script=SCRIPT, **settings) as server:
        server.wait_ready()
        choices = server.http.get("/server_info").json()["engine"]["choices"]
        value, reason = next(choice[1:] for choice in choices if choice[0] == "deterministic")
        if asked is None and value == "off":
            pytest.skip(f"not the default here: {reason}")
        assert value == "on" and reason in server.log
        check_crowds(server)
