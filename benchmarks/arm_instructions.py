"""`python -m benchmarks.arm_instructions LLAMA_CPP`: instructions of AArch64 that a token takes, beside ggml's.

Counts what qemu-user executes (arm/count.c) for each product of a layer by one row, with quire's kernels
(arm/quire.cpp) and with ggml's CPU backend (arm/ggml.cpp), both cross-compiled for one level; rounding the activations
is part of it. Instructions are not time, but no machine of AArch64 is needed. LLAMA_CPP: llama.cpp's sources
(`vendor/llama.cpp` of llama-cpp-python's source distribution). Needs g++-aarch64-linux-gnu and qemu-user (not -static)
of a version from 6 to 8.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.worker.cpu import build

HERE = Path(__file__).parent / "arm"
CXX, CC, ROOT = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu"
REPEATS = 16
# (outputs, inputs) of the products of a layer, the number of layers, and the head
MODELS = {
    "SmolLM2-135M": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], 30, (49152, 576)),
    "Qwen3-0.6B": ([(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], 28, (151936, 1024)),
}
# kinds of weights here and in ggml; the 256 weights of a block of Q4_K do not divide SmolLM2's rows
KINDS = {"q4_0": "q4_0", "q4_K": "q4_K", "bf16": "bf16", "bf16 in 12 bits": "bf16"}
GGML = ["*.c", "*.cpp"] + [
    f"ggml-cpu/{name}" for name in ("*.c", "*.cpp", "llamafile/*.cpp", "tiled/*.cpp", "arch/arm/*.c", "arch/arm/*.cpp")
]


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return done.stderr


def build_ggml(sources: Path, options: list[str], work: Path) -> Path:
    """Compile ggml's CPU backend and its program; objects that are there are taken again."""
    ggml = sources / "ggml"
    version = (ggml / "src/ggml-version.h.in").read_text()
    (work / "ggml-version.h").write_text(re.sub("@.*@", "0", version))
    folders = [f"-I{folder}" for folder in (ggml / "include", ggml / "src", ggml / "src/ggml-cpu", work)]
    names = ("GGML_USE_CPU", "GGML_USE_CPU_REPACK", "GGML_USE_LLAMAFILE", "_GNU_SOURCE", "NDEBUG")
    flags = [*options, *(f"-D{name}" for name in names), *folders, "-w"]

    def compiled(source: Path) -> Path:
        out = work / f"{str(source.relative_to(ggml / 'src')).replace('/', '_')}.o"
        if not out.exists():
            language = [CC, "-std=c11"] if source.suffix == ".c" else [CXX, "-std=c++17"]
            _run(*language, "-O3", *flags, "-c", source, "-o", out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [path for name in GGML for path in sorted((ggml / "src").glob(name))]))
    _run(CXX, "-O2", "-std=c++17", *folders, HERE / "ggml.cpp", *objects, "-pthread", "-ldl", "-o", work / "ggml")
    return work / "ggml"


def build_quire(level: str, options: list[str], work: Path) -> Path:
    """Compile the kernels of a level and their program."""
    os.environ["CXX"] = CXX
    library = build.build(level, work, report=None)
    _run(CXX, "-O2", "-std=c++17", *options, f"-I{build.SOURCES}", HERE / "quire.cpp", library, "-o", work / "quire")
    return work / "quire"


class Counter:
    """Counts instructions with qemu's plugin."""

    def __init__(self, work: Path) -> None:
        self.plugin, self.libraries = work / "count.so", work
        _run("gcc", "-O2", "-shared", "-fPIC", HERE / "count.c", "-o", self.plugin)

    def product(self, program: Path, kind: str, n: int, k: int) -> float:
        """Return the instructions of one product."""
        return (self._all(program, kind, n, k, REPEATS) - self._all(program, kind, n, k, 0)) / REPEATS

    def _all(self, program: Path, *arguments: object) -> int:
        command = ["qemu-aarch64", "-cpu", "max", "-L", ROOT, "-E", f"LD_LIBRARY_PATH={self.libraries}"]
        said = _run(*command, "-plugin", self.plugin, program, *arguments)
        return int(re.search(r"instructions: (\d+)", said)[1])

    def token(self, program: Path, kind: str, model: str) -> float:
        """Return the instructions of a model's products for one token."""
        products, layers, (n, k) = MODELS[model]
        # the head is counted by a sixteenth of its outputs
        head = self.product(program, kind, n // 16, k) * 16
        return layers * sum(self.product(program, kind, *shape) for shape in products) + head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, metavar="LLAMA_CPP")
    parser.add_argument("--level", choices=build.levels_of("aarch64"), default="i8mm")
    parser.add_argument("--work", type=Path, default=Path("arm-instructions"), help="folder for what is compiled")
    args = parser.parse_args()
    work = args.work.absolute() / args.level
    work.mkdir(parents=True, exist_ok=True)
    (architecture,) = build.LEVELS[args.level]
    counter, ggml = Counter(work), build_ggml(args.sources, [f"-m{architecture}+fp16"], work)
    quire = build_quire(args.level, [f"-m{architecture}"], work)
    print("| model | weights | quire | llama.cpp | ratio |\n|---|---|---|---|---|")
    for model, (products, _, _) in MODELS.items():
        for kind, theirs in KINDS.items():
            if kind == "q4_K" and any(k % 256 for _, k in products):
                continue
            ours, other = counter.token(quire, kind, model), counter.token(ggml, theirs, model)
            print(f"| {model} | {kind} | {ours / 1e6:.0f} M | {other / 1e6:.0f} M | {ours / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
