"""The served model, as requests are checked against it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from quire.checkpoints.library.entries import Entry
from quire.engine.messages import PoolingInfo, WorkerReady

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preset:
    """Values that the model's name adds (`quire create`, Ollama's store) to requests without them. `sampling` has the
    parameters that generation_config.json may have, under our names, `options` the other fields of GenerationOptions.
    """

    entry: Entry = Entry("")
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the served model that requests are checked against; known once the engine is ready."""

    max_model_len: int  # see `context_length`
    vocab_size: int
    eos_token_ids: list[int]
    sampling_defaults: dict[str, Any]  # from generation_config.json, under our parameter names
    max_logprobs: int  # -1: no limit
    priorities: bool  # whether the scheduler uses them
    pooling: PoolingInfo | None = None  # None: it makes no embeddings
    keeps_states: bool = False  # whether layers have recurrent states, whose checkpoints are sparse
    other_defaults: dict[str, Any] = field(default_factory=dict)  # for sampling, where the model's files have none
    preset: Preset = field(default_factory=Preset)
    transcribes: bool = False  # it writes what it hears, and answers no prompt

    @property
    def writes(self) -> bool:
        """Return whether it continues prompts."""
        return not self.transcribes and (self.pooling is None or self.pooling.generates)


def context_length(worker: WorkerReady) -> int:
    """Return the most tokens that a request may have: the context length, or less if the model generates no text and
    its files say where they cut texts (sentence-transformers' max_seq_length).
    """
    pooling = worker.pooling
    if pooling is None or pooling.generates or not pooling.max_tokens:
        return worker.max_model_len
    return min(pooling.max_tokens, worker.max_model_len)


def known_token_ids(token_ids: list[int], vocab_size: int) -> list[int]:
    """Return the end-of-sequence ids that the model can sample; others are logged and dropped.

    Some models list ids beyond their vocabulary.
    """
    known = [token_id for token_id in token_ids if 0 <= token_id < vocab_size]
    if len(known) < len(token_ids):
        logger.warning(
            "ignoring the end-of-sequence ids %s: the model's vocabulary has %d tokens",
            sorted(set(token_ids) - set(known)),
            vocab_size,
        )
    return known
