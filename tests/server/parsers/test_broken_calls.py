"""Whatever a model writes, in any pieces: arguments are JSON objects, and no marker of a format is content, thoughts or
an argument.
"""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format
from tests.server.parsers.answers import add_up, cut, events_of, parse, parser
from tests.server.parsers.renderers import RENDERERS
from tests.server.parsers.samples import SAMPLES
from tests.server.parsers.test_rendered_calls import CALLS, calls_of

TOOL_NAMES = [candidate.name for candidate in TOOL_FORMATS]
PLAIN = [candidate.name for candidate in REASONING_FORMATS if candidate.name != "gpt_oss"]
PAIRS = [(tools, "gpt_oss" if tools == "gpt_oss" else PLAIN[i % len(PLAIN)]) for i, tools in enumerate(TOOL_NAMES)]
BRACKETS = list("{}[]\"':,()\\\n\x00 ")


def markers_of(tools: str, thoughts: str) -> set[str]:
    return {*tool_format(tools).strays, *reasoning_format(thoughts).strays}


@st.composite
def mutated(draw, text: str, markers: list[str]) -> str:
    """`text` with pieces left out, doubled, put in, and cut off."""
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(text)))
        match draw(st.sampled_from(["leave out", "put in", "double", "cut"])):
            case "leave out":
                text = text[:place] + text[place + draw(st.integers(1, 12)) :]
            case "put in":
                text = text[:place] + draw(st.sampled_from(BRACKETS + markers)) + text[place:]
            case "double":
                text = text[:place] + text[max(place - draw(st.integers(1, 20)), 0) :]
            case "cut":
                text = text[:place] if draw(st.booleans()) else text
    return text


@st.composite
def answers(draw, tools: str, thoughts: str) -> str:
    reasoning = reasoning_format(thoughts)
    calls = RENDERERS[tools](draw(calls_of(tools)))
    call = RENDERERS[tools](draw(st.lists(CALLS, min_size=1, max_size=1)))
    blocks = st.sampled_from(
        [
            calls,
            f"{reasoning.begin}I think.{reasoning.end}",
            f"{reasoning.begin}I would {call}{reasoning.end}",
            "Some text",
            " ",
            "\n\n",
            *SAMPLES[tools],
        ]
    )
    text = "".join(draw(st.lists(blocks, min_size=1, max_size=4)))
    return draw(mutated(text, sorted(markers_of(tools, thoughts))))


def check(answer, markers: set[str]) -> None:
    for call in answer.calls:
        assert call.name and isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
        call.name.encode()
    for marker in markers:
        assert marker not in answer.reasoning, marker
        assert marker not in answer.content, marker


@pytest.mark.slow
@pytest.mark.parametrize(("tools", "thoughts"), PAIRS)
@settings(max_examples=20)
@given(data=st.data())
def test_broken_calls(tools, thoughts, data):
    text = data.draw(answers(tools, thoughts), "text").replace("`", "'")  # in code, markers are quoted
    opened = data.draw(st.booleans(), "opened")
    places = data.draw(st.lists(st.integers(0, 2000), max_size=30), "places")
    whole = add_up(events_of(parser(tools, thoughts, opened), [text]))
    markers = markers_of(tools, thoughts)
    left = re.sub("|".join(map(re.escape, sorted(markers, key=len, reverse=True))), "", text)
    check(whole, {marker for marker in markers if marker not in left})  # "<<think>think>" is two halves of one
    assert add_up(events_of(parser(tools, thoughts, opened), cut(text, places))) == whole
    assert add_up(events_of(parser(tools, thoughts, opened), text)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_NAMES)
@settings(max_examples=8)
@given(data=st.data())
def test_calls_without_an_end(name, data):
    """A call that is cut off ends at its last character, and the end of its section may be missing or doubled."""
    calls = data.draw(calls_of(name))
    text = RENDERERS[name](calls)
    end = data.draw(st.integers(0, len(text)))
    answer = parse(text[:end], name, "think")
    check(answer, {*tool_format(name).markers})
    assert len(answer.calls) <= len(calls)
    for marker in tool_format(name).strays:
        check(parse(text + marker, name, "think"), {marker})


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_NAMES)
def test_a_call_without_one_of_its_characters(name):
    """No marker is in the arguments either, nor after them, whatever follows the call."""
    markers = set(tool_format(name).strays)
    ends = {"</arg_value>", "｜DSML｜"}  # the text of a value may have its end tag
    call = RENDERERS[name]([("get_weather", {"city": "Paris", "days": 3, "where": {"a": ["b"]}})])
    for after in ("", "\nDone.", "\n" + call):
        for place in (place for place in range(len(call)) if call[place] not in "`\n"):
            text = call[:place] + call[place + 1 :] + after
            answer = parse(text, name)
            check(answer, markers if "```" not in answer.content else set())  # in code, markers are quoted
            for one in answer.calls:
                assert not any(marker in one.arguments for marker in {*tool_format(name).markers} - ends), text


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_control_characters_and_half_pairs_are_escaped(name):
    arguments = {"city": "one\ntwo\tthree", "note": "x"}
    text = RENDERERS[name]([("get_weather", arguments)])
    for raw in (text, text.replace("\\n", "\n").replace("\\t", "\t")):
        (call,) = parse(raw, name).calls
        assert json.loads(call.arguments) == arguments
    (call,) = parse(RENDERERS[name]([("get_weather", {"city": "qz"})]).replace("qz", "\\ud83d"), name).calls
    call.arguments.encode()
    json.dumps(json.loads(call.arguments), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_without_tools_there_are_no_calls(name):
    thoughts = "gpt_oss" if name == "gpt_oss" else "think"
    for sample in SAMPLES[name]:
        assert not add_up(events_of(parser(name, thoughts, functions=()), sample)).calls


@pytest.mark.parametrize("rest", ["}]", "}} x]", " x y]", '"x"]', "\\u007d]"])
@pytest.mark.parametrize("marker", ["<tool_call>", "<|tool_call|>"])
def test_text_after_the_arguments_in_a_string(marker, rest):
    """What follows an object within its string is the same content, in whatever pieces it arrives."""
    text = f'{marker}[{{"name": "now", "arguments": "{{}}{rest}'
    whole = add_up(events_of(parser("granite", "granite"), [text]))
    assert add_up(events_of(parser("granite", "granite"), text)) == whole
