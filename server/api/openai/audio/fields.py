"""The fields of the forms of /v1/audio/transcriptions and /v1/audio/translations, and their checks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from starlette.datastructures import FormData, UploadFile

from quire.server.errors import BadRequest
from quire.server.media.audio.languages import asked_code
from quire.server.request.hints import Ignored

if TYPE_CHECKING:
    from quire.server.media.audio.service import Recognizer
    from quire.server.values import Json

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
TIMED = ("srt", "vtt", "verbose_json")
MAX_PROMPT = 1 << 14  # characters
# fields of OpenAI's models without a meaning here
_UNSUPPORTED = ("known_speaker_names", "known_speaker_references")
_VAD = {"threshold": (0.0, 1.0), "silence_duration_ms": (20, 10_000), "prefix_padding_ms": (0, 10_000)}
_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off", "")
_ONE = {"type": "string"}
FIELDS: dict[str, Json] = {
    "file": {"type": "string", "format": "binary"},
    "model": _ONE,
    "language": _ONE | {"description": "ISO 639 code; detected by default"},
    "prompt": _ONE,
    "response_format": _ONE | {"enum": list(FORMATS)},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "timestamp_granularities[]": {"type": "array", "items": _ONE | {"enum": ["segment", "word"]}},
    "include[]": {"type": "array", "items": _ONE | {"enum": ["logprobs"]}},
    "chunking_strategy": _ONE,
    "stream": {"type": "boolean"},
    "condition_on_previous_text": {"type": "boolean"},
}
_OTHERS = {name.removesuffix("[]"): schema for name, schema in FIELDS.items() if name != "file"}
_IN_JSON = {"file_url": {"type": "string", "description": "data:audio/wav;base64,..."}} | _OTHERS
FORM = {
    "content": {
        "multipart/form-data": {"schema": {"type": "object", "required": ["file"], "properties": FIELDS}},
        "application/json": {"schema": {"type": "object", "required": ["file_url"], "properties": _IN_JSON}},
    },
    "required": True,
}


@dataclass(slots=True)
class Fields:
    """The fields of a form, with validated values."""

    upload: UploadFile
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float = 0.0
    words: bool = False
    segments: bool = True  # in the answer of verbose_json
    logprobs: bool = False
    stream: bool = False
    follows: bool = False
    vad: dict[str, float] = field(default_factory=dict)
    ignored: Ignored = field(default_factory=Ignored)


def read_fields(form: FormData, strict: bool) -> Fields:
    """Return the fields. Raises BadRequest naming the field, with `strict` also for unknown ones."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise BadRequest("Missing required parameter: file.", param="file", code="missing_required_parameter")
    given = {name: value for name, value in form.multi_items() if isinstance(value, str)}
    lists = {
        name: [value for key, value in form.multi_items() if key in (name, f"{name}[]")]
        for name in ("timestamp_granularities", "include")
    }
    fields = Fields(upload, given.get("model"))
    fields.language = asked_code(given.get("language"))
    fields.prompt = _prompt(given.get("prompt", ""))
    fields.response_format = _choice("response_format", given.get("response_format") or "json", FORMATS)
    fields.temperature = _number("temperature", given.get("temperature") or "0", 0.0, 1.0)
    fields.stream = _flag("stream", given)
    fields.follows = _flag("condition_on_previous_text", given)
    fields.vad = _read_vad(given)
    _check_lists(fields, lists)
    if fields.stream and fields.response_format not in ("json", "text"):
        raise BadRequest("stream needs response_format json or text.", param="stream")
    for name in given:
        plain = name.partition("[")[0]
        if plain in _UNSUPPORTED:
            raise BadRequest(f"{plain} is not supported: the model does not tell speakers apart.", param=plain)
        if plain not in FIELDS and plain not in lists:
            if strict:
                raise BadRequest(f"Unknown parameter: '{plain[:100]}'.", param=plain[:100], code="unknown_parameter")
            fields.ignored.record_unknown(plain)
    return fields


def check_model(fields: Fields, model: Recognizer, task: str) -> None:
    """Raise BadRequest for a language, a translation or word timestamps that the model does not support."""
    if fields.words and not model.alignment_heads:
        raise BadRequest(
            "timestamp_granularities: the model has no timestamps of words: its files have no alignment_heads.",
            param="timestamp_granularities",
        )
    if task == "translate" and "translate" not in model.tasks:
        raise BadRequest("The model translates nothing: it transcribes only.", param="model")
    if fields.follows and not model.follows:
        raise BadRequest(
            "condition_on_previous_text: each piece is transcribed by itself with this model.",
            param="condition_on_previous_text",
        )
    if fields.language is not None and fields.language not in model.codes:
        raise BadRequest(
            f"language '{fields.language[:50]}' is not one of this model's: {', '.join(model.codes)}.", param="language"
        )


def _check_lists(fields: Fields, lists: dict[str, list[object]]) -> None:
    wanted = [_choice("timestamp_granularities", one, ("segment", "word")) for one in lists["timestamp_granularities"]]
    fields.words, fields.segments = "word" in wanted, "segment" in wanted or not wanted
    if fields.words and fields.response_format != "verbose_json":  # the AI SDK asks for segments with json, too
        raise BadRequest(
            "timestamp_granularities word needs response_format verbose_json.", param="timestamp_granularities"
        )
    for value in lists["include"]:
        _choice("include", value, ("logprobs",))
        fields.logprobs = True
    if fields.logprobs and fields.response_format != "json":
        raise BadRequest("include logprobs needs response_format json.", param="include")


def _prompt(text: str) -> str:
    if len(text) > MAX_PROMPT:
        raise BadRequest(f"prompt has {len(text)} characters, and {MAX_PROMPT} are the most.", param="prompt")
    return text


def _read_vad(given: dict[str, str]) -> dict[str, float]:
    """Return the parameters of server_vad, which come as JSON or as fields of their own."""
    text, param = given.get("chunking_strategy", "auto"), "chunking_strategy"
    values: Json = {
        name.removeprefix(f"{param}[").removesuffix("]"): value
        for name, value in given.items()
        if name.startswith(f"{param}[")
    }
    if text != "auto":
        try:
            values = json.loads(text)
        except ValueError:
            values = None
    if not isinstance(values, dict) or values.pop("type", "server_vad") != "server_vad":
        raise BadRequest(f"{param} must be auto, or an object with the type server_vad.", param=param)
    if unknown := sorted(set(values) - set(_VAD)):
        raise BadRequest(f"{param} has no '{unknown[0][:100]}'; it has: type, {', '.join(_VAD)}.", param=param)
    return {name: _number(f"{param}.{name}", value, *_VAD[name]) for name, value in values.items()}


def _choice(param: str, value: object, known: tuple[str, ...]) -> str:
    if value not in known:
        raise BadRequest(f"{param} must be one of {', '.join(known)}, not '{str(value)[:100]}'.", param=param)
    return value


def _number(param: str, value: object, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise BadRequest(f"{param} must be a number between {low:g} and {high:g}.", param=param)
    return number


def _flag(name: str, given: dict[str, str]) -> bool:
    value = given.get(name, "false").lower()
    if value not in _TRUE + _FALSE:
        raise BadRequest(f"{name} must be true or false.", param=name)
    return value in _TRUE
