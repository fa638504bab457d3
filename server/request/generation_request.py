"""One prompt and its parameters, checked and ready for the engine: made by `prepare.py`, sent by
`generation.py` sends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire.engine.messages import MediaItem, PoolingParams, RequestTiming, SamplingParams, Transfer
from quire.server.lora.served import Chosen
from quire.server.media.inputs import Lease, MediaKind
from quire.server.request.parse import Parsing
from quire.server.request.progress import PrefillProgress
from quire.server.structured.structure import Structure
from quire.server.text.detokenizer import StopStrings


@dataclass(slots=True)
class Attached:
    """An image or a part of a video in a prompt, and the lease that keeps its features until the last output."""

    item: MediaItem
    lease: Lease
    kind: MediaKind = "image"


@dataclass(slots=True)
class GenerationRequest:
    """n choices of one prompt, checked and ready for the engine.

    `sampling.seed` is the seed of the first choice; choice i has `seed + i`. Choices that are not sampled are equal:
    the engine computes one (`num_copies`). `prompt_text` is the prompt if it was
    given as text and not truncated. `structure` must be compiled into `sampling` before the request is sent.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    stop: list[str] | StopStrings = field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    cache_key: str | None = None  # the conversation whose cached prefix is wanted for `cache_seconds`
    cache_seconds: float = 0.0
    turn_start: int = 0  # number of prompt tokens before the user's last message, 0: unknown
    background: bool = False
    timing: RequestTiming | None = None  # for the choice that ended last
    tenant: str = ""  # who shares the engine with others, with `weight`
    weight: float = 1.0
    arrival_time: float = field(default_factory=time.time)
    prompt_text: str | None = None
    structure: Structure | None = None
    parsing: Parsing | None = None  # None: the text is the answer
    visible_ids: frozenset[int] = frozenset()  # special tokens that are shown although special tokens are not
    text_ends: frozenset[int] = frozenset()  # tokens that end the text before them (`Detokenizer`)
    pooling: PoolingParams | None = None  # ask for a vector (`pooling.py`) instead of text
    media: list[Attached] = field(default_factory=list)
    adapters: list[Chosen] = field(default_factory=list)  # for LoRA
    progress: PrefillProgress | None = None  # is told how much of the prompt is computed
    transfer: Transfer | None = None  # blocks of the prompt that go to another server, or are at one
    sent: Transfer | None = None  # where they are, once a choice has ended
    engine: int | None = None  # the one of several that the client chose

    @property
    def num_copies(self) -> int:
        """Return the number of choices that one sequence answers: all, if none is sampled, because they are equal."""
        return self.n if self.sampling.temperature == 0.0 else 1

    def num_media_tokens(self, kind: MediaKind) -> int:
        """Return the number of tokens of the prompt that embeddings of images or videos replace."""
        return sum(one.item.num_embeds for one in self.media if one.kind == kind)
