"""Anthropic's `cache_control`: the lifetime of a cached prompt, and the tokens that it adds to the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import UNSET

from quire.server.api import needs
from quire.server.api.anthropic.protocol import CacheControl, CacheCreation, MessageUsage, PromptFields, ToolResult
from quire.server.request.usage import TokenUsage

_SECONDS = {"5m": 300.0, "1h": 3600.0}


class Caching(NamedTuple):
    """`seconds`: for how long the prompt is wanted, 0 without `cache_control`; `num_tokens`: its cached tokens."""

    seconds: float = 0.0
    num_tokens: int = 0

    def usage(self, used: TokenUsage) -> MessageUsage:
        cached = used.counts.cached
        created = max(self.num_tokens - cached, 0)
        kind = "ephemeral_1h_input_tokens" if self.seconds > _SECONDS["5m"] else "ephemeral_5m_input_tokens"
        return MessageUsage(
            input_tokens=used.num_prompt - cached - created,
            output_tokens=used.num_output,
            cache_read_input_tokens=cached,
            cache_creation_input_tokens=created,
            cache_creation=CacheCreation(**{kind: created}) if self.seconds else UNSET,
        )


def seconds_wanted(body: PromptFields) -> float:
    """Return the longest time of all marks of a request, 0 without any."""
    return max((_SECONDS[mark.ttl or "5m"] for mark in _marks(body) if mark is not None), default=0.0)


def caching(seconds: float, num_prompt_tokens: int, state: needs.ConfiguredEngine) -> Caching:
    """Return the prompt tokens that a request leaves in the cache. The last token is always computed."""
    size = state.ready.worker.block_size if state.ready is not None else 0
    if not seconds or not size or not state.config.cache.enable_prefix_caching:
        return Caching(seconds)
    return Caching(seconds, (num_prompt_tokens - 1) // size * size)


def _marks(body: PromptFields) -> Iterator[CacheControl | None]:
    yield body.cache_control
    for tool in body.tools or ():
        yield tool.cache_control
    for content in (body.system, *(message.content for message in body.messages)):
        for block in content if isinstance(content, list) else ():
            yield block.cache_control
            if isinstance(block, ToolResult) and isinstance(block.content, list):
                yield from (part.cache_control for part in block.content)
