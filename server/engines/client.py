"""The server side of the engine socket: sends requests and routes outputs to their streams.

The client keeps every open request with the token ids it has so far, and resubmits it after the engine dies, so
that the streams continue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

import msgspec
import zmq

from quire.configs.sockets import close_when_collected
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    Call,
    CalledTools,
    CallResult,
    Choice,
    EngineCalls,
    EngineDead,
    EngineOutput,
    EngineStats,
    FromEngine,
    Hello,
    Progress,
    Ready,
    StepOutputs,
    ToEngine,
)
from quire.server.engines.quarantine import Quarantine

logger = logging.getLogger("quire.engine_client")

T = TypeVar("T")
Args = TypeVarTuple("Args")

_MESSAGES_PER_TURN = 64  # messages read before other tasks of the event loop run
_BYTES_PER_TURN = 2**16  # for log-probabilities, mostly
_RECONNECT_MS = 20  # between attempts while the engine's socket does not exist yet
_LEAVING = 4  # messages from the engine within which it may still run a request whose client left


class EngineUnavailable(RuntimeError):
    """Raised if no engine is ready, or the engine died before it answered."""


class EngineCallError(RuntimeError):
    """A utility call failed inside the engine."""


@dataclass(slots=True)
class _Prompt:
    """The state that the choices of a request share."""

    request: AddRequest
    created: float  # time.monotonic()


@dataclass(slots=True, eq=False)
class _Open:
    """A choice that is not finished."""

    prompt: _Prompt
    choice: Choice  # as first sent
    stream: OutputStream
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0  # number received
    num_repeated: int = 0  # prompt logprobs that the current engine sends again
    num_received: int = 0  # tokens received from the current engine
    num_crashes: int = 0  # this and the next two: same as in `Suspect`
    num_solo_deaths: int = 0
    runs_to_end: bool = False
    is_open: bool = True
    computed: bool = False  # the prompt was processed: an output arrived
    sent: bool = False  # sent to the current engine
    paused: bool = False  # aborted in the engine; will wait
    waits: bool = True  # for an engine, or until all suspects are cleared


class OutputStream:
    """The outputs of all n choices of a request, as they arrive.

    Outputs that arrive while the reader is busy are merged into one per choice.
    """

    __slots__ = ("_client", "_pending", "_unfinished", "_waiter")

    def __init__(self, client: EngineClient, request_ids: list[str]):
        self._client = client
        self._unfinished = set(request_ids)
        self._pending: dict[str, EngineOutput] = {}
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._pending:
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self._pending.pop(next(iter(self._pending)))
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        return output

    @property
    def engine(self) -> int:
        """Return the index of the engine that runs the request."""
        return self._client.index

    def abort(self, request_id: str) -> None:
        """Abort one choice. Idempotent."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._pending.pop(request_id, None)
            self._client._abort([request_id])

    def called_tools(self, request_id: str) -> None:
        """Report that the answer of a choice, which has ended, called tools."""
        self._client._send(CalledTools([request_id]))

    async def aclose(self) -> None:
        """Abort what is unfinished. Idempotent."""
        unfinished, self._unfinished = self._unfinished, set()
        self._pending.clear()
        self._client._abort(sorted(unfinished))
        self._wake()

    def _put(self, output: EngineOutput) -> None:
        earlier = self._pending.get(output.request_id)
        self._pending[output.request_id] = output if earlier is None else _merge(earlier, output)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(a: EngineOutput, b: EngineOutput) -> EngineOutput:
    """Return `a` followed by `b`. Extends the lists of `a` in place, so that merging many outputs takes linear time."""
    a.new_token_ids.extend(b.new_token_ids)
    return msgspec.structs.replace(
        b,
        new_token_ids=a.new_token_ids,
        logprobs=_extend(a.logprobs, b.logprobs),
        prompt_logprobs=_extend(a.prompt_logprobs, b.prompt_logprobs),
        counts=a.counts.then(b.counts),
        timing=b.timing or a.timing,
    )


def _extend(a: list | None, b: list | None) -> list | None:
    if a is None or b is None:
        return b if a is None else a
    a.extend(b)
    return a


