"""Counts of tokens: their merge over time, and over the choices of a request."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.messages import NO_COUNTS, EngineOutput, SamplingParams, TokenCounts
from quire.server.generate.deltas import Choice
from quire.server.request.delta import Delta
from quire.server.request.generation_request import GenerationRequest
from quire.server.request.usage import TokenUsage

NAMES = TokenCounts.__struct_fields__


def delta(index: int, token_ids: list[int], **counts: int) -> Delta:
    return Delta(index, "", token_ids, None, None, None, None, TokenCounts(**counts), None)


@pytest.mark.parametrize("name", NAMES)
def test_a_count_never_falls(name):
    before, after = TokenCounts(**{name: 3}), TokenCounts(**{name: 5})
    assert before.then(after) == after.then(before) == after.then(NO_COUNTS) == NO_COUNTS.then(after) == after


@pytest.mark.parametrize("name", NAMES)
def test_a_count_of_the_engine_reaches_the_usage(name):
    output = EngineOutput("r", [1], counts=TokenCounts(**{name: 7}))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineOutput)
    choice, used = Choice(0), TokenUsage(9)
    choice.add(delta(0, [1], **{name: getattr(received.counts, name)}))
    used.add(choice)
    assert used.counts == TokenCounts(**{name: 7})


def test_choices_share_their_prompt_and_add_up_their_outputs():
    requests = [GenerationRequest(str(i), [1] * 10, SamplingParams(prediction=[1]), n=2) for i in range(2)]
    used = TokenUsage.for_requests(requests)
    assert (used.num_prompt, used.n, used.num_predicted, used.num_output) == (20, 2, 1, 0)
    for index, cached in enumerate((0, 8, 6, 4)):
        used.add(delta(index, [1, 2, 3], cached=cached, accepted=1, rejected=index))
        used.add(delta(index, [4], cached=cached, accepted=2, rejected=index))
    assert used.num_output == 16
    assert used.counts == TokenCounts(cached=0 + 4, accepted=8, rejected=6)
