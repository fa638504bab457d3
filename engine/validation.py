"""Check requests before they are queued.

Every value that would raise in the scheduler or in a worker is rejected here, before the request touches shared state.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from quire.engine.messages import AddRequest
from quire.worker.messages import (
    LOGPROBS_MODES,
    MAX_NGRAM_COMPARISONS,
    MediaInfo,
    MediaItem,
    NoRepeatNgram,
    PoolingInfo,
    SamplingParams,
)

# number of bad words times the length of the longest: the number of tokens that workers compare per step
MAX_BAD_WORDS_SIZE = 1 << 18

MAX_MARKER_TOKENS = 256  # per text that begins or ends thinking
MAX_STOP_TOKEN_IDS = 1024  # searched for every sampled token


def check_request(
    message: AddRequest, max_model_len: int, vocab_size: int, pooling: PoolingInfo | None = None, max_loras: int = 0
) -> None:
    """Raise ValueError, naming the parameter and its limit, for a request that cannot run."""
    prompt, sampling = message.prompt_token_ids, message.sampling
    if not prompt:
        raise ValueError("prompt_token_ids is empty")
    _check_token_ids("prompt_token_ids", prompt, vocab_size)
    for choice in message.choices:
        _check_token_ids("output_token_ids", choice.output_token_ids, vocab_size)
    if len({choice.request_id for choice in message.choices}) < len(message.choices):
        raise ValueError("request_id: two choices of a request have the same id")
    check_sampling(sampling, max_model_len, vocab_size)
    _check_adapters(message, max_loras)
    _check_task(message, pooling)
    if len(prompt) + min(sampling.max_tokens, 1) > max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but a request may have at most {max_model_len} tokens in total, "
            "prompt and output (limited by the model's context length or the KV cache)"
        )


def _check_adapters(message: AddRequest, max_loras: int) -> None:
    keys = {use.key for use in message.adapters}
    if len(keys) < len(message.adapters):
        raise ValueError("lora: an adapter is given twice")
    if len(keys) > max_loras:
        raise ValueError(f"lora: a request uses {len(keys)} adapters, but at most {max_loras} may run (--max-loras)")
    if not all(math.isfinite(use.scale) for use in message.adapters):
        raise ValueError("lora: a scale is not a finite number")


def _check_task(message: AddRequest, pooling: PoolingInfo | None) -> None:
    """Raise ValueError if the model cannot do what the request asks for, text or a vector."""
    if message.pooling is None:
        if pooling is not None and not pooling.generates:
            raise ValueError("this model cannot generate text: it has no output head")
        return
    if message.sampling.max_tokens or message.sampling.prompt_logprobs is not None or message.siblings:
        raise ValueError("a pooling request has max_tokens 0, no prompt_logprobs and one choice")
    if message.pooling.task == "align":  # see `check_media`
        return
    if pooling is None or message.pooling.task not in pooling.tasks:
        known = ", ".join(pooling.tasks) if pooling else "none"
        raise ValueError(f"pooling task {message.pooling.task!r} is not supported by this model; supported: {known}")
    if not 0 <= message.pooling.num_dimensions <= pooling.num_dimensions:
        raise ValueError(f"num_dimensions is {message.pooling.num_dimensions}, the model has {pooling.num_dimensions}")
    if not 0 <= message.pooling.second_start <= len(message.prompt_token_ids):
        raise ValueError(f"second_start is {message.pooling.second_start}, but must be within the prompt")


def check_media(message: AddRequest, media: MediaInfo | None, longest_span: int) -> None:
    """Raise ValueError, naming the image and the limit, for images that the model cannot read. `longest_span` is the
    maximum number of tokens of an image in a prompt of a model that computes its images whole.
    """
    if message.pooling is not None and message.pooling.task == "align":
        _check_alignment(message, media)
    if not message.media:
        return
    if media is None:
        raise ValueError("this model does not read images")
    if media.cross:
        _check_audio(message.media, media)
        return
    end = 0
    for i, item in enumerate(message.media, 1):
        span = message.prompt_token_ids[item.offset : item.offset + item.length]
        if item.offset < end or item.length < 1 or len(span) < item.length:
            raise ValueError(f"image {i}: its tokens {item.offset} to {item.offset + item.length} are misplaced")
        if item.time is not None and (i == 1 or item.offset != end or item.time < 0):
            raise ValueError(f"image {i} continues a video at {item.time}, but does not follow a frame of one")
        end = item.offset + item.length
        _check_image(i, item, span, media, longest_span)


def _check_audio(items: list[MediaItem], media: MediaInfo) -> None:
    (item, *others) = items
    if others:
        raise ValueError(f"a request of this model has one piece of audio, not {len(items)}")
    if (item.offset, item.length, item.num_embeds) != (0, 1, media.cross):
        raise ValueError(f"the audio has {item.num_embeds} embeddings, but {media.cross} at token 0 are expected")


def _check_alignment(message: AddRequest, media: MediaInfo | None) -> None:
    wanted = message.pooling.alignment
    if media is None or not media.cross or not message.media or wanted is None:
        raise ValueError("pooling task 'align' needs audio and a model with cross-attention")
    layers, heads = media.cross_heads
    if not wanted.heads or not all(0 <= layer < layers and 0 <= head < heads for layer, head in wanted.heads):
        raise ValueError(f"alignment: heads must be of {layers} layers with {heads} heads")
    if not 0 <= wanted.first < len(message.prompt_token_ids) or not 0 < wanted.positions <= media.cross:
        raise ValueError(f"alignment: it must begin within the prompt and have 1 to {media.cross} positions")
    if wanted.width < 1 or wanted.width % 2 == 0:
        raise ValueError(f"alignment: the width of the median filter is {wanted.width}, but must be odd")


def _check_image(i: int, item: MediaItem, span: list[int], media: MediaInfo, longest_span: int) -> None:
    placeholders = max(span.count(media.image_token_id), span.count(media.video_token_id))
    if placeholders != item.num_embeds or not placeholders:
        raise ValueError(f"image {i} has {item.num_embeds} embeddings, but {placeholders} placeholders")
    if item.num_embeds > media.cache_size:
        raise ValueError(
            f"image {i} has {item.num_embeds} tokens, but may have at most {media.cache_size}: send a smaller image"
        )
    if media.whole and item.length > longest_span:
        raise ValueError(
            f"image {i} has {item.length} tokens, but may have at most {longest_span}, because one step must compute "
            "it and a token of every other request: raise --max-num-batched-tokens or send a smaller image"
        )
    if media.has_grids:
        t, h, w = item.grid or (0, 0, 0)
        if t * h * w != item.num_embeds:
            raise ValueError(f"image {i} has a grid of {item.grid}, but {item.num_embeds} tokens")


def check_sampling(sampling: SamplingParams, max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError, naming the parameter and its limit, for sampling parameters out of range."""
    for name in ("max_tokens", "min_tokens"):
        if (value := getattr(sampling, name)) < 0:
            raise ValueError(f"{name} is {value}, but must be at least 0")
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "eos_token_ids"):
        token_ids = getattr(sampling, name) or ()
        limit = MAX_STOP_TOKEN_IDS if name in ("stop_token_ids", "eos_token_ids") else vocab_size
        if len(token_ids) > limit:
            raise ValueError(f"{name} has {len(token_ids)} entries, but may have at most {limit}")
        _check_token_ids(name, token_ids, vocab_size)
    if sampling.no_repeat_ngram is not None:
        _check_ngram(sampling.no_repeat_ngram, max_model_len, vocab_size)
    _check_bad_words(sampling.bad_words_ids or [], max_model_len, vocab_size)
    if (thinking := sampling.thinking) is not None:
        for name, token_ids in (("begin", thinking.begin), ("end", thinking.end), ("forced", thinking.forced)):
            if not 0 < len(token_ids) <= MAX_MARKER_TOKENS:
                raise ValueError(f"thinking.{name} has {len(token_ids)} tokens, but must have 1 to {MAX_MARKER_TOKENS}")
            _check_token_ids(f"thinking.{name}", token_ids, vocab_size)
        if thinking.budget < 0:
            raise ValueError(f"thinking.budget is {thinking.budget}, but must be at least 0")
    if sampling.logprobs_mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode is {sampling.logprobs_mode!r}, but must be one of {', '.join(LOGPROBS_MODES)}")


