"""llama.cpp's samplers: which a request asks for, and in which order -> `SamplerChain`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quire.engine.messages import SAMPLERS, Dry, SamplerChain
from quire.server.errors import BadRequest
from quire.server.request.fields import SamplingFields
from quire.server.text.breakers import BreakerIndex

LAST_TOKENS = 64  # that llama.cpp's and Ollama's penalties count by default
DEFAULT_BREAKERS = ("\n", ":", '"', "*")
_LETTERS = {  # for `samplers` as one text
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature",
}  # fmt: skip
_OTHER_NAMES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}
# parameters that only tune others
_TUNING = ("xtc_threshold", "dynatemp_exponent", "min_keep", "mirostat_tau", "mirostat_eta")
# the other parameters of samplers, with the values at which they do nothing
_NEUTRAL: dict[str, Any] = {"dry_multiplier": 0.0} | {
    one.name: one.default
    for one in msgspec.structs.fields(SamplerChain)
    if one.name in SamplingFields.__struct_fields__ and one.name not in _TUNING
}


class Breaking(Protocol):
    """The part of `Tokenizer` that DRY needs."""

    @property
    def breakers(self) -> BreakerIndex: ...


def chain_of(options: SamplingFields, tokenizer: Breaking, vocab_size: int) -> SamplerChain | None:
    """Return the samplers of a request; None if it uses none but those that OpenAI and vLLM have. Raises BadRequest."""
    given = {name: getattr(options, name) for name in (*_NEUTRAL, *_TUNING)}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if (sigma := values.get("top_n_sigma")) is not None:
        values["top_n_sigma"] = max(sigma, 0.0)  # -1: off
    order = order_of(options.samplers)
    if options.samplers is None and all(values.get(name, off) == off for name, off in _NEUTRAL.items()):
        return None
    multiplier = values.pop("dry_multiplier", 0.0)
    has_dry = multiplier and "dry" in order and not values.get("mirostat")
    dry = _dry(options, multiplier, tokenizer, vocab_size) if has_dry else None
    return SamplerChain(order=order, dry=dry, **values)


def order_of(samplers: list[str] | str | None) -> tuple[str, ...]:
    """Return the names of samplers, each once. Raises BadRequest for one that is not known."""
    if samplers is None:
        return SAMPLERS
    if isinstance(samplers, str):
        names = [_LETTERS.get(letter, letter) for letter in samplers]
    else:
        spelled = {name.replace("_", joint): name for name in SAMPLERS for joint in ("_", "-", "")} | _OTHER_NAMES
        names = [spelled.get(name.lower(), name) for name in samplers]
    for name in names:
        if name not in SAMPLERS:
            letters = "".join(_LETTERS)
            raise BadRequest(
                f"samplers: '{name[:40]}' is not a sampler here; these are: {', '.join(SAMPLERS)}, or the letters "
                f"{letters}.",
                param="samplers",
            )
    return tuple(dict.fromkeys(names))


def _dry(options: SamplingFields, multiplier: float, tokenizer: Breaking, vocab_size: int) -> Dry:
    tokens: dict[int, None] = {}
    sequences: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for text in DEFAULT_BREAKERS if options.dry_sequence_breakers is None else options.dry_sequence_breakers:
        whole, others = tokenizer.breakers.find(text)
        tokens |= dict.fromkeys(whole)
        sequences += others
    known = range(vocab_size)  # a tokenizer may have tokens for which the model has no embedding
    given = {
        "base": options.dry_base,
        "allowed_length": options.dry_allowed_length,
        "last_n": options.dry_penalty_last_n,
    }
    return Dry(
        multiplier,
        breakers=tuple(token for token in tokens if token in known),
        sequences=tuple((tuple(t for t in first if t in known), rest) for first, rest in sequences),
        **{name: value for name, value in given.items() if value is not None},
    )
