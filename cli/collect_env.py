"""Implements `quire collect-env`, which prints versions and hardware for a bug report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from quire.configs import platforms

PACKAGES = (
    "torch",
    "flash-attn",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "jinja2",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "pyzmq",
    "msgspec",
    "prometheus-client",
    "pyyaml",
    "numpy",
    "openai",
    "aiohttp",
)
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "QUIRE_CONFIG",
)
# torch runs in a child process: a broken installation must not end the report
_TORCH = """
import torch

capability = torch.backends.cpu.get_cpu_capability()
print("threads:", torch.get_num_threads(), "| capability:", capability, "| CUDA build:", torch.version.cuda)
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.1f} GiB, compute capability {p.major}.{p.minor}")
"""


def main() -> int:
    """Print the report and return 0."""
    print("\n".join(f"{name + ':':<20} {value}" for name, value in report()))
    return 0


def report() -> list[tuple[str, str]]:
    """Return (name, value) lines; an unknown value says why it is unknown."""
    lines = [
        ("quire", version("quire")),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
    ]
    lines += [
        ("CPU", cpu_model()),
        (
            "cores",
            f"{len(platforms.usable_cpus())} usable of {os.cpu_count()}",
        ),
    ]
    lines += [
        ("CPU features", " ".join(cpu_features()) or "unknown, or none that quire uses"),
        ("memory", memory()),
    ]
    lines += [
        ("GPU driver", run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]))
    ]
    lines += [("torch sees", line) for line in run([sys.executable, "-c", _TORCH]).splitlines()]
    lines += [(name, version(name)) for name in PACKAGES]
    return lines + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def run(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return f"{command[0]} not found"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within 60 s"
    output = result.stdout if result.returncode == 0 else result.stderr or result.stdout
    return output.strip() or f"{command[0]} printed nothing (exit status {result.returncode})"


def cpu_model() -> str:
    names = proc_values("/proc/cpuinfo", "model name")
    return names[0] if names else platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    flags = proc_values("/proc/cpuinfo", "flags") or proc_values("/proc/cpuinfo", "Features")
    present = set(flags[0].split()) if flags else set()
    return [flag for flag in CPU_FLAGS if flag in present]


def memory() -> str:
    values = [proc_values("/proc/meminfo", key) for key in ("MemTotal", "MemAvailable")]
    if not all(values):
        return "unknown"
    total, available = (int(value[0].split()[0]) / 2**20 for value in values)
    return f"{total:.1f} GiB, {available:.1f} GiB available"


def proc_values(path: str, key: str) -> list[str]:
    """Return the values of the `key: value` lines of a /proc file; [] if there is no such file."""
    if not Path(path).is_file():
        return []
    lines = (line.partition(":") for line in Path(path).read_text(encoding="utf-8").splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]
