"""Converts the output ids of one request to sendable text: whole characters, without the beginning of a stop string."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence

from quire.server.text.tokenizer import Tokenizer


class StopStrings:
    """Finds stop strings in text that arrives in parts. An Aho-Corasick automaton, so the cost does not depend on the
    number of stop strings.

    A state represents the longest suffix of the text that begins a stop string; 0 is the empty suffix. Immutable; the
    choices of a request share one instance.
    """

    def __init__(self, stop: Sequence[str]):
        self.strings = list(stop)
        self.depth = [0]  # per state: length of that suffix in characters
        self.held = [0]  # per state: length of the longest suffix that can still grow into a stop string
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]  # per state: the state of the next shorter such suffix
        self._hit = [-1]  # per state: index of the first string in `stop` that it completes, or -1
        for index, string in enumerate(self.strings):
            self._add(index, string)
        self._link()
        first = "".join(sorted(self._next[0]))
        self._skip = re.compile(f"[^{re.escape(first)}]*").match if first else None

    def __len__(self) -> int:
        return len(self.strings)

    def _add(self, index: int, string: str) -> None:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.held.append(0)
                self._fail.append(0)
                self._hit.append(-1)
            state = following
        if self._hit[state] < 0:
            self._hit[state] = index

    def _link(self) -> None:
        """Compute the failure links, breadth first, because each needs those of shorter prefixes."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            shorter = self._fail[state]
            self.held[state] = self.depth[state] if self._next[state] else self.held[shorter]
            hits = [hit for hit in (self._hit[state], self._hit[shorter]) if hit >= 0]
            self._hit[state] = min(hits, default=-1)
            for char, child in self._next[state].items():
                self._fail[child] = self.step(shorter, char) if state else 0
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while (following := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._fail[state]
        return following

    def scan(self, state: int, text: str, match: bool) -> tuple[int, int, int]:
        """Advance `state` over `text`; if `match`, stop at the end of the first stop string. Returns the new state, the
        number of characters read, and the index of that string or -1.
        """
        position, end = 0, len(text)
        while position < end:
            if state == 0:
                position = self._skip(text, position).end()
                if position == end:
                    break
            state = self.step(state, text[position])
            position += 1
            if match and self._hit[state] >= 0:
                return state, position, self._hit[state]
        return state, end, -1


class Detokenizer:
    """Decodes one sequence as its tokens arrive.

    The results of `push` and `finish` add up to the full text, cut at the first stop string.

        text decoded so far:  [ emitted ............ | tail ]      tail: longest suffix that may grow into a stop string
        tokens:               [ num_released | the rest     ]      released: all of their text is emitted

    A stop string counts if a token after the first `min_tokens` completes it. If several match, the one completed
    first wins, then the one that is first in `stop`.

    A character whose last bytes are missing is left out at the end of the sequence, and before a token of `text_ends`,
    which ends the text before it wherever that is: a marker of thoughts or calls, a stop token that is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] | StopStrings = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
        visible_ids: frozenset[int] = frozenset(),
        text_ends: frozenset[int] = frozenset(),
    ):
        self.stopped: str | None = None  # the stop string that was found
        self.num_tokens = 0  # tokens pushed, up to the one that completed a stop string
        self.num_released = 0
        self._stream = tokenizer.stream(
            prompt_token_ids, skip_special_tokens, spaces_between_special_tokens, visible_ids
        )
        self._text_ends = text_ends
        self._stop = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._state = 0  # state of `_stop` at the end of the text decoded so far
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._tail = ""
        self._num_decoded = 0  # characters
        # per unreleased token: the number of emitted characters that releases it
        self._ends: deque[int] = deque()

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that can be sent now. Tokens after a stop string are ignored."""
        texts = []
        for token_id in ids:
            if self.stopped is not None:
                break
            texts.append(self._push_one(token_id))
        return "".join(texts)

    def finish(self) -> str:
        """End the sequence and return the text still held back."""
        if self.stopped is not None:
            return ""
        text = self._stream.finish()
        if self._stop:
            text = self._before_stop(text) + self._tail
            self._tail = ""
        self._release_all()
        return text

    def _push_one(self, token_id: int) -> str:
        stream = self._stream
        text = stream.finish() if token_id in self._text_ends and stream.held else ""
        text += stream.push((token_id,))
        held = stream.held
        self.num_tokens += 1
        self._num_decoded += len(text)
        if self._stop and text:
            text = self._before_stop(text)
        if self.stopped is not None or not (held or self._tail):
            self._release_all()
        else:
            self._ends.append(self._num_decoded + held)  # a held token waits for at least the next character
            num_emitted = self._num_decoded - len(self._tail)
            while self._ends and self._ends[0] <= num_emitted:
                self._ends.popleft()
                self.num_released += 1
        return text

    def _release_all(self) -> None:
        self.num_released = self.num_tokens
        self._ends.clear()

    def _before_stop(self, text: str) -> str:
        """Append `text` to the tail; return the text that leaves it: everything up to a stop string, or everything that
        cannot begin one.
        """
        buffer = self._tail + text
        self._state, num_read, hit = self._stop.scan(self._state, text, self.num_tokens > self._min_tokens)
        if hit >= 0:
            self.stopped = self._stop.strings[hit]
            end = len(self._tail) + num_read
            self._tail = ""
            return buffer[: end if self._include else end - len(self.stopped)]
        start = len(buffer) - self._stop.held[self._state]
        self._tail = buffer[start:]
        return buffer[:start]
