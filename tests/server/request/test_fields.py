"""Every sampling parameter reaches the engine from every dialect that has it, under the dialect's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from quire.engine.messages import SamplingParams
from quire.server import routes
from quire.server.api.anthropic import protocol as anthropic
from quire.server.api.anthropic.translate import spec as anthropic_spec
from quire.server.api.llamacpp import infill
from quire.server.api.ollama import protocol as ollama
from quire.server.api.ollama import translate as ollama_translate
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.openai.responses.protocol import ResponsesRequest
from quire.server.api.openai.responses.translate import spec as responses_spec
from quire.server.api.openai.translate import chat_spec, completion_spec
from quire.server.api.textgen import protocol as textgen
from quire.server.api.textgen import sglang, tgi
from quire.server.http.parse_body import parse
from quire.server.model_info import ModelInfo
from quire.server.offline import params as offline
from quire.server.request.fields import NEUTRAL, SamplingFields
from quire.server.request.request import GenerationOptions, GenerationSpec
from quire.server.request.sampling import to_sampling_params

MESSAGES = [{"role": "user", "content": "x"}]
MODEL = ModelInfo(100, 512, [2], {}, 20, False)
FIELDS = {one.name: one.type for one in msgspec.structs.fields(SamplingFields)}


class Dialect(NamedTuple):
    body: type[msgspec.Struct]
    required: dict
    spec: Callable[..., GenerationSpec]
    within: str = ""  # the object that has the parameters
    fields: type[msgspec.Struct] | None = None  # its type
    has_all: bool = True


DIALECTS = {
    "chat": Dialect(ChatCompletionRequest, {"messages": MESSAGES}, chat_spec),
    "completions": Dialect(CompletionRequest, {"prompt": "x"}, completion_spec),
    "responses": Dialect(ResponsesRequest, {"input": "x"}, lambda body, **fields: responses_spec(body, [], **fields)),
    "ollama chat": Dialect(
        ollama.ChatRequest, {"model": "m", "messages": MESSAGES}, ollama_translate.chat_spec, "options", ollama.Options
    ),
    "ollama generate": Dialect(
        ollama.GenerateRequest,
        {"model": "m", "prompt": "x"},
        ollama_translate.generate_spec,
        "options",
        ollama.Options,
    ),
    "infill": Dialect(infill.InfillRequest, {"input_prefix": "x", "input_suffix": "y"}, infill.spec),
    "sglang": Dialect(
        textgen.TextRequest, {"text": "x"}, sglang.spec, "sampling_params", textgen.SamplingParameters
    ),
    "tgi": Dialect(textgen.TextRequest, {"inputs": "x"}, tgi.spec, "parameters", textgen.Parameters, has_all=False),
    "anthropic": Dialect(
        anthropic.MessagesRequest,
        {"model": "m", "max_tokens": 1, "messages": MESSAGES},
        lambda body, **fields: anthropic_spec(body, True, **fields),
        has_all=False,
    ),
}  # fmt: skip


class NoWords:
    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        raise AssertionError("no bad words were given")


def sample(name: str) -> object:
    """A value within the range of a parameter, other than the neutral one."""
    for value in (0.5, 3, 1, True, "x", ["x"], [3]):
        try:
            msgspec.convert(value, FIELDS[name])
        except msgspec.ValidationError:
            continue
        if value != NEUTRAL.get(name):
            return value
    raise AssertionError(f"add a value of {name}'s type")


def reaches(options: GenerationOptions, spec: GenerationSpec, name: str) -> object:
    """The value of a parameter that the engine gets, or the options of one that the engine knows by another name."""
    if name in SamplingParams.__struct_fields__:
        return getattr(to_sampling_params(spec, MODEL, NoWords()), name)
    return getattr(options, name)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_reaches_the_engine(name, dialect):
    body, required, spec_of, within, fields, has_all = DIALECTS[dialect]
    fields = fields or body
    if name not in fields.__struct_fields__:
        assert not has_all
        return
    theirs = fields.__struct_encode_fields__[fields.__struct_fields__.index(name)]
    given = {theirs: sample(name)} | ({"do_sample": True} if dialect == "tgi" else {})
    request, ignored = parse(msgspec.json.encode(required | ({within: given} if within else given)), body, strict=True)
    assert not ignored
    spec = spec_of(request, request_id="x")
    assert reaches(spec.options, spec, name) == sample(name)


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_reaches_the_engine_offline(name):
    options = offline.SamplingParams(**{name: sample(name)}).to_options()
    assert reaches(options, GenerationSpec(request_id="x", prompts=["x"], options=options), name) == sample(name)


def test_offline_parameters_begin_with_the_neutral_values():
    params = offline.SamplingParams()
    assert {name: getattr(params, name) for name in NEUTRAL} == NEUTRAL


def structs(cls: object, found: set[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """The Structs of which a type consists."""
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        if cls in found:
            return found
        found.add(cls)
        for one in msgspec.structs.fields(cls):
            structs(one.type, found)
    for inner in getattr(cls, "__args__", ()):
        structs(inner, found)
    return found


def test_no_parameter_is_declared_and_classed_as_having_no_effect():
    found: set[type[msgspec.Struct]] = set()
    for route in routes.ROUTES:
        structs(route.body, found)
    assert ChatCompletionRequest in found and ollama.Options in found
    for cls in found:
        classed = {*getattr(cls, "unsupported", ()), *getattr(cls, "hints", ()), *getattr(cls, "harmless", ())}
        names = zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True)
        assert not classed & {theirs for name, theirs in names if name in FIELDS}, cls
