"""Parameters against repeated sequences of tokens: transformers' `no_repeat_ngram_size`, and those of the logits
processors for DeepSeek-OCR in vLLM and SGLang (`vllm_xargs`, `custom_params`).
"""

from __future__ import annotations

import json
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from quire.engine.messages import MAX_NGRAM_COMPARISONS, NoRepeatNgram
from quire.server.errors import BadRequest
from quire.server.request.limits import INT64_MAX, MAX_STOP_TOKEN_IDS, TokenId

_SGLANG_PROCESSOR = b"DeepseekOCRNoRepeatNGramLogitProcessor"
_VLLM_WINDOW = 100

Positive = Annotated[int, Meta(ge=1, le=INT64_MAX)]


class NgramArguments(msgspec.Struct, kw_only=True):
    """Parameters of vLLM's and SGLang's processors. Without `ngram_size` they have no effect."""

    ngram_size: Positive | None = None
    window_size: Positive | None = None
    whitelist_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None

    harmless: ClassVar = frozenset()
    unsupported: ClassVar[dict[str, tuple]] = {}

    def parameter(self, default_window: int, *, reads_prompt: bool) -> NoRepeatNgram | None:
        """Return the same, for the engine."""
        if self.ngram_size is None:
            return None
        exempt = tuple(dict.fromkeys(self.whitelist_token_ids or ()))
        return NoRepeatNgram(self.ngram_size, self.window_size or default_window, exempt, reads_prompt)


def from_vllm(arguments: NgramArguments | None) -> NoRepeatNgram | None:
    """Return the settings of vLLM's processor in `vllm_xargs`: only the output counts."""
    return arguments and arguments.parameter(_VLLM_WINDOW, reads_prompt=False)


def from_sglang(processor: str | None, arguments: NgramArguments | None) -> NoRepeatNgram | None:
    """Return settings of SGLang's processor in `custom_params`: the prompt counts, too. `processor` is the serialized
    object, of which only the name is read. Raises BadRequest for another one.
    """
    if processor is None:
        if arguments is not None and arguments.ngram_size is not None:
            raise BadRequest("custom_params need custom_logit_processor.", param="custom_params")
        return None
    if _SGLANG_PROCESSOR not in _serialized(processor):
        raise BadRequest(
            f"custom_logit_processor is not supported, except {_SGLANG_PROCESSOR.decode()}.",
            param="custom_logit_processor",
        )
    if arguments is None or arguments.ngram_size is None or arguments.window_size is None:
        raise BadRequest("custom_params must have ngram_size and window_size.", param="custom_params")
    return arguments.parameter(0, reads_prompt=True)


def _serialized(processor: str) -> bytes:
    """Return the bytes of {"callable": hexadecimal digits}."""
    try:
        return bytes.fromhex(json.loads(processor)["callable"])
    except (ValueError, TypeError, KeyError):
        raise BadRequest(
            "custom_logit_processor is not what SGLang's to_str returns.", param="custom_logit_processor"
        ) from None


def chosen_ngram(
    of_processor: NoRepeatNgram | None, size: int | None, window: int | None, max_model_len: int, vocab_size: int
) -> NoRepeatNgram | None:
    """Return the parameter for the engine: that of a processor, or `no_repeat_ngram_size` and
    `no_repeat_ngram_window_size` (0 is off, and no window). Raises BadRequest if both are given, or out of range.
    """
    if size and of_processor:
        raise BadRequest(
            "no_repeat_ngram_size and ngram_size of a logits processor are the same: give one.",
            param="no_repeat_ngram_size",
        )
    ngram = NoRepeatNgram(size, window or 0) if size else of_processor
    if ngram is None:
        return None
    name = "no_repeat_ngram_size" if size else "ngram_size"
    searched = min(ngram.window or max_model_len, max_model_len)
    if ngram.size * searched > MAX_NGRAM_COMPARISONS:
        raise BadRequest(
            f"{name} {ngram.size} in a window of {searched} tokens: the product must not exceed "
            f"{MAX_NGRAM_COMPARISONS}.",
            param=name,
        )
    if ngram.exempt and max(ngram.exempt) >= vocab_size:
        raise BadRequest(
            f"whitelist_token_ids: token id {max(ngram.exempt)} is not in the vocabulary, which has {vocab_size} "
            "entries.",
            param="whitelist_token_ids",
        )
    return ngram
