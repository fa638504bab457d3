"""The native kernels of the instruction-set levels that this CPU lacks, computed with AVX2 (avx512.h): the same code
but for its instructions, and slow.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from unittest import mock

from quire.worker.cpu import build

HEADER = Path(__file__).parent / "avx512.h"
_MACROS = {"amx": ["-DEMULATE_BF16", "-DEMULATE_AMX"], "avx512bf16": ["-DEMULATE_BF16"], "avx512": []}
# as fast as with -O3, and compiled sooner; SRA of GCC 12 fails with an internal error on vectors wider than the
# machine's
_FLAGS = ["-O1", "-fno-tree-sra", "-Wno-psabi"]
_ASSEMBLY = {  # of csrc that is not a macro of its own
    'asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));': "sum = emulated_dpwssd_epi32(sum, a, b);",
    'asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(x));': "sum = emulated_dpbusd_epi32(sum, bytes, x);",
    'asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");': "emulated_ldtilecfg(&config);",
    'asm volatile("tilerelease" ::);': "emulated_tilerelease();",
}


def build_library(level: str) -> Path:
    """The library of `level`, compiled into the cache if it is not there.

    Raises:
        BuildError: the compiler failed (with its output).
    """
    with tempfile.TemporaryDirectory() as folder:
        for path in build.SOURCES.iterdir():
            (Path(folder) / path.name).write_text(_emulated(path))
        (Path(folder) / HEADER.name).write_text(HEADER.read_text())
        with mock.patch.multiple(
            build,
            SOURCES=Path(folder),
            FLAGS=[*build.FLAGS, *_FLAGS, *_MACROS[level]],
            LEVELS={level: build.LEVELS["avx2"]},
        ):
            return build.build(level, build.cache_folder())


def _emulated(path: Path) -> str:
    text = path.read_text().replace("_mm512_", "emulated_")
    for assembly, call in _ASSEMBLY.items():
        text = text.replace(assembly, call)
    if path.name == "amx.h":
        text = re.sub(r"^#define TILE_(.*\\\n)*.*\n", "", text, flags=re.MULTILINE)
    return f'#include "{HEADER.name}"\n{text}' if path.suffix == ".cpp" else text
