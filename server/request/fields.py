"""The sampling parameters, each declared once for every dialect. The types carry the bounds into parsers and OpenAPI.

A type of a dialect's parameters inherits them, and declares again those that it names or bounds otherwise:

    class Options(SamplingFields, kw_only=True):
        repetition_penalty: RepetitionPenalty | None = msgspec.field(default=None, name="repeat_penalty")

A dialect that takes a few of them only (TGI, Anthropic) declares these under the same attribute names. `options_of`
finds them in either.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from quire.engine.messages import SamplingParams
from quire.server.request.limits import (
    AtLeastMinusOne,
    Breakers,
    DryBase,
    DryMultiplier,
    DynatempExponent,
    DynatempRange,
    Int64,
    LastTokens,
    MinKeep,
    MinP,
    Mirostat,
    MirostatEta,
    MirostatTau,
    NonNegative,
    Penalty,
    RepetitionPenalty,
    Samplers,
    Share,
    Sigmas,
    Temperature,
    TopP,
    TypicalP,
)

T = TypeVar("T", bound=msgspec.Struct)


class SamplingFields(msgspec.Struct, kw_only=True):
    """Parameters of sampling. None: not given.

    Those that the engine's `SamplingParams` has under the same name reach it by this name (`sampling.py`); its default
    there is the one of OpenAI's dialect, and has no effect on the distribution.
    """

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: AtLeastMinusOne | None = None  # -1 and 0: off
    min_p: MinP | None = None
    seed: Int64 | None = None  # -1: none
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    # llama.cpp's (docs/samplers.md); with one of them temperature and filters run in llama.cpp's order
    # the last tokens of prompt and output that all three penalties count; None: OpenAI's and vLLM's rules
    repeat_last_n: LastTokens | None = None
    typical_p: TypicalP | None = None
    top_n_sigma: Sigmas | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    dynatemp_range: DynatempRange | None = None
    dynatemp_exponent: DynatempExponent | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: NonNegative | None = None
    dry_penalty_last_n: LastTokens | None = None
    dry_sequence_breakers: Breakers | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: MirostatTau | None = None
    mirostat_eta: MirostatEta | None = None
    samplers: Samplers | None = None  # names, or llama.cpp's letters
    min_keep: MinKeep | None = None
    no_repeat_ngram_size: NonNegative | None = None  # 0: off
    no_repeat_ngram_window_size: NonNegative | None = None  # last tokens that are searched; 0: all


# the parameters that the engine takes under the same name, with their neutral values; a seed has none
NEUTRAL: dict[str, Any] = {
    one.name: one.default
    for one in msgspec.structs.fields(SamplingParams)
    if one.name in SamplingFields.__struct_fields__ and one.name != "seed"
}


def with_sampling_fields(base: type[T]) -> type[T]:
    """Return a subclass of `base` that also has the fields of `SamplingFields`: Structs cannot have two bases."""
    fields = [(one.name, one.type, one.default) for one in msgspec.structs.fields(SamplingFields)]
    return msgspec.defstruct(f"Sampled{base.__name__}", fields, bases=(base,), module=base.__module__, kw_only=True)
