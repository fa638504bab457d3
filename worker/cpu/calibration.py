"""Compares the time of products in two native libraries, for `build.choose_level`. Needs no torch and runs as a script:

    python calibration.py LIBRARY OTHER

Prints the time of OTHER's products divided by LIBRARY's: the geometric mean over ROWS, then one ratio per number of
rows. Takes some milliseconds of one thread's CPU time.
"""

from __future__ import annotations

import math
import os
import sys
import time
from ctypes import CDLL, POINTER, Structure, addressof, byref, c_char, c_int, c_long, c_void_p

N = K = 1024
ROWS = (1, 8, 32, 128)
ROUNDS = 5


class _Compact(Structure):  # same as native.CompactArgs, whose module imports torch
    _fields_ = [
        ("data", c_void_p),
        ("exceptions", c_void_p),
        ("first", c_void_p),
        ("scales", c_void_p),
        ("k_steps", c_int),
        ("units", c_void_p),
    ]


def _memory(size: int) -> c_void_p:
    """Return a pointer to `size` bytes, aligned to 64 and never freed."""
    room = (c_char * (size + 64))()
    _KEPT.append(room)
    return c_void_p(-(-addressof(room) // 64) * 64)


_KEPT: list = []


def _random(count: int) -> c_void_p:
    """Return a pointer to `count` random bf16 numbers of magnitude 2^-8 to 2."""
    every = int.from_bytes(b"\1\0" * count, "little")
    bits = int.from_bytes(os.urandom(2 * count), "little") & every * 0x83FF | every * 0x3C00
    memory = _memory(2 * count)
    (c_char * (2 * count)).from_address(memory.value)[:] = bits.to_bytes(2 * count, "little")
    return memory


class Products:
    """One library, with the weight packed in its layout."""

    def __init__(self, path: str, weight: c_void_p) -> None:
        self.lib = CDLL(path)
        self.lib.quire_set_threads(c_int(1))
        self.lib.quire_gemm_compact.restype = c_long
        self.lib.quire_gemm_compact.argtypes = [c_void_p, c_long, *[c_void_p] * 5, c_long, c_long, c_int, c_long]
        self.lib.quire_gemm_run_compact.argtypes = [
            c_void_p,
            c_long,
            POINTER(_Compact),
            c_void_p,
            c_void_p,
            *[c_long] * 4,
            c_int,
            c_int,
        ]
        data, exceptions, first, scales, units = (
            _memory(N * K * 3 // 2),
            _memory(N * K // 8),
            _memory(N // 8),
            _memory(N // 8),
            _memory(N * K // 256),
        )
        if self.lib.quire_gemm_compact(weight, K, data, exceptions, first, scales, units, N, K, 0, N * K // 64 - 1) < 0:
            raise ValueError("the weight cannot be compact")
        self.weight = _Compact(data, exceptions, first, scales, K // 32, units)

    def seconds(self, x: c_void_p, rows: int, out: c_void_p) -> float:
        start = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
        self.lib.quire_gemm_run_compact(x, K, byref(self.weight), None, out, N, rows, N, K, 0, 0)
        return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - start


def main(paths: list[str]) -> None:
    weight, x, out = _random(N * K), _random(ROWS[-1] * K), _memory(ROWS[-1] * N * 2)
    libraries = [Products(path, weight) for path in paths]
    ratios = []
    for rows in ROWS:
        times = [[library.seconds(x, rows, out) for library in libraries] for _ in range(ROUNDS + 1)][1:]
        ratios.append(min(narrow for _, narrow in times) / min(wide for wide, _ in times))
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"{mean:.3f}", *(f"{rows}:{ratio:.3f}" for rows, ratio in zip(ROWS, ratios)))


if __name__ == "__main__":
    main(sys.argv[1:3])
