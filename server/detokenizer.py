"""Output ids of one request -> text that may be sent: whole characters, and never the beginning of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from server.tokenizer import Tokenizer


class Detokenizer:
    """Text of one sequence as its tokens arrive. The pushes and `finish` add up to the full text, cut at the first stop string.

        text decoded so far:  [ emitted ............ | tail ]       tail: the longest end that may grow into a stop string
        tokens:               [ num_released | the rest     ]       released: all of their text is emitted

    A stop string counts if it is complete with a token after the first `min_tokens`. Of several, the one complete first wins, then the one that comes
    first in `stop`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str] = (), include_stop_str_in_output: bool = False,
                 skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True, min_tokens: int = 0):
        self.stopped: str | None = None  # the stop string that was hit
        self.num_tokens = 0  # pushed, up to the one that completed a stop string
        self.num_released = 0
        self._stream = tokenizer.stream(prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        self._stop = list(stop)
        self._first_chars = {s[0] for s in self._stop}
        self._longest = max(map(len, self._stop), default=0)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._tail = ""
        self._num_decoded = 0  # characters
        self._ends: deque[int] = deque()  # of each token not released: the number of characters that must be emitted for it to be

    def push(self, ids: Iterable[int]) -> str:
        """Take new tokens; return the text that may be sent now. Once a stop string was hit, tokens are ignored."""
        texts = []
        for token_id in ids:
            if self.stopped is not None:
                break
            texts.append(self._push_one(token_id))
        return "".join(texts)

    def finish(self) -> str:
        """The text still held back: no more tokens will come. An unfinished character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._stream.finish()
        if self._stop:
            text = self._before_stop(text) + self._tail
            self._tail = ""
        self._release_all()
        return text

    def _push_one(self, token_id: int) -> str:
        text = self._stream.push((token_id,))
        held = self._stream.held
        self.num_tokens += 1
        self._num_decoded += len(text)
        if self._stop and text:
            text = self._before_stop(text)
        if self.stopped is not None or not (held or self._tail):
            self._release_all()
        else:
            self._ends.append(self._num_decoded + held)  # a held token waits for the next character at least
            num_emitted = self._num_decoded - len(self._tail)
            while self._ends and self._ends[0] <= num_emitted:
                self._ends.popleft()
                self.num_released += 1
        return text

    def _release_all(self) -> None:
        self.num_released = self.num_tokens
        self._ends.clear()

    def _before_stop(self, text: str) -> str:
        """Append `text` to the tail; return what leaves it: all up to a stop string, or all that cannot be the beginning of one."""
        buffer = self._tail + text
        if self.num_tokens > self._min_tokens and (hit := self._find_stop(buffer)):
            self.stopped, cut = hit
            self._tail = ""
            return buffer[:cut]
        start = self._start_of_partial_stop(buffer)
        self._tail = buffer[start:]
        return buffer[:start]

    def _find_stop(self, buffer: str) -> tuple[str, int] | None:
        """The stop string that is complete first within the new part of `buffer`, and where to cut."""
        best, best_end = None, len(buffer) + 1
        for stop in self._stop:
            start = buffer.find(stop, max(0, len(self._tail) - len(stop) + 1))  # it must end behind the tail, which was searched before
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = stop, start + len(stop)
        if best is None:
            return None
        return best, best_end if self._include else best_end - len(best)

    def _start_of_partial_stop(self, buffer: str) -> int:
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._first_chars:
                end = buffer[start:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop):
                    return start
        return len(buffer)
