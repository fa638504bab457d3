"""Executes steps without a model or torch, for tests of the scheduler and the server and for measuring engine overhead.

The next token is a pure function of all tokens before it, so `expected_tokens` predicts the output of any request
without running the engine, and any scheduling mistake changes the output. With `validate` the fake also simulates a
paged KV cache: each slot stores a hash of its token and all tokens before it, and the fake checks, for every token that
a step reads, that the block table still leads to that hash.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from quire.configs.config import Config
from quire.engine.executor.base import Executor, ReportProgress
from quire.worker.cache.tiers.base import Rank
from quire.worker.cache.tiers.fingerprint import fingerprint
from quire.worker.cache.tiers.open import open_tiers, plan_tiers
from quire.worker.cache.tiers.store import TierStore
from quire.worker.messages import (
    REMOTE,
    SLOTS,
    CacheGroup,
    MediaInfo,
    MediaItem,
    MemoryPlan,
    NewRequest,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenLogprobs,
    WorkerReady,
)

BACKEND = "tests.helpers.engine.fake_executor:FakeExecutor"  # of `distributed_executor_backend`

_MASK = (1 << 61) - 1


def extend(state: int, token_id: int) -> int:
    """Return the hash of a context extended by one token."""
    return (state * 6364136223846793005 + (token_id + 1) * 1442695040888963407) & _MASK


def next_token(state: int, sampling: SamplingParams, num_outputs: int, vocab_size: int, eos_chance: float) -> int:
    """Return the token that follows a context.

    It is an end-of-sequence token with probability `eos_chance`, except below `min_tokens`. With a chance of 0, only
    its limits end a request, whatever its seed.
    """
    # mix all bits, because the low bits are dropped below
    mixed = (state ^ (state >> 29)) * 0xBF58476D1CE4E5B9 + sampling.seed * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 32)) & _MASK
    if sampling.eos_token_ids and num_outputs >= sampling.min_tokens and mixed % 9973 < eos_chance * 9973:
        return sampling.eos_token_ids[mixed % len(sampling.eos_token_ids)]
    token_id = (mixed >> 14) % vocab_size
    for _ in () if sampling.ignore_eos else sampling.eos_token_ids:
        if token_id in sampling.eos_token_ids:
            token_id = (token_id + 1) % vocab_size
    return token_id


def with_images(token_ids: list[int], media: Sequence[MediaItem]) -> list[int]:
    """Replace the tokens of images by numbers that depend on the image and on the place in it."""
    token_ids = list(token_ids)
    for item in media:
        content = crc32(item.key.encode())
        for i in range(item.length):
            token_ids[item.offset + i] += 1000 + content * (i + 1)
    return token_ids


def token_logprobs(token_id: int, num_logprobs: int, vocab_size: int) -> TokenLogprobs:
    """Return log-probabilities of an invented distribution in which `token_id` is the most likely token.

    `num_logprobs` is as in `SamplingParams.logprobs`.
    """
    count = vocab_size if num_logprobs < 0 else num_logprobs
    return TokenLogprobs(
        [token_id, *((token_id + i) % vocab_size for i in range(count))], [-0.5, *(-0.5 - i for i in range(count))], 1
    )


def expected_tokens(
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    max_model_len: int,
    vocab_size: int,
    eos_chance: float = 0.0,
    media: Sequence[MediaItem] = (),
) -> list[int]:
    """Return the tokens that one request generates alone: the reference output for any schedule."""
    state, outputs = 0, []
    for token_id in with_images(prompt_token_ids, media):
        state = extend(state, token_id)
    while len(outputs) < sampling.max_tokens and len(prompt_token_ids) + len(outputs) < max_model_len:
        token_id = next_token(state, sampling, len(outputs), vocab_size, eos_chance)
        outputs.append(token_id)
        state = extend(state, token_id)
        is_eos = token_id in sampling.eos_token_ids and not sampling.ignore_eos
        if len(outputs) > sampling.min_tokens and (is_eos or token_id in sampling.stop_token_ids):
            break
    return outputs


@dataclass(frozen=True)
class FakeOptions:
    """Configures the fake. A process reads it from the variable FAKE_EXECUTOR, such as
    "step_delay=0.01,eos_chance=0.05,validate=0".
    """

    validate: bool = True
    eos_chance: float = 0.0
    step_delay: float = 0.0  # seconds per step on the simulated device; steps in flight queue up there
    load_delay: float = 0.0  # duration of loading in seconds
    hang_at_step: float = 0.0  # this step never ends
    fail_at_step: float = 0.0  # the result of this step raises (the engine's warm-up request takes steps 1 and 2)
    fail_on_token: float = -1.0  # the first step of a prompt with this token raises,
    fail_after: float = 0.0  # or the step after it has generated this number of tokens in this process
    groups: str = "full"  # cache groups of the simulated model, e.g. "full+window:24+state"
    # images that the simulated model reads: image token id, cache size and encoder budget, e.g. "5:64:16" or, if an
    # image is computed whole, "5:64:16:whole"; "5/6" has the token id of videos, too. An image whose key begins with
    # "unreadable" cannot be encoded.
    images: str = ""
    # the most drafts of a request per step, if the model has no states, and how likely each is to be wrong
    drafts: float = 0.0
    wrong_drafts: float = 0.0

    @classmethod
    def from_text(cls, text: str) -> FakeOptions:
        """Parse options. Raises ValueError for an unknown name."""
        pairs = dict(pair.split("=", 1) for pair in text.split(",") if pair)
        if unknown := pairs.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"FAKE_EXECUTOR: unknown option {', '.join(sorted(unknown))}")
        return cls(**{name: _READ.get(name, float)(value) for name, value in pairs.items()})

    def cache_groups(self) -> list[CacheGroup]:
        kinds = (text.partition(":") for text in self.groups.split("+"))
        return [CacheGroup(kind, int(window or 0)) for kind, _, window in kinds]

    def media_info(self) -> MediaInfo | None:
        if not self.images:
            return None
        token_ids, size, budget, *whole = self.images.split(":")
        image, _, video = token_ids.partition("/")
        video_token_id = int(video) if video else None
        return MediaInfo(int(image), int(size), int(budget), bool(whole), video_token_id=video_token_id)


_READ: dict[str, Any] = {"validate": lambda text: text not in ("0", "false"), "groups": str, "images": str}


@dataclass(slots=True)
class _Row:
    """Holds a request's state in the worker: its tokens, as hashes of the context up to each, and its block tables."""

    sampling: SamplingParams
    num_prompt_tokens: int
    num_entered: int  # tokens when it came to this process
    states: list[int]  # states[p] covers tokens 0 .. p
    token_ids: list[int]
    block_ids: list[list[int]] = field(default_factory=list)  # per cache group
    media: list[MediaItem] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)  # likely next tokens


