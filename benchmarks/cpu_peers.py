"""Measures one stream and one prompt of models on this CPU in quire, llama.cpp, ik_llama.cpp and OpenVINO GenAI, one
after the other, in turn: A B C A B C. Keep the machine quiet: the better of the rounds counts.

    python benchmarks/cpu_peers.py MODEL.gguf [MODEL.gguf ..] [--threads 1] [--prompt 512] [--tokens 32] [--rounds 2]
    --llama-bench llama.cpp=PATH --llama-bench ik_llama.cpp=PATH --openvino PYTHON

PATH is a `llama-bench`, PYTHON the interpreter of an environment with `pip install openvino-genai openvino-tokenizers`.
quire runs `step.py`, without its server, as the others do. Prints a Markdown table of tokens per second, and the ratio
of quire to the best other; - where an engine cannot load a model, whose last line of output goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

_TIMEOUT = 900  # seconds of one run
_OPENVINO = """
import json, sys
import openvino_genai
model, threads, prompt, tokens = sys.argv[1], *map(int, sys.argv[2:])
pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
settings = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
def run(count):
    metrics = pipeline.generate(["hello " * count], settings).perf_metrics
    return metrics.get_num_input_tokens(), metrics.get_ttft().mean, metrics.get_tpot().mean
per_word = run(64)[0] / 64
size, first, each = run(int(prompt / per_word))
print(json.dumps([1000 / each, 1000 * size / first]))
"""


class Speed(NamedTuple):
    """Tokens per second."""

    stream: float
    prompt: float


class Load(NamedTuple):
    model: str
    threads: int
    prompt: int
    tokens: int


Engine = Callable[[Load], Speed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--llama-bench", action="append", default=[], metavar="NAME=PATH", type=_named)
    parser.add_argument("--openvino", metavar="PYTHON")
    arguments = parser.parse_args()
    engines: dict[str, Engine] = {"quire": run_quire}
    engines |= {name: partial(run_llama_bench, path) for name, path in arguments.llama_bench}
    if arguments.openvino:
        engines["OpenVINO"] = partial(run_openvino, arguments.openvino)
    print(header(list(engines)))
    for model in arguments.models:
        load = Load(model, arguments.threads, arguments.prompt, arguments.tokens)
        print(row(Path(model).stem, measure(engines, load, arguments.rounds)), flush=True)
    return 0


def _named(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"must be NAME=PATH of a file, got {text}")
    return name, path


def measure(engines: dict[str, Engine], load: Load, rounds: int) -> dict[str, Speed | None]:
    """Return the best of the rounds, by engine; None for one that cannot run the model."""
    best: dict[str, Speed | None] = {}
    for _ in range(rounds):
        for name, engine in engines.items():
            if best.get(name, ()) is None:
                continue
            try:
                speed = engine(load)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name}: {load.model}: {error}", file=sys.stderr)
                best[name] = None
                continue
            before = best.get(name) or speed
            best[name] = Speed(*map(max, before, speed))
    return best


# ---- engines


def run_quire(load: Load) -> Speed:
    step = Path(__file__).with_name("step.py")
    loads = [f"1x{load.tokens}", str(load.prompt)]
    sizes = ["--threads", str(load.threads), "--rounds", "4"]
    text = _run([sys.executable, str(step), load.model, *sizes, "--loads", *loads])
    milliseconds = [float(re.search(rf"^{one}: ([\d.]+) ms", text, re.MULTILINE)[1]) for one in loads]
    return Speed(1000 / milliseconds[0], 1000 * load.prompt / milliseconds[1])


def run_llama_bench(path: str, load: Load) -> Speed:
    sizes = ["-t", str(load.threads), "-p", str(load.prompt), "-n", str(load.tokens), "-r", "2", "-o", "json"]
    text = _run([path, "-m", load.model, *sizes])
    tests = json.loads(text[text.index("[") :])
    rates = {test["n_gen"] > 0: test["avg_ts"] for test in tests}
    return Speed(rates[True], rates[False])


def run_openvino(python: str, load: Load) -> Speed:
    sizes = map(str, (load.threads, load.prompt, load.tokens))
    return Speed(*json.loads(_run([python, "-c", _OPENVINO, load.model, *sizes]).splitlines()[-1]))


def _run(command: list[str]) -> str:
    """Return the output of a command. Raises RuntimeError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise RuntimeError(lines[-1])
    return done.stdout


# ---- table


def header(names: list[str]) -> str:
    columns = [f"{what}: {name}" if name == names[0] else name for what in ("1 stream", "prompt") for name in names]
    half = len(names)
    columns[half:half] = ["ratio"]
    return f"| model | {' | '.join(columns)} | ratio |\n|{'---|' * (2 * half + 3)}"


def row(title: str, speeds: dict[str, Speed | None]) -> str:
    cells = [title]
    for figure in range(2):
        own, *others = [speed and speed[figure] for speed in speeds.values()]
        best = max((other for other in others if other), default=None)
        cells += [f"{rate:.1f}" if rate else "-" for rate in (own, *others)]
        cells.append(f"**{own / best:.2f}**" if own and best else "-")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
