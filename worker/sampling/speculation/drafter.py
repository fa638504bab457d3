"""The interface of drafters, and the tokens of a request that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from quire.worker.attention.base import AttentionBackend
from quire.worker.batch.input_batch import InputBatch
from quire.worker.messages import NewRequest, StepInput
from quire.worker.parallel import pp
from quire.worker.platforms.ops import Ops


class History:
    """The tokens of one request on the host, prompt then outputs, and its prediction."""

    def __init__(self, new: NewRequest) -> None:
        self.conversation = new.conversation
        self.scope: str | None = new.scope
        self.source: np.ndarray | None = None  # the earlier text that it follows
        self.own_match = 0, 0, 0  # number of tokens then, and the longest match in its own text
        self.num_prompt_tokens = new.num_prompt_tokens
        self.prediction = new.sampling.prediction or []
        self.has_grammar = new.sampling.grammar is not None
        self._added: Sequence[int] = new.token_ids  # not yet in `_tokens`: made an array only for drafts
        self._tokens = np.empty(0, dtype=np.int32)
        self._size = 0

    def add(self, token_ids: list[int]) -> None:
        """Append outputs."""
        self._flush()
        self._added = token_ids

    def forget(self) -> None:
        """Stop being a source for later requests, and stop following an earlier text."""
        self.scope = self.source = None

    @property
    def size(self) -> int:
        return self._size + len(self._added)

    @property
    def tokens(self) -> np.ndarray:
        """Return all tokens, int32."""
        self._flush()
        return self._tokens[: self._size]

    @property
    def outputs(self) -> np.ndarray:
        return self.tokens[self.num_prompt_tokens :]

    def _flush(self) -> None:
        size = self._size + len(self._added)
        if size > len(self._tokens):
            grown = np.empty(size + size // 4 + 64, dtype=np.int32)
            grown[: self._size] = self._tokens[: self._size]
            self._tokens = grown
        self._tokens[self._size : size] = self._added
        self._size, self._added = size, ()


class Drafter(Protocol):
    """One source of drafts. Takes at most tens of microseconds; keeps state per request only in `History`."""

    def propose(self, row: int, history: History, limit: int) -> list[int]:
        """Return likely next tokens of the request in `row`, at most `limit`; [] for none."""


def relative_size(parts: Sequence[nn.Module], model: nn.Module) -> float:
    """Return the weight bytes of `parts` divided by those of `model`, an estimate of the ratio of their step times.
    This rank holds one pipeline stage of `model`.
    """
    return sum(map(_weight_bytes, parts)) / max(_weight_bytes(model) * pp().size, 1)


def _weight_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


class ModelDrafter(Protocol):
    """A source of drafts that computes them on the device: when the step that verifies them begins or, with several
    pipeline stages, of which the last one drafts and the first one embeds, right after the step before.
    """

    needs_hidden: bool  # whether `follow` reads hidden states
    cost: float  # per draft, in one-token steps of the model

    def use(self, ops: Ops, backend: AttentionBackend) -> None:
        """Switch to a platform's operations."""

    def draft(self, step: StepInput, counts: dict[int, int]) -> dict[int, list[int]]:
        """Return `counts[i]` likely next tokens of the requests at batch positions i of `step`, whose tables are up to
        date.

        They are written to the token table.
        """

    def follow(self, batch: InputBatch, hidden: torch.Tensor, drafted: dict[int, int]) -> None:
        """Take the tokens of a step, and the sampled ones after them in the token table. `hidden` `[T, H]` are their
        hidden states, if it needs them; `drafted[i]` tokens were drafted by this drafter for batch position i.
        """
