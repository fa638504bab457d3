"""Kills processes under load; clients see only a pause, and every text equals that of an undisturbed run.

The suite runs a few rounds of deaths for each process layout. Before a release: RECOVERY_ROUNDS=20 python -m
pytest tests/end_to_end/test_recovery.py -k test_deaths
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers.server.running import poll, write_model_folder
from tests.server.test_launch import CHAT, HELLO, ServerProcess, gone, server_process

pytestmark = pytest.mark.slow

# No limit to the number of deaths, so that one server can live through all rounds.
SCRIPT = """
import json, sys
from quire.configs.config import Config
from quire.server.engines import supervisor
from quire.server.launch import serve
supervisor.DEATH_WINDOW = 0.0
sys.exit(serve(Config.from_flat(**json.loads(sys.argv[1]))))
"""
ROUNDS = int(os.environ["RECOVERY_ROUNDS"]) if "RECOVERY_ROUNDS" in os.environ else None
STREAMS = 32
# prompts take several steps
TINY = {
    "device": "cpu",
    "dtype": "float32",
    "distributed_executor_backend": None,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 2048,
    "num_threads": 1,
}

# Client requests, in turn (the fake executor also uses seeds of greedy requests): seeded and greedy, streams and whole
# answers, several choices, log-probabilities, penalties.
KINDS = [
    {"stream": True, "seed": 1, "temperature": 0.8},
    {"stream": False, "seed": 2, "temperature": 0},
    {"stream": True, "seed": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"stream": True, "seed": 7, "n": 2, "temperature": 1.0, "top_p": 0.9},
    {"stream": False, "seed": 3, "n": 3, "temperature": 0.7},
    {"stream": True, "seed": 11, "temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"stream": False, "seed": 5, "temperature": 0.9, "logprobs": True, "top_logprobs": 1},
    {"stream": True, "seed": 8, "temperature": 0, "repetition_penalty": 1.2, "min_p": 0.05},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    """A model folder with all files that the fake executor needs."""
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


@dataclass
class Choice:
    """The output of one choice as the client received it."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict) -> None:
        assert self.finish_reason is None, "a chunk after the last"
        self.text += choice.get("message", choice.get("delta", {})).get("content") or ""
        self.finish_reason = choice["finish_reason"]
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            self.tokens.append(entry["token"])
            self.logprobs.append(entry["logprob"])

    def check(self, expected: Choice) -> None:
        assert (self.text, self.finish_reason, self.tokens) == (expected.text, expected.finish_reason, expected.tokens)
        assert self.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def request_body(number: int, num_tokens: int) -> dict:
    messages = [
        {
            "role": "user",
            "content": f"Tell me the story of number {number}. " + "It was a long book. " * (8 * (number % 5)),
        }
    ]
    return {"messages": messages, "max_tokens": num_tokens + 7 * (number % 4), "ignore_eos": True} | KINDS[
        number % len(KINDS)
    ]


async def ask(http: httpx.AsyncClient, body: dict) -> list[Choice]:
    choices = [Choice() for _ in range(body.get("n", 1))]
    if not body["stream"]:
        answer = await http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            choices[choice["index"]].add(choice)
        return choices
    async with http.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    choices[choice["index"]].add(choice)
            elif line.startswith("data:"):
                assert line == "data: [DONE]"
    return choices


def crowd(
    server: ServerProcess, bodies: list[dict], disturb: Callable[[], None] | None = None, after: float = 0.0
) -> tuple[list[list[Choice]], float]:
    """Run all requests at once and call `disturb` after `after` seconds; returns (answers, seconds)."""

    async def main() -> list[list[Choice]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", timeout=240.0, trust_env=False, limits=limits
        ) as http:
            clients = [asyncio.create_task(ask(http, body)) for body in bodies]
            if disturb is not None:
                await asyncio.sleep(after)
                await asyncio.to_thread(disturb)
            return await asyncio.gather(*clients)

    start = time.monotonic()
    return asyncio.run(main()), time.monotonic() - start


