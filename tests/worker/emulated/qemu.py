"""The native kernels of AArch64's levels, cross-compiled and run under qemu-user by a process of their own.

The library that tests load has the kernels' names and hands each call over (aarch64/host.c, aarch64/guest.c). Pointers
mean the same in both processes, since all memory of this one is in a file that the other maps (aarch64/arena.c), which
must be preloaded: `environment()`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from ctypes import c_bool, c_double, c_float
from pathlib import Path
from unittest import mock

from quire.worker.cpu import build, native

FOLDER = Path(__file__).parent / "aarch64"
CXX, CC = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc"
ROOT = "/usr/aarch64-linux-gnu"  # of the cross compiler's libraries
# of qemu 7.2 and later; `max` has everything
CPUS = {"neon": "cortex-a53", "dotprod": "neoverse-n1", "i8mm": "max", "bf16": "max"}


def qemu() -> str | None:
    """Path of qemu-user for AArch64."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def missing() -> str:
    """Why there can be no kernels of AArch64 here, or ""."""
    if qemu() is None:
        return "qemu-user is not installed"
    if shutil.which(CXX) is None or shutil.which("gcc") is None:
        return f"{CXX} (with gcc) is not installed"
    return ""


def environment() -> dict[str, str]:
    """Variables of a process that calls the kernels."""
    arena = _made("libarena.so", ["gcc", "-O2", "-shared", "-fPIC", str(FOLDER / "arena.c"), "-pthread"])
    return {"LD_PRELOAD": str(arena), "PYTHONMALLOC": "malloc"}


def build_library(level: str) -> Path:
    """The library of `level` for this process, compiled into the cache if it is not there ($EMULATED_LIBRARY: around
    that one, compiled otherwise).

    Raises:
        BuildError: the compiler failed (with its output).
    """
    if given := os.environ.get("EMULATED_LIBRARY"):
        kernels = Path(given)
    else:
        # -O1: compiled in a third of the time
        with mock.patch.dict(os.environ, {"CXX": CXX}), mock.patch.object(build, "FLAGS", [*build.FLAGS, "-O1"]):
            kernels = build.build(level, build.cache_folder())
    source, folder = _calls(), build.cache_folder()
    guest_source = _written(folder / "guest-calls.c", source["guest"])
    guest = _made("guest", [CC, "-O1", str(FOLDER / "guest.c"), str(guest_source), f"-I{FOLDER}", "-ldl"])
    host_source = _written(folder / "host-calls.c", source["host"])
    names = {"QEMU": qemu(), "CPU": CPUS[level], "ROOT": ROOT, "GUEST": str(guest), "LIBRARY": str(kernels)}
    options = [f'-D{name}="{value}"' for name, value in names.items()]
    command = ["gcc", "-O1", "-shared", "-fPIC", *options, f"-I{FOLDER}", str(FOLDER / "host.c"), str(host_source)]
    return _made(f"host-{level}.so", command)


def _written(path: Path, text: str) -> Path:
    """A file with `text`, whose name tells it."""
    path = path.with_name(f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
    return path


def _made(name: str, command: list[str]) -> Path:
    """What `command` makes, in the cache: made again if the command or a source has changed."""
    digest = hashlib.sha256("\0".join(command).encode())
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.read_bytes())
    target = build.cache_folder() / f"{digest.hexdigest()[:16]}-{name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True)
        if done.returncode:
            raise build.BuildError(f"{' '.join(command)} failed:\n{done.stderr}")
        os.replace(draft, target)
    return target


def _type(of: type | None) -> str:
    """The C type that stands for a ctypes type: all but floats are whole numbers of 64 bits."""
    return {c_float: "float", c_double: "double", None: "void"}.get(of, "int64_t")


def _calls() -> dict[str, str]:
    """C of the host's functions, and of the guest's dispatcher, from the signatures."""
    host = ['#include "arena.h"', "union Result quire_call(const struct Call* call);"]
    guest = ['#include "arena.h"', "#include <dlfcn.h>"]
    guest += ["union Result quire_dispatch(void* library, const struct Call* call) {", "  union Result r = {0};"]
    guest += ["  switch (call->function) {"]
    for i, (name, (arguments, result)) in enumerate(native._SIGNATURES.items()):
        types = [_type(of) for of in arguments]
        fields = ["real" if of == "float" else "whole" for of in types]
        given = ", ".join(f"{of} a{j}" for j, of in enumerate(types)) or "void"
        sent = ", ".join(f"{{.{field} = a{j}}}" for j, field in enumerate(fields))
        value = "real" if result is c_double else "whole"
        # a result of fewer bits than 64 leaves the others undefined
        returned = "" if result is None else f"return {'(_Bool)(char)' if result is c_bool else ''}r.{value};"
        host.append(
            f"{_type(result)} {name}({given}) {{ const struct Call call = {{{i}, {len(types)}, {{{sent}}}}};"
            f" const union Result r = quire_call(&call); (void)r; {returned} }}"
        )
        passed = ", ".join(f"call->arguments[{j}].{field}" for j, field in enumerate(fields))
        call = f'(({_type(result)} (*)({", ".join(types) or "void"}))dlsym(library, "{name}"))({passed})'
        guest.append(f"    case {i}: {'' if result is None else f'r.{value} = '}{call}; break;")
    guest += ["  }", "  return r;", "}"]
    return {"host": "\n".join(host) + "\n", "guest": "\n".join(guest) + "\n"}
