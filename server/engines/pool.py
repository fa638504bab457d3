"""Several engines behind one server (`--data-parallel-size`): to the routes they are one, which has the methods of
`EngineClient` that they use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.engine.messages import AddRequest, Ready
from quire.server.engines.client import EngineClient, OutputStream

_CHUNK = 32  # tokens of a prompt that are looked up at once
_MAX_PROMPT = 256 * _CHUNK  # tokens from its start: prompts that are so long and differ later share enough
_MAX_CHUNKS = 1 << 16  # remembered of each engine


class EnginePool:
    """One client per engine.

    A request goes to one of them and stays there; when that engine dies, it waits for its successor.
    """

    def __init__(self, clients: list[EngineClient]):
        self.clients = clients
        self.router = PrefixRouter(len(clients))
        self._complete = False

    @property
    def ready(self) -> Ready | None:
        """What all engines together take, once every one has started; None while no engine is up."""
        up = [client.ready for client in self.clients if client.ready is not None]
        self._complete = self._complete or len(up) == len(self.clients)
        if not up or not self._complete:
            return None
        least = min(up, key=lambda ready: ready.worker.max_model_len)
        return msgspec.structs.replace(
            least,
            worker=msgspec.structs.replace(least.worker, max_num_seqs=sum(ready.worker.max_num_seqs for ready in up)),
        )

    @property
    def num_open(self) -> int:
        return sum(client.num_open for client in self.clients)

    @property
    def load(self) -> int:
        return sum(client.load for client in self.clients)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(client.num_waiting_tokens for client in self.clients)

    def generate(self, request: AddRequest) -> OutputStream:
        """To the engine that has most of the prompt cached, unless it is much busier than others.

        The n choices of a request stay together.
        """
        loads = [client.load if client.ready is not None else None for client in self.clients]
        return self.clients[self.router.choose(request.prompt_token_ids, request.cache_salt, loads)].generate(request)

    def forget(self, engine: int) -> None:
        """That engine has died, and its cache with it."""
        self.router.forget(engine)

    async def call(self, method: str, *args: Any, timeout: float = 10.0) -> Any:
        """Call a method of every engine; the answer is the one that all give, or the list of theirs.

        Raises as `EngineClient.call`.
        """
        answers = await asyncio.gather(*(client.call(method, *args, timeout=timeout) for client in self.clients))
        return answers[0] if all(answer == answers[0] for answer in answers) else answers

    async def close(self, reason: str = "the server is shutting down") -> None:
        for client in self.clients:
            await client.close(reason)


class PrefixRouter:
    """Which engine has seen which prompts.

    It is a guess about their caches, which evict on their own; a wrong one costs time only.
    """

    def __init__(self, num_engines: int):
        # hashes of prompts' beginnings, the latest used last
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        self._last_use = [0] * num_engines
        self._num_chosen = 0

    def choose(self, token_ids: list[int], salt: str | None, loads: list[int | None]) -> int:
        """An engine's index. `loads` are their open requests, None for one that is not up; if none is, each counts as
        idle.

        Busy is who has more than half as many again as the least busy one, and eight.
        """
        up = {i: load for i, load in enumerate(loads) if load is not None} or dict.fromkeys(range(len(loads)), 0)
        limit = 1.5 * min(up.values()) + 8
        hashes = list(prefix_hashes(token_ids, salt))
        chosen = max(
            (i for i in up if up[i] <= limit), key=lambda i: (self._num_seen(i, hashes), -up[i], -self._last_use[i])
        )
        self._num_chosen += 1
        self._last_use[chosen] = self._num_chosen
        self._remember(chosen, hashes)
        return chosen

    def forget(self, engine: int) -> None:
        self._seen[engine].clear()

    def _num_seen(self, engine: int, hashes: list[int]) -> int:
        """How many chunks from the start of the prompt on."""
        seen = self._seen[engine]
        return next((count for count, value in enumerate(hashes) if value not in seen), len(hashes))

    def _remember(self, engine: int, hashes: list[int]) -> None:
        seen = self._seen[engine]
        for value in reversed(hashes):  # so that of one prompt the end is forgotten first
            seen[value] = None
            seen.move_to_end(value)
        while len(seen) > _MAX_CHUNKS:
            seen.popitem(last=False)


def prefix_hashes(token_ids: list[int], salt: str | None) -> Iterator[int]:
    """One hash for every full chunk of a prompt's first `_MAX_PROMPT` tokens, of everything up to its end."""
    value = hash(salt)
    for end in range(_CHUNK, min(len(token_ids), _MAX_PROMPT) + 1, _CHUNK):
        value = hash((value, *token_ids[end - _CHUNK : end]))
        yield value
