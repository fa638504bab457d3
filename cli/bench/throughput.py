"""Implements `quire bench throughput`, which submits all prompts to the engine at once, without HTTP."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from quire.cli.bench.datasets import add_dataset_flags, make_samples
from quire.cli.bench.plot import add_plot_flag, plot_throughput, require_plot
from quire.cli.main import Parser, add_config_flags, read_settings
from quire.configs.options import find_option
from quire.configs.sources import Settings

ENGINE_SECTIONS = ("model", "cache", "scheduler", "parallel", "device")


def engine_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that apply without HTTP. The environment, a file and the embedded model may set others."""
    return {name: value for name, value in settings.values.items() if find_option(name).section in ENGINE_SECTIONS}


def parse_offline(parser: Parser, argv: list[str], plotted: str) -> tuple[argparse.Namespace, Settings]:
    """Add the common flags of benchmarks without HTTP; return the arguments and the settings of the engine. `plotted`
    describes the figure of `--plot`. Exits if a figure cannot be drawn.
    """
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="sampling temperature (default: 1)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")
    add_plot_flag(parser, plotted)
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    add_config_flags(parser, sections=ENGINE_SECTIONS)
    arguments = parser.parse_args(argv)
    try:
        require_plot(arguments.plot)
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return arguments, read_settings(parser, arguments)


def main(argv: list[str]) -> int:
    """Run `quire bench throughput ARGV...`."""
    parser = Parser(
        prog="quire bench throughput",
        usage="quire bench throughput [MODEL] [flags]",
        description="Generate for all prompts at once, without HTTP, and report tokens per second.",
    )
    add_dataset_flags(parser)
    arguments, settings = parse_offline(parser, argv, "tokens per second")

    from quire.server.offline.llm import LLM
    from quire.server.offline.params import SamplingParams

    try:
        with LLM(**engine_settings(settings)) as llm:
            samples = make_samples(arguments, llm.tokenizer, settings.values.get("seed", 0))
            params = [
                SamplingParams(temperature=arguments.temperature, max_tokens=sample.output_len, ignore_eos=True)
                for sample in samples
            ]
            start = time.perf_counter()
            outputs = llm.generate([sample.prompt for sample in samples], params, use_tqdm=not arguments.disable_tqdm)
            elapsed = time.perf_counter() - start
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    figures = {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (input_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
    }
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total "
        f"tokens/s, {figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {input_tokens}\nTotal num output tokens:  {output_tokens}")
    if arguments.output_json:
        Path(arguments.output_json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_throughput(figures, arguments.plot)
    return 0
