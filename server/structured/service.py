"""Structures -> grammars, off the event loop: the cache, the processes that compile, and the engine's vocabulary."""

from __future__ import annotations

import asyncio
import logging
import select
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.messages import Vocabulary
from quire.server.errors import BadRequest, Unavailable
from quire.server.structured.structure import MAX_BYTES, Structure

if TYPE_CHECKING:
    from quire.server.generate.generation import GenerationRequest
    from quire.server.state import ModelInfo, ServerState
    from quire.server.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.structured")

NUM_PROCESSES = 2
MAX_WAITING = 256  # structures that wait for a process
TIMEOUT = 5.0  # seconds until a process that does not answer is killed; its own limit is a little lower
START_TIMEOUT = 30.0  # seconds for the first answer, which waits for the process to start
CACHE_BYTES = 2**24  # of structures and their grammars
_Answer = tuple[str | None, str | None, list[tuple[str, str]]]  # of a process: see compile_process.Answer


async def constrain(requests: Sequence[GenerationRequest], state: ServerState) -> None:
    """Compile the structures of `requests` into their sampling parameters. Call it before they are sent.

    Raises BadRequest naming the field and the mistake, Unavailable if too many structures wait.
    """
    for request in requests:
        if (structure := request.structure) is not None:
            grammar = await state.structures.grammar(structure, state)
            after = structure.after if isinstance(structure.after, list) else None
            request.sampling = msgspec.structs.replace(request.sampling, grammar=grammar, grammar_after=after)


class Structures:
    """Belongs to one event loop. Starts nothing before the first structure."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[bytes, str | _Refusal] = OrderedDict()  # by structure, most recently used last
        self._num_bytes = 0
        self._compiling: dict[bytes, asyncio.Future[str | _Refusal]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._processes: list[_Process] = []  # idle
        self._lock = threading.Lock()
        self._specials: bytes | None = None  # the first frame of a process
        self._preparing: asyncio.Task[None] | None = None

    async def grammar(self, structure: Structure, state: ServerState) -> str:
        """The grammar of `structure`. Raises BadRequest, Unavailable."""
        key = self._key(structure)
        if (known := self._grammars.get(key)) is None:
            if len(self._compiling) >= MAX_WAITING:
                raise Unavailable("Too many grammars are being compiled.", retry_after=1)
            if key not in self._compiling:
                self._compiling[key] = asyncio.ensure_future(self._compile(key, state))
            known = await asyncio.shield(self._compiling[key])
        else:
            self._grammars.move_to_end(key)
        if isinstance(known, _Refusal):
            raise BadRequest(f"{structure.param}: {known.reason}.", param=structure.param)
        return known

    def close(self) -> None:
        """End the processes. Idempotent."""
        with self._lock:
            while self._processes:
                self._processes.pop().end()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _key(self, structure: Structure) -> bytes:
        try:
            key = msgspec.msgpack.encode(msgspec.structs.replace(structure, param=""))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"{structure.param}: {error}.", param=structure.param) from None
        if len(key) > MAX_BYTES:
            raise BadRequest(f"{structure.param} has more than {MAX_BYTES} bytes.", param=structure.param)
        return key

    async def _compile(self, key: bytes, state: ServerState) -> str | _Refusal:
        try:
            await self._prepare(state)
            result = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, key)
        finally:
            del self._compiling[key]
        self._remember(key, result)
        return result

    def _remember(self, key: bytes, result: str | _Refusal) -> None:
        self._grammars[key] = result
        self._num_bytes += _size(key, result)
        while self._num_bytes > CACHE_BYTES:
            self._num_bytes -= _size(*self._grammars.popitem(last=False))

    # ---- the vocabulary

    async def _prepare(self, state: ServerState) -> None:
        """Once: give the engines the vocabulary; they read it while the first structure is compiled."""
        if self._preparing is None:
            self._preparing = asyncio.ensure_future(self._start(state))
        try:
            await asyncio.shield(self._preparing)
        except Exception:
            self._preparing = None
            raise

    async def _start(self, state: ServerState) -> None:
        if not state.model.eos_token_ids:
            raise BadRequest("This model has no end-of-sequence token, which structured output needs.")
        self._pool = self._pool or ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="structures")
        loop = asyncio.get_running_loop()
        self._specials, vocabulary = await loop.run_in_executor(self._pool, _read, state.tokenizer, state.model)
        state.client.set_vocabulary(vocabulary)

    # ---- in a thread of the pool

    def _ask(self, key: bytes) -> str | _Refusal:
        with self._lock:
            process = self._processes.pop() if self._processes else None
        process = process or _Process(self._specials)
        answer = process.ask(key)
        if answer is None:
            process.end()
            return _Refusal("it takes too much time or memory to compile")
        with self._lock:
            self._processes.append(process)
        grammar, error, unenforced = answer
        for name, reason in unenforced:
            logger.warning("tool %s: its parameters cannot be enforced, any are accepted: %s", name, reason)
        return _Refusal(error) if grammar is None else grammar


class _Refusal(msgspec.Struct):
    """Why a structure has no grammar."""

    reason: str


def _size(key: bytes, result: str | _Refusal) -> int:
    return len(key) + len(result if isinstance(result, str) else result.reason) + 256


class _Process:
    """A child that runs `compile_process.py`."""

    def __init__(self, vocabulary: bytes):
        self._child = subprocess.Popen(
            [sys.executable, "-m", "quire.server.structured.compile_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._started = False
        self._greeting = vocabulary

    def ask(self, structure: bytes) -> _Answer | None:
        """None if the process died or did not answer in time."""
        frames = [structure] if self._started else [self._greeting, structure]
        timeout, self._started = TIMEOUT if self._started else START_TIMEOUT, True
        try:
            for frame in frames:
                self._child.stdin.write(len(frame).to_bytes(4, "big") + frame)
            self._child.stdin.flush()
            if not select.select([self._child.stdout], [], [], timeout)[0]:
                logger.warning("killing process %d: no grammar after %.0f s", self._child.pid, timeout)
                return None
            size = int.from_bytes(self._child.stdout.read(4), "big")
            data = self._child.stdout.read(size) if size else b""
        except OSError:
            return None
        return msgspec.msgpack.decode(data, type=_Answer) if data else None

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()


def _read(tokenizer: Tokenizer, model: ModelInfo) -> tuple[bytes, bytes]:
    """What the processes that compile need to know of the vocabulary, and all of it for the engines, as msgpack."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(model.vocab_size)]
    special = sorted(token_id for token_id in tokenizer.special_ids if token_id < model.vocab_size)
    specials = {tokens[token_id].decode(): token_id for token_id in special if tokens[token_id]}
    whole = Vocabulary(tokens, special, model.eos_token_ids)
    encode: Any = msgspec.msgpack.encode
    return encode((specials, model.eos_token_ids, model.vocab_size)), encode(whole)
