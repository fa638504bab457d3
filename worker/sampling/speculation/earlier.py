"""Earlier texts of the same conversation, a second source for looking up what follows.

Conversations are those that clients name (`prompt_cache_key`, `X-Session-ID`), each by its API key and cache salt, so
that no text of another key is ever a source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

MAX_CONVERSATIONS = 128
MAX_TOKENS = 1 << 15  # per conversation, the newest ones
BETWEEN = -1  # after each text


def ended(tokens: np.ndarray) -> np.ndarray:
    """Return a text that nothing follows."""
    return np.append(tokens, np.int32(BETWEEN))


def joined(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the newest tokens of texts, oldest first."""
    return np.concatenate(texts)[-MAX_TOKENS:]


class EarlierTexts:
    """The last tokens of conversations, least recently used first out: at most 16 MiB."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, np.ndarray] = OrderedDict()

    def tokens(self, conversation: str) -> np.ndarray:
        """Tokens, int32, oldest first."""
        return self._texts.get(conversation, np.empty(0, dtype=np.int32))

    def add(self, conversation: str, tokens: np.ndarray) -> None:
        """Add the tokens, prompt and output, of a request of the conversation that ended."""
        before = self._texts.pop(conversation, np.empty(0, dtype=np.int32))
        self._texts[conversation] = joined([before, ended(tokens)])
        while len(self._texts) > MAX_CONVERSATIONS:
            self._texts.popitem(last=False)

    def forget(self, key: str) -> None:
        """Forget a conversation with any salt."""
        for conversation in [one for one in self._texts if one.partition("\0")[0] == key]:
            del self._texts[conversation]
