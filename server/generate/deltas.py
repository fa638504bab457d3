"""Streams of `Delta`s: several prompts merged, cut at a deadline, or collected into whole choices."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.messages import NO_COUNTS, TokenCounts, TokenLogprobs
from quire.server.errors import BadRequest, EngineError
from quire.server.generate.deadlines import NO_DEADLINES, Deadlines, all_wait, within
from quire.server.generate.generation import Generation
from quire.server.parsers.events import Event
from quire.server.request.delta import Delta

# Transforms the deltas of one request between generation and dialect, e.g. parses reasoning and tool calls from the
# text. It sees all choices (`Delta.index`), and passes on every delta that has an `error` or a `finish_reason`.
Stage = Callable[[AsyncIterator[Delta]], AsyncIterator[Delta]]
PER_TURN = 128  # prompts of one request that are begun, ended, or copied, before others get their turn


def identity(deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    """Return the stage that changes nothing."""
    return deltas


async def run(
    generations: list[Generation],
    limits: Deadlines = NO_DEADLINES,
    stage: Stage = identity,
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all prompts after `stage`, `index` counting choices across prompts (prompt index * n + i).

    A deadline that passes after the first delta ends every unfinished choice with stop_reason "timeout" and
    finish_reason "timeout", for `limits.predict` "length"; one before it raises Unavailable or GatewayTimeout. Closing
    the generator aborts what still runs. Raises EngineError when a choice fails, BadRequest when the engine refuses it.
    """
    deltas = aiter(generations[0]) if len(generations) == 1 else _merge(generations)
    try:
        if limits:
            deltas = _until(deltas, generations, limits)
        if (num_copies := generations[0].request.num_copies) > 1:
            deltas = _copied(deltas, num_copies)
        async for delta in stage(deltas):
            if delta.error is not None:
                raise BadRequest(delta.error) if delta.error_kind == "invalid_request" else EngineError(delta.error)
            if delta.finish_reason == "tool_calls":
                generation = generations[delta.index // generations[0].request.n]
                generation.called_tools(delta.index % generation.request.n)
            yield delta
    finally:
        for number, generation in enumerate(generations, start=1):
            await generation.aclose()
            if number % PER_TURN == 0:
                await asyncio.sleep(0)


async def _merge(generations: list[Generation]) -> AsyncGenerator[Delta, None]:
    """Yield merged deltas. One task per prompt feeds a queue of one place: while the reader is busy, outputs are merged
    upstream.
    """
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(generation: Generation, offset: int) -> None:
        try:
            async for delta in generation:
                delta.index += offset
                await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i, generation in enumerate(generations):
            tasks.append(asyncio.create_task(pump(generation, i * generation.request.n)))
            if len(tasks) % PER_TURN == 0:
                await asyncio.sleep(0)
        remaining = len(tasks)
        while remaining:
            item = await queue.get()
            if item is None:
                remaining -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copied(deltas: AsyncIterator[Delta], num_copies: int) -> AsyncGenerator[Delta, None]:
    """Yield each delta once per copy of its choice."""
    async for delta in deltas:
        whole = dataclasses.replace(delta)  # later stages change the one that they get
        yield delta
        for i in range(1, num_copies):
            yield dataclasses.replace(whole, index=whole.index + i)
            if i % PER_TURN == 0:
                await asyncio.sleep(0)


async def _until(
    deltas: AsyncIterator[Delta], generations: Sequence[Generation], limits: Deadlines
) -> AsyncGenerator[Delta, None]:
    clock = asyncio.get_running_loop().time
    started = clock()
    deadline, reason = (math.inf if limits.total is None else started + limits.total), "timeout"

    async def waits() -> bool:
        ids = [request_id for one in generations for request_id in one.open_ids]
        return await all_wait(generations[0].client, ids)

    request = generations[0].request
    unfinished = set(range(0, len(generations) * request.n, request.num_copies))
    try:
        delta = await within(anext(deltas), limits, waits)
        if limits.predict is not None and clock() + limits.predict < deadline:
            deadline, reason = clock() + limits.predict, "length"
        while True:
            if delta.finish_reason is not None:
                unfinished.discard(delta.index)
            yield delta
            if not unfinished:
                return
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                delta = await anext(deltas)
    except StopAsyncIteration:
        return
    except TimeoutError:
        pass
    for index in sorted(unfinished):
        yield Delta(
            index=index,
            text="",
            token_ids=[],
            logprobs=None,
            prompt_logprobs=None,
            finish_reason=reason,
            stop_reason="timeout",
            counts=NO_COUNTS,
            error=None,
        )


@dataclass(slots=True)
class Choice:
    """One choice, complete or as far as it was generated."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    counts: TokenCounts = NO_COUNTS
    events: list[Event] = field(default_factory=list)  # if the text is parsed
    num_reasoning_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.prompt_logprobs.extend(delta.prompt_logprobs or ())
        self.counts = self.counts.then(delta.counts)
        self.events.extend(delta.events or ())
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


POSITION_SIZE = 64  # bytes of work (`threads.py`) that the log-probabilities of one position are


def answer_size(choices: list[Choice]) -> int:
    """Return the work of serializing the whole answer, in bytes, for `Threads.run`."""
    return sum(
        16 + len(choice.token_ids) // 4 + (len(choice.logprobs) + len(choice.prompt_logprobs)) * POSITION_SIZE
        for choice in choices
    )


async def collect(deltas: AsyncGenerator[Delta, None], num_choices: int) -> list[Choice]:
    """Return every choice, complete. Raises EngineError."""
    choices = [Choice(i) for i in range(num_choices)]
    try:
        async for delta in deltas:
            choices[delta.index].add(delta)
    finally:
        await deltas.aclose()
    return choices
