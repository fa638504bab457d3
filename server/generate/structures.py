"""Compiles structures to grammars, off the event loop: the cache, the fair queue, and the engine's vocabulary."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.engine.messages import Vocabulary
from quire.server.errors import ApiError, BadRequest, Unavailable
from quire.server.structured.process import CompileProcess, ProcessDied
from quire.server.structured.structure import MAX_BYTES, Structure, encoded
from quire.server.turns.fair_queue import Turns

if TYPE_CHECKING:
    from quire.configs.config import Config
    from quire.server.engines.handle import EngineHandle
    from quire.server.model_info import ModelInfo
    from quire.server.request.generation_request import GenerationRequest
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.structured")

NUM_PROCESSES = 3
PER_TENANT = 2  # processes that work for one tenant at once: the others' structures find a free one
MAX_WAITING = 256  # structures of one tenant that wait for a process
CACHE_BYTES = 2**24  # for structures and their grammars
RETRY_AFTER = 10  # seconds, for the client
WARM_AFTER = 5.0  # seconds from the start of a server, which has other work until then
_ANY_LETTER = Structure(kind="regex", value="[a-z]", param="")


class Served(Protocol):
    """The parts of the server that structures need."""

    config: Config
    model: ModelInfo | None
    tokenizer: Tokenizer | None
    client: EngineHandle | None
    structures: Structures


async def constrain(requests: Sequence[GenerationRequest], state: Served, tenant: str = "") -> None:
    """Compile the structures of `requests` into their sampling parameters, in the tenant's turn, before they are sent.
    A structure is dropped when no request waits for it any more.

    Raises BadRequest naming the field and the mistake, Unavailable if too many structures wait or one could not be
    compiled within its limits.
    """
    for request in requests:
        if (structure := request.structure) is not None:
            if state.config.server.additional_properties:
                structure = msgspec.structs.replace(structure, additional_properties=True)
            grammar = await state.structures.grammar(structure, state, tenant)
            after = structure.after if isinstance(structure.after, list) else None
            request.sampling = msgspec.structs.replace(request.sampling, grammar=grammar, grammar_after=after)


class _Refusal(msgspec.Struct):
    """The reason why a structure has no grammar."""

    reason: str


class _Compilation:
    """A structure that is being compiled, and how many requests wait for it."""

    def __init__(self, task: asyncio.Task[str | _Refusal]):
        self.task, self.num_waiting = task, 0


class Structures:
    """A cache of grammars on one event loop. Starts no process before the first structure or `warm`."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str | _Refusal] = OrderedDict()  # by structure, most recently used last
        self._num_bytes = 0
        self._compiling: dict[tuple[str, bytes], _Compilation] = {}  # by tenant: each waits in its own queue only
        self._turns = Turns(NUM_PROCESSES, per_tenant=PER_TENANT, max_waiting=MAX_WAITING, what="grammars")
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[CompileProcess] = []
        self._lock = threading.Lock()
        self._specials: bytes | None = None  # the first frame of a process
        self._preparing: asyncio.Task[None] | None = None
        self._warming: asyncio.Task[None] | None = None

    def warm(self, state: Served) -> None:
        """Start a process after `WARM_AFTER` seconds, and let the engines read the vocabulary, so that a server's first
        structure does not wait for them.
        """
        if self._warming is None and state.model.eos_token_ids:
            self._warming = asyncio.ensure_future(self._warm(state))

    async def _warm(self, state: Served) -> None:
        await asyncio.sleep(WARM_AFTER)
        try:
            await self.grammar(_ANY_LETTER, state)
        except ApiError as error:  # the first structure tries again
            logger.warning("structured output is not ready yet: %s", error.message)

    async def grammar(self, structure: Structure, state: Served, tenant: str = "") -> str:
        """Return the grammar of `structure`. Raises BadRequest, Unavailable."""
        key = _key(structure)
        if (known := self._grammars.get(key)) is None:
            known = await self._wait(key, state, tenant)
        else:
            self._grammars.move_to_end(key)
        if isinstance(known, _Refusal):
            raise BadRequest(f"{structure.param}: {known.reason}.", param=structure.param)
        return known

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._warming is not None:
            self._warming.cancel()
        with self._lock:
            while self._idle:
                self._idle.pop().end()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, key: bytes, state: Served, tenant: str) -> str | _Refusal:
        place = tenant, key
        if (one := self._compiling.get(place)) is None:
            one = self._compiling[place] = _Compilation(asyncio.ensure_future(self._compile(key, state, tenant)))
            one.task.add_done_callback(lambda task: self._ended(place, one))
        one.num_waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.num_waiting -= 1
            if not one.num_waiting and not one.task.done():
                self._ended(place, one)
                one.task.cancel()

    def _ended(self, place: tuple[str, bytes], one: _Compilation) -> None:
        if self._compiling.get(place) is one:
            del self._compiling[place]
        if one.task.done() and not one.task.cancelled():
            one.task.exception()  # every waiter has seen it

    async def _compile(self, key: bytes, state: Served, tenant: str) -> str | _Refusal:
        await self._prepare(state)
        async with self._turns.turn(tenant):
            if (known := self._grammars.get(key)) is not None:  # another tenant's turn came first
                return known
            result = await self._ask(key)
        if key in self._grammars:
            return result
        self._grammars[key] = result
        self._num_bytes += _size(key, result)
        while self._num_bytes > CACHE_BYTES:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))
        return result

    # ---- the processes

    async def _ask(self, key: bytes) -> str | _Refusal:
        """Compile with an idle process, then with a fresh one: the idle one may have been killed, or be at its limit
        because of earlier work.
        """
        for process in (self._idle_process(), None):
            process = process or CompileProcess(self._specials)
            future = self._pool.submit(process.ask, key)
            try:
                answer = await asyncio.wrap_future(future)
            except ProcessDied as error:
                logger.warning("a compile process ended: %s", error)
            except BaseException:  # no request waits any more: its thread sees that the process has ended
                process.kill()
                future.add_done_callback(lambda _, process=process: process.end())
                raise
            else:
                with self._lock:
                    self._idle.append(process)
                for name, reason in answer.unenforced:
                    logger.warning("tool %s: its parameters cannot be enforced, any are accepted: %s", name, reason)
                return _Refusal(answer.error or "") if answer.grammar is None else answer.grammar
        raise Unavailable("The grammar takes too much time or memory to compile now.", retry_after=RETRY_AFTER)

    def _idle_process(self) -> CompileProcess | None:
        """Return an idle process that is alive."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive():
                    return process
                process.end()
        return None

    # ---- the vocabulary

    async def _prepare(self, state: Served) -> None:
        """Give the engines the vocabulary once; they read it while the first structure is compiled."""
        if self._preparing is None:
            self._preparing = asyncio.ensure_future(self._start(state))
        try:
            await asyncio.shield(self._preparing)
        except Exception:
            self._preparing = None
            raise

    async def _start(self, state: Served) -> None:
        if not state.model.eos_token_ids:
            raise BadRequest("This model has no end-of-sequence token, which structured output needs.")
        self._pool = self._pool or ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="structures")
        loop = asyncio.get_running_loop()
        self._specials, vocabulary = await loop.run_in_executor(self._pool, _read, state.tokenizer, state.model)
        state.client.set_vocabulary(vocabulary)


def _key(structure: Structure) -> bytes:
    try:
        key = encoded(msgspec.structs.replace(structure, param=""))
    except RecursionError:
        raise BadRequest(f"{structure.param}: it is nested too deeply.", param=structure.param) from None
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{structure.param}: {error}.", param=structure.param) from None
    if len(key) > MAX_BYTES:
        raise BadRequest(f"{structure.param} has more than {MAX_BYTES} bytes.", param=structure.param)
    return key


def _size(key: bytes, result: str | _Refusal) -> int:
    return len(key) + len(result if isinstance(result, str) else result.reason) + 256


def _read(tokenizer: Tokenizer, model: ModelInfo) -> tuple[bytes, bytes]:
    """Return the vocabulary for the compile processes, and all of it for the engines, as msgpack."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(model.vocab_size)]
    special = sorted(token_id for token_id in tokenizer.special_ids if token_id < model.vocab_size)
    specials = {tokens[token_id].decode(): token_id for token_id in special if tokens[token_id]}
    whole = Vocabulary(tokens, special, model.eos_token_ids)
    encode: Callable[[object], bytes] = msgspec.msgpack.encode
    return encode((specials, model.eos_token_ids, model.vocab_size)), encode(whole)
