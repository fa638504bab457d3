"""The tests of the native kernels once more with each level of AArch64, cross-compiled and run under qemu-user
(tests/worker/emulated/qemu.py), and what decides which level a CPU has.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker.cpu import build
from tests.worker.emulated import qemu

ROOT = Path(__file__).parents[3]
# What levels share is tested once: without instructions of their own, levels differ by the compiler's choice only.
_MODULES = ("kernels", "native_attention", "native_ops", "native_sampler", "experts", "lora_kernels", "segments")
_EVERYTHING = [f"tests/worker/cpu/test_{name}.py" for name in (*_MODULES, "argmax_prefilter", "fixed_point")]
_TESTS = {
    "neon": _EVERYTHING,
    "dotprod": ["tests/worker/cpu/test_kernels.py", "tests/worker/cpu/test_argmax_prefilter.py"],
    "i8mm": ["tests/worker/cpu/test_kernels.py"],
    "bf16": ["tests/worker/cpu/test_kernels.py", "tests/worker/cpu/test_native_attention.py"],
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", build.levels_of("aarch64"))
def test_the_kernels_of_a_level_agree_with_their_twins(level):
    if level not in os.environ.get("ARM_LEVELS", "").split(","):
        pytest.skip("compiles for minutes: ARM_LEVELS=neon,dotprod,i8mm,bf16 names the levels to test")
    if reason := qemu.missing():
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-p", "tests.worker.emulated.everywhere", "-q", "-m", "not slow"]
    done = subprocess.run(
        [*command, *_TESTS[level]], cwd=ROOT, env=os.environ | {"EMULATED_LEVEL": level}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


class _Libc:
    """A C library that tells of a CPU of AArch64."""

    def __init__(self, first: int, second: int, features: set[str] = frozenset()):
        def getauxval(kind: int) -> int:
            return {16: first, 26: second}[kind]

        def sysctlbyname(name: bytes, value, size, new, new_size) -> int:
            known = name.decode().removeprefix("hw.optional.arm.") in features
            value._obj.value = 1 if known else 0
            return 0 if known else -1

        self.getauxval, self.sysctlbyname = getauxval, sysctlbyname


@pytest.mark.parametrize(
    ("first", "second", "levels"),
    [
        (1 << 1, 0, ["neon"]),  # Cortex-A72
        (1 << 1 | 1 << 20, 0, ["dotprod", "neon"]),  # Neoverse N1
        (1 << 1 | 1 << 20, 1 << 13, ["i8mm", "dotprod", "neon"]),
        (1 << 1 | 1 << 20, 1 << 14, ["dotprod", "neon"]),
        (1 << 1 | 1 << 20, 1 << 13 | 1 << 14, ["bf16", "i8mm", "dotprod", "neon"]),  # Neoverse V1
        (1 << 1 | 1 << 20, 0x1A03F986181, ["bf16", "i8mm", "dotprod", "neon"]),  # Apple M4 in a VM: SME without SVE
    ],
)
def test_levels_of_linux(monkeypatch, first, second, levels):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Libc(first, second))
    assert build.cpu_levels() == levels and build.choose_level() == (levels[0], "this CPU's best")


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        (set(), ["neon"]),
        ({"FEAT_DotProd"}, ["dotprod", "neon"]),  # M1
        ({"FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16"}, ["bf16", "i8mm", "dotprod", "neon"]),  # M2
    ],
)
def test_levels_of_macos(monkeypatch, features, levels):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Libc(0, 0, features))
    assert build.cpu_levels() == levels


@pytest.mark.parametrize(("machine", "system"), [("riscv64", "linux"), ("x86_64", "darwin"), ("ppc64le", "linux")])
def test_other_machines_have_no_level(monkeypatch, machine, system):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    assert build.cpu_levels() == [] and build.choose_level() == (None, build.NO_LEVEL)


def test_programs_of_32_bits_have_no_level(monkeypatch):
    """A Raspberry Pi with a kernel of 64 bits and a system of 32, whose bits of AT_HWCAP mean something else."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert build.cpu_levels() == [] and build.choose_level() == (None, build.NO_LEVEL)


def test_a_wheel_is_for_one_kind_of_machine():
    def libraries(*levels: str) -> list[Path]:
        return [Path(f"quire-0123-{level}-4567.so") for level in levels]

    assert build.machine_of(libraries(*build.levels_of("aarch64"))) == "aarch64"
    assert build.machine_of(libraries(*build.levels_of("x86_64"))) == "x86_64"
    with pytest.raises(build.BuildError, match="several kinds"):
        build.machine_of(libraries("avx2", "neon"))
