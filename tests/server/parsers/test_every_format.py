"""What holds for every format: cutting the text changes nothing, nothing is lost, the cost is linear."""

from __future__ import annotations

import gc
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.answer import AnswerParser
from quire.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.server.parsers.answers import add_up, cut, events_of, parser
from tests.server.parsers.samples import SAMPLES

TOOL_NAMES = [candidate.name for candidate in TOOL_FORMATS]
REASONING_NAMES = [candidate.name for candidate in REASONING_FORMATS]
PAIRS = [(tools, "think") for tools in TOOL_NAMES] + [("hermes", reasoning) for reasoning in REASONING_NAMES]


def pieces_of_text(tools: str, reasoning: str) -> st.SearchStrategy[str]:
    """Texts of markers, pieces of calls and what may be confused with them."""
    formats = [c for c in TOOL_FORMATS if c.name == tools], [c for c in REASONING_FORMATS if c.name == reasoning]
    own = [*formats[0][0].markers, *formats[0][0].begins, *formats[0][0].first, *formats[1][0].markers]
    common = ["{", "}", "[", "]", '"', "'", "\\", "\n", " ", ",", ":", "=", "(", ")", "<", "</", "|", ">", "```", "`"]
    words = [
        "name",
        '"name"',
        '"arguments"',
        "get_weather",
        "now",
        "1",
        "true",
        "é",
        "😀",
        "\\u00e9",
        "functions.now:0",
    ]
    return st.lists(st.sampled_from(own * 3 + common + words), max_size=40).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
@settings(max_examples=40)
@given(data=st.data())
def test_cutting_changes_nothing(tools, reasoning, data):
    samples = st.sampled_from(SAMPLES[tools])
    text = data.draw(st.lists(pieces_of_text(tools, reasoning) | samples, max_size=3).map("".join), "text")
    places = data.draw(st.lists(st.integers(0, 2000), max_size=30), "places")
    opened = data.draw(st.booleans(), "opened")
    whole = add_up(events_of(parser(tools, reasoning, opened), [text]))
    assert add_up(events_of(parser(tools, reasoning, opened), cut(text, places))) == whole
    assert add_up(events_of(parser(tools, reasoning, opened), text)) == whole


@pytest.mark.parametrize("tools", TOOL_NAMES)
@settings(max_examples=25)
@given(text=st.text(st.characters(exclude_characters="<[{◁|`")))
def test_text_without_markers_passes(tools, text):
    answer = add_up(events_of(parser(tools, "think"), text))
    assert (answer.content, answer.reasoning, answer.calls) == (text, "", [])


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_text_is_not_held_back(tools):
    """Everything but the white space at the end is handed out at once."""
    one = parser(tools, "think")
    for piece in ["Hel", "lo, ", "world", "!", " It costs", " 3 ", "€"]:
        answer = add_up(one.push(piece))
        assert answer.content.strip() == piece.strip()


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_calls_are_handed_out_as_they_arrive(tools):
    """The name before the arguments, and a long string in pieces that lag by no more than half a mark."""
    sample = SAMPLES[tools][0]
    head, tail = sample.split("Paris")
    one = parser(tools, "think")
    events = one.push(head + "Le ")  # a quote is known to be no part of three when something follows
    assert [call.name for call in add_up(events).calls] == ["get_weather"]
    for word in ["Saint-", "Remy ", "en ", "Bouze", "mont ", "Saint-", "Genes "]:
        (event,) = one.push(word)
        assert event.text == word
        events.append(event)
    (call,) = add_up([*events, *one.push(tail), *one.finish()]).calls
    assert json.loads(call.arguments)["city"].endswith("Genes ")


@pytest.mark.slow
@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_a_sample_cut_anywhere_loses_nothing(tools):
    for sample in SAMPLES[tools]:
        for end in range(len(sample)):
            answer = add_up(events_of(parser(tools, "think"), [sample[:end]]))
            whole = add_up(events_of(parser(tools, "think"), [sample]))
            assert [c.name for c in answer.calls] == [c.name for c in whole.calls][: len(answer.calls)]
            for call, complete in zip(answer.calls[:-1], whole.calls):
                assert call == complete
            if answer.calls:
                arguments = json.loads(whole.calls[len(answer.calls) - 1].arguments)
                assert is_part(json.loads(answer.calls[-1].arguments), arguments)


def is_part(part, whole) -> bool:
    """Whether `part` is `whole` without some of its end."""
    if isinstance(part, str):
        return whole.startswith(part)
    if isinstance(part, list):
        return len(part) <= len(whole) and all(map(is_part, part, whole))
    if isinstance(part, dict):
        return list(part) == list(whole)[: len(part)] and all(is_part(part[key], whole[key]) for key in part)
    return part == whole


@pytest.mark.slow
@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_the_cost_is_linear(tools):
    """A text of 100,000 characters, in small pieces, for beginnings that could make a parser read again."""
    chosen = next(candidate for candidate in TOOL_FORMATS if candidate.name == tools)
    begun = SAMPLES[tools][0][:-20]
    for unit in {"{", '{"a":"', " ", *chosen.begins[:1], *chosen.first[:1], SAMPLES[tools][0][:30]}:
        short, long = (
            seconds(parser(tools, "think"), begun + unit * (size // len(unit))) for size in (10_000, 100_000)
        )
        assert long < 25 * short + 0.2, (unit, short, long)


def seconds(one: AnswerParser, text: str) -> float:
    pieces = [text[i : i + 8] for i in range(0, len(text), 8)]
    gc.disable()  # the rest of the process may have much to collect
    try:
        start = time.process_time()
        events_of(one, pieces)
        return time.process_time() - start
    finally:
        gc.enable()
