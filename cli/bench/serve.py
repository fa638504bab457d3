"""Implements `quire bench serve`, which measures a running OpenAI-compatible server, with vLLM's flags and figures."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoints.library.names import same_model
from quire.cli.api_client import explain
from quire.cli.bench.connection import Client, HttpError
from quire.cli.bench.datasets import Encoder, Sample, add_dataset_flags, make_samples, non_negative_int, positive_int
from quire.cli.bench.load import Result, Target, arrival_gaps, run_load, send
from quire.cli.bench.plot import add_plot_flag, plot_sweep, require_plot
from quire.cli.bench.report import METRICS, parse_goodput, render, summarize
from quire.cli.chat import add_tls_flag
from quire.cli.main import Parser
from quire.server.startup.bar import Bar


def parser() -> Parser:
    result = Parser(
        prog="quire bench serve",
        description="Measure a running OpenAI-compatible server: throughput, and latencies as clients see them.",
    )
    server = result.add_argument_group("Server")
    server.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        help="URL of the server, with or without /v1 (default: http://HOST:PORT)",
    )
    server.add_argument("--host", default="127.0.0.1", help="host of the server (default: 127.0.0.1)")
    server.add_argument(
        "--port", type=positive_int, default=8000, metavar="N", help="port of the server (default: 8000)"
    )
    server.add_argument(
        "--endpoint",
        metavar="PATH",
        help="path to measure: /v1/completions or /v1/chat/completions (default: /v1/completions, and for random-mm "
        "/v1/chat/completions)",
    )
    server.add_argument("--model", metavar="NAME", help="model name in requests (default: the first of /v1/models)")
    server.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="tokenizer for exact prompt lengths (default: the served model's, if it is a local folder)",
    )
    server.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_tls_flag(server)
    add_dataset_flags(result)
    load = result.add_argument_group("Load")
    load.add_argument(
        "--request-rate",
        type=positive_float,
        default=float("inf"),
        metavar="R",
        help="requests per second, or inf for all at once (default: inf)",
    )
    load.add_argument(
        "--burstiness",
        type=positive_float,
        default=1.0,
        metavar="B",
        help="distribution of the gaps between requests: 1 is Poisson, less is burstier (default: 1)",
    )
    load.add_argument(
        "--max-concurrency",
        type=concurrencies,
        metavar="N[,N...]",
        help="maximum number of concurrent requests; several numbers make a sweep (default: no limit)",
    )
    load.add_argument(
        "--num-warmups",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="number of requests before the measurement, after the first that tests the server (default: 0)",
    )
    load.add_argument("--ignore-eos", action="store_true", help="generate exactly the requested number of tokens")
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    load.add_argument(
        "--extra-body", type=json.loads, default={}, metavar="JSON", help="fields to add to every request"
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (default: 0)")
    output = result.add_argument_group("Output")
    output.add_argument(
        "--percentile-metrics",
        type=metric_names,
        default=list(METRICS),
        metavar="NAMES",
        help=f"metrics to report, comma-separated: {','.join(METRICS)} (default: all)",
    )
    output.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=[90.0, 99.0],
        metavar="P[,P...]",
        help="percentiles to report (default: 90,99)",
    )
    output.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="also count the requests within these limits: ttft:500 tpot:50 e2el:3000",
    )
    output.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    output.add_argument(
        "--result-dir", default=".", metavar="DIR", help="folder of the JSON file (default: the current one)"
    )
    output.add_argument("--result-filename", metavar="FILE", help="name of the JSON file (default: from time and load)")
    output.add_argument("--save-detailed", action="store_true", help="add the times of every request to the JSON file")
    add_plot_flag(output, "throughput against latency over the sweep")
    output.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    return result


def positive_float(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def concurrencies(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, got {text}")
    return values


def metric_names(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(METRICS)}")
    return names


def main(argv: list[str]) -> int:
    """Run `quire bench serve ARGV...`; returns 1 if a request failed."""
    flags = parser()
    arguments = flags.parse_args(argv)
    try:
        goodput = parse_goodput(arguments.goodput)
        require_plot(arguments.plot)
        runs = asyncio.run(measure(arguments, goodput))
        if arguments.save_result or arguments.result_filename:
            save(arguments, runs)
        if arguments.plot:
            plot_sweep(runs, arguments.plot)
    except (ValueError, OSError, RuntimeError) as error:
        flags.exit(1, f"{flags.prog}: error: {error}\n")
    return 1 if any(run["failed"] for run in runs) else 0


async def measure(arguments: argparse.Namespace, goodput: dict[str, float]) -> list[dict[str, Any]]:
    """Run the load once for each number of --max-concurrency.

    Raises RuntimeError when the server does not answer the first request.
    """
    with_images = arguments.dataset_name == "random-mm"
    url, endpoint = server_and_endpoint(
        arguments.base_url or f"http://{arguments.host}:{arguments.port}",
        arguments.endpoint or ("/v1/chat/completions" if with_images else "/v1/completions"),
    )
    if with_images and not endpoint.endswith("/chat/completions"):
        raise ValueError("--dataset-name random-mm needs --endpoint /v1/chat/completions")
    client = Client(url, arguments.api_key, arguments.insecure)
    with contextlib.closing(client):
        model, root = await find_model(client, arguments.model)
        target = Target(client, endpoint, model, arguments.ignore_eos, arguments.temperature, arguments.extra_body)
        encoder = load_encoder(arguments.tokenizer, root)
        await warm_up(
            target, make_samples(with_prompts(arguments, arguments.num_warmups + 1), encoder, arguments.seed - 1)
        )
        runs = []
        for i, limit in enumerate(arguments.max_concurrency or [None]):
            # new prompts per run: the prefix cache has those of the last run
            samples = make_samples(arguments, encoder, arguments.seed + i)
            runs.append(await measure_once(target, samples, limit, arguments, goodput))
        return runs


def server_and_endpoint(url: str, endpoint: str) -> tuple[str, str]:
    """Return (server, path of the endpoint).

    The URL may end with /v1, as in clients of OpenAI's API; the endpoint may then omit it.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if root != url.rstrip("/") and not endpoint.startswith("/v1/"):
        endpoint = "/v1/" + endpoint.lstrip("/")
    return root, endpoint