def check(answers: list[list[Choice]], expected: list[list[Choice]]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        for choice, expected_choice in zip(answer, wanted, strict=True):
            choice.check(expected_choice)


def wait_for_death(server: ServerProcess, engine: psutil.Process, serving: bool) -> None:
    """Wait until the engine ends; health reports within a second whether another one serves."""
    poll(lambda: gone(engine), 10)
    dead = time.monotonic()
    poll(lambda: server.status("/health") == (200 if serving else 503), 5)
    assert time.monotonic() - dead < 10.0


def survive(server: ServerProcess, rounds: int, streams: int, num_tokens: int, seed: int) -> None:
    """Run rounds of deaths at random times, alternating between one of the engine's workers, if any, and the engine;
    sometimes kill again while the next engine loads.
    """
    rng = random.Random(seed)
    bodies = [request_body(number, num_tokens) for number in range(streams)]
    expected, duration = crowd(server, bodies)
    num_engines = len(server.engines())
    for number in range(rounds):
        alive = server.engines()
        engine = rng.choice(alive)
        workers = [child for child in engine.children() if child.name().startswith("quire-worker")]
        victim = rng.choice(workers) if workers and number % 2 == 0 else engine
        how = rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
        twice = number % 3 == 1

        def disturb(engine=engine, victim=victim, how=how, twice=twice, alive=alive) -> None:
            victim.send_signal(how)
            wait_for_death(server, engine, serving=len(alive) > 1)
            if twice:
                second = poll(lambda: [other for other in server.engines() if other not in alive], 5)[0]
                time.sleep(rng.uniform(0, 0.3))
                second.kill()

        answers, _ = crowd(server, bodies, disturb, after=rng.uniform(0.02, 0.7 * duration))
        check(answers, expected)
        server.wait_ready()
        # even if another engine serves meanwhile
        poll(lambda count=number + 1: server.log.count("the engine is ready again") == count, 60)
        assert len(server.engines()) == num_engines


@pytest.mark.parametrize(
    "several",
    [{}, {"data_parallel_size": 2}, {"data_parallel_size": 2, "api_server_count": 2}],
    ids=["one", "dp2", "dp2-api2"],
)
def test_deaths_without_a_model(model_folder, tmp_path, several):
    # otherwise the second death of a round hits an engine that already has the requests, and they fail
    fake = "step_delay=0.01,load_delay=0.5"
    with server_process(model_folder, tmp_path, fake=fake, script=SCRIPT, **several) as server:
        survive(server.wait_ready(), ROUNDS or 2, STREAMS, num_tokens=100, seed=1)


PLACEMENTS = {
    "uniproc": {},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "mp": {"distributed_executor_backend": "mp"},
}
SUITE_ROUNDS = {"uniproc": 2, "tp2": 2, "pp2": 1, "dp2": 1}  # every start costs seconds


@pytest.mark.timeout(300 + 90 * (ROUNDS or 0))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_deaths(checkpoint, tmp_path, name):
    rounds = ROUNDS or SUITE_ROUNDS.get(name)
    if rounds is None:
        pytest.skip("much like the others: set RECOVERY_ROUNDS")
    with server_process(checkpoint("qwen3"), tmp_path, script=SCRIPT, **TINY | PLACEMENTS[name]) as server:
        survive(server.wait_ready(), rounds, STREAMS, num_tokens=150 if ROUNDS else 60, seed=2)


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_an_engine_killed_while_it_verifies_drafts(checkpoint, tmp_path, method):
    """Texts and log-probabilities equal those without drafts and without a death."""
    folder = checkpoint("qwen3")
    config = {"method": method, "num_speculative_tokens": 4} | ({"model": folder} if method == "draft_model" else {})
    settings = TINY | {"speculative_config": json.dumps(config)}
    with server_process(folder, tmp_path, script=SCRIPT, **settings) as server:
        server.wait_ready()
        bodies = [request_body(number, 60) for number in range(12)]
        expected, _ = crowd(server, [body | {"speculation": False} for body in bodies])
        drafted, duration = crowd(server, bodies)
        check(drafted, expected)
        engine = server.engine()

        def disturb() -> None:
            engine.send_signal(signal.SIGKILL)
            wait_for_death(server, engine, serving=False)

        answers, _ = crowd(server, bodies, disturb, after=0.4 * duration)
        check(answers, expected)
        accepted = re.findall(r"vllm:spec_decode_num_accepted_tokens_total{.*} (\S+)", server.http.get("/metrics").text)
        assert sum(map(float, accepted)) > 50


def test_an_engine_killed_again_while_it_starts(model_folder, tmp_path):
    """Two of three deaths in a minute; the second is no death at start, because only the first engine can have one."""
    with server_process(model_folder, tmp_path, fake="load_delay=1,step_delay=0.01") as server:
        first = server.wait_ready().engine()
        bodies = [request_body(number, 60) for number in range(4)]
        expected, _ = crowd(server, bodies)

        def disturb() -> None:
            first.kill()
            second = poll(lambda: [engine for engine in server.engines() if engine.pid != first.pid])[0]
            poll(lambda: server.http.get("/health").json().get("phase") == "loading weights")
            second.kill()

        answers, _ = crowd(server, bodies, disturb, after=0.2)
        check(answers, expected)
        server.wait_ready()
        assert server.log.count("engine 0 died (signal SIGKILL)") == 2 and server.log.count("is ready again") == 1


def test_requests_that_come_while_the_engine_is_replaced_wait(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="load_delay=0.5") as server:
        server.wait_ready().engine().kill()
        poll(lambda: server.status("/ready") == 503)
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
        assert answer.status_code == 200 and server.status("/ready") == 200


# ---- when recovery must stop


POISON = 3  # a token id that the prompt of one request has


@pytest.mark.parametrize("several", [{}, {"api_server_count": 2}], ids=["one", "api2"])
def test_a_request_that_kills_the_engine_fails_alone(model_folder, tmp_path, several):
    """Each engine dies when it receives one request.

    Eight running requests and some later ones get complete texts, and the server stays up, twice in a minute.
    """
    num_deaths = 3 if several else 2  # with several frontends, a solo death must be confirmed
    with server_process(model_folder, tmp_path, fake=f"fail_on_token={POISON},step_delay=0.01", **several) as server:
        server.wait_ready()
        bodies = [request_body(number, 100) for number in range(8)]
        expected, _ = crowd(server, bodies)
        for number in range(2):
            refused = []

            def disturb(refused=refused) -> None:
                refused.append(
                    server.http.post("/v1/completions", json={"prompt": [5, POISON, 6], "max_tokens": 10}, timeout=60)
                )

            answers, _ = crowd(server, bodies, disturb, after=0.3)
            check(answers, expected)
            assert (
                refused[0].status_code == 500
                and f"died {num_deaths} times while it ran this request" in refused[0].json()["error"]["message"]
            )
            poll(lambda count=number + 1: server.log.count("is ready again") == num_deaths * count, 20)
        assert server.status("/ready") == 200


@pytest.mark.parametrize(
    ("several", "step_delay", "tokens"),
    [({}, 0.001, 100), ({"api_server_count": 2}, 0.01, 20)],
    ids=["one-fast", "api2-slow"],
)
def test_a_request_that_kills_each_engine_later_fails_alone(model_folder, tmp_path, several, step_delay, tokens):
    """Each engine dies when it has generated so many tokens for one request: more than a short trial."""
    fake = f"fail_on_token={POISON},fail_after={tokens},step_delay={step_delay}"
    with server_process(model_folder, tmp_path, fake=fake, **several) as server:
        server.wait_ready()
        bodies = [request_body(number, 100) for number in range(4)]
        expected, _ = crowd(server, bodies)
        refused = []

        def disturb() -> None:
            body = {"prompt": [5, POISON, 6], "max_tokens": 480, "ignore_eos": True}
            refused.append(server.http.post("/v1/completions", json=body, timeout=120))

        answers, _ = crowd(server, bodies, disturb, after=0.02)
        check(answers, expected)
        assert refused[0].status_code == 500 and "while it ran this request" in refused[0].json()["error"]["message"]
        server.wait_ready()
        assert server.log.count("is ready again") <= 6


def test_an_engine_that_dies_whatever_it_runs(model_folder, tmp_path):
    """Every engine dies in its 60th step: each request is ended, the server is not."""
    with server_process(model_folder, tmp_path, fake="fail_at_step=60,step_delay=0.005") as server:
        server.wait_ready()
        stream = server.stream(num_tokens=300)
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 300, "ignore_eos": True}, timeout=60)
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
        ends = [answer.json(), json.loads(lines[-1][6:])]
        assert any("while it ran this request" in end.get("error", {}).get("message", "") for end in ends)
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 5, "ignore_eos": True}, timeout=60)
        assert answer.status_code == 200, answer.text


