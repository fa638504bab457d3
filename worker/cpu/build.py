"""Compile the native CPU kernels (`csrc/`) into one shared library per instruction-set level. Needs no torch and also
runs as a script.

A library's name identifies its inputs: `quire-<hash of the sources and flags>-<level>-<compiler>.so`. It is renamed
into place atomically, and a file lock keeps two processes from building the same library. If a build is killed, the
next one reuses its object files. The libraries depend on libc and libstdc++ only, in versions that `MANYLINUX` has.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
# -falign-functions: without it the speed of a loop depends on the code before it in the library.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-falign-functions=64",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
_AVX2 = ["avx2", "fma", "f16c", "bmi2"]
_AVX512 = [*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"]
_BF16 = [*_AVX512, "avx512bf16"]
# Best level first. The values are compiler options without their -m.
LEVELS = {
    "amx": [*_BF16, "avx512vbmi", "amx-tile", "amx-bf16", "amx-int8"],
    "avx512bf16": _BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "bf16": ["arch=armv8.2-a+dotprod+i8mm+bf16"],
    "i8mm": ["arch=armv8.2-a+dotprod+i8mm"],
    "dotprod": ["arch=armv8.2-a+dotprod"],
    "neon": ["arch=armv8-a"],
}
# The features that a level needs of an AArch64 CPU: bits of AT_HWCAP and AT_HWCAP2 (Linux), names of sysctl (macOS)
_ARM_NEEDS = {
    "bf16": (1 << 20, 1 << 13 | 1 << 14, ("FEAT_DotProd", "FEAT_I8MM", "FEAT_BF16")),
    "i8mm": (1 << 20, 1 << 13, ("FEAT_DotProd", "FEAT_I8MM")),
    "dotprod": (1 << 20, 0, ("FEAT_DotProd",)),
    "neon": (1 << 1, 0, ()),
}
_NAMES_OF_MACHINES = {"x86_64": "x86_64", "AMD64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_MUCH_FASTER = 0.95  # maximum time relative to the level with more instructions; a smaller gain may be noise
# compiler option -> flag in /proc/cpuinfo, if spelled differently
_CPU_FLAGS = {
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
}


# Why there is no level
NO_LEVEL = "the CPU lacks AVX2 or NEON, or the system is neither Linux nor macOS on Arm, or has 32 bits"
LINE_INTERVAL = 5.0  # seconds between lines about a build
Report = Callable[[str, int, int], None]
LINK_FLAGS = ["-shared", "-pthread", "-s"]
# The system whose wheels may hold the libraries, and the newest symbol versions that it has.
MANYLINUX = "manylinux_2_28"
_OLDEST_SYSTEM = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_COMPILER_BYTES = 3 << 28  # that a compiler of the largest file takes
BUSY = 75  # exit status: another process is building this library


_NO_COMPILER = "no C++ compiler (looked for $CXX, g++, clang++)"


class BuildError(Exception):
    """The kernels cannot be compiled on this machine; the message says why."""


def cpu_level() -> str | None:
    """Return the level with the most instructions that this machine's CPU supports, or None if it supports no level (of
    another kind, or too old).
    """
    return next(iter(cpu_levels()), None)


def choose_level(asked: str = "auto") -> tuple[str | None, str]:
    """Return (the level to use, the reason): the requested one; for "auto" the one with the most instructions, or a
    narrower one if calibration finds that faster. The level is None if this CPU supports none.

    Raises:
        ValueError: this CPU does not support the requested level.
    """
    levels = cpu_levels()
    if asked != "auto":
        if asked not in levels:
            raise ValueError(
                f"cpu_level {asked!r} is not supported by this CPU: set --cpu-level to one of auto, {', '.join(levels)}"
            )
        return asked, "as asked"
    if not levels:
        return None, NO_LEVEL
    for narrower in rivals(levels[0]):
        libraries = [find_library(level) for level in (levels[0], narrower)]
        if all(libraries) and (times := _calibrated(*libraries)) is not None:
            ratio = f"{times:.2f} x the time of {levels[0]}'s products, measured"
            return (
                (narrower, ratio) if times < _MUCH_FASTER else (levels[0], f"this CPU's best: {narrower} takes {ratio}")
            )
    return levels[0], "this CPU's best"


def rivals(level: str) -> list[str]:
    """Return the narrower levels that may be faster than `level`, because CPUs lower their clock for wide registers.

    AMX has no rival.
    """
    return [narrower for narrower in cpu_levels() if narrower == "avx2" and level in ("avx512bf16", "avx512")]


def _calibrated(wide: Path, narrow: Path) -> float | None:
    """Return the time of products with library `narrow` divided by that with `wide`, or None if the measurement failed.

    Measured once per CPU model and pair of libraries, in a separate process, and cached.
    """
    digest = hashlib.sha256(f"{wide.name} {narrow.name} {_cpuinfo('model name')}".encode()).hexdigest()[:16]
    result = cache_folder() / f"quire-{digest}.calibration"
    if not result.exists():
        calibration = subprocess.run(
            [sys.executable, Path(__file__).with_name("calibration.py"), wide, narrow], capture_output=True, text=True
        )
        if calibration.returncode:
            return None
        with contextlib.suppress(OSError):  # the cache is not writable: the next start measures again
            result.parent.mkdir(parents=True, exist_ok=True)
            draft = result.with_name(f"{result.name}.{os.getpid()}")
            draft.write_text(calibration.stdout)
            os.replace(draft, result)
        return float(calibration.stdout.split()[0])
    return float(result.read_text().split()[0])


def machine() -> str | None:
    """Return the kind of this machine, as in names of wheels, or None if there are no levels for it (or for its
    system).
    """
    if sys.maxsize < 2**32:  # 32-bit programs on a kernel of 64 bits, as on a Raspberry Pi
        return None
    found = _NAMES_OF_MACHINES.get(platform.machine())
    systems = {"x86_64": ("linux",), "aarch64": ("linux", "darwin")}
    return found if sys.platform in systems.get(found, ()) else None


def target_machine() -> str | None:
    """Return the kind of machine that the compiler compiles for, or None without a compiler or if there are no levels.
    A compiler that does not report its target is assumed to compile for this machine.
    """
    if (cxx := compiler()) is None:
        return None
    target = subprocess.run([cxx, "-dumpmachine"], capture_output=True, text=True).stdout
    if not target.strip():
        return machine()
    return _NAMES_OF_MACHINES.get(target.split("-")[0].strip())


def levels_of(kind: str | None) -> list[str]:
    """Return the levels of a kind of machine, best first."""
    return [level for level in LEVELS if kind == ("aarch64" if level in _ARM_NEEDS else "x86_64")]


def cpu_levels() -> list[str]:
    """Return the levels that this machine's CPU supports, the one with the most instructions first."""
    if machine() == "aarch64":
        return _arm_levels()
    if machine() is None:
        return []
    flags = set(_cpuinfo("flags").split())
    return [
        level
        for level in levels_of("x86_64")
        if all(_CPU_FLAGS.get(need, need) in flags for need in LEVELS[level]) and (level != "amx" or _amx_permitted())
    ]