async def find_model(client: Client, name: str | None) -> tuple[str, str | None]:
    """Return (model name for requests, its folder or Hub id if the server reports it)."""
    try:
        status, body = await client.fetch("GET", "/v1/models")
    except (OSError, EOFError, HttpError) as error:
        raise RuntimeError(f"no server at {client.host}:{client.port}: {explain(error, client.url)}") from error
    if status != 200:
        raise RuntimeError(f"/v1/models answered {status}: {body.decode(errors='replace')[:300]}")
    models = msgspec.json.decode(body)["data"]
    name = name and same_model(name, [card["id"] for card in models])
    card = next((card for card in models if name in (None, card["id"])), None)
    if card is None:
        raise RuntimeError(f"--model {name}: the server has {', '.join(card['id'] for card in models)}")
    return card["id"], card.get("root")


def load_encoder(tokenizer: str | None, root: str | None) -> Encoder | None:
    """Return the tokenizer for prompt lengths, or None to count prompts in words. The report always has the server's
    token counts.
    """
    folder = tokenizer or root
    if folder is None or not Path(folder).is_dir():
        if tokenizer is not None:
            raise ValueError(f"--tokenizer: no folder {tokenizer}")
        return None
    from quire.server.text.tokenizer import Tokenizer

    return Tokenizer.load(folder)


def with_prompts(arguments: argparse.Namespace, num_prompts: int) -> argparse.Namespace:
    return argparse.Namespace(**(vars(arguments) | {"num_prompts": num_prompts}))


async def warm_up(target: Target, samples: Sequence[Sample]) -> None:
    """Send the first sample as a test, then the others at once. Raises RuntimeError if the first fails."""
    first = await send(target, samples[0])
    if first.error:
        raise RuntimeError(f"the first request failed: {first.error}")
    await asyncio.gather(*(send(target, sample) for sample in samples[1:]))


async def measure_once(
    target: Target, samples: list[Sample], limit: int | None, arguments: argparse.Namespace, goodput: dict[str, float]
) -> dict[str, Any]:
    gaps = arrival_gaps(len(samples), arguments.request_rate, arguments.burstiness, arguments.seed)
    label = f"concurrency {limit}" if limit else f"rate {arguments.request_rate:g}"
    with Bar(total=len(samples), desc=label, disable=arguments.disable_tqdm, unit="req") as bar:
        results, duration = await run_load(target, samples, gaps, limit, lambda result: bar.update())
    figures = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": target.model,
        "endpoint": target.endpoint,
        "dataset_name": arguments.dataset_name,
        "num_prompts": len(samples),
        "request_rate": arguments.request_rate if arguments.request_rate != float("inf") else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": limit,
    }
    figures |= summarize(results, duration, arguments.metric_percentiles, goodput)
    if limit and len(arguments.max_concurrency) > 1:
        print(f"\n{label}")
    print(render(figures, arguments.percentile_metrics), flush=True)
    print_errors(results)
    if arguments.save_detailed:
        figures["requests"] = [msgspec.to_builtins(vars_of(result)) for result in results]
    return figures


def vars_of(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__slots__}


def print_errors(results: Sequence[Result]) -> None:
    errors: dict[str, int] = {}
    for result in results:
        if result.error:
            errors[result.error] = errors.get(result.error, 0) + 1
    for error, count in sorted(errors.items(), key=lambda item: -item[1])[:5]:
        print(f"{count} x {error}")


def save(arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    name = arguments.result_filename or f"quire-{arguments.dataset_name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path = Path(arguments.result_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs[0] if len(runs) == 1 else runs, indent=1) + "\n", encoding="utf-8")
    print(f"figures written to {path}")