def test_an_engine_that_cannot_be_started_again(model_folder, tmp_path):
    """Holds for slow starts: consecutive failed starts count without the one-minute window."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    with server_process(str(folder), tmp_path, fake="step_delay=0.02", script=SCRIPT) as server:
        server.wait_ready()
        stream = server.stream(num_tokens=400)
        (folder / "config.json").write_text("{")
        server.engine().kill()
        last = [line for line in stream.iter_lines() if line.startswith("data: {")][-1]
        assert "Expecting property name" in json.loads(last[6:])["error"]["message"]
        assert server.wait(30) == 1 and "3 restarts in a row failed" in server.log


# ---- hanging steps


def test_a_hung_engine_is_replaced(model_folder, tmp_path):
    """An engine that neither exits nor sends messages is replaced; its stacks are logged if it can write them."""
    with server_process(model_folder, tmp_path, fake="step_delay=0.01", step_timeout=2.0, script=SCRIPT) as server:
        server.wait_ready()
        bodies = [request_body(number, 100) for number in range(4)]
        expected, _ = crowd(server, bodies)
        engine = server.engine()
        answers, _ = crowd(server, bodies, engine.suspend, after=0.3)
        check(answers, expected)
        assert gone(engine) and "it hung: no step ended for --step-timeout 2 seconds" in server.log


def test_a_hung_step_leaves_its_stack_in_the_log(model_folder, tmp_path):
    with server_process(model_folder, tmp_path, fake="hang_at_step=40,step_delay=0.005", step_timeout=1.0) as server:
        server.wait_ready()
        answer = server.http.post(CHAT, json={"messages": HELLO, "max_tokens": 50, "ignore_eos": True}, timeout=60)
        assert answer.status_code == 200, answer.text  # the new engine needs fewer steps for the rest
        stacks = server.log.partition("it hung: no step ended for --step-timeout 1 seconds")[2]
        assert "Current thread" in stacks and 'helpers/engine/fake_executor.py", line' in stacks and "in step" in stacks


def test_a_rank_that_hangs(checkpoint, tmp_path):
    """The other ranks wait for it, and their stacks show where."""
    with server_process(
        checkpoint("qwen3"), tmp_path, step_timeout=5.0, **TINY | {"tensor_parallel_size": 2}
    ) as server:
        server.wait_ready()
        bodies = [request_body(number, 60) for number in range(3)]
        expected, _ = crowd(server, bodies)
        ranks = server.engine().children()
        victim = next(rank for rank in ranks if rank.name() == "quire-worker-1")
        answers, _ = crowd(server, bodies, victim.suspend, after=0.1)
        check(answers, expected)
        stacks = server.log.partition("it hung: no step ended for --step-timeout 5 seconds")[2]
        of = {
            process: stacks.partition(f"the stacks of the threads of {process}:\n")[2].partition(" server: ")[0]
            for process in ("engine", "worker 0", "worker 1")
        }
        assert (
            'worker/parallel.py", line' in of["worker 0"]
            and 'engine/core.py", line' in of["engine"]
            and of["worker 1"].startswith("none: the process is stopped")
        )
        assert all(gone(rank) for rank in ranks)


# ---- leftovers


@pytest.fixture
def temporary_files() -> Iterator[Path]:
    """The folder for temporary files of the processes. Not below tmp_path, which is too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        yield Path(folder)


