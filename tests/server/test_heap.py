"""The heap of a server's process."""

import gc
import subprocess
import sys

import pytest

from quire.server import heap

_COUNT_MAPPINGS = """
import ctypes, sys
from quire.server import heap

class Info(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(3)] + [("hblks", ctypes.c_size_t)]
    _fields_ += [(f"after{i}", ctypes.c_size_t) for i in range(6)]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallinfo2.restype = Info
if sys.argv[1] == "apart":
    heap.fix_mmap_threshold()
libc.free(libc.malloc(4 << 20))  # glibc raises its threshold when such a block is freed
before = libc.mallinfo2().hblks
pointers = [libc.malloc(256 << 10) for _ in range(3)]
print(libc.mallinfo2().hblks - before)
heap.trim()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's mallopt")
@pytest.mark.parametrize(("how", "num_mappings"), [("apart", 3), ("as it is", 0)])
def test_the_buffers_of_sockets_are_mappings_of_their_own(how, num_mappings):
    """They are not cut out of the heap, also after a larger block was freed."""
    found = subprocess.run([sys.executable, "-c", _COUNT_MAPPINGS, how], capture_output=True, text=True, check=True)
    assert int(found.stdout) == num_mappings


def test_collections_are_rare_until_a_server_is_ready(monkeypatch):
    frozen, usual = [], gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    try:
        heap.settle()  # a process that imported its packages otherwise
        assert not frozen and gc.get_threshold() == usual
        heap.collect_rarely()
        assert gc.get_threshold()[0] > 10_000
        heap.settle()
        assert frozen and gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*usual)
