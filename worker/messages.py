"""Contract 3, engine -> worker: what a step runs and what comes back. Torch-free; the engine imports it, nothing else
of `worker`.

A request lives in the worker as a `row` of its tables, handed out by the scheduler. `rows`, `num_computed`,
`num_scheduled` and `new_blocks` of a `StepInput` are parallel lists in batch order. Nothing names a finished request: a
row is freed by being overwritten by a `NewRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How one sequence is sampled. The server fills in every default, so that a request can be replayed after a
    restart: `seed` is always a number.

    Raises nothing: what is out of range is refused where the request enters the server
    (`server/api/openai/protocol.py`) and the engine (`engine/validation.py`).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] | None = None  # token sequences whose last token must not follow the others
    stop_token_ids: list[int] = []  # end the output, and are reported as `stop_reason`
    eos_token_ids: list[int] = []  # end the output unless `ignore_eos`; banned, like stop_token_ids, below `min_tokens`
    ignore_eos: bool = False
    # None: none; 0: of the sampled token only; k: and the k most likely; -1: the whole vocabulary
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    logprobs_mode: str = "raw_logprobs"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    The first entry is the token that stands there; then come the most likely ones, in order (it may be among them).
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the first entry, 1 is the most likely


class CacheGroup(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the scheduler knows of the layers that share a block table (`worker/cache/spec.py`).

    full: every token's block is kept. window: a token at position p sees p - window + 1 .. p. state: one page per
    request, which a step reads and writes; its block table has two entries, the page that the next step reads (0: start
    anew) and the page that it writes.
    """

    kind: str = "full"
    window: int = 0

    def first_block(self, position: int, block_size: int) -> int:
        """Index of the first block that a token at `position` or later sees."""
        return max(position - self.window + 1, 0) // block_size if self.kind == "window" else 0

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a request of `num_tokens` holds at once while it is computed in chunks of at most
        `chunk` tokens.
        """
        if self.kind == "state":
            return 2
        total = -(-num_tokens // block_size)
        if self.kind == "full":
            return total
        return min(total, -(-(self.window + chunk) // block_size) + 1)


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, chunk: int) -> int:
    """The most blocks of all groups that a request of `num_tokens` holds at once, see `CacheGroup.most_blocks`."""
    return sum(group.most_blocks(num_tokens, block_size, chunk) for group in groups)


def longest_request(groups: Sequence[CacheGroup], num_blocks: int, block_size: int, chunk: int, limit: int) -> int:
    """The most tokens, at most `limit`, of a request that `num_blocks` blocks hold; 0 if they hold none."""
    low, high = 0, limit  # a request of `low` tokens fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if most_blocks(groups, middle, block_size, chunk) <= num_blocks else (low, middle - 1)
        )
    return low


class NewRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request enters row `row`, for the first time or again after preemption."""

    row: int
    token_ids: list[int]  # prompt, then the outputs so far
    num_prompt_tokens: int
    # per cache group all blocks it has, those of this step included; 0 stands for a block that no token sees any more
    block_ids: list[list[int]]
    sampling: SamplingParams


class StepInput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One forward pass over `num_scheduled[i]` tokens of row `rows[i]`, which follow its `num_computed[i]` tokens
    already in the KV cache.
    """

    step: int
    new: list[NewRequest]
    rows: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    # per row and cache group, appended to the row's block table; [] for rows with none, and for rows in `new`
    new_blocks: list[list[list[int]]]
    samples: list[int]  # ascending batch positions whose chunk reaches their last known token, and so are sampled


class StepOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a step sampled: one entry per entry of `StepInput.samples`."""

    step: int
    token_ids: list[list[int]]  # one list per sampling row (more than one token only when speculating)
    logprobs: list[list[TokenLogprobs] | None] | None = None  # parallel to token_ids
    # batch position -> entries for the prompt tokens that this chunk's logits predict
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    errors: dict[int, str] | None = None  # batch position -> why this request alone failed


class MemoryPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the device's memory goes, in bytes."""

    device: str
    total: int
    available: int  # to this process: what it holds already, and what is free
    weights: int
    activations: int
    kv_cache: int
    reserve: int
    bytes_per_block: int
    graphs: int = 0  # what CUDA graphs may come to need, an estimate


class WorkerReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `initialize` found: the numbers the scheduler needs, and what was chosen automatically and why."""

    num_blocks: int  # including the null block 0
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    default_depth: int  # steps in flight
    plan: MemoryPlan
    choices: list[tuple[str, str, str]] = []  # (setting, value, reason)
    works_idle: bool = False  # whether `Worker.work_idle` has something to do
    groups: list[CacheGroup] = msgspec.field(default_factory=lambda: [CacheGroup()])
