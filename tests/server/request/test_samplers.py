"""llama.cpp's samplers in a request, as the engine gets them."""

from __future__ import annotations

import pytest

from quire.engine.messages import SAMPLERS, Dry, SamplerChain
from quire.server.errors import BadRequest
from quire.server.request.request import GenerationOptions
from quire.server.request.samplers import chain_of, order_of
from quire.server.text.breakers import BreakerIndex

VOCABULARY = [b"a", b"\n", b"b\n", b":", b"c:d", b"**", b'"', b"x"]


class Tokenizer:
    breakers = BreakerIndex(VOCABULARY, lambda texts: [[ord(c) % 8 for c in text] for text in texts])


def chain(**options) -> SamplerChain | None:
    return chain_of(GenerationOptions(**options), Tokenizer(), 7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 3, "repeat_last_n": 5},
        {"typical_p": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "dry_multiplier": 0.0, "mirostat": 0},
        {"xtc_threshold": 0.2, "dry_base": 2.0, "mirostat_tau": 3.0, "min_keep": 2},  # of samplers that are off
    ],
)
def test_requests_without_them_take_the_usual_way(options):
    assert chain(**options) is None


def test_parameters():
    assert chain(typical_p=0.5, min_keep=3) == SamplerChain(SAMPLERS, typical_p=0.5, min_keep=3)
    assert chain(mirostat=2, mirostat_tau=4.0, dry_multiplier=1.0) == SamplerChain(
        SAMPLERS, mirostat=2, mirostat_tau=4.0
    )
    assert chain(samplers=["temperature"], dry_multiplier=1.0) == SamplerChain(("temperature",))


def test_dry_ends_at_the_tokens_of_its_breakers():
    assert chain(dry_multiplier=0.5).dry == Dry(0.5, breakers=(1, 2, 3, 4, 6, 5))
    own = chain(dry_multiplier=0.5, dry_base=2.0, dry_penalty_last_n=9, dry_sequence_breakers=["c:e", "x"]).dry
    assert own == Dry(0.5, 2.0, last_n=9, sequences=()), "token 7 is beyond the model's vocabulary"
    (sequence,) = chain(dry_multiplier=0.5, dry_sequence_breakers=[":z"]).dry.sequences
    assert sequence == ((3,), (ord("z") % 8,))
    assert chain(dry_multiplier=0.5, dry_sequence_breakers=[]).dry == Dry(0.5)


@pytest.mark.parametrize(
    ("given", "order"),
    [
        (None, SAMPLERS),
        (["top_k", "top-p", "minp", "Temperature", "typ"], ("top_k", "top_p", "min_p", "temperature", "typ_p")),
        ("edskypmxt", SAMPLERS),
        ("kt", ("top_k", "temperature")),
        ([], ()),
    ],
)  # fmt: skip
def test_order(given, order):
    assert order_of(given) == order


@pytest.mark.parametrize("given", [["top_k", "infill"], "kz", ["adaptive_p"]])
def test_an_unknown_sampler_is_refused_by_name(given):
    with pytest.raises(BadRequest, match="is not a sampler here; these are: penalties, dry") as error:
        order_of(given)
    assert error.value.param == "samplers"