class EngineClient:
    """The connection to one engine at a time. All methods must be called on one event loop.

    `index` is the engine's number. `progress`, `ready` and `dead` are the current engine's last messages about itself.
    `on_stats` and `on_progress` are called as messages arrive, `on_connect` with each new engine's address, `on_death`
    with the reason of each death, `on_leaving` when an engine takes no more requests. After an engine dies, its
    requests are sent to the next one in the order that `quarantine.py` defines.
    """

    def __init__(
        self,
        on_stats: Callable[[EngineStats], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        index: int = 0,
        *,
        on_connect: Callable[[str], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        on_leaving: Callable[[], None] | None = None,
    ):
        self.index = index
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.dead: str | None = None
        self.is_leaving = False  # the engine finishes what it has, and takes no more
        self.num_messages = 0  # messages received from all engines
        self.num_elsewhere = 0  # open requests of other frontends at the engine, as last reported
        # prompt tokens of our choices without output; each choice counts, because it needs its own rows and steps even
        # if the prompt is cached
        self.num_waiting_tokens = 0
        self.num_background = 0  # our unfinished background choices, not counted by queue limits
        # engine deaths while our requests ran: `quarantine.py` ends the culprit request, and the server keeps running
        self.num_explained_deaths = 0
        self._vocabulary: bytes | None = None  # for grammars; set once one was needed
        self._quarantine = Quarantine()
        self._frontend: int | None = None  # our number, if other frontends share the engine
        self._turn: int | None = None  # the frontend that may try its suspects; -1: the parent has yet to say
        self._on_suspects: Callable[[bool], None] | None = None
        self._pausing: int | None = None  # number of the call that the engine answers once it has paused our requests
        self._any_wait = False  # whether a request may wait
        self._left_at: int | None = None  # `num_messages` when the engine's last request was aborted
        self._on_stats = on_stats
        self._on_progress = on_progress
        self._on_connect = on_connect
        self._on_death = on_death
        self._on_leaving = on_leaving or (lambda: None)
        self._open: dict[str, _Open] = {}  # in order of arrival
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._waiters: list[asyncio.Future[None]] = []
        self._context: zmq.Context | None = None
        self._socket: zmq.Socket | None = None
        self._closed: str | None = None  # the reason, once closed
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    def share(self, frontend: int, on_suspects: Callable[[bool], None]) -> None:
        """Note that other frontends share the engine, and that `frontend` is the number of this one.

        `on_suspects` is called with True when we have suspects, and with False when none are left; the answer is
        `set_turn`.
        """
        self._frontend, self._on_suspects = frontend, on_suspects
        self._quarantine.num_needed = 2

    def set_turn(self, frontend: int | None) -> None:
        """Note whose suspects are on trial. While they are another frontend's, we send nothing new."""
        self._turn = frontend
        self._advance_trials()

    # ---- the engine

    async def connect(self, address: str) -> None:
        """Connect to the engine at `address`.

        Open requests are resubmitted once it is ready; suspects of the last death are sent in groups.
        """
        self._disconnect("the engine was replaced")
        self.dead = self.progress = None
        self.is_leaving = False
        self._context = self._context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, _RECONNECT_MS)):
            self._socket.setsockopt(option, value)
        self._finalizer = close_when_collected(self, self._context, self._socket)
        self._socket.connect(address)
        asyncio.get_running_loop().add_reader(self._socket.getsockopt(zmq.FD), self._on_readable)
        self._send(Hello())
        if self._on_connect is not None:
            self._on_connect(address)

    async def wait_ready(self) -> Ready:
        """Wait until the engine is ready. Raises EngineUnavailable if it dies first."""
        while self.ready is None:
            if self.dead is not None or self._closed is not None:
                raise EngineUnavailable(self.dead or self._closed)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self.ready

    def on_dead(self, reason: str) -> None:
        """Handle the death of the engine: it reported it, or its process ended.

        Pending calls fail; requests wait for the next `connect`, or fail on `close`.
        """
        self.dead = reason
        self._disconnect(reason)
        if self._on_death is not None:
            self._on_death(reason)

    def on_leaving(self) -> None:
        """Note that the engine drains before it exits: later requests wait for the next `connect`."""
        self.is_leaving = True
        self._on_leaving()

    def fail_open(self, reason: str) -> None:
        """Fail every open request, but accept later ones."""
        for request_id in list(self._open):
            self._fail(request_id, reason)

    async def close(self, reason: str = "the server is shutting down") -> None:
        """Fail every open request, and every later one. Idempotent."""
        reason = self.dead or reason
        self._disconnect(reason)
        self._closed = self._closed or reason
        self._wake_waiters()
        self.fail_open(reason)
        if self._context is not None:
            self._context.term()
            self._context = None

    def _disconnect(self, reason: str) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()
        self._finalizer.detach()
        self._socket = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
        self._calls.clear()
        if self.ready is not None:
            self._find_suspects(self.ready.worker.max_num_seqs)
        self.ready = None
        self._wake_waiters()

    def _find_suspects(self, max_num_seqs: int) -> None:
        """Mark the requests that could have been in the dead engine's batch: the first ones of each tenant, in queue
        order."""
        sent = sorted(
            (entry for entry in self._open.values() if entry.sent),
            key=lambda entry: (entry.prompt.request.background, entry.prompt.request.priority),
        )
        # for each tenant, because the engine serves tenants in turns (`engine/shares.py`)
        before: Counter[str] = Counter()
        suspects = []
        for entry in sent:
            tenant = entry.prompt.request.tenant
            if before[tenant] < max_num_seqs:
                suspects.append(entry)
            before[tenant] += 1
        left, self._left_at = self._left_at, None
        self.num_explained_deaths += bool(sent) or (left is not None and self.num_messages - left < _LEAVING)
        self._quarantine.on_death(suspects)
        self._pausing = None
        for entry in sent:
            entry.paused, entry.sent, entry.waits = False, False, True
        if culprit := self._quarantine.culprit:
            self._fail(
                culprit.choice.request_id, f"the engine died {culprit.num_crashes} times while it ran this request"
            )
        if self._on_suspects is not None:
            self._on_suspects(self._quarantine.active)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # ---- requests

    @property
    def num_open(self) -> int:
        """Return the number of our unfinished choices."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Return whether the engine has no requests; other frontends' requests are known only after a short delay."""
        return not self.num_elsewhere and not any(entry.sent for entry in self._open.values())

    @property
    def load(self) -> int:
        """Return the number of unfinished foreground choices in the engine, including those of other frontends."""
        return self.num_open - self.num_background + self.num_elsewhere

    def generate(self, request: AddRequest) -> OutputStream:
        """Submit a request; one stream delivers the outputs of all its choices. The request waits while no engine
        is ready and while suspects are on trial.

        Raises ValueError for a request_id that is in use.
        """
        choices = request.choices
        if taken := [choice.request_id for choice in choices if choice.request_id in self._open]:
            raise ValueError(f"request_id {taken[0]!r} is in use")
        stream = OutputStream(self, [choice.request_id for choice in choices])
        prompt = _Prompt(request, time.monotonic())
        if request.background:
            self.num_background += len(choices)
        else:
            self.num_waiting_tokens += len(choices) * len(request.prompt_token_ids)
        entries = [_Open(prompt, choice, stream) for choice in choices]
        self._open |= {entry.choice.request_id: entry for entry in entries}
        if self._closed is not None:
            for choice in choices:
                self._fail(choice.request_id, self._closed)
        elif self.ready is None or self._is_held:
            self._any_wait = True
        else:
            self._submit(entries)
        return stream

    @property
    def _is_held(self) -> bool:
        """Return whether new requests wait: the engine drains, or suspects are on trial, here or elsewhere."""
        return self.is_leaving or self._quarantine.active or (self._turn is not None and self._turn != self._frontend)

    def _submit(self, entries: list[_Open]) -> None:
        """Send `entries` with their outputs so far; consecutive choices of one prompt share a message."""
        for _, group in itertools.groupby(entries, key=lambda entry: id(entry.prompt)):
            choices, prompt = [], None
            for entry in group:
                choice, prompt = entry.choice, entry.prompt
                if entry.output_token_ids:
                    choice = msgspec.structs.replace(
                        choice, output_token_ids=[*choice.output_token_ids, *entry.output_token_ids]
                    )
                choices.append(choice)
                entry.num_repeated, entry.num_received = entry.num_prompt_logprobs, 0
                entry.sent, entry.waits = True, False
            self._send(prompt.request.with_choices(choices, age=time.monotonic() - prompt.created))

    def _advance_trials(self) -> None:
        """Start the next trial, or send all waiting requests if no suspect is left. Called after every output."""
        if self.ready is None:
            return
        if self._quarantine.active and self._turn == self._frontend and self._pausing is None:
            if cleared := self._quarantine.cleared(last=self._on_suspects is not None):
                self._pause(cleared)
            elif suspects := self._quarantine.next_trial():
                self._submit(suspects)
            if not self._quarantine.active and self._on_suspects is not None:
                self._turn = -1
                self._on_suspects(False)
        if self._any_wait and not self._is_held:
            self._any_wait = False
            self._submit([entry for entry in self._open.values() if entry.waits])

    def _pause(self, entries: list[_Open]) -> None:
        """Abort `entries` in the engine until all suspects are cleared. Outputs that are on their way are dropped."""
        for entry in entries:
            entry.paused = True
        self._send(AbortRequests([entry.choice.request_id for entry in entries]))
        self._pausing = self._send_call(EngineCalls.stats)

    def _on_paused(self) -> None:
        self._pausing = None
        for entry in self._open.values():
            if entry.paused:
                entry.paused, entry.sent, entry.waits = False, False, True
        self._any_wait = True
        self._advance_trials()

    def _abort(self, request_ids: list[str]) -> None:
        entries = [self._close_request(request_id) for request_id in request_ids if request_id in self._open]
        if sent := [entry.choice.request_id for entry in entries if entry.sent]:
            self._left_at = self.num_messages
            self._send(AbortRequests(sent))
        self._advance_trials()

    def _fail(self, request_id: str, reason: str) -> None:
        self._close_request(request_id).stream._put(EngineOutput(request_id, [], "error", error=reason))

    def _close_request(self, request_id: str) -> _Open:
        entry = self._open.pop(request_id)
        entry.is_open = False
        self.num_background -= entry.prompt.request.background
        self._record_computed(entry)
        return entry

    def _record_computed(self, entry: _Open) -> None:
        """Record that the choice's prompt was processed, or is no longer needed."""
        if not entry.computed:
            entry.computed = True
            if not entry.prompt.request.background:
                self.num_waiting_tokens -= len(entry.prompt.request.prompt_token_ids)

    # ---- utility calls

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Send the tokens that grammars need, now and to every later engine before its requests."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            if self.ready is not None:
                self._send_vocabulary()

    def _send_vocabulary(self) -> None:
        if self._vocabulary is not None:
            self._send_call(EngineCalls.set_vocabulary, self._vocabulary)

    def _send_call(self, method: Callable[[EngineCalls, *Args], object], *args: *Args) -> int:
        call_id = next(self._call_ids)
        self._send(Call(call_id, method.__name__, list(args)))
        return call_id

    async def call(self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0) -> T:
        """Call a method of the engine. Raises EngineCallError, EngineUnavailable, TimeoutError."""
        if self.ready is None:
            raise EngineUnavailable(self.dead or "the engine is not ready")
        call_id = self._send_call(method, *args)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(future, timeout)
        finally:
            self._calls.pop(call_id, None)

    async def call_each(
        self, method: Callable[[EngineCalls, *Args], T], *args: *Args, timeout: float = 10.0
    ) -> list[T]:
        """Return the answer of the only engine, as a list. Raises as `call`."""
        return [await self.call(method, *args, timeout=timeout)]

    # ---- the socket

    def _send(self, message: ToEngine) -> None:
        if self._socket is None:
            return
        self._socket.send(self._encode(message), zmq.NOBLOCK)
        # send() may consume the descriptor's readiness edge: check for input explicitly.
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._on_readable)

    def _on_readable(self) -> None:
        """Read messages. The descriptor is edge-triggered: unless everything was read, reschedule, also after an
        exception in a callback.
        """
        more, num_bytes = True, 0
        try:
            for _ in range(_MESSAGES_PER_TURN):
                if num_bytes > _BYTES_PER_TURN:
                    return
                if self._socket is None:  # a message may end the connection
                    return
                try:
                    frame = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    more = False
                    return
                self.num_messages += 1
                num_bytes += len(frame)
                self._receive(self._decode(frame))
        finally:
            if more and self._socket is not None:
                asyncio.get_running_loop().call_soon(self._on_readable)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                for output in message.outputs:
                    self._on_output(output)
                if message.stats is not None and self._on_stats is not None:
                    self._on_stats(message.stats)
            case Progress():
                self.progress = message
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready():
                self._on_ready(message)
            case CallResult():
                self._on_call_result(message)
            case EngineDead():
                self.on_dead(message.reason)

    def _on_output(self, output: EngineOutput) -> None:
        entry = self._open.get(output.request_id)
        if entry is None or entry.paused:  # aborted while the output was on its way
            return
        entry.output_token_ids.extend(output.new_token_ids)
        entry.num_received += len(output.new_token_ids)
        if not output.counts.prefilled:
            self._record_computed(entry)
        if output.prompt_logprobs is not None:
            output = self._without_repeated(entry, output)
        if output.finish_reason is not None:
            self._close_request(output.request_id)
        entry.stream._put(output)
        self._advance_trials()

    def _without_repeated(self, entry: _Open, output: EngineOutput) -> EngineOutput:
        """Drop prompt logprobs that were already received from an earlier engine; they arrive in parts."""
        fresh = output.prompt_logprobs[entry.num_repeated :]
        entry.num_repeated -= len(output.prompt_logprobs) - len(fresh)
        entry.num_prompt_logprobs += len(fresh)
        return msgspec.structs.replace(output, prompt_logprobs=fresh or None)

    def _on_ready(self, ready: Ready) -> None:
        first = self.ready is None
        self.ready = ready
        if first:
            self._send_vocabulary()
            self._any_wait = True
            self._advance_trials()
        self._wake_waiters()

    def _on_call_result(self, result: CallResult) -> None:
        if result.call_id == self._pausing:
            self._on_paused()
            return
        future = self._calls.get(result.call_id)
        if future is None or future.done():  # the caller timed out
            return
        if result.error is None:
            future.set_result(result.value)
        else:
            future.set_exception(EngineCallError(result.error))
