"""Every spelling of a constraint in a request."""

from __future__ import annotations

import msgspec
import pytest

from quire.server.api.openai.protocol import ChatCompletionRequest
from quire.server.api.openai.structure import structure_of
from quire.server.errors import BadRequest
from quire.server.http.parse_body import parse
from quire.server.structured.structure import Structure

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"title": "X"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
GRAMMAR = 'root ::= "a"'


def structure(**fields) -> Structure | None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return structure_of(parse(msgspec.json.encode(body), ChatCompletionRequest, strict=True)[0])


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            SCHEMA,
            "response_format.schema",
        ),
        ({"response_format": TAG}, "structural_tag", TAG, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"const": 1}'}}, "json_schema", {"const": 1}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "grammar", GRAMMAR, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": msgspec.json.encode(TAG).decode(), "json_object": False}},
            "structural_tag",
            TAG,
            "structured_outputs.structural_tag",
        ),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
        ({"guided_grammar": GRAMMAR}, "grammar", GRAMMAR, "guided_grammar"),
        ({"regex": "a"}, "regex", "a", "regex"),
        ({"ebnf": GRAMMAR}, "grammar", GRAMMAR, "ebnf"),
        ({"grammar": GRAMMAR}, "grammar", GRAMMAR, "grammar"),
        ({"json_schema": '{"const": 1}'}, "json_schema", {"const": 1}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema", SCHEMA, "json_schema"),
    ],
)
def test_spellings(fields, kind, value, param):
    assert structure(**fields) == Structure(kind=kind, value=value, param=param)


def test_whitespace():
    compact = structure(structured_outputs={"json": {}, "disable_any_whitespace": True})
    assert compact.compact
    assert structure(structured_outputs={"json": {}, "whitespace_pattern": " ?"}).whitespace == " ?"
    assert structure(guided_json={}, guided_whitespace_pattern=" ?").whitespace == " ?"


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_no_constraint(fields):
    assert structure(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_json": "[1"}, "guided_json"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_mistakes_name_the_field(fields, param):
    with pytest.raises(BadRequest) as caught:
        structure(**fields)
    assert caught.value.param == param
