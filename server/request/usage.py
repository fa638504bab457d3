"""Tokens of one request, which each dialect reports under its own names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.messages import NO_COUNTS, TokenCounts
from quire.server.request.generation_request import GenerationRequest

# the choices of a prompt share these; the others are of their outputs
_OF_PROMPT = frozenset({"cached", "prefilled"})


class News(Protocol):
    """A `Delta`, or a whole `Choice`."""

    index: int
    token_ids: list[int]
    num_reasoning_tokens: int
    counts: TokenCounts


@dataclass(slots=True)
class TokenUsage:
    """Tokens of a request so far.

    A prompt shared by n choices counts once, and as cached only as far as the choice that found least of it.
    """

    num_prompt: int  # for all prompts
    n: int = 1  # choices of each
    num_images: int = 0  # tokens of the prompts that stand for images
    num_videos: int = 0  # those that stand for videos
    num_predicted: int | None = None  # tokens of the longest prediction of the client's
    num_output: int = 0
    num_reasoning: int = 0  # among `num_output`
    _counts: dict[int, TokenCounts] = field(default_factory=dict)  # by choice

    @classmethod
    def for_requests(cls, requests: Sequence[GenerationRequest]) -> TokenUsage:
        """Return the usage of requests that differ in their prompts only, before their first output."""
        return cls(
            sum(len(one.prompt_token_ids) for one in requests),
            max((one.n for one in requests), default=1),
            sum(one.num_media_tokens("image") for one in requests),
            sum(one.num_media_tokens("video") for one in requests),
            max((len(found) for one in requests if (found := one.sampling.prediction) is not None), default=None),
        )

    def add(self, news: News) -> None:
        self.num_output += len(news.token_ids)
        self.num_reasoning += news.num_reasoning_tokens
        self._counts[news.index] = self._counts.get(news.index, NO_COUNTS).then(news.counts)

    @property
    def predicted(self) -> tuple[int, int] | None:
        """Return the accepted and rejected drafts of a request with a prediction; none for an empty prediction."""
        if self.num_predicted is None:
            return None
        return (self.counts.accepted, self.counts.rejected) if self.num_predicted else (0, 0)

    @property
    def counts(self) -> TokenCounts:
        """Return the counts of all choices together."""
        if len(self._counts) == 1:
            return next(iter(self._counts.values()))
        prompts: dict[int, list[TokenCounts]] = {}
        for index, counts in self._counts.items():
            prompts.setdefault(index // self.n, []).append(counts)
        return TokenCounts(*(_total(name, prompts.values()) for name in TokenCounts.__struct_fields__))


def _total(name: str, prompts: Iterable[list[TokenCounts]]) -> int:
    combine = min if name in _OF_PROMPT else sum
    return sum(combine(getattr(counts, name) for counts in choices) for choices in prompts)
