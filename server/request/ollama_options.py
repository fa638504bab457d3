"""Ollama's `options`, `think` and `format`, which its clients also send to OpenAI's routes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.server.request.fields import SamplingFields
from quire.server.request.limits import INT64_MAX, RepetitionPenalty, Stop, Stops

MAX_FIELDS = 4096
Json = Annotated[dict[str, Any], Meta(max_length=MAX_FIELDS)]
Think = bool | Literal["low", "medium", "high", "max"] | None
Format = Literal["", "json"] | Json | None
# how Ollama loads a model; here `quire serve` has decided it
_LOADING = frozenset(
    {
        "num_ctx",
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "use_mmap",
        "use_mlock",
        "embedding_only",
    }
)


class Options(SamplingFields, kw_only=True):
    # -2 to 0, and more than fit: all that the context holds
    num_predict: Annotated[int, Meta(ge=-2, le=INT64_MAX)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    repetition_penalty: RepetitionPenalty | None = msgspec.field(default=None, name="repeat_penalty")
    stop: Stop | Stops | None = None

    harmless: ClassVar = _LOADING
    unsupported: ClassVar[dict[str, tuple]] = {}
    hints: ClassVar[dict[str, tuple]] = {"tfs_z": (1.0,), "penalize_newline": (True,)}  # Ollama ignores them as well