def _arm_levels() -> list[str]:
    """Return the levels that this machine's CPU, of AArch64, supports."""
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":

        def has(feature: str) -> bool:
            value, size = ctypes.c_int(0), ctypes.c_size_t(4)
            name = f"hw.optional.arm.{feature}".encode()
            found = libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
            return found == 0 and value.value == 1

        return [level for level, (_, _, features) in _ARM_NEEDS.items() if all(map(has, features))]
    libc.getauxval.argtypes, libc.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    first, second = libc.getauxval(16), libc.getauxval(26)  # AT_HWCAP, AT_HWCAP2
    return [level for level, (needs, more, _) in _ARM_NEEDS.items() if first & needs == needs and second & more == more]


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(key)), "")
    except FileNotFoundError:  # no /proc
        return ""


@cache
def _amx_permitted() -> bool:
    """Return whether Linux permits this process to use the tile registers. Same request as `amx_permitted` in
    csrc/amx.h.
    """
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0  # SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA


def compiler() -> str | None:
    """Return the path of the C++ compiler: $CXX, else g++, else clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def library_prefix(level: str) -> str:
    """Return the common prefix of the names of all libraries built from these sources for `level`, by any compiler."""
    digest = hashlib.sha256(" ".join(FLAGS + LINK_FLAGS + LEVELS[level]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"quire-{digest.hexdigest()[:16]}-{level}-"


def library_name(level: str, cxx: str) -> str:
    """Return the name of the library that `cxx` builds for `level`.

    The name identifies the compiler by its path, size and mtime, which is faster than running it for its version.
    """
    path = os.path.realpath(cxx)
    stat = os.stat(path)
    digest = hashlib.sha256(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    return f"{library_prefix(level)}{digest[:8]}.so"


def cache_folder() -> Path:
    """Return $QUIRE_CACHE/kernels, by default ~/.cache/quire/kernels."""
    root = os.environ.get("QUIRE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quire"
    )
    return Path(root) / "kernels"


def prebuilt_folder() -> Path:
    """Return the folder for libraries that a wheel or an image ships."""
    return Path(__file__).parent / "prebuilt"


def find_library(level: str) -> Path | None:
    """Return a library for `level` that is ready to load, or None: a prebuilt one, else the cached one of this
    machine's compiler (without a compiler: a cached one of any).
    """
    cxx = compiler()
    cached = library_name(level, cxx) if cxx else f"{library_prefix(level)}*.so"
    for folder, pattern in ((prebuilt_folder(), f"{library_prefix(level)}*.so"), (cache_folder(), cached)):
        if found := sorted(folder.glob(pattern)):
            return found[0]
    return None


class Busy(Exception):
    """Another process is building this library."""


def build(level: str, folder: Path, wait: bool = True, report: Report | None = None) -> Path:
    """Compile the library for `level` into `folder` unless it exists, and return its path. `wait` for another process
    that is building it. `report` receives the level, how many files are compiled and how many there are.

    Raises:
        BuildError: there is no compiler, or it failed; the message contains its output.
        Busy: without `wait`.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError(_NO_COMPILER)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(level, cxx)
    with open(_lock_of(target), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"another process is building {target.name}") from None
        if not target.exists():
            work = _work_of(target)
            work.mkdir(exist_ok=True)
            _compile(cxx, level, work, target, report)
            shutil.rmtree(work)
    return target


