"""Owners of sockets that the garbage collector finds in a cycle end at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

OWNERS = {
    "engine": "from quire.engine.ipc import ServerSocket\nowner = ServerSocket('ipc://{folder}/engine')",
    "client": (
        "import asyncio\nfrom quire.server.engines.client import EngineClient\n"
        "async def connected():\n"
        "    client = EngineClient()\n    await client.connect('ipc://{folder}/engine')\n    return client\n"
        "owner = asyncio.run(connected())"
    ),
    "publisher": (
        "from quire.configs.kv_events import KVEventsSettings\nfrom quire.engine.kv.publisher import KVEventPublisher\n"
        "owner = KVEventPublisher(KVEventsSettings(endpoint='ipc://{folder}/events'))\n"
        "owner.stop()"
    ),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_cycle_of_an_owner_is_collected(owner, tmp_path):
    made = OWNERS[owner].format(folder=tmp_path)
    script = f"import gc\n{made}\nowner.cycle = owner\ndel owner\ngc.collect()\nprint('over')"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "over\n", run.stderr
