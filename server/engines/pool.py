"""Several engines of one server (`--data-parallel-size`), as one `EngineHandle`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import msgspec

from quire.engine.messages import AddRequest, EngineCalls, Ready
from quire.server.engines.client import Args, EngineClient, OutputStream, T

_CHUNK = 32  # tokens of a prompt per hash
_MAX_PROMPT = 256 * _CHUNK  # leading tokens: prompts that share this many share enough
_MAX_CHUNKS = 1 << 16  # chunks remembered per engine


class EnginePool:
    """One client per engine.

    A request stays with the engine chosen for it; if that engine dies, the request waits for its successor.
    """

    def __init__(self, clients: list[EngineClient]):
        self.clients = clients
        self.router = PrefixRouter(len(clients))
        self._complete = False

    @property
    def ready(self) -> Ready | None:
        """Return the combined capacity of the running engines, once all have started; None while none is ready."""
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
        """Submit to the engine that the client chose, else to the one with the longest cached prefix of the prompt,
        unless it is much busier than the others.

        The n choices of a request go to one engine.
        """
        loads = [None if client.ready is None or client.is_leaving else client.load for client in self.clients]
        kind = (request.cache_salt, *((use.key, use.scale) for use in request.adapters))
        chosen = self.router.choose(request.prompt_token_ids, kind, loads, request.engine)
        return self.clients[chosen].generate(request)

    def forget(self, engine: int) -> None:
        """Forget the prompts of an engine that died: its prefix cache is lost."""
        self.router.forget(engine)

    def set_vocabulary(self, vocabulary: bytes) -> None:
        for client in self.clients:
            client.set_vocabulary(vocabulary)

    async def call(self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0) -> T | list[T]:
        """Call a method of every engine; returns the common answer, or the list of differing answers.

        Raises the same errors as `EngineClient.call`.
        """
        answers = await self.call_each(method, *args, timeout=timeout)
        return answers[0] if all(answer == answers[0] for answer in answers) else answers

    async def call_each(
        self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0
    ) -> list[T]:
        """Return the answer of every engine. Raises as `call`."""
        return await asyncio.gather(*(client.call(method, *args, timeout=timeout) for client in self.clients))

    async def close(self, reason: str = "the server is shutting down") -> None:
        for client in self.clients:
            await client.close(reason)


class PrefixRouter:
    """Estimates which engine has cached which prompts.

    The caches evict independently, so the estimate may be wrong; that only costs time.
    """

    def __init__(self, num_engines: int):
        # hashes of prompt prefixes, most recently used last
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        self._last_use = [0] * num_engines
        self._num_chosen = 0

    def choose(self, token_ids: list[int], salt: Hashable, loads: list[int | None], asked: int | None = None) -> int:
        """Return the index of the engine for a prompt: `asked` if it exists. `loads` are open requests per engine, None
        if it is not ready; if no engine is ready, all count as idle.

        An engine is busy if it has more than 1.5 times the smallest load plus 8.
        """
        up = {i: load for i, load in enumerate(loads) if load is not None} or dict.fromkeys(range(len(loads)), 0)
        limit = 1.5 * min(up.values()) + 8
        hashes = list(prefix_hashes(token_ids, salt))
        allowed = [i for i in up if up[i] <= limit] if asked is None else [asked]
        chosen = max(allowed, key=lambda i: (self._num_seen(i, hashes), -up.get(i, 0), -self._last_use[i]))
        self._num_chosen += 1
        self._last_use[chosen] = self._num_chosen
        self._remember(chosen, hashes)
        return chosen

    def forget(self, engine: int) -> None:
        self._seen[engine].clear()

    def _num_seen(self, engine: int, hashes: list[int]) -> int:
        """Return the number of leading chunks of the prompt that the engine has seen."""
        seen = self._seen[engine]
        return next((count for count, value in enumerate(hashes) if value not in seen), len(hashes))

    def _remember(self, engine: int, hashes: list[int]) -> None:
        seen = self._seen[engine]
        for value in reversed(hashes):  # so that the end of a prompt is evicted first
            seen[value] = None
            seen.move_to_end(value)
        while len(seen) > _MAX_CHUNKS:
            seen.popitem(last=False)


def prefix_hashes(token_ids: list[int], salt: Hashable) -> Iterator[int]:
    """Yield for each full chunk of a prompt's first `_MAX_PROMPT` tokens the hash of all tokens up to its end."""
    value = hash(salt)
    for end in range(_CHUNK, min(len(token_ids), _MAX_PROMPT) + 1, _CHUNK):
        value = hash((value, *token_ids[end - _CHUNK : end]))
        yield value
