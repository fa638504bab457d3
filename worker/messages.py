"""Contract 3, engine <-> worker: the input of a step, its output, and the calls between steps. Torch-free; the only
module of `worker` that the engine imports.

A request occupies a `row` of the worker's tables, assigned by the scheduler. `rows`, `num_computed`, `num_scheduled`
and `new_blocks` of a `StepInput` are parallel lists in batch order. No message announces a finished request: its row is
free until a `NewRequest` overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

# prefix of errors that a request's own grammar causes
GRAMMAR_ERROR = "structured output: "
# the error of a request for which no token can be sampled
NO_TOKEN_ERROR = (
    "the logits of this request are not finite, or its constraints (allowed_token_ids, bad_words, min_tokens, "
    "logit_bias, structured output) exclude every token"
)
# limits of a grammar's matcher, in llguidance's units (LLParserLimits): to compile, and per step
GRAMMAR_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms
    "max_grammar_size": 200_000,  # symbols
    "max_items_in_row": 2_000,
    "step_lexer_fuel": 200_000,  # about 14 ms
    "step_max_items": 50_000,  # about 3 ms
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "verbose_errors": False,
}


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The tokens as grammars see them, by id: the bytes that each adds to a text, empty for ids without a token.

    Special tokens match only where a grammar names them.
    """

    tokens: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """At most `budget` tokens in each block of thoughts, then the tokens `forced`. A block lasts from after `begin`, or
    from the first output token if the prompt has `opened` it, until `end`.
    """

    budget: int
    opened: bool
    begin: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]


# n-gram size times the number of tokens searched for it: comparisons in every step
MAX_NGRAM_COMPARISONS = 1 << 21


