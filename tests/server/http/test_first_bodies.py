"""Bodies that are the first of a process, in several threads at once. msgspec builds a type when it first meets it, and
crashes if two threads do so at the same time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from quire.server.http.parse_body import parse
from quire.server.errors import BadRequest
from quire.server.routes import ROUTES
bodies = [route.body for route in ROUTES if isinstance(route.body, type)]
assert len(bodies) > 20
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)

def work(number):
    barrier.wait()
    for cls in bodies[number:] + bodies[:number]:
        try:
            parse(b'{"model": "x", "max_tokens": 3, "input": [], "messages": [{"role": "user", "content": "a"}]}', cls)
        except BadRequest:
            pass

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_first_bodies_in_several_threads():
    for _ in range(3):
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
