"""Tests `quire bench`: figures against a server with known delays, and arithmetic against independent formulas."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import main as cli
from quire.cli.bench import datasets, load, report, serve, startup
from quire.cli.bench.connection import Client
from tests.helpers.engine.fake_executor import BACKEND
from tests.helpers.server.fake_openai import MODEL, FakeOpenAI
from tests.helpers.server.light_model import write_light_model

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    with FakeOpenAI() as server:
        yield server


def bench(server: FakeOpenAI, *arguments: str) -> int:
    return cli.main(
        [
            "bench",
            "serve",
            "--port",
            str(server.port),
            "--disable-tqdm",
            "--num-prompts",
            "6",
            "--random-input-len",
            "5",
            "--random-output-len",
            "4",
            *arguments,
        ]
    )


def test_figures_of_a_server_with_known_delays(tmp_path, capsys):
    with FakeOpenAI(first_delay=0.1, token_delay=0.03) as server:
        assert (
            bench(
                server,
                "--max-concurrency",
                "2",
                "--ignore-eos",
                "--result-dir",
                str(tmp_path),
                "--result-filename",
                "out/r.json",
                "--save-detailed",
                "--goodput",
                "ttft:5000",
                "e2el:1",
            )
            == 0
        )
    figures = json.loads((tmp_path / "out" / "r.json").read_text())
    assert (figures["completed"], figures["failed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (
        6,
        0,
        30,
        24,
    )
    assert server.max_running == 2 and len(server.requests) == 7  # one more to test the server
    assert 0.1 <= figures["median_ttft_ms"] / 1000 < 0.25
    assert 0.03 <= figures["median_tpot_ms"] / 1000 < 0.08 and 0.03 <= figures["median_itl_ms"] / 1000 < 0.08
    assert figures["duration"] >= 3 * (0.1 + 3 * 0.03)  # three rounds of two
    assert figures["output_throughput"] == pytest.approx(24 / figures["duration"])
    assert figures["request_goodput"] == 0.0  # no request ends within 1 ms
    assert len(figures["requests"]) == 6 and all(len(request["itl"]) == 3 for request in figures["requests"])
    assert server.requests[1]["ignore_eos"] is True and server.requests[1]["stream_options"] == {"include_usage": True}
    printed = capsys.readouterr().out
    assert (
        f"{figures['p99_ttft_ms']:.2f}" in printed
        and "P99 TTFT (ms)" in printed
        and "Request goodput (req/s)" in printed
    )


def test_chat_endpoint_does_not_take_the_role_for_a_token(tmp_path):
    with FakeOpenAI(first_delay=0.15) as server:
        assert (
            bench(
                server,
                "--endpoint",
                "/v1/chat/completions",
                "--result-filename",
                str(tmp_path / "r.json"),
                "--extra-body",
                '{"top_k": 3}',
            )
            == 0
        )
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["median_ttft_ms"] >= 150 and figures["total_output_tokens"] == 24
    assert server.requests[0]["messages"][0]["role"] == "user" and server.requests[0]["top_k"] == 3


def test_sweep_gives_a_run_for_each_concurrency_and_a_plot(server, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert (
        bench(
            server,
            "--max-concurrency",
            "1,3",
            "--result-filename",
            str(tmp_path / "r.json"),
            "--plot",
            str(tmp_path / "p.png"),
        )
        == 0
    )
    assert [run["max_concurrency"] for run in json.loads((tmp_path / "r.json").read_text())] == [1, 3]
    # one to test the server, and new ones for each run, so that no prefix is cached
    assert len({request["prompt"] for request in server.requests}) == 13
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "concurrency 3" in capsys.readouterr().out


def test_plot_without_matplotlib_fails_before_measuring(server, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(SystemExit) as exit:
        bench(server, "--plot", "x.png")
    assert exit.value.code == 1 and "pip install 'quire[plot]'" in capsys.readouterr().err
    assert not server.requests


@pytest.mark.parametrize(
    "kind, message",
    [("stream", "error in the stream: {'message': 'the engine failed'}"), ("cut", "the stream ended without [DONE]")],
)
def test_failures_inside_streams_are_counted(server, kind, message, capsys, monkeypatch):
    normal_send = load.send

    async def fail_after_the_first(target, sample):
        result = await normal_send(target, sample)
        server.fail = kind
        return result

    monkeypatch.setattr(serve, "send", fail_after_the_first)
    assert bench(server) == 1
    printed = capsys.readouterr().out
    assert (
        f"6 x HttpError: {message}" in printed and "Failed requests                                        6" in printed
    )


def test_a_refusing_server_is_reported_and_not_measured(server, capsys):
    server.fail = "status"
    with pytest.raises(SystemExit) as exit:
        bench(server)
    assert (
        exit.value.code == 1
        and "the first request failed: HttpError: HTTP 500: out of order" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "other"], f"--model other: the server has {MODEL}"),
        (["--goodput", "itl:3"], "--goodput: expected ttft, tpot or e2el"),
        (["--goodput", "ttft:x"], "is not a number of milliseconds"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "x"], "needs --tokenizer"),
        (["--tokenizer", "/nowhere"], "--tokenizer: no folder /nowhere"),
        (["--random-range-ratio", "1"], "--random-range-ratio: must be at least 0 and below 1"),
        (["--max-concurrency", "0"], "--max-concurrency: must be at least 1"),
        (["--percentile-metrics", "ttfb"], "'ttfb' is not one of ttft, tpot, itl, e2el"),
        (["--request-rte", "1"], "did you mean --request-rate?"),
    ],
)
def test_wrong_options_are_named(server, arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        bench(server, *arguments)
    assert exit.value.code in (1, 2) and message in capsys.readouterr().err


def test_connections_are_reused_and_replaced_when_the_server_closed_them(server):
    async def run() -> None:
        client = Client(server.url)
        for _ in range(3):
            status, body = await client.fetch("GET", "/v1/models")
            assert status == 200 and json.loads(body)["data"][0]["id"] == MODEL
        (connection,) = client.idle
        connection.writer.close()
        await connection.writer.wait_closed()
        assert (await client.fetch("GET", "/v1/models"))[0] == 200
        assert len(client.idle) == 1 and client.idle[0] is not connection
        client.close()

    asyncio.run(run())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert report.percentile(sorted(values), percent) == pytest.approx(
        float(numpy.percentile(values, percent)), rel=1e-9, abs=1e-9
    )


def test_tpot_leaves_out_the_first_token():
    assert load.Result(output_tokens=5, ttft=1.0, latency=3.0).tpot == 0.5
    assert load.Result(output_tokens=1, ttft=1.0, latency=1.0).tpot is None


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    gaps = load.arrival_gaps(20000, request_rate=8.0, burstiness=burstiness, seed=1)
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8 / burstiness**0.5, rel=0.05)  # gamma of that shape
    assert load.arrival_gaps(3, float("inf"), burstiness, 1) == [0.0, 0.0, 0.0]


def test_requests_leave_at_the_rate(server):
    start = time.perf_counter()
    assert bench(server, "--request-rate", "20", "--seed", "3") == 0
    assert time.perf_counter() - start >= sum(load.arrival_gaps(6, 20, 1.0, 3))


class WordEncoder:
    """One token per three characters, so that prompts are cut and extended in the middle of words."""

    def encode(self, text, add_special_tokens=True):
        return [text[i : i + 3] for i in range(0, len(text), 3)]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(ids)


def samples(encoder, seed=0, **options):
    arguments = serve.parser().parse_args(
        [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    )
    return datasets.make_samples(arguments, encoder, seed)


def test_random_samples_have_the_asked_lengths():
    made = samples(WordEncoder(), num_prompts=50, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    assert made == samples(
        WordEncoder(), num_prompts=50, random_input_len=20, random_output_len=10, random_range_ratio=0.5
    )
    assert made != samples(
        WordEncoder(), seed=1, num_prompts=50, random_input_len=20, random_output_len=10, random_range_ratio=0.5
    )
    for sample in made:
        assert (
            len(WordEncoder().encode(sample.prompt)) == sample.prompt_len
            and 10 <= sample.prompt_len <= 30
            and 5 <= sample.output_len <= 15
        )
    assert len({sample.prompt_len for sample in made}) > 5
    assert all(len(sample.prompt.split()) == 7 for sample in samples(None, num_prompts=3, random_input_len=7))


def test_prefix_repetition_shares_prefixes():
    made = samples(
        None,
        dataset_name="prefix-repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=2,
        prefix_repetition_output_len=5,
    )
    prefixes = [" ".join(sample.prompt.split()[:6]) for sample in made]
    assert len(set(prefixes)) == 3 and all(prefixes.count(prefix) == 4 for prefix in prefixes)
    assert len({sample.prompt for sample in made}) > 3 and {
        (sample.prompt_len, sample.output_len) for sample in made
    } == {(8, 5)}


def test_sharegpt_uses_conversations_of_usable_length(tmp_path):
    turns = [
        ("a" * 60, "b" * 30),
        ("a" * 6, "b" * 30),
        ("a" * 60, "b" * 6),
        ("a" * 6000, "b" * 30),
        ("c" * 90, "d" * 60),
    ]
    content = [
        {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        for question, answer in turns
    ]
    (tmp_path / "s.json").write_text(json.dumps([*content, {"conversations": []}]))
    made = samples(WordEncoder(), dataset_name="sharegpt", dataset_path=tmp_path / "s.json", num_prompts=4)
    assert {(sample.prompt, sample.prompt_len, sample.output_len) for sample in made} == {
        ("a" * 60, 20, 10),
        ("c" * 90, 30, 20),
    } and len(made) == 4


# ---- with the whole server and engine and the fake executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_light_model(tmp_path_factory.mktemp("light"))


FAKE = ["--distributed-executor-backend", BACKEND, "--max-model-len", "256"]


@pytest.mark.slow
def test_startup_stages_come_in_order(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_EXECUTOR", "load_delay=1")
    assert (
        cli.main(["bench", "startup", folder, *FAKE, "--num-iters", "2", "--output-json", str(tmp_path / "r.json")])
        == 0
    )
    figures = json.loads((tmp_path / "r.json").read_text())
    assert list(figures) == list(startup.STAGES) and all(len(values) == 2 for values in figures.values())
    for live, ready, first_token in zip(*figures.values()):
        assert 0 < live <= ready < first_token and ready >= 1.0
    assert "first token of the first request" in capsys.readouterr().out


def test_startup_reports_a_server_that_ends(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "startup", str(tmp_path / "nowhere")])
    assert (
        exit.value.code == 1
        and "ended with status 1" in (shown := capsys.readouterr().err)
        and "there is no folder" in shown
    )


def test_startup_takes_another_servers_command(capsys):
    command = f"{sys.executable} -c 'import sys; sys.exit(sys.argv[1])' port-{{port}}"
    with pytest.raises(SystemExit):
        cli.main(["bench", "startup", "--serve-command", command])
    assert "port-" in (shown := capsys.readouterr().err) and "{port}" not in shown
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "startup", "--serve-command", command, "--num-iter", "1"])
    assert exit.value.code == 2 and "did you mean --num-iters?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_offline_benchmarks_need_no_model(kind, folder, tmp_path, capsys, monkeypatch):
    """The embedded model has a name for the HTTP API, and the environment may have settings of the server:
    the engine needs neither.
    """
    monkeypatch.setattr("quire.cli.main.embedded_model", lambda: folder)
    monkeypatch.setenv("QUIRE_PORT", "8123")
    sizes = (
        ["--num-prompts", "2"]
        if kind == "throughput"
        else ["--batch-size", "1", "--num-iters", "1", "--num-iters-warmup", "0"]
    )
    assert cli.main(["bench", kind, *FAKE, *sizes, "--input-len", "4", "--output-len", "3", "--disable-tqdm"]) == 0
    assert "requests/s" in (shown := capsys.readouterr().out) or "Avg latency" in shown


@pytest.mark.parametrize(
    "url, endpoint, expected",
    [
        ("http://h:1", "/v1/completions", ("http://h:1", "/v1/completions")),
        ("http://h:1/v1", "/v1/chat/completions", ("http://h:1", "/v1/chat/completions")),
        ("http://h:1/v1/", "/chat/completions", ("http://h:1", "/v1/chat/completions")),
        ("http://h:1/sub/v1", "/v1/completions", ("http://h:1/sub", "/v1/completions")),
        ("http://h:1/sub", "/generate", ("http://h:1/sub", "/generate")),
    ],
)
def test_the_url_may_end_with_v1(url, endpoint, expected):
    assert serve.server_and_endpoint(url, endpoint) == expected


@pytest.mark.parametrize("flag", ["--base-url", "--url"])
def test_a_url_of_the_api_is_understood(server, flag):
    assert bench(server, flag, f"{server.url}/v1", "--num-prompts", "1") == 0
    assert len(server.requests) == 2


def test_throughput_and_latency_count_the_tokens(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_EXECUTOR", "step_delay=0.01")

    def plotted(name: str) -> list[str]:
        return ["--plot", str(tmp_path / f"{name}.png")] if importlib.util.find_spec("matplotlib") else []

    assert (
        cli.main(
            [
                "bench",
                "throughput",
                folder,
                *FAKE,
                "--num-prompts",
                "8",
                "--input-len",
                "12",
                "--output-len",
                "6",
                "--disable-tqdm",
                "--output-json",
                str(tmp_path / "t.json"),
                *plotted("t"),
            ]
        )
        == 0
    )
    figures = json.loads((tmp_path / "t.json").read_text())
    assert (figures["num_requests"], figures["total_input_tokens"], figures["total_output_tokens"]) == (8, 96, 48)
    assert figures["elapsed_time"] >= 6 * 0.01 and figures["output_tokens_per_second"] == pytest.approx(
        48 / figures["elapsed_time"]
    )
    assert (
        cli.main(
            [
                "bench",
                "latency",
                folder,
                *FAKE,
                "--batch-size",
                "2",
                "--input-len",
                "4",
                "--output-len",
                "5",
                "--num-iters",
                "3",
                "--num-iters-warmup",
                "1",
                "--disable-tqdm",
                "--output-json",
                str(tmp_path / "l.json"),
                *plotted("l"),
            ]
        )
        == 0
    )
    latencies = json.loads((tmp_path / "l.json").read_text())["latencies"]
    assert len(latencies) == 3 and all(5 * 0.01 <= latency < 5 for latency in latencies)
    assert "requests/s" in (shown := capsys.readouterr().out) and "Avg latency" in shown
    for name in "tl" if plotted("t") else "":
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def script(name: str):
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parent.parent.parent / "benchmarks" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overhead_attributes_cpu_time(folder, capsys):
    assert script("overhead").main([folder, "--max-concurrency", "2", "--output-len", "32", "--input-len", "16"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    frontends, streams, speed, *rest = row.split()
    assert "CPU us per token" in header and (frontends, streams) == ("1", "2") and float(speed) > 100 and len(rest) == 5