def _check_bad_words(words: list[list[int]], max_model_len: int, vocab_size: int) -> None:
    longest = max(map(len, words), default=0)
    if longest > max_model_len:
        raise ValueError(f"bad_words: an entry has {longest} tokens, but a request may have at most {max_model_len}")
    if len(words) * longest > MAX_BAD_WORDS_SIZE:
        raise ValueError(
            f"bad_words: {len(words)} sequences, the longest of {longest} tokens; the product must not exceed "
            f"{MAX_BAD_WORDS_SIZE}"
        )
    for word in words:
        _check_token_ids("bad_words", word, vocab_size)


def _check_ngram(ngram: NoRepeatNgram, max_model_len: int, vocab_size: int) -> None:
    if ngram.size < 1 or ngram.window < 0:
        raise ValueError(
            f"no_repeat_ngram has size {ngram.size} and window {ngram.window}, which must be at least 1 and 0"
        )
    window = min(ngram.window or max_model_len, max_model_len)
    if ngram.size * window > MAX_NGRAM_COMPARISONS:
        raise ValueError(
            f"no_repeat_ngram_size {ngram.size} in a window of {window} tokens: the product must not exceed "
            f"{MAX_NGRAM_COMPARISONS}; choose a smaller window (no_repeat_ngram_window_size)"
        )
    _check_token_ids("whitelist_token_ids", ngram.exempt, vocab_size)


def _check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name}: token id {bad} is outside the model's vocabulary, 0 .. {vocab_size - 1}")