def is_being_built(target: Path) -> bool:
    """Return whether a process is building the library `target` now."""
    try:
        with open(_lock_of(target), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no such file or folder
        return False
    return False


def progress(target: Path) -> tuple[int, int]:
    """Return (files compiled, all files) of a running build of `target`."""
    num_files = len(list(SOURCES.glob("*.cpp")))
    return (num_files if target.exists() else len(list(_work_of(target).glob("*.o")))), num_files


def _lock_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.lock")


def _work_of(target: Path) -> Path:
    return target.with_name(f".build-{target.name}")


def machine_of(libraries: list[Path]) -> str:
    """Return the kind of machine that libraries are for; those of a wheel may be for one kind only."""
    kinds = {"aarch64" if library.name.split("-")[2] in _ARM_NEEDS else "x86_64" for library in libraries}
    if len(kinds) != 1:
        raise BuildError(f"the libraries are for several kinds of machines: {', '.join(sorted(kinds))}")
    return kinds.pop()


def newer_symbols(library: Path) -> list[str]:
    """Return the symbol versions that `library` needs and `MANYLINUX` lacks."""
    versions = set(re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d[\d.]*)(?=\0)", library.read_bytes()))
    wanted = {(name.decode(), version.decode()) for name, version in versions}
    return [
        f"{name}_{version}"
        for name, version in sorted(wanted)
        if tuple(map(int, version.split("."))) > _OLDEST_SYSTEM[name]
    ]


def _compile(cxx: str, level: str, work: Path, target: Path, report: Report | None) -> None:
    """Compile and link `target` from object files in `work`, reusing those that a killed build left there."""
    options = FLAGS + [f"-m{name}" for name in LEVELS[level]]
    environment = os.environ | {"TMPDIR": str(work)}  # a killed compiler leaves its temporary files

    def make(out: Path, *arguments: str) -> None:
        if out.exists():
            return
        draft = work / f"{out.name}.new"
        command = [cxx, *arguments, "-o", str(draft)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        if result.returncode:
            raise BuildError(f"{' '.join(command)} failed:\n{result.stdout}")
        os.replace(draft, out)

    objects = {work / f"{source.stem}.o": source for source in sorted(SOURCES.glob("*.cpp"))}
    if report is not None:
        report(level, 0, len(objects))
    with ThreadPoolExecutor(_num_compilers()) as pool:
        made = [pool.submit(make, out, *options, "-c", str(objects[out])) for out in objects]
        for num_done, future in enumerate(as_completed(made), start=1):
            if future.exception() is not None:
                pool.shutdown(cancel_futures=True)
                raise future.exception()
            if report is not None:
                report(level, num_done, len(made))
    make(target, *LINK_FLAGS, *map(str, objects))


def _num_compilers(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many compilers may run at once: one per core, since more would slow down the server that waits for
    them, and as many as the memory holds. `cgroup` has a container's limits.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    v1 = cgroup / "cpu"
    words = _words(cgroup / "cpu.max") or [*_words(v1 / "cpu.cfs_quota_us"), *_words(v1 / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdigit():  # else "max", or -1
        cores = min(cores, int(words[0]) // int(words[1]))
    for limit in (*_words(cgroup / "memory.max"), *_words(cgroup / "memory/memory.limit_in_bytes")):
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    return max(1, min(cores, memory // _COMPILER_BYTES))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # another version of control groups, or another system
        return []


def build_kernels(
    folder: Path | None = None, levels: list[str] | None = None, wait: bool = True, report: Report | None = None
) -> list[Path]:
    """Build the libraries of `levels` (default: all, this CPU's first) into `folder` (default: `prebuilt_folder()`),
    for a wheel or an image. Returns their paths.

    Raises:
        BuildError: there is no compiler, or it failed.
        Busy: without `wait`, another process is building one.
        ValueError: a level is unknown.
    """
    for level in levels or []:
        if level not in LEVELS:
            raise ValueError(f"unknown instruction-set level {level!r}; there are {', '.join(LEVELS)}")
    if not levels:
        levels = sorted(levels_of(target_machine()), key=lambda level: level != cpu_level())
    if not levels:
        raise BuildError(_NO_COMPILER if compiler() is None else "the C++ compiler's machine has no kernels")
    return [build(level, folder or prebuilt_folder(), wait, report) for level in levels]


class _Lines:
    """Reports of a build: a bar on a terminal, a line every 5 seconds elsewhere."""

    def __init__(self) -> None:
        self.last_report = time.monotonic()

    def __call__(self, level: str, num_done: int, num_files: int) -> None:
        line = f"compiling kernels for {level}: {num_done} of {num_files} files"
        if sys.stderr.isatty():
            filled = 30 * num_done // num_files
            end = "\n" if num_done == num_files else ""
            print(f"\r{line} |{'#' * filled:<30}|", end=end, file=sys.stderr, flush=True)
        elif num_done in (0, num_files) or time.monotonic() - self.last_report >= LINE_INTERVAL:
            self.last_report = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def _build_and_calibrate(level: str, folder: Path | None) -> None:
    """Build `level`, calibrate, and exit. Runs in a forked child that has no reader for its output."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        with contextlib.suppress(Busy):
            build(level, folder or prebuilt_folder(), wait=False)
        choose_level()
    finally:
        os._exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="quire build-kernels",
        allow_abbrev=False,
        description="Compile the native CPU kernels into the installed package, so that no start needs a compiler. "
        "Without this the first start on a machine compiles those it needs, in the background, into the cache.",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the libraries (default: worker/cpu/prebuilt of the package, where a start looks first)",
    )
    parser.add_argument(
        "--level",
        action="append",
        choices=list(LEVELS),
        help="instruction-set level, may be repeated (default: all of the machine that the compiler compiles for)",
    )
    # A level to build in a forked child after the others, so that the caller need not wait for it.
    parser.add_argument("--then", choices=list(LEVELS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help=f"exit with status {BUSY} if another process is building the same library",
    )
    args = parser.parse_args(argv)
    # at the server's own priority: each second of the slow path costs more than the build
    try:
        report = None if args.no_wait else _Lines()
        for path in build_kernels(args.into, args.level, wait=not args.no_wait, report=report):
            print(path, flush=True)
        if args.then and os.fork() == 0:
            _build_and_calibrate(args.then, args.into)
    except Busy as busy:
        print(busy, file=sys.stderr)
        return BUSY
    except (BuildError, OSError) as error:
        print(f"quire build-kernels: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
