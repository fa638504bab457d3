"""llama.cpp's and Ollama's names in OpenAI's routes give the answers of OpenAI's names."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.messages import SAMPLERS
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.openai.translate import chat_spec, completion_spec
from quire.server.errors import BadRequest
from quire.server.http.parse_body import parse
from quire.server.model_info import ModelInfo
from quire.server.request.sampling import to_sampling_params

MODEL = ModelInfo(100, 512, [2], {}, 20, False)


def spec_of(kind: str, **fields):
    cls = {"chat": ChatCompletionRequest, "completions": CompletionRequest}[kind]
    required = {"prompt": "x"} if kind == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    body, ignored = parse(msgspec.json.encode(required | fields), cls, strict=True)
    assert not ignored
    return (completion_spec if kind == "completions" else chat_spec)(body, request_id="r")


def params_of(kind: str, **fields):
    params = to_sampling_params(spec_of(kind, **{"seed": 1} | fields), MODEL, None)
    return msgspec.structs.asdict(params)


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 1.3}, {"repetition_penalty": 1.3, "repeat_last_n": 64}),
        ({"repeat_penalty": 1.3, "repeat_last_n": -1}, {"repetition_penalty": 1.3, "repeat_last_n": -1}),
        ({"n_predict": 7}, {"max_tokens": 7}),
        ({"options": {"num_predict": 7, "top_k": 3}}, {"max_tokens": 7, "top_k": 3}),
        ({"options": {"temperature": 0.5}, "temperature": 0.7}, {"temperature": 0.7}),
        ({"options": {"repeat_penalty": 1.2}}, {"repetition_penalty": 1.2, "repeat_last_n": 64}),
        ({"options": {"mirostat": 2}}, {"mirostat": 2}),
        ({"options": {"stop": ["x"], "seed": 5}, "seed": None}, {"stop": ["x"], "seed": 5}),
    ],
)  # fmt: skip
def test_equal_parameters(kind, theirs, ours):
    assert params_of(kind, **theirs) == params_of(kind, **ours)


def test_probabilities():
    assert params_of("chat", n_probs=3) == params_of("chat", logprobs=True, top_logprobs=3)
    assert params_of("completions", n_probs=3) == params_of("completions", logprobs=3)
    assert params_of("chat", n_probs=0)["logprobs"] is None


def test_output_without_a_limit():
    for fields in ({"n_predict": -1}, {"options": {"num_predict": -1}}, {"options": {"num_predict": 0}}):
        assert params_of("completions", **fields)["max_tokens"] == MODEL.max_model_len
    assert params_of("completions", n_predict=-1, max_tokens=3)["max_tokens"] == 3
    assert params_of("completions")["max_tokens"] == 16


def test_errors_name_the_field_that_was_given():
    for kind in ("chat", "completions"):
        assert spec_of(kind, n_predict=9).max_tokens_param == "n_predict"
        assert spec_of(kind, options={"num_predict": 9}).max_tokens_param == "options.num_predict"
        assert spec_of(kind, max_tokens=9).max_tokens_param == "max_tokens"
        assert spec_of(kind, n_probs=2).logprobs_param == "n_probs"
    assert spec_of("chat", think=True).prompts.reasoning.enabled_param == "think"


def test_cache_prompt_false_shares_no_blocks():
    salts = {spec_of("chat", cache_prompt=False).cache_salt for _ in range(3)}
    assert len(salts) == 3 and None not in salts
    assert spec_of("chat", cache_prompt=True).cache_salt is None
    assert spec_of("chat", cache_prompt=False, cache_salt="mine").cache_salt == "mine"


def test_format_and_think():
    schema = {"type": "object"}
    assert spec_of("chat", format="json").structure.kind == "json_object"
    structure = spec_of("completions", format=schema).structure
    assert (structure.kind, structure.value) == ("json_schema", schema)
    assert spec_of("chat", format="").structure is None
    assert spec_of("chat", think=False).prompts.reasoning.enabled is False
    assert spec_of("chat", think="low").prompts.reasoning.effort == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.3, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"n_predict": 3, "max_completion_tokens": 4}, "n_predict"),
        ({"n_predict": 0}, "n_predict"),
        ({"format": "json", "response_format": {"type": "json_object"}}, "format"),
        ({"think": True, "enable_thinking": False}, "think"),
        ({"options": {"temperature": 9}}, "options.temperature"),
        ({"samplers": ["infill"]}, "samplers"),
    ],
)
def test_two_names_that_differ_are_refused(fields, param):
    with pytest.raises(BadRequest) as error:
        params_of("chat", **fields)
    assert error.value.param == param


def test_samplers_reach_the_engine():
    fields = {"xtc_probability": 0.5, "samplers": "kxt", "top_k": 4}
    chain = params_of("chat", **fields)["chain"]
    assert chain.order == ("top_k", "xtc", "temperature") and chain.xtc_probability == 0.5
    assert params_of("chat", typical_p=0.5)["chain"].order == SAMPLERS
    assert params_of("chat", mirostat=1)["speculation"] is False
