"""Compiles every Triton kernel for GPUs that this machine may lack, and reports the resources that each kernel takes.
Runs the functions that launch them and compiles instead of launching.

python -m tools.compile_kernels [--capability 80 --capability 90 --capability 100] [--part experts] [--first]
python -m tools.compile_kernels --cache DIR [--capability 90]     compiles for servers with TRITON_CACHE_DIR=DIR

Needs Triton and the ptxas that it brings; not with TRITON_INTERPRET set. Prints a line per variant of a kernel:
registers of a thread, bytes that do not fit into registers (spills), shared memory of a block. Exits with 1 if a kernel
spills or takes more shared memory than the GPU has. Results are kept in Triton's cache, by the sources of a kernel, its
variant and the compiler. `--first` compiles the first variant of each kernel only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.worker.cuda.kernels import limits
from tools.kernel_launches import PARTS

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}


_LAUNCH = JITFunction.run


@dataclass(frozen=True, slots=True)
class Compiled:
    """Records the resources of a kernel's variant: registers and spilled bytes per thread, bytes of shared memory."""

    name: str
    variant: str
    warps: int
    registers: int
    spills: int
    shared: int
    seconds: float

    def line(self) -> str:
        return (
            f"{self.name}: {self.registers} registers, {self.spills} bytes spilled, {self.shared} bytes shared, "
            f"{self.warps} warps, {self.seconds:.1f} s; {self.variant}"
        )

    def faults(self, capability: int) -> list[str]:
        """Return reasons why the variant is slow or cannot run."""
        limit = limits.KNOWN[capability].shared
        faults = [f"spills {self.spills} bytes"] if self.spills else []
        return faults + ([f"takes {self.shared} of {limit} bytes of shared memory"] if self.shared > limit else [])


def compile_launches(capability: int, found: Callable[[Compiled], None], first_only: bool = False) -> None:
    """Let every later launch in this process compile its kernel for `capability` with the given arguments, without
    running it, and pass the result to `found`; equal variants once, with `first_only` one variant of each kernel.
    """
    seen: set[tuple | str] = set()
    target = GPUTarget("cuda", capability, 32)

    def run(kernel: JITFunction, *args, grid, warmup, **kwargs):
        values = dict(zip(kernel.arg_names, args)) | kwargs
        signature, constants, attributes = _specialized(kernel, values)
        options = {name: value for name, value in values.items() if name not in kernel.arg_names}
        key = kernel.__name__, str(signature), str(constants), str(attributes), str(options)
        if key in seen or (first_only and kernel.__name__ in seen):
            return
        seen.update((key, kernel.__name__))
        cached = _Cached(kernel, capability, key)
        if (known := cached.read()) is not None:
            return found(known)
        start, log = time.perf_counter(), io.StringIO()
        with contextlib.redirect_stdout(log):
            source = ASTSource(kernel, signature, constants, attributes)
            binary = triton.compile(source, target=target, options=options)
        registers, spills = read_log(log.getvalue())
        variant = ", ".join(f"{name}={constants[name]}" for name in kernel.arg_names if name in constants)
        seconds = time.perf_counter() - start
        metadata = binary.metadata
        result = Compiled(kernel.__name__, variant, metadata.num_warps, registers, spills, metadata.shared, seconds)
        cached.write(result)
        found(result)

    _compile_by(run, capability)
    knobs.compilation.always_compile = True  # a kernel from the cache has no log
    knobs.nvidia.dump_ptxas_log = True


def fill_cache(folder: str, capability: int, found: Callable[[str], None]) -> None:
    """Let every later launch in this process compile its kernel for `capability` into Triton's cache in `folder`, where
    a server with TRITON_CACHE_DIR set to it finds the same variant. Its name is passed to `found`.
    """

    def run(kernel: JITFunction, *args, grid, warmup, **kwargs):
        compiled = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        if compiled is not None and id(compiled) not in seen:
            seen[id(compiled)] = compiled
            found(kernel.__name__)

    seen: dict[int, object] = {}
    launch = _LAUNCH
    _compile_by(run, capability)
    knobs.cache.dir = folder
    driver.set_active(_Absent(capability))


class _Absent:
    """Stands in for Triton's driver where there is no GPU, as far as compiling needs one."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels remember their variants by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_by(run: Callable[..., None], capability: int) -> None:
    """Let launches call `run` and see the limits of a GPU of `capability`."""
    limits.for_device = lambda device: limits.KNOWN[capability]
    JITFunction.run = run


class _Cached:
    """Keeps the result of a variant in a file of Triton's cache, named by a hash of all inputs."""

    def __init__(self, kernel: JITFunction, capability: int, key: tuple) -> None:
        parts = kernel.cache_key, triton.__version__, capability, *key
        name = hashlib.sha256(repr(parts).encode()).hexdigest()
        self._path = Path(knobs.cache.dir) / "quire-compiled" / f"{name}.json"

    def read(self) -> Compiled | None:
        if not self._path.exists():
            return None
        return Compiled(**json.loads(self._path.read_text()))

    def write(self, result: Compiled) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(result)))
        partial.replace(self._path)


def _specialized(kernel: JITFunction, values: dict) -> tuple[dict, dict, dict]:
    """Return (signature, constants, attributes) of a launch with the arguments `values`, as Triton specializes it."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and free):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and free):
            attributes[i,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def read_log(log: str) -> tuple[int, int]:
    """Return (registers per thread, bytes spilled) of `ptxas -v`. Raises ValueError if the log does not have them."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise ValueError(f"not a log of ptxas -v: {log!r}")
    return int(registers[1]), max(map(int, spills.groups()))


def _fill(folder: str, capabilities: Iterable[int], parts: Iterable[Callable[[], None]]) -> int:
    for capability in capabilities:
        names: list[str] = []
        fill_cache(folder, capability, names.append)
        for part in parts:
            part()
        print(f"sm_{capability}: {len(names)} variants of {len(set(names))} kernels in {folder}", flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", choices=limits.KNOWN, help="default: all of them")
    parts = {part.__name__: part for part in PARTS}
    parser.add_argument("--part", action="append", choices=parts, help="default: all of them")
    parser.add_argument("--first", action="store_true", help="the first variant of each kernel only")
    parser.add_argument("--cache", metavar="DIR", help="fill Triton's cache in DIR instead of reporting")
    arguments = parser.parse_args(argv)
    if arguments.cache:
        return _fill(arguments.cache, arguments.capability or limits.KNOWN, [parts[n] for n in arguments.part or parts])
    faults: list[str] = []
    for capability in arguments.capability or limits.KNOWN:

        def found(compiled: Compiled, capability: int = capability) -> None:
            print(f"sm_{capability} {compiled.line()}", flush=True)
            faults.extend(f"sm_{capability} {compiled.line()}: {fault}" for fault in compiled.faults(capability))

        compile_launches(capability, found, arguments.first)
        for name in arguments.part or parts:
            parts[name]()
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
