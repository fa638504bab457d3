"""Structures that are no JSON schemas: which texts match."""

from __future__ import annotations

import pytest

from quire.server.structured.structure import Structure
from tests.server.structured.walk import EOS, SPECIALS, accepts, allowed, ids, matcher

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def check(structure: Structure, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not accepts(structure, text)] == []
    assert [text for text in no if accepts(structure, text)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value", "yes", "no"),
    [
        ("json_object", None, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "", '{"a"}']),
        ("regex", r"^[a-c]{2}\d+$", ["ab1", "cc12"], ["a1", "ab", "ab1 ", "ab1x"]),
        ("regex", "a*?b+?", ["b", "aabb"], ["a", ""]),
        ("regex", r"a/b\$", ["a/b$"], ["a/b"]),
        ("regex", r"(yes|no)\.?", ["yes", "no."], ["maybe"]),
        ("choice", ["red", "green/blue", 'x"y\\', "ä\n"], ["red", "green/blue", 'x"y\\', "ä\n"], ["re", "redd", ""]),
        ("choice", ["a", "ab", "a", "<tool>", ""], ["a", "ab", ""], ["b", "abb", "aa"]),
        ("choice", [f"0{i}" for i in range(10_000)], ["00", "07", "0999"], ["0", "0x", "010000"]),
        ("choice", ["0"] * 10_000, ["0"], ["", "00"]),
        ("grammar", 'root ::= "a" (digit | "b")+ "c"\ndigit ::= [0-9]', ["a1b2c"], ["ac", "a1"]),
        ("grammar", 'root ::= item{2,3} end?\nitem ::= "x" | "(" root ")"\nend ::= [^a-z]', ["xx", "x(xx)!"], ["x"]),
        ("grammar", 'start: "hello" WORD "!"\nWORD: /[a-z]{2,5}/', ["helloabc!"], ["hello!", "helloa!"]),
    ],
)
def test_texts(kind, value, yes, no):
    check(Structure(kind=kind, value=value), yes, no)


def test_whitespace():
    spaced, tabbed = '{ "a" :\n 1 }', '{"a":\t1}'
    check(Structure(kind="json_schema", value=OBJECT), ['{"a":1}', spaced], [tabbed, '{"a":  1}'])
    check(Structure(kind="json_schema", value=OBJECT, compact=True), ['{"a":1}'], [spaced, tabbed])
    check(Structure(kind="json_schema", value=OBJECT, whitespace=r"\t"), ['{"a":1}', tabbed], [spaced])


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", 'root ::= "a', "at line"),
        ("grammar", "start: unknown_rule", "unknown"),
        ("json_schema", False, "no value is valid"),
        ("structural_tag", {"type": "triggered_tags", "triggers": ["<"], "tags": []}, "tags: must be a list"),
        ("structural_tag", {"format": {"type": "magic"}}, "format.type: 'magic' is not one of"),
        (
            "structural_tag",
            {"format": {"type": "sequence", "elements": [{"type": "regex"}]}},
            "format.elements.0.pattern",
        ),
        (
            "structural_tag",
            {"type": "json_schema", "json_schema": {"not": {"pattern": "a"}}},
            "json_schema at #: not: ",
        ),
    ],
)
def test_errors_name_the_mistake(kind, value, error):
    with pytest.raises(ValueError) as caught:
        matcher(Structure(kind=kind, value=value))
    assert error in str(caught.value)


def test_only_the_end_of_the_sequence_follows_a_complete_text():
    state = matcher(Structure(kind="choice", value=["ab"]))
    assert state.consume_tokens(ids("ab"))
    assert allowed(state) == [EOS]


def test_special_tokens_match_only_where_the_grammar_names_them():
    state = matcher(Structure(kind="json_schema", value={"type": "string"}))
    assert state.consume_tokens(ids('"'))
    assert set(SPECIALS.values()).isdisjoint(allowed(state))
    state = matcher(Structure(kind="choice", value=["<tool>x"]))
    assert allowed(state) == [SPECIALS["<tool>"]]


# ---- structural tags

TAG = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"}
CALL = '<f=a>{"a":1}</f>'


def triggered(**options) -> Structure:
    tags = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, OTHER], **options}
    return Structure(kind="structural_tag", value={"type": "structural_tag", "format": tags})


def test_text_is_free_until_a_trigger():
    check(
        triggered(),
        ["", "hello", CALL, f"text {CALL} more <f=b>12</f> < f", "a </think> b"],
        ["<f=c>", "text <f=a>{}</f>", "<f=b>x</f>", "<f=b>12", "<f="],
    )


def test_one_or_more_tags():
    check(triggered(at_least_one=True), [CALL, CALL + " then text", CALL + CALL], ["", "text", f"text {CALL}"])
    check(triggered(stop_after_first=True), ["", "text", CALL, f"text {CALL}"], [CALL + CALL, CALL + "x"])
    check(triggered(at_least_one=True, stop_after_first=True), [CALL], ["", CALL + "x", CALL + CALL])