@dataclass(slots=True)
class _Result:
    output: StepOutput
    ready_at: float
    fails: bool
    hangs: bool

    def result(self) -> StepOutput:
        if self.fails:
            raise RuntimeError(f"injected failure of step {self.output.step}")
        if self.hangs:
            time.sleep(1e9)
        if (delay := self.ready_at - time.monotonic()) > 0:
            time.sleep(delay)
        return self.output


class FakeExecutor(Executor):
    """Processes every `StepInput` as a worker would. Raises AssertionError if `validate` finds a step that no worker
    could run correctly.

    Sizes come from the configuration: `num_gpu_blocks_override` (1024), `block_size` (16), `max_model_len` (4096),
    `max_num_seqs` (64), `max_num_batched_tokens` (2048). `vocab_size` is that of the model folder's config.json if it
    exists, else 1000.
    """

    def __init__(self, config: Config, options: FakeOptions | None = None):
        self.options = options or FakeOptions.from_text(os.environ.get("FAKE_EXECUTOR", ""))
        self.ready = _sizes(config, self.options.cache_groups(), self.options.media_info())
        self.num_steps = 0
        self._encoded = (0.0, 0.0)
        self._images: dict[str, int] = {}  # encoded images, by key: number of embeddings
        self._rows: dict[int, _Row] = {}
        # Contents of each slot of each page: the hash of a token's context or, in the first slot of a state page, of
        # all tokens that the state has processed. Entries include the group, because any group may use a page.
        num_pages = self.ready.num_blocks + self.ready.num_states
        self._slots: list[tuple[int, int] | None] = [None] * (num_pages * self.ready.block_size)
        self._free_at = 0.0
        has_states = any(group.kind == "state" for group in self.ready.groups)
        self._max_draft = int(self.options.drafts) if not has_states else 0
        self.workers = self  # has the methods of `WorkerCalls`
        self.tiers = self._open_tiers(config)
        self.slots = next((tier for tier in self.tiers.tiers if tier.name == SLOTS), None) if self.tiers else None
        self.transfers = next((tier for tier in self.tiers.tiers if tier.name == REMOTE), None) if self.tiers else None

    def _open_tiers(self, config: Config) -> TierStore | None:
        facts = (self.ready.groups, self.ready.block_size, self.ready.vocab_size, config.model.model)
        mark = functools.partial(fingerprint, b"fake", facts)
        tiers = open_tiers(self.ready.tiers, Rank(config, self._gather, mark, portable=mark))
        return TierStore(self._gather, self._scatter, tiers) if tiers else None

    def initialize(self, progress: ReportProgress) -> WorkerReady:
        for i in range(10):
            progress("loading weights", i / 10)
            time.sleep(self.options.load_delay / 10)
        progress("loading weights", 1.0)
        return self.ready

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    # ---- calls between steps

    def look_for_ops(self) -> bool:
        return False

    def describe_ops(self) -> dict[str, object]:
        return {"name": "fake", "status": "fake", "since": None}

    def encoded(self) -> tuple[float, float]:
        return self._encoded

    def work_idle(self) -> bool:
        return False

    def wants_memory_back(self, idle: float) -> bool:
        return False

    def give_back(self) -> None:
        """Lose the contents of all blocks."""
        self._slots = [None] * len(self._slots)

    def memory_short(self) -> int:
        return 0

    def give_back_blocks(self, block_ids: list[int]) -> None:
        """Lose the contents of these blocks."""
        for block_id in block_ids:
            first = block_id * self.ready.block_size
            self._slots[first : first + self.ready.block_size] = [None] * self.ready.block_size

    def start_profile(self) -> str:
        return "the fake executor takes no profiles"

    def stop_profile(self) -> tuple[str, str]:
        return self.start_profile(), ""

    def load_lora(self, key: str, folder: str) -> str:
        """Accept an adapter, which does not change the fake tokens."""
        return ""

    def forget_conversation(self, key: str) -> None:
        """No action."""

    def forget_texts(self) -> None:
        """No action."""

    def unload_lora(self, key: str) -> None:
        """No action."""

    def prepare_warm_up(self) -> list[str]:
        """Accept the call: nothing is compiled."""
        return []

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Accept a vocabulary: grammars do not change the fake tokens."""

    def shutdown(self) -> None:
        if self.tiers is not None:
            self.tiers.stop()

    # ---- steps

    def _gather(self, block_id: int) -> bytes:
        size = self.ready.block_size
        return msgspec.msgpack.encode(self._slots[block_id * size : (block_id + 1) * size])

    def _scatter(self, block_id: int, content: bytes) -> None:
        size = self.ready.block_size
        slots = msgspec.msgpack.decode(content, type=list[tuple[int, int] | None])
        self._slots[block_id * size : (block_id + 1) * size] = slots

    def execute(self, step: StepInput) -> _Result:
        if self.options.validate:
            self._check_shape(step)
        self.num_steps += 1
        if step.stores:
            self.tiers.store(step.stores)
        self._encode(step)
        for new in step.new:
            self._rows[new.row] = self._enter(new)
        batch = [self._rows[row] for row in step.rows]
        for row, new_blocks in zip(batch, step.new_blocks):
            for group, ids, added in zip(self.ready.groups, row.block_ids, new_blocks):
                ids[:] = added or ids if group.kind == "state" else ids + added
        for i, count in step.num_draft.items():
            assert count <= len(batch[i].draft), f"batch position {i} verifies {count} of {len(batch[i].draft)} drafts"
            self._append(batch[i], batch[i].draft[:count])
        if self.options.validate:
            self._write_and_check(step, batch)
        errors = self._check_images(step, batch)
        sampled = self._sample(step, batch)
        num_draft, predicted = self._propose(step, batch) if self._max_draft else (None, None)
        output = StepOutput(
            step.step,
            *sampled,
            self._prompt_logprobs(step, batch),
            errors or None,
            num_draft=num_draft,
            predicted=predicted,
        )
        self._free_at = max(self._free_at, time.monotonic()) + self.options.step_delay
        fails = step.step == self.options.fail_at_step or (
            self.options.fail_on_token >= 0 and any(map(self._is_poison, batch))
        )
        return _Result(
            output, self._free_at if self.options.step_delay else 0.0, fails, step.step == self.options.hang_at_step
        )

    def _is_poison(self, row: _Row) -> bool:
        return len(row.token_ids) - row.num_entered > self.options.fail_after and (
            self.options.fail_on_token in row.token_ids[: row.num_prompt_tokens]
        )

    def _enter(self, new: NewRequest) -> _Row:
        row = _Row(new.sampling, new.num_prompt_tokens, len(new.token_ids), [], [], media=new.media)
        row.block_ids = [list(ids) for ids in new.block_ids]
        self._append(row, new.token_ids, new.media)
        return row

    def _append(self, row: _Row, token_ids: Sequence[int], media: Sequence[MediaItem] = ()) -> None:
        state = row.states[-1] if row.states else 0
        row.token_ids.extend(token_ids)
        for token_id in with_images(token_ids, media) if media else token_ids:
            state = extend(state, token_id)
            row.states.append(state)

    def _encode(self, step: StepInput) -> None:
        """Drop and encode images as the step says, within the limits of `MediaInfo`."""
        for key in step.evict:
            del self._images[key]
        self._encoded = (time.time() - 1e-4, time.time())
        added = [item.num_embeds for item in step.encode]
        for item in step.encode:
            assert item.key not in self._images, f"{item.key} is encoded twice"
            self._images[item.key] = item.num_embeds
        if step.encode:
            assert sum(self._images.values()) <= self.ready.media.cache_size, f"{self._images} do not fit"
            assert len(added) == 1 or sum(added) <= self.ready.media.encoder_budget, f"a step encodes {added}"

    def _check_images(self, step: StepInput, batch: list[_Row]) -> dict[int, str]:
        """Check that the images of the step's tokens are there. Returns the errors of those that are unreadable."""
        errors = {}
        for i, row in enumerate(batch):
            start, end = step.num_computed[i], step.num_computed[i] + step.num_scheduled[i]
            for item in row.media:
                last = item.offset + item.length
                if item.offset >= end or last <= start:
                    continue
                assert item.key in self._images, f"step {step.step}: image {item.key} is not encoded"
                if self.ready.media.whole:
                    assert start <= item.offset and last <= end, f"a chunk cuts the image {item.key}"
                if item.key.startswith("unreadable"):
                    errors[i] = f"image {item.key} cannot be read"
        return errors

    def _sample(
        self, step: StepInput, batch: list[_Row]
    ) -> tuple[list[list[int]], list[list[TokenLogprobs] | None] | None]:
        token_ids, logprobs, any_logprobs = [], [], False
        for i in step.samples:
            row = batch[i]
            if self.options.validate:
                end = step.num_computed[i] + step.num_scheduled[i]
                assert end == len(row.states), (
                    f"batch position {i} samples after {end} tokens, but its row has {len(row.states)}"
                )
            new = self._verify(row, step.num_draft.get(i, 0))
            token_ids.append(new)
            num = row.sampling.logprobs
            any_logprobs = any_logprobs or num is not None
            logprobs.append(
                None if num is None else [token_logprobs(token_id, num, self.ready.vocab_size) for token_id in new]
            )
        return token_ids, logprobs if any_logprobs else None

    def _verify(self, row: _Row, num_draft: int) -> list[int]:
        """Replace the drafts, the last `num_draft` tokens of the row, by those that are right and the token after."""
        known = len(row.token_ids) - num_draft
        draft, new = row.token_ids[known:], []
        while len(new) <= num_draft and new == draft[: len(new)]:
            end = known + len(new)
            new.append(self._next(row.states[end - 1], row, end))
        computed = row.states[: known + len(new) - 1]
        del row.token_ids[known:], row.states[known:]
        for g, group in enumerate(self.ready.groups):
            if group.kind == "state" and num_draft:
                self._slots[row.block_ids[g][1] * self.ready.block_size] = (g, computed[-1])
        self._append(row, new)
        return new

    def _next(self, state: int, row: _Row, num_tokens: int) -> int:
        num_outputs = num_tokens - row.num_prompt_tokens
        return next_token(state, row.sampling, num_outputs, self.ready.vocab_size, self.options.eos_chance)

    def _propose(self, step: StepInput, batch: list[_Row]) -> tuple[dict[int, int], list[int]]:
        """Make drafts for the rows that sampled: the same place of a prediction, or tokens of pseudo-random number and
        correctness, as the options say. Returns the drafts of `StepOutput`.
        """
        predicted = []
        for i in step.samples:
            row, state = batch[i], batch[i].states[-1]
            row.draft = []
            if row.sampling.prediction and row.sampling.speculation:
                place = len(row.token_ids) - row.num_prompt_tokens
                row.draft = row.sampling.prediction[place : place + self._max_draft]
                predicted.append(i)
                continue
            for k in range((state >> 7) % (self._max_draft + 1) if row.sampling.speculation else 0):
                token_id = self._next(state, row, len(row.token_ids) + k)
                if (state >> 20) % 1000 < self.options.wrong_drafts * 1000:
                    token_id = (token_id + 1) % self.ready.vocab_size
                state = extend(state, token_id)
                row.draft.append(token_id)
        return {i: len(batch[i].draft) for i in step.samples if batch[i].draft}, predicted

    def _prompt_logprobs(self, step: StepInput, batch: list[_Row]) -> dict[int, list[TokenLogprobs]] | None:
        entries = {}
        for i, row in enumerate(batch):
            num, start = row.sampling.prompt_logprobs, step.num_computed[i] + 1
            if num is not None and start < row.num_prompt_tokens:
                end = min(start + step.num_scheduled[i], row.num_prompt_tokens)
                entries[i] = [
                    token_logprobs(token_id, num, self.ready.vocab_size) for token_id in row.token_ids[start:end]
                ]
        return entries or None

    # ---- validation

    def _check_shape(self, step: StepInput) -> None:
        size, ready = len(step.rows), self.ready
        assert size == len(step.num_computed) == len(step.num_scheduled) == len(step.new_blocks), (
            "the lists of a step differ in length"
        )
        assert 0 < size <= ready.max_num_seqs, f"a step has {size} requests"
        assert len(set(step.rows)) == size, f"a row appears twice: {step.rows}"
        assert all(0 <= row < ready.max_num_seqs for row in step.rows), f"row out of range: {step.rows}"
        assert all(count > 0 for count in step.num_scheduled), f"a row has no scheduled tokens: {step.num_scheduled}"
        assert sum(step.num_scheduled) <= ready.max_num_batched_tokens, f"a step has {sum(step.num_scheduled)} tokens"
        assert step.samples == sorted(set(step.samples)) and all(0 <= i < size for i in step.samples), (
            f"samples: {step.samples}"
        )
        position_of = {row: i for i, row in enumerate(step.rows)}
        for new in step.new:
            assert new.row in position_of, f"row {new.row} is new but does not run"
            assert not step.new_blocks[position_of[new.row]], "a new row has blocks in new_blocks instead of block_ids"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids) <= ready.max_model_len

    def _write_and_check(self, step: StepInput, batch: list[_Row]) -> None:
        """Read states, write the whole step, then read the tokens that attention reads, as every layer does. So a
        request may share blocks that the same step fills.
        """
        written: set[int] = set()
        spans = [(start, start + count) for start, count in zip(step.num_computed, step.num_scheduled)]
        for g, group in enumerate(self.ready.groups):
            for i, row in enumerate(batch):
                start, end = spans[i]
                assert end <= len(row.states), (
                    f"row {step.rows[i]} has {len(row.states)} tokens, but computes up to {end}"
                )
                self._check_table(g, row, start)
                if group.kind == "state":
                    self._step_state(g, row, start, end, step.checkpoints.get(i, []), written)
                else:
                    self._write(g, row, start, end, written)
        for g, group in enumerate(self.ready.groups):
            for i, row in enumerate(batch):
                start, end = spans[i]
                first = group.first_block(start, 1)
                for position in range(first, 0 if group.kind == "state" else end):
                    assert self._slots[self._slot(g, row, position)] == (g, row.states[position]), (
                        f"step {step.step}: row {step.rows[i]} reads another token than its own at position {position}"
                    )

    def _check_table(self, g: int, row: _Row, start: int) -> None:
        """Check a block table from the first block that a token from `start` on attends to. Earlier entries may be
        stale: their blocks were released and may be reused.
        """
        group = self.ready.groups[g]
        ids = row.block_ids[g][group.first_block(start, self.ready.block_size) :]
        if group.kind == "state":
            first, end = self.ready.num_blocks, self.ready.num_blocks + self.ready.num_states
            correct = len(ids) == 2 and ids[1] and all(not block_id or first <= block_id < end for block_id in ids)
        else:
            correct = len(set(ids)) == len(ids) and all(0 < block_id < self.ready.num_blocks for block_id in ids)
        assert correct, f"block table {row.block_ids[g]}"

    def _write(self, g: int, row: _Row, start: int, end: int, written: set[int]) -> None:
        for position in range(start, end):
            slot = self._slot(g, row, position)
            assert slot not in written, f"slot {slot} is written twice in one step"
            written.add(slot)
            self._slots[slot] = (g, row.states[position])

    def _step_state(
        self, g: int, row: _Row, start: int, end: int, checkpoints: list[tuple[int, int]], written: set[int]
    ) -> None:
        """Read a state before the step and write it after the step, and at its checkpoints. A step never reads a page
        that another request of the step writes.
        """
        read, write = (block_id * self.ready.block_size for block_id in row.block_ids[g])
        assert read not in written and write not in written, f"the page of slot {write} is written twice in one step"
        if start == 0:
            assert read == 0, "a request without computed tokens reads a state"
        else:
            assert read and self._slots[read] == (g, row.states[start - 1]), (
                f"the state of {start} tokens was never written to slot {read}"
            )
        pages = [(count, page * self.ready.block_size) for count, page in checkpoints]
        assert sorted(pages) == pages and all(0 < count < end - start for count, _ in pages), f"checkpoints {pages}"
        for count, slot in [*pages, (end - start, write)]:
            assert (slot not in written and slot != read) or (slot, count) == (write, end - start)
            written.add(slot)
            self._slots[slot] = (g, row.states[start + count - 1])

    def _slot(self, g: int, row: _Row, position: int) -> int:
        block, offset = divmod(position, self.ready.block_size)
        ids = row.block_ids[g]
        assert block < len(ids) and ids[block], f"position {position} has no block: {ids}"
        return ids[block] * self.ready.block_size + offset


class _Platform:
    """Stands for a machine with much RAM."""

    shares_ram = True

    def free_ram(self) -> int:
        return 1 << 50


def _sizes(config: Config, groups: list[CacheGroup], media: MediaInfo | None) -> WorkerReady:
    path = Path(config.model.model, "config.json")
    vocab_size = json.loads(path.read_text())["vocab_size"] if config.model.model and path.exists() else 1000
    max_model_len = 4096 if config.model.max_model_len == "auto" else int(config.model.max_model_len)
    plan = MemoryPlan("fake", 0, 0, 0, 0, 0, 0, 0)
    return WorkerReady(
        config.cache.num_gpu_blocks_override or 1024,
        config.cache.block_size or 16,
        max_model_len,
        config.scheduler.max_num_seqs or 64,
        config.scheduler.max_num_batched_tokens or 2048,
        vocab_size,
        1,
        plan,
        [("executor", "fake", "requested")],
        groups=groups,
        media=media,
        num_states=2 * (config.scheduler.max_num_seqs or 64) + 3,
        tiers=plan_tiers(config, _Platform()),
        max_loras=(config.lora.max_loras or 8) if config.lora.enabled else 0,
    )
