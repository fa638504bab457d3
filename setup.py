"""Compiles the native CPU kernels of every instruction-set level into a wheel, so that installing it needs no compiler.

Everything else is in pyproject.toml. The levels are those of the machine that $CXX compiles for. Without a compiler,
and on machines without levels, the wheel holds the libraries that `quire build-kernels --into worker/cpu/prebuilt` left
in the sources, or none.
"""

from __future__ import annotations

import compileall
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

logger = logging.getLogger(__name__)
FOLDER = Path("worker", "cpu")


def _build_script() -> ModuleType:
    # a source distribution has the folders inside `quire` only, where a checkout has links
    script = Path(__file__).parent / "quire" / FOLDER / "build.py"
    spec = importlib.util.spec_from_file_location("quire_build_kernels", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write_byte_code() -> None:
    """Compile the modules in their place. Where PYTHONDONTWRITEBYTECODE is set, each start would compile them, which
    takes as long as importing them.
    """
    package = Path(__file__).parent / "quire"
    for folder in sorted({path.resolve() for path in [package, *package.iterdir()] if path.is_dir()}):
        compileall.compile_dir(folder, quiet=1)


class BuildWithKernels(build_py):
    """Adds the libraries to the package. An editable installation compiles its own at the first start."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            _write_byte_code()
        else:
            self._add_kernels(Path(self.build_lib, "quire", FOLDER, "prebuilt"))

    def _add_kernels(self, folder: Path) -> None:
        kernels = _build_script()
        levels = kernels.levels_of(kernels.target_machine() or kernels.machine())
        missing = [level for level in levels if not list(folder.glob(f"{kernels.library_prefix(level)}*.so"))]
        if not levels or (missing and kernels.compiler() is None):
            logger.warning("no C++ compiler for x86-64 or AArch64: the wheel has no native CPU kernels (%s)", missing)
            return
        for level in missing:
            logger.info("compiling the native CPU kernels (%s)", level)
            try:
                kernels.build(level, folder)
            except kernels.BuildError as error:  # an older compiler lacks the newest instructions
                logger.warning("the native CPU kernels (%s) are not in the wheel: %s", level, error)
        for lock in folder.glob("*.lock"):
            lock.unlink()


class WheelWithKernels(bdist_wheel):
    """Names the oldest system that the wheel's libraries run on."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        libraries = list(Path(self.bdist_dir).rglob("prebuilt/*.so")) if self.bdist_dir else []
        if not libraries:
            return tag
        kernels = _build_script()
        newer = {symbol for library in libraries for symbol in kernels.newer_symbols(library)}
        if newer:
            logger.warning("the kernels want %s: the wheel is for this system only", ", ".join(sorted(newer)))
        kind = kernels.machine_of(libraries)
        return "py3", "none", f"{'linux' if newer else kernels.MANYLINUX}_{kind}"


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
