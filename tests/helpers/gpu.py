"""Finds out whether there is a GPU, without importing torch."""

from __future__ import annotations

import ctypes
from glob import glob


def has_gpu() -> bool:
    """Return whether there is a GPU, by its device file or, where that is hidden (WSL, some sandboxes), by the driver's
    library, which torch also asks.
    """
    if glob("/dev/nvidia[0-9]*"):
        return True
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
