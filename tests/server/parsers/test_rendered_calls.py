"""Calls written in a format parse back, and the format's grammar accepts them and no wrong ones."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.parsers.registry import TOOL_FORMATS, tool_format
from quire.server.parsers.tools.base import Tool
from quire.server.structured.structure import Structure
from tests.server.parsers.answers import TOOLS, parse
from tests.server.parsers.renderers import RENDERERS
from tests.server.structured.walk import accepts

NAMES = [candidate.name for candidate in TOOL_FORMATS]
ONE_CALL = {"gpt_oss"}  # the model stops after a call
# text that could be taken for a tag, a quote or white space of the format is tested by the samples
WORDS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="<>[]|`'\"\\"), min_size=1, max_size=8)
TEXTS = st.lists(WORDS | st.sampled_from(["it's", 'a "b"', "\\n", "x\ny", "{", "}", "(", "1,2"]), min_size=1).map(
    " ".join
)
CLEAN = TEXTS.map(str.strip).filter(lambda text: text.lower() not in ("null", "none", "true", "false"))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | CLEAN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b_c"]), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": CLEAN,
        "days": st.integers(-(2**40), 2**40),
        "unit": st.sampled_from(["celsius", "fahrenheit"]),
        "metric": st.booleans(),
        "where": st.dictionaries(st.sampled_from(["a", "b_c"]), VALUES, max_size=2),
        "names": st.lists(CLEAN, max_size=3),
        "level": st.floats(-1e6, 1e6, width=32),
    },
)
CALLS = st.one_of(st.just(("now", {})), ARGUMENTS.map(lambda arguments: ("get_weather", arguments)))


def calls_of(name: str) -> st.SearchStrategy:
    return st.lists(CALLS, min_size=1, max_size=1 if name in ONE_CALL else 3)


@functools.cache
def grammar(name: str, required: bool, parallel: bool, strict: bool) -> Structure:
    tools = [Tool(tool.name, tool.parameters | {"additionalProperties": False}, strict) for tool in TOOLS]
    tag = tool_format(name).structure(tools, required=required, parallel=parallel)
    return Structure(kind="structural_tag", value=tag)


def values(calls) -> list:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(data=st.data())
def test_calls_parse_back(name, data):
    calls = data.draw(calls_of(name))
    answer = parse(RENDERERS[name](calls), name)
    assert values(answer.calls) == calls
    assert answer.content == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_grammar_accepts_calls(name):
    weather = ("get_weather", {"city": "Paris", "days": 3, "unit": "celsius", "metric": True, "where": {"a": [1]}})
    calls = [weather] if name in ONE_CALL else [weather, ("now", {})]
    text = json_for_python(name, RENDERERS[name](calls))
    for strict in (False, True):
        assert accepts(grammar(name, True, True, strict), text)
        assert accepts(grammar(name, True, False, strict), RENDERERS[name]([("now", {})]))
    assert accepts(grammar(name, False, True, True), text)
    assert accepts(grammar(name, False, False, False), json_for_python(name, RENDERERS[name]([weather])))
    assert values(parse(text, name).calls) == calls


def json_for_python(name: str, text: str) -> str:
    """The grammars of lists in Python write values as JSON, which the parser reads as well."""
    pythonic = name in ("pythonic", "llama4_pythonic", "gemma3")
    return text.replace("'", '"').replace("True", "true") if pythonic else text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_grammar_rejects_wrong_calls(name):
    render = RENDERERS[name]
    required, single = grammar(name, True, True, False), grammar(name, True, False, False)
    assert not accepts(required, "Just text.")
    assert not accepts(required, "")
    assert not accepts(required, json_for_python(name, render([("get_weather", {"days": "many"})])))
    assert not accepts(required, json_for_python(name, render([("get_weather", {"size": 1})])))
    assert not accepts(required, render([("other", {})]))
    assert not accepts(
        grammar(name, False, True, True), json_for_python(name, render([("get_weather", {"days": "x"})]))
    )
    if name not in ONE_CALL:
        assert not accepts(single, render([("now", {}), ("now", {})]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_schema_that_cannot_be_enforced_frees_only_its_tool(name):
    schema = {"properties": {"city": {"type": "string", "not": {"pattern": "x"}}}}
    tools = [Tool("now", schema, best_effort=True), *(tool for tool in TOOLS if tool.name != "now")]
    tag = tool_format(name).structure(tools, required=True, parallel=False)
    lenient = Structure(kind="structural_tag", value=tag)
    render = RENDERERS[name]
    assert accepts(lenient, json_for_python(name, render([("now", {"city": 1, "other": [2]})])))
    assert not accepts(lenient, json_for_python(name, render([("get_weather", {"days": "many"})])))
    assert not accepts(lenient, render([("other", {})]))


@pytest.mark.parametrize("name", NAMES)
def test_without_required_the_grammar_accepts_text(name):
    text = "Just text, 1 < 2."
    if name == "gpt_oss":
        text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{text}"
    assert accepts(grammar(name, False, True, True), text)
    assert accepts(grammar(name, False, False, False), text)


@pytest.mark.parametrize("name", NAMES)
def test_no_grammar_where_any_text_will_do(name):
    assert tool_format(name).structure(TOOLS, required=False, parallel=True) is None
