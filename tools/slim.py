"""Removes files that no server reads from a virtual environment: `python tools/slim.py` with its own interpreter, in
the build of an image.

Prints each kind of removed files and its size. Sources that a server imports stay. Byte code stays for the modules that
a start imports, with quire's own models or with transformers'.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

# torch refuses to be imported without torch_shm_manager
PATTERNS = {
    "torch's tests": (
        "torch/test",
        "torch/lib/*test*.so",
        "torch/lib/libbackend_with_compiler.so",
        *(f"torch/testing/_internal/{name}" for name in ("common_methods_invocations.py", "generated", "opinfo")),
    ),
    "torch's headers and programs": ("torch/include", "torch/share", "torch/bin/[!t]*", "torch/bin/t[!o]*"),
    "tests of other packages": tuple(f"{name}/**/tests" for name in ("numpy", "sympy", "mpmath")),
    "templates of transformers' models": ("transformers/models/*/modular_*.py",),
    "types of compiled modules, for editors": ("**/*.pyi",),
    "command lines of other packages": tuple(
        pattern
        for name in ("markdown_it", "mdurl", "pygments", "rich", "shellingham", "typer")
        for pattern in (name, f"{name}-*.dist-info", f"{name}_py-*.dist-info")
    ),
    "graphs, for training compiled models": ("networkx", "networkx-*.dist-info"),
    "setuptools": (
        "setuptools",
        "setuptools-*.dist-info",
        "pkg_resources",
        "_distutils_hack",
        "distutils-precedence.pth",
    ),
}
COMPILED = ("torch", "transformers", "sympy", "mpmath", "pip")  # packages of which a start imports little
_IMPORTED = """
import json, sys
from quire.engine.executor.base import import_executor
import_executor("uniproc")
import quire.server.app, quire.worker.models.fallback
specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
print(json.dumps([spec.cached for spec in specs if isinstance(getattr(spec, "cached", None), str)]))
"""


def found(site: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from site.glob(pattern)


def unused_byte_code(site: Path, used: Iterable[str]) -> Iterator[Path]:
    kept = {Path(path) for path in used}
    for package in COMPILED:
        yield from (path for path in site.glob(f"{package}/**/*.pyc") if path not in kept)


def size_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if not file.is_dir())


def remove(paths: Iterable[Path]) -> int:
    """Remove files and folders; returns their bytes."""
    total = 0
    for path in list(paths):
        if path.exists():  # not in a folder that is removed already
            total += size_of(path)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return total


def imported() -> list[str]:
    """Return the byte code files that a start reads, after compiling missing ones."""
    command = [sys.executable, "-W", "ignore", "-c", _IMPORTED]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def slim(site: Path, used: Iterable[str]) -> dict[str, int]:
    """Remove all unused files from the folder of packages. Returns the bytes by kind."""
    removed = {kind: remove(found(site, patterns)) for kind, patterns in PATTERNS.items()}
    return removed | {"byte code that no start reads": remove(unused_byte_code(site, used))}


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    for kind, size in slim(site, imported()).items():
        print(f"removed {size / 1e6:6.1f} MB: {kind}")


if __name__ == "__main__":
    main()
