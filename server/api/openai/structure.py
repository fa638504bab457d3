"""The spellings of a constraint on the output -> `Structure`: OpenAI's response_format, vLLM's structured_outputs and
its older guided_*, and the fields of SGLang and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.server.api.openai.protocol import GenerationFields, StructuredOutputs
from quire.server.errors import BadRequest
from quire.server.structured.structure import Kind, Structure
from quire.server.values import Json

# field -> kind, of the fields that hold a value of their own
_FIELDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json_schema",
}
_KINDS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def structure_of(body: GenerationFields) -> Structure | None:
    """Return the constraint on the output. Raises BadRequest if it is malformed or if there are two."""
    given = [*_response_format(body.response_format), *_structured_outputs(body.structured_outputs), *_fields(body)]
    if len(given) > 1:
        names = " and ".join(structure.param for structure in given)
        raise BadRequest(f"Only one constraint on the output is possible, not {names}.", param=given[1].param)
    if not given:
        return None
    (structure,) = given
    if body.guided_whitespace_pattern is not None:
        structure = msgspec.structs.replace(structure, whitespace=body.guided_whitespace_pattern)
    return structure


def from_options(options: StructuredOutputs, param: str) -> Structure:
    """Return the one constraint that `options` has. Raises BadRequest unless there is exactly one."""
    given = {name: value for name in _KINDS if (value := getattr(options, name)) not in (None, False)}
    if len(given) != 1:
        raise BadRequest(
            f"{param} must have exactly one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}.", param=param
        )
    ((name, value),) = given.items()
    if name == "json_object":
        value = None
    path = f"{param}.{name}"
    return Structure(
        kind=_KINDS[name],
        value=_json(value, path) if name in ("json", "structural_tag") else value,
        param=path,
        additional_properties=bool(options.additional_properties),
        compact=bool(options.disable_any_whitespace),
        whitespace=options.whitespace_pattern,
    )


def _structured_outputs(options: StructuredOutputs | None) -> Iterator[Structure]:
    if options is not None:
        yield from_options(options, "structured_outputs")


def _fields(body: GenerationFields) -> Iterator[Structure]:
    for name, kind in _FIELDS.items():
        if (value := getattr(body, name)) is not None:
            yield Structure(kind=kind, value=_json(value, name) if kind == "json_schema" else value, param=name)


def _response_format(given: dict[str, Any] | None) -> Iterator[Structure]:
    param = "response_format"
    match given and given.get("type"):
        case None if given is None:
            return
        case "text":
            return
        case "json_object":
            schema = given.get("schema")  # llama.cpp's
            kind: Kind = "json_object" if schema is None else "json_schema"
            yield Structure(kind=kind, value=schema, param=param if schema is None else f"{param}.schema")
        case "json_schema":
            inner = given.get("json_schema")
            if not isinstance(inner, dict):
                raise BadRequest(f"{param} of type json_schema needs an object json_schema.", param=param)
            if "schema" not in inner:
                raise BadRequest(
                    f"Missing required parameter: {param}.json_schema.schema.",
                    param=f"{param}.json_schema.schema",
                    code="missing_required_parameter",
                )
            yield Structure(kind="json_schema", value=inner["schema"], param=f"{param}.json_schema.schema")
        case "structural_tag":
            yield Structure(kind="structural_tag", value=given, param=param)
        case kind:
            raise BadRequest(
                f"{param}.type must be text, json_object, json_schema or structural_tag, not {str(kind)[:100]!r}.",
                param=f"{param}.type",
            )


def _json(value: Json, param: str) -> Any:
    """Return a value, which may be given as JSON text. Raises BadRequest."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{param} is not valid JSON: {error}.", param=param) from None
