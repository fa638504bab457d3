"""Decoding requests are added to a step together, and one token of a request is received by a shorter way: with the
result of the general ones.
"""

import copy
from types import SimpleNamespace

import pytest

from quire.engine.messages import AddRequest, SamplingParams
from quire.engine.request import Request
from quire.engine.step import Step
from quire.worker.messages import StepInput


def empty_step() -> Step:
    return Step(StepInput(1, [], [], [], [], [], [], [], [], {}), [])


def test_added_together_or_one_by_one():
    def requests():
        def request(row: int) -> SimpleNamespace:
            counts = {"num_in_flight": 1, "num_computed_tokens": row + 3}
            return SimpleNamespace(row=row, token_ids=[1] * (row + 3), sampling=SimpleNamespace(max_tokens=9), **counts)

        return [request(row) for row in (4, 0, 2)]

    class ById(dict):
        def get(self, request, default=None):
            return super().get(request.row, default)

    blocks = ById({0: [[7]]})
    together, others = (empty_step() for _ in range(2))
    ours, theirs = requests(), requests()
    together.add_decodes(ours, blocks)
    for request in theirs:
        others.add(request, request.num_computed_tokens, 1, blocks.get(request, []))
    assert together.input == others.input and together.num_tokens == others.num_tokens == 3
    assert together.input.samples == [0, 1, 2] and together.input.new_blocks == [[], [[7]], []]
    assert [request.num_in_flight for request in ours] == [request.num_in_flight for request in theirs] == [2] * 3


def make_request(**sampling) -> Request:
    message = AddRequest("a", [5, 6, 7], SamplingParams(**sampling))
    return Request(message, message.choices[0], b"client", 1, 1, 0.0, 50, False)


@pytest.mark.parametrize(
    "sampling, token_ids, received, reason",
    [
        ({"max_tokens": 3}, [8, 9], 2, None),
        ({"max_tokens": 3}, [8, 9, 10, 11], 3, "length"),
        ({"max_tokens": 9, "stop_token_ids": [9]}, [8, 9, 10], 2, "stop"),
        ({"max_tokens": 9, "stop_token_ids": [9], "min_tokens": 4}, [8, 9, 10], 3, None),
    ],
)
def test_tokens_are_received_up_to_the_one_that_finishes(sampling, token_ids, received, reason):
    request = make_request(**sampling)
    one_by_one, prompt = copy.copy(request), request.token_ids
    assert request.append(token_ids) == (received, reason)
    assert [one_by_one.append_one(token_id) for token_id in token_ids[:received]][-1] == reason
    assert request.token_ids == one_by_one.token_ids == [5, 6, 7, *token_ids[:received]]
    assert prompt == [5, 6, 7]  # which sibling choices share


def test_a_request_decodes_when_one_known_token_is_left():
    request = make_request(max_tokens=9)
    states = []
    for computed, in_flight in ((0, 0), (2, 0), (3, 0), (3, 1), (3, 2)):
        request.num_computed_tokens, request.num_in_flight = computed, in_flight
        states.append(request.is_decoding)
    assert states == [False, False, False, True, False]
