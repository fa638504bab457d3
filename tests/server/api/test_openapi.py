"""The OpenAPI document for its readers: every route has a sentence, described parameters, and an example that a server
answered, which has the type that the document says.
"""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from quire.server.api.ops.tokenizer_info import TokenizerInfo
from quire.server.http.route import Route
from quire.server.openapi import EXAMPLES, document
from quire.server.routes import ROUTES

DOCUMENT = document("quire", "1", ROUTES)
OPEN = (TokenizerInfo,)  # the names of more fields are the model's
EXAMPLE = json.loads(EXAMPLES.read_text(encoding="utf-8"))


def plain(route: Route) -> str:
    return f"{route.method} {re.sub(r':path}', '}', route.path)}"


def operation(route: Route) -> dict:
    method, path = plain(route).split(" ")
    return DOCUMENT["paths"][path][method.lower()]


@pytest.mark.parametrize("route", ROUTES, ids=plain)
def test_every_route_has_a_sentence_and_described_parameters(route):
    found = operation(route)
    assert re.fullmatch(r"[A-Z0-9][^\n]{10,200}\.", found["summary"]) and found["summary"].count(" ") > 1
    assert found["description"].startswith(found["summary"]) and "\n" not in found["description"]
    assert all(len(one["description"].split()) > 2 for one in found.get("parameters", []))
    named = re.findall(r"{(\w+)", route.path) + list(route.query)
    assert [one["name"] for one in found.get("parameters", [])] == named


def test_nothing_is_for_readers_of_the_code():
    assert "Raises" not in json.dumps(DOCUMENT) and "ApiError" not in json.dumps(DOCUMENT)


@pytest.mark.parametrize("route", ROUTES, ids=plain)
def test_every_route_has_an_example_of_its_type(route):
    found, example = operation(route), EXAMPLE[plain(route)]
    answer = found["responses"][str(example["status"])]
    if "answer" not in example:
        assert answer["description"] == "Done; there is no body" and "content" not in answer
        return
    assert answer["content"][example["type"]]["example"] == example["answer"]
    if route.answer is None:
        assert example["status"] >= 400
        return
    assert example["status"] == route.status
    if isinstance(route.answer, str):
        assert example["type"] == route.answer and example["answer"].strip()
        return
    fitting = [cls for cls in route.answers if fits(example["answer"], cls)]
    assert fitting, [refusal(example["answer"], cls) for cls in route.answers]


def fits(value: object, cls: type) -> bool:
    return refusal(value, cls) is None


def refusal(value: object, cls: type) -> str | None:
    """Why a value is not of a type: also fields that the type does not have."""
    try:
        read = json.loads(msgspec.json.encode(msgspec.json.decode(json.dumps(value), type=cls)))
    except msgspec.ValidationError as error:
        return str(error)
    return None if cls in OPEN else unknown(value, read)


def unknown(value: object, read: object, where: str = "") -> str | None:
    if isinstance(value, dict) and isinstance(read, dict):
        parts = ((value[name], read.get(name, msgspec.UNSET), f"{where}.{name}") for name in value)
    elif isinstance(value, list) and isinstance(read, list):
        parts = ((one, two, f"{where}[]") for one, two in zip(value, read, strict=True))
    else:
        return f"{where} is no field" if read is msgspec.UNSET else None
    return next((why for part in parts if (why := unknown(*part)) is not None), None)


@pytest.mark.parametrize("route", [one for one in ROUTES if isinstance(one.body, type)], ids=plain)
def test_examples_of_requests_are_bodies_of_their_routes(route):
    request = EXAMPLE[plain(route)]["request"]
    assert msgspec.json.decode(json.dumps(request), type=route.body) is not None
    assert operation(route)["requestBody"]["content"]["application/json"]["example"] == request


def test_examples_tell_nothing_of_the_machine_that_made_them():
    text = EXAMPLES.read_text(encoding="utf-8")
    assert not re.search(r"/(?:tmp|home|root|work|usr)/", text) and EXAMPLE.keys() == {plain(route) for route in ROUTES}
