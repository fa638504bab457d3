"""Grammars: which tokens may come next in rows whose output must match one.

A row has a matcher of the library llguidance, which knows the text so far. A matcher needs the previous token's id on
the host, while the forward pass of the next step is started before that id has arrived. Hence a thread does the work of
the host: `begin`, before the forward pass, lets it wait for the ids, advance the matchers and fill the bitmasks while
the forward pass runs; `apply`, before sampling, waits for it. Any number of steps may be in flight, and rows without a
grammar cost nothing.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from quire.configs import platforms
from quire.worker.batch.input_batch import SamplingBatch
from quire.worker.messages import GRAMMAR_ERROR, GRAMMAR_LIMITS, NewRequest, SamplingParams, Vocabulary
from quire.worker.platforms.base import Event, Platform
from quire.worker.sampling.grammar_cache import GrammarCache

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.worker.batch.request_table import RequestTable

logger = logging.getLogger(__name__)

MAX_THREADS = 8  # threads that fill bitmasks
_EXCLUDED = float("-inf")
_LONGEST_TOKEN = 48  # bytes of a token that is guessed


class _Matcher:
    """The state of one request. Used by the threads of `GrammarRows` only."""

    def __init__(self, after: list[int] | None, spells: bool = False) -> None:
        """Create the grammar; `spells`: where it forces a text, allow only the longest tokens."""
        self.after, self.spells = after or [], spells
        self.is_active = not self.after  # whether the grammar applies already
        self.last: list[int] = []  # the last len(after) outputs, until then
        self.preferred: dict[int, int] = {}  # token of a forced text's end -> the longer one that the model chose
        self.state: LLMatcher | None = None
        self.ready: Future[None]  # the end of `start`
        self.error: str | None = None

    def start(self, state: LLMatcher, token_ids: list[int]) -> None:
        self.state = state
        self.check()
        for token_id in token_ids:
            self.advance(token_id)

    def advance(self, token_id: int) -> None:
        """Take an output."""
        if self.error is not None:
            return
        if token_id < 0:  # every token was excluded: the request has failed
            self.error = f"{GRAMMAR_ERROR}no token was possible"
            return
        if not self.is_active:
            self.last = [*self.last, token_id][-len(self.after) :]
            self.is_active = self.last == self.after
        elif not self.state.is_stopped():  # after its end only end-of-sequence tokens follow
            self.state.consume_token(token_id)
            self.check()

    @property
    def is_complete(self) -> bool:
        return self.state.is_stopped()

    def copy(self) -> _Matcher:
        """Return a matcher in the same state, to try drafts with; takes about 10 us."""
        copy = _Matcher(self.after, self.spells)
        copy.is_active, copy.last, copy.error = self.is_active, self.last, self.error
        copy.state, copy.preferred = self.state.deep_copy(), self.preferred
        return copy

    def try_draft(self, token_id: int) -> bool:
        """Take a draft, unless the grammar excludes it."""
        if self.is_active and not self.state.is_stopped() and not self.state.validate_tokens([token_id]):
            return False
        self.advance(token_id)
        return self.error is None

    def check(self) -> None:
        if self.state.is_error():
            self.error = f"{GRAMMAR_ERROR}{self.state.get_error().splitlines()[0][:500]}"


_Arrival = tuple[Event, torch.Tensor, list[tuple[int, _Matcher]], dict[int, list[int]]]


@dataclass(slots=True)
class Masks:
    """The bitmasks of a step: `bits[k]` belongs to sampling row `rows[k]`."""

    rows: list[int] = field(default_factory=list)
    bits: np.ndarray | None = None  # [R, V / 32] int32
    errors: dict[int, str] = field(default_factory=dict)  # by sampling row
    complete: list[int] = field(default_factory=list)  # sampling rows whose text is complete
    closed: list[int] = field(default_factory=list)  # sampling rows after a draft that the grammar excludes
    eos_token_id: int = -1

    def end(self, logits: torch.Tensor) -> None:
        """Allow complete rows only the end of the sequence, whatever other parameters exclude, and closed rows no
        token.
        """
        for row in self.complete:
            logits[row].fill_(_EXCLUDED)
            logits[row, self.eos_token_id] = 0.0
        for row in self.closed:
            logits[row].fill_(_EXCLUDED)


_NONE = Masks()


class GrammarRows:
    """A `RowState`: the matchers of rows with a grammar."""

    def __init__(self, table: RequestTable, platform: Platform) -> None:
        self.vocab_size, self.platform = table.vocab_size, platform
        self.rows: dict[int, _Matcher] = {}
        self._tokens: Future[Tokens] | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._filling: ThreadPoolExecutor | None = None
        # outputs that no matcher has seen: when and where they arrive, the sampling rows that matchers want, and the
        # drafts that were verified there
        self._arriving: list[_Arrival] = []
        self._masks: Future[Masks] | None = None

    def set_vocabulary(self, data: bytes) -> None:
        """Read the `Vocabulary`, once, in a thread."""
        if self._tokens is None:
            self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile")
            self._filling = ThreadPoolExecutor(1, thread_name_prefix="grammar-fill")
            self._tokens = self._compiling.submit(Tokens, data, self.vocab_size)

    def add(self, row: int, new: NewRequest) -> None:
        grammar = new.sampling.grammar
        if grammar is None:
            return
        if self._tokens is None:
            raise ValueError("grammar: the server has not sent the vocabulary")
        matcher = self.rows[row] = _Matcher(new.sampling.grammar_after, not _excludes_tokens(new.sampling))
        matcher.ready = self._compiling.submit(self._start, matcher, grammar, new.token_ids[new.num_prompt_tokens :])

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def warm_up(self) -> None:
        """Run the kernel that applies bitmasks, which no request needs before the server has sent the vocabulary."""
        logits = torch.zeros(1, self.vocab_size, device=self.platform.device)
        send, width = self.platform.to_device, -(-self.vocab_size // 32)
        self.platform.ops.exclude_by_bitmask(
            logits, send(np.zeros(1, np.int64)), send(np.full((1, width), -1, np.int32))
        )

    def needed(self, batch: SamplingBatch) -> bool:
        """Return whether a row of the batch has a grammar."""
        return bool(self.rows) and not self.rows.keys().isdisjoint(batch.rows)

    def begin(self, batch: SamplingBatch) -> None:
        """Start to fill the bitmasks of a step, before its forward pass is launched."""
        self._masks = None
        if self.needed(batch):
            arriving, self._arriving = self._arriving, []
            self._masks = self._filling.submit(self._fill, self._matchers(batch), arriving, batch.drafts)

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> Masks:
        """Exclude the tokens that grammars do not allow from the logits `[S, V]`; waits for the bitmasks."""
        if self._masks is None:
            return _NONE
        masks = self._masks.result()
        if masks.rows:
            send = self.platform.to_device
            rows = send(np.array(masks.rows, dtype=np.int64))
            self.platform.ops.exclude_by_bitmask(logits, rows, send(masks.bits))
        return masks

    def sampled(self, batch: SamplingBatch, token_ids: torch.Tensor, event: Event) -> None:
        """Note the sampled ids `[S]`, which may be read once `event` has passed."""
        if self._masks is not None:
            self._arriving.append((event, token_ids, self._matchers(batch), batch.drafts))

    def _matchers(self, batch: SamplingBatch) -> list[tuple[int, _Matcher]]:
        """Return (first sampling row, matcher) of the requests with a grammar."""
        found, j = [], 0
        while j < len(batch.rows):
            if batch.rows[j] in self.rows:
                found.append((j, self.rows[batch.rows[j]]))
            j += 1 + len(batch.drafts.get(j, ()))
        return found

    def forced(self, limits: dict[int, int], guess: bool = False) -> dict[int, list[int]]:
        """Return the next tokens of rows, at most `limits[row]`, as long as a row's grammar allows only one or, with
        `guess`, as long as it forces the next bytes: then the longest token of these bytes. Waits for the outputs that
        no matcher has seen.
        """
        arriving, self._arriving = self._arriving, []
        matchers = [(self.rows[row], limit) for row, limit in limits.items()]
        return dict(zip(limits, self._filling.submit(self._all_forced, matchers, guess, arriving).result()))

    def allowed(self, row: int, token_ids: list[int], limit: int) -> list[int]:
        """Return those of `token_ids` that the grammar of `row` allows as its next tokens, and after them the tokens
        that it forces, at most `limit` together.
        """
        arriving, self._arriving = self._arriving, []
        return self._filling.submit(self._allowed, self.rows[row], token_ids, limit, arriving).result()

    # ---- in threads

    def _start(self, matcher: _Matcher, grammar: str, token_ids: list[int]) -> None:
        try:
            matcher.start(self._tokens.result().matcher(grammar), token_ids)
        except Exception as error:  # llguidance is missing, for example: fails this request only
            logger.exception("cannot compile a grammar")
            matcher.error = f"grammar: {type(error).__name__}: {error}"

    def _fill(
        self,
        matchers: Sequence[tuple[int, _Matcher]],
        arriving: Sequence[_Arrival],
        drafts: dict[int, list[int]],
    ) -> Masks:
        self._receive(arriving)
        for _, matcher in matchers:
            matcher.ready.result()
        masks = Masks()
        active = [(j, matcher) for j, matcher in matchers if matcher.is_active and matcher.error is None]
        if active:
            tokens = self._tokens.result()
            masks.bits, masks.eos_token_id = tokens.fill([matcher for _, matcher in active]), tokens.eos_token_id
            masks.rows = [j for j, _ in active]
            for j, matcher in active:
                matcher.check()
                if matcher.error is None and matcher.is_complete:
                    masks.complete.append(j)
        masks.errors = {j: matcher.error for j, matcher in matchers if matcher.error is not None}
        if drafts:
            self._fill_after_drafts([(j, matcher) for j, matcher in active if matcher.error is None], drafts, masks)
            waiting = [(j, matcher) for j, matcher in matchers if not matcher.is_active and matcher.error is None]
            self._fill_after_drafts(waiting, drafts, masks)
        return masks

    def _fill_after_drafts(
        self, matchers: list[tuple[int, _Matcher]], drafts: dict[int, list[int]], masks: Masks
    ) -> None:
        """Add the bitmasks of the sampling rows after drafts. The matchers themselves see no draft."""
        tokens, bits = self._tokens.result(), [] if masks.bits is None else [masks.bits]
        for first, matcher in matchers:
            copy = matcher.copy() if first in drafts else None
            for j, draft in enumerate(drafts.get(first, ()), first + 1):
                if copy is None or not copy.try_draft(draft):
                    copy = None
                    masks.closed.append(j)
                elif copy.is_active:
                    bits.append(tokens.fill([copy]))
                    masks.rows.append(j)
                    copy.check()
                    if copy.error is not None:
                        copy = None
                        masks.closed.append(j)
                    elif copy.is_complete:
                        masks.complete.append(j)
        masks.bits = np.concatenate(bits) if bits else None
        masks.eos_token_id = tokens.eos_token_id

    def _receive(self, arriving: Sequence[_Arrival]) -> None:
        """Let matchers take the outputs that arrived: a sampled token and, as long as it is the draft, the next one."""
        for event, token_ids, waiting, drafts in arriving:
            event.synchronize()
            ids = token_ids.tolist()
            for j, matcher in waiting:
                matcher.advance(ids[j])
                for k, draft in enumerate(drafts.get(j, ()), j):
                    if ids[k] != draft or ids[k + 1] < 0:
                        if ids[k] not in (-1, draft) and matcher.is_active and matcher.error is None:
                            self._tokens.result().learn(matcher, draft, ids[k])
                        break
                    matcher.advance(ids[k + 1])

    def _all_forced(
        self, matchers: Sequence[tuple[_Matcher, int]], guess: bool, arriving: Sequence[_Arrival]
    ) -> list[list[int]]:
        self._receive(arriving)
        return [self._forced(matcher, limit, guess) for matcher, limit in matchers]

    def _forced(self, matcher: _Matcher, limit: int, guess: bool) -> list[int]:
        matcher.ready.result()
        if matcher.error is not None or not matcher.is_active:
            return []
        return self._forced_after(matcher.copy(), limit, guess)

    def _forced_after(self, copy: _Matcher, limit: int, guess: bool) -> list[int]:
        """Advance a copy of a matcher by the tokens that are forced."""
        forced: list[int] = []
        # If only one token is possible, its bytes are forced, which is quick to check.
        tokens = self._tokens.result()
        while len(forced) < limit and not copy.state.is_stopped() and (text := copy.state.compute_ff_bytes()):
            token_id = tokens.guess(copy, text) if guess else tokens.only(copy)
            if token_id is None or not copy.try_draft(token_id):
                break
            forced.append(token_id)
        return forced

    def _allowed(self, matcher: _Matcher, token_ids: list[int], limit: int, arriving: Sequence[_Arrival]) -> list[int]:
        self._receive(arriving)
        matcher.ready.result()
        if matcher.error is not None:
            return []
        copy, tokens, found = matcher.copy(), self._tokens.result(), []
        for token_id in token_ids:
            spelled = tokens.spelled(copy)
            if spelled not in (None, token_id) or not copy.try_draft(token_id):
                break
            found.append(token_id)
        if found and copy.error is None and copy.is_active:
            found += self._forced_after(copy, limit - len(found), guess=True)
        return found


def _excludes_tokens(sampling: SamplingParams) -> bool:
    """Return whether a request excludes tokens, one of which may be the longest of a forced text."""
    some = sampling.allowed_token_ids, sampling.bad_words_ids, sampling.no_repeat_ngram
    return any(some) or bool(sampling.min_tokens or sampling.logit_bias)


class Tokens:
    """The vocabulary, as llguidance reads it, and the grammars compiled for it. Raises ImportError without it."""

    def __init__(self, data: bytes, vocab_size: int) -> None:
        from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

        vocabulary = msgspec.msgpack.decode(data, type=Vocabulary)
        assert len(vocabulary.tokens) == vocab_size
        self.tokenizer: LLTokenizer = LLTokenizer(
            _Wrapper(vocabulary), n_vocab=vocab_size, eos_token=vocabulary.eos_token_ids
        )
        num_threads = min(MAX_THREADS, max(len(platforms.usable_cpus()) // 2, 1))
        self.executor: LLExecutor = LLExecutor(num_threads)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        special = {*vocabulary.special_ids, *vocabulary.eos_token_ids}
        self.texts = vocabulary.tokens
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token and i not in special}
        self._sorted = sorted(self._ids)
        self._num_words = -(-vocab_size // 32)
        self._compiled = GrammarCache(
            lambda grammar: LLMatcher(self.tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        )

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a new matcher at the beginning of the grammar."""
        return self._compiled.matcher(grammar)

    def only(self, matcher: _Matcher) -> int | None:
        """Return the token that the matcher allows next, or None if it allows several."""
        bits = self.fill([matcher])
        words = np.flatnonzero(bits)
        if len(words) != 1:
            return None
        word = int(bits[0, words[0]]) & 0xFFFFFFFF
        return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1

    def longest(self, text: bytes) -> int | None:
        """Return the longest token that `text` begins with."""
        for length in range(min(len(text), _LONGEST_TOKEN), 0, -1):
            if (token_id := self._ids.get(text[:length])) is not None:
                return token_id
        return None

    def guess(self, matcher: _Matcher, text: bytes) -> int | None:
        """Return the token that the model is likely to choose where the grammar forces `text`."""
        token_id = self.longest(text)
        if token_id is None or token_id not in matcher.preferred or self.texts[token_id] != text:
            return token_id
        longer = matcher.preferred[token_id]
        return longer if matcher.state.validate_tokens([longer]) else token_id

    def learn(self, matcher: _Matcher, draft: int, chosen: int) -> None:
        """Record the token that the model chose in place of a draft, if one's text begins with the other's."""
        if self.texts[chosen].startswith(self.texts[draft]):
            matcher.preferred[draft] = chosen
        elif self.texts[draft].startswith(self.texts[chosen]):
            matcher.preferred.pop(chosen, None)

    def spelled(self, matcher: _Matcher) -> int | None:
        """Return the longest token of the text that the grammar forces, unless a longer one begins with all of this
        text: then the model chooses.
        """
        if not matcher.spells or not matcher.is_active or matcher.state.is_stopped():
            return None
        text = matcher.state.compute_ff_bytes()
        if not text or self._is_prefix_of_longer(text):
            return None
        token_id = self.longest(text)
        return token_id if token_id is not None and matcher.state.validate_tokens([token_id]) else None

    def _is_prefix_of_longer(self, text: bytes) -> bool:
        """Return whether a token is longer than `text` and begins with it."""
        place = bisect.bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def fill(self, matchers: list[_Matcher]) -> np.ndarray:
        """Return bitmasks `[R, V / 32]` int32 of the tokens that each matcher allows next."""
        bits = np.zeros((len(matchers), self._num_words), dtype=np.uint32)
        targets = []
        for k, matcher in enumerate(matchers):
            if (token_id := self.spelled(matcher)) is None:
                targets.append((matcher.state, k))
            else:
                bits[k, token_id // 32] = 1 << token_id % 32
        if targets:
            self.executor.unsafe_compute_mask_ptr(targets, bits.ctypes.data, 4 * self._num_words, len(matchers))
        return bits.view(np.int32)


class _Wrapper:
    """A `Vocabulary` with the names that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_token_ids})
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("grammars force no text, so none is tokenized")