def test_the_older_form():
    value = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
        "triggers": ["<f="],
    }
    check(Structure(kind="structural_tag", value=value), [CALL, "text", f"x{CALL}y"], ["<f=a>{}</f>"])


def test_triggers_that_are_special_tokens():
    tag = {
        "type": "tag",
        "begin": '<tool>{"x":',
        "content": {"type": "json_schema", "json_schema": OBJECT},
        "end": "}</tool>",
    }
    tags = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [tag]}
    check(
        Structure(kind="structural_tag", value={"format": tags}),
        ["text", 'a<tool>{"x":{"a":1}}</tool>b', "a</think>b"],
        ["a<tool>", 'a<tool>{"x":{}}</tool>'],
    )


@pytest.mark.parametrize(
    ("node", "yes", "no"),
    [
        ({"type": "const_string", "value": "a b"}, ["a b"], ["a"]),
        ({"type": "or", "elements": [TAG, OTHER]}, [CALL, "<f=b>1</f>"], [""]),
        ({"type": "optional", "content": TAG}, ["", CALL], [CALL + CALL]),
        ({"type": "star", "content": OTHER}, ["", "<f=b>1</f><f=b>2</f>"], ["x"]),
        ({"type": "plus", "content": OTHER}, ["<f=b>1</f>"], [""]),
        (
            {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "x"}},
            ["x", "xx"],
            ["xxx"],
        ),
        ({"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", "}, ["", f"{CALL}, {CALL}"], [CALL * 2]),
        (
            {"type": "tags_with_separator", "tags": [OTHER], "separator": ",", "at_least_one": True},
            ["<f=b>1</f>", "<f=b>1</f>,<f=b>2</f>"],
            [""],
        ),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            ["<t>any <f= thing</t>", "<t></t>"],
            ["<t>a", "<t>a</t>b"],
        ),
        (
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"},
            ["thoughts <tool>x</think>"],
            ["thoughts", "a</think>b"],
        ),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "token", "token": "<tool>"}, OTHER]},
            ["x<tool><f=b>1</f>"],
            ["<f=b>1</f>"],
        ),
        (
            {"type": "tag", "begin": "a", "content": {"type": "regex", "pattern": "b*"}, "end": ["c", "d"]},
            ["abbc", "ad"],
            ["ab"],
        ),
        ({"type": "any_text", "excludes": ["no", "non"]}, ["yes n o"], ["x no y"]),
        ({"type": "any_text", "max_chars": 2}, ["", "äö"], ["abc"]),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes"], ["maybe"]),
        ({"type": "dispatch", "rules": [["#", {"type": "regex", "pattern": "[0-9]"}]]}, ["a#1b#2", "x"], ["#x", "#"]),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<tool>"],
                "tags": [{"type": "tag", "begin": {"type": "token", "token": "<tool>"}, "content": OTHER, "end": ""}],
            },
            ["x", "x<tool><f=b>1</f>y"],
            ["<tool>x"],
        ),
    ],
)
def test_formats(node, yes, no):
    check(Structure(kind="structural_tag", value=node), yes, no)


def test_a_part_that_the_structure_does_not_constrain():
    after_text = Structure(kind="json_schema", value=OBJECT, after="END")
    check(after_text, ['thoughts END{"a":1}', 'END{"a":1}'], ['{"a":1}', 'END thoughts {"a":1}', "thoughts END"])
    after_token = Structure(kind="json_schema", value=OBJECT, after="</think>")
    check(after_token, ['so <tool> is</think>{"a":1}'], ['{"a":1}', "</think>so"])


@pytest.mark.parametrize(
    ("style", "yes", "no"),
    [
        (
            "qwen_xml",
            "\n<parameter=city>\nNew York</parameter>\n<parameter=days>\n3\n</parameter>",
            "<parameter=city>x</parameter><parameter=days>three</parameter>",
        ),
        ("minimax_xml", '<parameter name="city">a < b</parameter><parameter name="days">3</parameter>', ""),
        (
            "glm_xml",
            "<arg_key>city</arg_key>\n<arg_value>Rom</arg_value><arg_key>days</arg_key><arg_value>1</arg_value>",
            "<arg_key>days</arg_key><arg_value>1</arg_value>",
        ),
        (
            "deepseek_xml",
            '<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">1</｜DSML｜parameter>',
            '<｜DSML｜parameter name="city" string="false">Rom</｜DSML｜parameter>',
        ),
    ],
)
def test_parameters_as_xml(style, yes, no):
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"$ref": "#/$defs/n"},
            "unit": {"type": "string", "enum": ["C"]},
        },
        "required": ["city", "days"],
        "$defs": {"n": {"type": "integer"}},
    }
    node = {"type": "json_schema", "json_schema": schema, "style": style}
    check(Structure(kind="structural_tag", value=node), [yes], [no])