class NoRepeatNgram(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """No sequence of `size` tokens occurs twice within the last `window` tokens (0: within all tokens)."""

    size: int
    window: int = 0
    exempt: tuple[int, ...] = ()  # tokens that may end a sequence that occurs again
    reads_prompt: bool = True  # whether sequences in the prompt count


class Dry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The parameters of DRY (`sampling/chain/dry.py`), with its breakers as tokens."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1  # tokens among which repetitions are looked for; -1: all
    breakers: tuple[int, ...] = ()  # tokens that contain a breaker
    sequences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # (any of these, then all of these) are one


class SamplerChain(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The samplers of llama.cpp, which run in `order` (`sampling/chain/`). They include the request's top_k, top_p,
    min_p and temperature.
    """

    order: tuple[str, ...]  # for SAMPLERS
    typical_p: float = 1.0  # 1 is off
    top_n_sigma: float = 0.0  # 0 is off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1  # more than 0.5 is off
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    min_keep: int = 0  # tokens that each sampler keeps at least
    mirostat: int = 0  # 1 or 2: after the temperature, in place of all others
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry: Dry | None = None


SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


class SpeechRules(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Constraints on the output of a speech recognizer (`sampling/speech.py`).

    With `timestamp_begin` the output has timestamps: the tokens from that id on, 20 ms apart. They come in pairs, the
    end of a segment and the start of the next one, and never decrease.
    """

    suppress: tuple[int, ...] = ()  # tokens that are never sampled
    suppress_first: tuple[int, ...] = ()  # that are not sampled as the first token of the output
    timestamp_begin: int = 0  # 0: no rules for timestamps
    end: int = 0  # the token that ends the output; those below it are text
    max_first: int = -1  # largest first timestamp, in steps after `timestamp_begin`; -1: any


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The sampling parameters of one sequence. The server fills in every default, so that a request can be replayed
    after a restart: `seed` is always a number.

    Values are not checked here: the server (`server/api/openai/protocol.py`) and the engine (`engine/validation.py`)
    reject values out of range.
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
    no_repeat_ngram: NoRepeatNgram | None = None
    bad_words_ids: list[list[int]] | None = None  # token sequences; a token that would complete one is excluded
    stop_token_ids: list[int] = []  # end the output and are reported as `stop_reason`
    # end the output unless `ignore_eos`; banned below `min_tokens`, as stop_token_ids are
    eos_token_ids: list[int] = []
    ignore_eos: bool = False
    # None: none; 0: the sampled token only; k: also the k most likely tokens; -1: the whole vocabulary
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token except the first
    logprobs_mode: str = "raw_logprobs"
    thinking: ThinkingBudget | None = None
    grammar: str | None = None  # constraint on the output: Lark in llguidance's variant
    grammar_after: list[int] | None = None  # outputs after which the grammar applies: the end of thinking
    speculation: bool = True  # whether steps may verify draft tokens of this request
    # llama.cpp's: all three penalties count the last tokens of prompt and output, -1: all; None: OpenAI's and vLLM's
    repeat_last_n: int | None = None
    chain: SamplerChain | None = None
    prediction: list[int] | None = None  # tokens that the client expects, a source of drafts; None: none was sent
    speech: SpeechRules | None = None

    @property
    def excludes_tokens(self) -> bool:
        """Return whether the request's own parameters can exclude every token."""
        some = self.allowed_token_ids, self.bad_words_ids, self.min_tokens, self.logit_bias, self.grammar, self.speech
        return any(some)


class Alignment(msgspec.Struct, frozen=True, array_like=True):
    """The cross-attention of a prompt's tokens, from `first` on, to the first `positions` of the encoder's output."""

    heads: tuple[tuple[int, int], ...]  # (layer, head) pairs to average
    first: int
    positions: int
    width: int  # of the median filter over the positions, odd


class PoolingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The request returns one vector for its prompt instead of tokens (`SamplingParams.max_tokens` is 0): embed, the
    pooled hidden states; classify, the logits of the model's classifier; token_classify, those of each token; align,
    the matrix of an `Alignment`, row by row.
    """

    task: str = "embed"
    num_dimensions: int = 0  # for an embedding: the first ones are kept; 0 keeps all
    normalize: bool = False  # scale an embedding to length 1, after the cut
    second_start: int = 0  # index of the first token of a pair's second text, 0 for one text
    alignment: Alignment | None = None  # for the task align


class PoolingInfo(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The results of a model for requests with `PoolingParams`."""

    tasks: list[str]  # for PoolingParams.task
    method: str  # how the hidden states of the prompt become one vector, see `worker/transformer/pooling.py`
    num_dimensions: int  # for an embedding
    normalize: bool = True  # whether an embedding is scaled to length 1 by default
    labels: list[str] = []  # for the classifier
    activation: str = "softmax"  # for the classifier by default: softmax, sigmoid or identity
    generates: bool = True  # whether the model can also generate text
    template: bool = False  # a cross-encoder whose chat template joins a query and a document
    prompt: str = ""  # precedes every text by default; with `template` it is a system message
    whole_prompts: bool = False  # an encoder: a prompt is computed in one step and shares no prefix
    max_tokens: int = 0  # texts are cut to this, special tokens included, unless a request says otherwise; 0: none
    truncation_side: str = "right"  # by default: where texts are cut
    matryoshka: bool = False  # whether a prefix of an embedding is itself an embedding of the text
    matryoshka_sizes: list[int] = []  # allowed numbers of dimensions, if the model's files list them
    default_dimensions: int = 0  # dimensions unless the request says otherwise; 0: all

    @property
    def reads_all(self) -> bool:
        """Return whether the vector depends on the hidden states of all tokens, not only on the last one's."""
        return self.method != "lasttoken" or self.whole_prompts


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position.

    The first entry is the actual token; the most likely tokens follow in order and may include it.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the first entry; 1 is the most likely


class CacheGroup(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The scheduler's view of a group of layers that share a block table (`worker/spec/cache.py`).

    full: the blocks of all tokens are kept; with a `window`, tokens of the output attend to the prompt and to the last
    `window` tokens of the output. window: a token at position p attends to p - window + 1 .. p. chunk: it
    attends to the positions from the last multiple of `window` up to p. state: one page per request, which a step reads
    and writes; its block table has two entries, the page that the next step reads (0: start from the initial state) and
    the page that it writes. States have pages of their own, whose ids follow those of the blocks. cross: every token
    attends to the `window` positions of an encoder's output, whose keys and values the request's first step writes.
    """

    kind: str = "full"
    window: int = 0

    @property
    def releases(self) -> bool:
        """Return whether blocks that no later token attends to are released while the request runs."""
        return self.kind in ("window", "chunk")

    @property
    def shares_outputs(self) -> bool:
        """Return whether keys and values of an output are those of a prompt with the same tokens, so that later prompts
        may use them.
        """
        return self.kind != "full" or not self.window

    def first_block(self, position: int, block_size: int) -> int:
        """Return the index of the first block that a token at `position` or later attends to."""
        match self.kind:
            case "window":
                return max(position - self.window + 1, 0) // block_size
            case "chunk":
                return position // self.window * self.window // block_size
        return 0

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` tokens holds at once while it is computed
        in chunks of at most `chunk` tokens.
        """
        if self.kind == "state":
            return 0
        if self.kind == "cross":
            return -(-self.window // block_size)
        total = -(-num_tokens // block_size)
        if self.kind == "full":
            return total
        return min(total, -(-(self.window + chunk) // block_size) + 1)


def most_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, chunk: int) -> int:
    """Return the maximum number of blocks of all groups that a request of `num_tokens` tokens holds at once, excluding
    state pages, see `CacheGroup.most_blocks`.
    """
    return sum(group.most_blocks(num_tokens, block_size, chunk) for group in groups)


def longest_request(groups: Sequence[CacheGroup], num_blocks: int, block_size: int, chunk: int, limit: int) -> int:
    """Return the maximum number of tokens, at most `limit`, of a request that fits into `num_blocks` blocks; 0 if none
    fits.
    """
    low, high = 0, limit  # a request of `low` tokens fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if most_blocks(groups, middle, block_size, chunk) <= num_blocks else (low, middle - 1)
        )
    return low


class MediaItem(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An image of a prompt, or frames of a video that are encoded together: its tokens, and where its features lie.

    The embeddings of the image replace those of the span's placeholders: its image tokens or video tokens, in
    order. A span may hold other tokens between them, such as the ends of rows.

    For a model with cross-attention (`MediaInfo.cross`) it is the audio to which all tokens attend: its span is the
    prompt's first token, which keeps its own embedding.
    """

    key: str  # hash of the content and the settings of preprocessing: equal keys have equal features and embeddings
    offset: int  # index of the span's first token
    length: int  # tokens of the span
    num_embeds: int  # placeholders among them
    path: str  # safetensors file in shared memory with the features, by the names that the model's encoder expects
    grid: tuple[int, int, int] | None = None  # (t, h, w) in placeholders, for models with three axes of positions
    time: int | None = None  # of a frame that begins, on the other axes, where its video does: positions from there


class MediaInfo(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The images that a model reads, and how many embeddings of images workers handle."""

    image_token_id: int  # the placeholder that embeddings replace
    cache_size: int  # embeddings that workers keep, and so the most that one image may have
    encoder_budget: int  # embeddings that one step computes; a single image may have more
    whole: bool = False  # tokens of an image attend to each other in both directions: one step computes its span
    has_grids: bool = False  # positions have three axes, so that items need a `grid`
    cross: int = 0  # embeddings of each item, to which the decoder attends; 0: embeddings replace placeholders
    cross_heads: tuple[int, int] = (0, 0)  # layers that attend to them, and heads of each
    audio: bool = False  # the items are audio instead of images
    video_token_id: int | None = None  # the placeholder of videos, if they have their own


class LoraUse(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A LoRA adapter of a request."""

    key: str  # hash of its files: equal keys mean equal weights
    path: str  # the folder with its files, which stays until the request has ended
    scale: float = 1.0  # factor of its contribution
    name: str = ""  # by which clients refer to it


class NewRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request assigned to row `row`, for the first time or again after preemption."""

    row: int
    token_ids: list[int]  # prompt, then the outputs so far
    num_prompt_tokens: int
    # per cache group all blocks of the request, including those of this step; 0 for a block that no later token attends
    # to
    block_ids: list[list[int]]
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    media: list[MediaItem] = []  # by offset; spans do not overlap
    adapters: list[LoraUse] = []
    conversation: str = ""  # key of the conversation that the client named, "" for none
    scope: str = ""  # tenant and salt: only requests of one scope have drafts from each other's texts


class StepInput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One forward pass over `num_scheduled[i]` tokens of row `rows[i]`, which follow the row's `num_computed[i]` tokens
    already in the KV cache.
    """

    step: int
    new: list[NewRequest]
    rows: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    # blocks per row and cache group to append to the row's block table; [] for rows with none and for rows in `new`
    new_blocks: list[list[list[int]]]
    # ascending batch positions whose chunk ends at their last known token, so that the next token is sampled
    samples: list[int]
    # images to encode before the forward pass; their embeddings are kept until their keys are in `evict`
    encode: list[MediaItem] = []
    evict: list[str] = []  # keys of embeddings to drop before `encode`, also of images that could not be encoded
    # batch position -> how many of its scheduled tokens, the last ones, are drafts of the worker. Such a row is in
    # `samples`: a token is sampled after its last known token and after each draft.
    num_draft: dict[int, int] = {}
    stores: list[tuple[int, bytes]] = []  # (block, key) to keep in lower tiers before the step reuses the blocks
    # batch position -> where its chunk also leaves its state: (number of its tokens before, page), ascending
    checkpoints: dict[int, list[tuple[int, int]]] = {}


class StepOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The results of a step: one entry per entry of `StepInput.samples`."""

    step: int
    # one list per sampling row: the drafts that were accepted, then one more token, which is missing only if none could
    # be sampled after at least one accepted draft: the next step tries again
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs] | None] | None = None  # parallel to token_ids
    # batch position -> entries for the prompt tokens that this chunk's logits predict
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    errors: dict[int, str] | None = None  # batch position -> error of this request alone
    pooled: dict[int, bytes] | None = None  # batch position of a completed prompt -> its vector, float32 in C order
    num_draft: dict[int, int] | None = None  # batch position -> drafts that the worker has for the row's next step
    predicted: list[int] | None = None  # those of these batch positions whose drafts come from the request's prediction


class MemoryPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The use of the device's memory, in bytes."""

    device: str
    total: int
    available: int  # available to this process: memory it holds already plus free memory
    weights: int
    activations: int
    kv_cache: int
    reserve: int
    bytes_per_block: int
    graphs: int = 0  # estimate of what CUDA graphs will need
    states: int = 0  # recurrent states of running requests and checkpoints of them, in addition to `kv_cache`
    images: int = 0  # estimate of the embeddings of images that are kept, and of what one encoder batch needs
    adapters: int = 0  # for LoRA, as many as may be loaded
    offload: int = 0  # for blocks that leave the pool, where the device's memory is the RAM
    shares_ram: bool = False  # the device's memory is the machine's RAM


SLOTS = "slots"  # the tier of llama.cpp's slot files, which has `SlotCalls`
REMOTE = "remote"  # the tier of blocks on other servers, which has `TransferCalls`


class TierInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tier below the KV cache (`worker/cache/tiers/`). Evicted blocks go down from the first tier to the last."""

    name: str  # ram, disk ...
    medium: str  # vLLM's name of it, in KV events; "": none are sent
    where: str  # human-readable location
    limit: int  # bytes of all ranks; 0: it takes no blocks evicted from another tier
    saves: bool = False  # whether hot blocks are written to it before they leave the KV cache, for the next start


class WorkerReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of `initialize`: sizes for the scheduler, and settings chosen automatically, with reasons."""

    num_blocks: int  # including the null block 0
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    default_depth: int  # steps in flight
    plan: MemoryPlan
    choices: list[tuple[str, str, str]] = []  # (setting, value, reason)
    works_idle: bool = False  # whether `Worker.work_idle` has work to do
    gives_back: bool = False  # whether `Worker.give_back` can return the memory of an idle engine's KV cache
    groups: list[CacheGroup] = msgspec.field(default_factory=lambda: [CacheGroup()])
    pooling: PoolingInfo | None = None  # None: the model only generates text
    media: MediaInfo | None = None  # None: requests with images are refused
    num_states: int = 0  # pages for recurrent states, whose ids follow those of the blocks
    tiers: list[TierInfo] = []  # below the KV cache, in the order in which blocks go down
    max_loras: int = 0  # adapters that a step may use; 0: requests with adapters are refused
    warnings: list[str] = []  # settings that work, but probably not as intended
    overlaps: bool = False  # whether a step runs on its own device while the host prepares the next
    compiles_at_use: bool = False  # whether the warm-up must run requests of every kind

    @property
    def has_slot_files(self) -> bool:
        return any(tier.name == SLOTS for tier in self.tiers)

    @property
    def has_transfers(self) -> bool:
        return any(tier.name == REMOTE for tier in self.tiers)


# ---- calls between two steps: every rank runs them, and the first rank's result is the answer


class WorkerCalls(Protocol):
    """Methods of `Worker` that the engine calls."""

    def set_vocabulary(self, vocabulary: bytes) -> None:
        """Take the tokens that grammars need, a `Vocabulary` as msgpack, before the first request with a grammar."""

    def load_lora(self, key: str, folder: str) -> str:
        """Read a LoRA adapter before its first request. Returns why it cannot be used, "" if it can."""

    def unload_lora(self, key: str) -> None:
        """Forget a LoRA adapter, unless requests use it."""

    def prepare_warm_up(self) -> list[str]:
        """Run what no request of the warm-up needs. Returns the keys of blank LoRA adapters, loaded for it."""

    def start_profile(self) -> str:
        """Begin a profile of the next steps. Returns why that is not possible, "" if it is."""

    def stop_profile(self) -> tuple[str, str]:
        """End the profile. Returns (why that is not possible, name of the file that was written)."""

    def forget_conversation(self, key: str) -> None:
        """Forget texts of a conversation that are sources of drafts."""

    def forget_texts(self) -> None:
        """Forget all texts that are sources of drafts."""

    def work_idle(self) -> bool:
        """Do one piece of deferred work, some tenths of a second at most, while no step is in flight. Returns whether
        more is left.
        """

    def look_for_ops(self) -> bool:
        """Switch to faster operations that became available. Returns whether more may follow."""

    def describe_ops(self) -> dict[str, object]:
        """Return the operations in use, the state of faster ones, and when the faster ones were loaded (time.time()).
        """

    def wants_memory_back(self, idle: float) -> bool:
        """Return whether the KV cache's memory should be given back, after `idle` seconds without a request."""

    def give_back(self) -> None:
        """Return the KV cache's memory to the system. No block may hold anything that is needed."""

    def give_back_blocks(self, block_ids: list[int]) -> None:
        """Return the memory of these blocks to the system, and of those made resident ahead."""

    def memory_short(self) -> int:
        """Return bytes by which the machine is short of memory."""

    def encoded(self) -> tuple[float, float]:
        """Return (begin, end), by time.time(), of encoding the images of the last step that had any."""


class TierReport(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Contents and traffic of a rank's tiers: `counts` since the start, the others since the last report."""

    used: dict[str, int]  # bytes by tier
    counts: dict[str, float]  # by name, see `TierStore.stats`
    store_sizes: list[int]  # bytes of each transfer from the pool
    load_sizes: list[int]  # bytes of each transfer into the pool
    changes: list[tuple[str, bytes, bool]] = []  # (medium, key, whether it is there now), in order


class TierCalls(Protocol):
    """Methods of `TierStore`, the tiers below the KV cache. Only if there are any."""

    def lookup(self, keys: list[bytes]) -> list[int]:
        """Return where each key is: 1 for the last tier, 2 for the one before it ..., 0: nowhere."""

    def store(self, blocks: list[tuple[int, bytes]]) -> None:
        """Keep the contents of blocks (id, key) that are about to be reused."""

    def save(self, blocks: list[tuple[int, bytes, int]]) -> int:
        """Write blocks (id, key, time of last use in ns) that stay in the pool to a tier that `saves`. Returns how many
        of the first blocks it has begun to write.
        """

    def flush(self, timeout: float) -> bool:
        """Wait until every tier has the blocks it was given, at most `timeout` seconds. Returns whether it has."""

    def load(self, number: int, keys: list[bytes], block_ids: list[int]) -> None:
        """Begin to read these keys, which `poll` copies into the blocks."""

    def poll(self) -> list[tuple[int, list[bool] | int]]:
        """Copy contents that were read. Returns, per load, its number and the count of blocks handled so far or, once
        the load has ended, whether each block holds its key's content.
        """

    def cancel(self, number: int) -> None:
        """Stop a load: its blocks are not written from now on."""

    def remove(self, keys: list[bytes]) -> None:
        """Forget these blocks in every tier."""

    def clear(self) -> None:
        """Forget every block of this model in every tier."""

    def watch(self) -> None:
        """Include `changes` in later `stats`."""

    def stats(self, take: bool = True) -> TierReport:
        """Return the contents and the traffic; without `take` the next report has the sizes and changes, too."""


class SlotReport(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The end of an action on a slot file, the same on all ranks if one of them failed."""

    size: int  # bytes of the file; below 0: it failed
    note: bytes = b""  # restored with the blocks
    keys: list[bytes] = []  # keys of the file's blocks, for `TierCalls.load`


class SlotCalls(Protocol):
    """Methods of the tier "slots". Each except `poll` begins an action. Only if there is this tier."""

    def save(self, name: str, note: bytes, blocks: list[tuple[int, bytes]]) -> None:
        """Begin to write `note` and these blocks (id, key), which stay as they are until the end."""

    def restore(self, name: str) -> None:
        """Begin to check a file; afterwards the tier holds its blocks."""

    def poll(self) -> SlotReport | None:
        """Continue the action. Returns its report once every rank has ended it, None until then."""


class TransferCalls(Protocol):
    """Methods of the tier "remote". Only if there is this tier."""

    def send(self, blocks: list[tuple[int, bytes]]) -> None:
        """Begin to copy these blocks (id, key), which stay as they are until the end, for other servers to read."""

    def poll(self) -> int:
        """Continue the copies. Returns how many calls of `send` every rank has completed since the start."""

    def expect(self, host: str, port: int, keys: list[bytes]) -> None:
        """Note that another server has the blocks of these keys, so that `TierCalls.lookup` finds them."""