def test_a_killed_server_leaves_nothing(checkpoint, tmp_path, temporary_files):
    with server_process(
        checkpoint("qwen3"), tmp_path, temporary=temporary_files, **TINY | {"tensor_parallel_size": 2}
    ) as server:
        server.wait_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len([child for child in children if child.name().startswith("quire-worker")]) == 2
        server.stream()
        assert list(temporary_files.iterdir())
        server.process.kill()
        poll(lambda: all(gone(child) for child in children), 2)
        left = [path.name for path in temporary_files.iterdir()]
        assert all(name.startswith("quire-memory-") for name in left), left  # what servers promise, shared by all


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_and_no_file_is_left(model_folder, tmp_path, temporary_files, signal_number):
    with server_process(
        model_folder, tmp_path, fake="step_delay=0.02", shutdown_timeout=0.1, temporary=temporary_files
    ) as server:
        server.wait_ready()
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.stream()
        assert list(temporary_files.iterdir())
        server.process.send_signal(signal_number)
        server.wait()
        poll(lambda: all(gone(child) for child in children), 2)
        assert not list(temporary_files.iterdir())


def test_the_stream_of_a_server_that_is_gone_goes_on_at_another(checkpoint, tmp_path):
    """As a router does it that keeps token ids: prompt and tokens so far are the prompt of the rest."""
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    prompt, ids = [], []
    folder = checkpoint("qwen3")
    with server_process(folder, tmp_path, **TINY) as dying, server_process(folder, tmp_path, **TINY) as other:
        dying.wait_ready()
        other.wait_ready()
        with (
            pytest.raises(httpx.RemoteProtocolError),
            dying.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    prompt, ids = choice.get("prompt_token_ids") or prompt, ids + choice["token_ids"]
                    if len(ids) > 20:
                        dying.process.kill()
        (whole,) = other.http.post("/v1/completions", json=body).json()["choices"]
        rest = body | {"prompt": prompt + ids, "max_tokens": 300 - len(ids)}
        (more,) = other.http.post("/v1/completions", json=rest).json()["choices"]
    assert 20 < len(ids) < 300 and prompt == whole["prompt_token_ids"]
    assert ids + more["token_ids"] == whole["token_ids"]
