"""Every server's words for sequences that must not be repeated arrive as one parameter, or are refused by name."""

from __future__ import annotations

import json

import pytest

from quire import SamplingParams
from quire.engine.messages import MAX_NGRAM_COMPARISONS, NoRepeatNgram
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.textgen.protocol import TextRequest
from quire.server.api.textgen.sglang import spec as sglang_spec
from quire.server.errors import BadRequest
from quire.server.http.parse_body import parse
from quire.server.request.sampling import to_sampling_params
from tests.server.request.test_sampling import MODEL, Words, chat, text

XARGS = {"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [501, 502]}


def serialized(name: str) -> str:
    """What SGLang's CustomLogitProcessor.to_str returns: the pickled class, in hexadecimal digits."""
    return json.dumps({"callable": (b"\x80\x04\x8c\x26sglang.srt.sampling." + name.encode() + b"\x94.").hex()})


SGLANG = serialized("DeepseekOCRNoRepeatNGramLogitProcessor")


def sglang(**fields) -> NoRepeatNgram | None:
    request, ignored = parse(json.dumps({"text": "x", **fields}).encode(), TextRequest)
    assert not ignored
    return to_sampling_params(sglang_spec(request, request_id="x"), MODEL, Words()).no_repeat_ngram


def offline(**fields) -> NoRepeatNgram | None:
    return SamplingParams(**fields).to_options().no_repeat_ngram


@pytest.mark.parametrize("convert", [chat, text])
@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, None),
        ({"no_repeat_ngram_size": 0}, None),
        ({"no_repeat_ngram_size": 3}, NoRepeatNgram(3)),
        ({"no_repeat_ngram_size": 35, "no_repeat_ngram_window_size": 1024}, NoRepeatNgram(35, 1024)),
        ({"no_repeat_ngram_window_size": 10}, None),
        ({"vllm_xargs": XARGS}, NoRepeatNgram(30, 90, (501, 502), False)),
        ({"vllm_xargs": {"ngram_size": 35}}, NoRepeatNgram(35, 100, (), False)),
        ({"vllm_xargs": {}}, None),
        ({"vllm_xargs": {"window_size": 10}}, None),
        (
            {"custom_logit_processor": SGLANG, "custom_params": XARGS | {"whitelist_token_ids": [5, 5]}},
            NoRepeatNgram(30, 90, (5,), True),
        ),
        ({"custom_params": {}}, None),
    ],
)
def test_parameter(convert, fields, expected):
    assert convert(**fields).no_repeat_ngram == expected


def test_native_sglang():
    assert sglang(sampling_params={"temperature": 0}) is None
    found = sglang(custom_logit_processor=SGLANG, sampling_params={"custom_params": XARGS})
    assert found == NoRepeatNgram(30, 90, (501, 502), True)


def test_offline():
    assert offline() is None
    found = offline(extra_args={"ngram_size": 30, "window_size": 90, "whitelist_token_ids": {502, 501}})
    assert (found.size, found.window, set(found.exempt), found.reads_prompt) == (30, 90, {501, 502}, False)
    options = SamplingParams(no_repeat_ngram_size=3, no_repeat_ngram_window_size=9).to_options()
    assert (options.no_repeat_ngram_size, options.no_repeat_ngram_window_size) == (3, 9)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"extra_args": {"ngram_size": 0}}, "extra_args.ngram_size"),
        ({"extra_args": {"ngram": 3}}, "extra_args.ngram is not supported; supported: ngram_size, window_size"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ],
)
def test_offline_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("cls, base", [(ChatCompletionRequest, {"messages": []}), (CompletionRequest, {"prompt": "x"})])
def test_unknown_arguments_are_reported(cls, base):
    _, ignored = parse(json.dumps({**base, "messages": [{"role": "user"}], "vllm_xargs": {"ngrams": 3}}).encode(), cls)
    assert any("ngrams" in name for name in ignored.unknown)


@pytest.mark.parametrize(
    "fields, param, message",
    [
        ({"no_repeat_ngram_size": 3, "vllm_xargs": XARGS}, "no_repeat_ngram_size", "give one"),
        ({"no_repeat_ngram_size": MAX_NGRAM_COMPARISONS}, "no_repeat_ngram_size", "must not exceed 2097152"),
        ({"vllm_xargs": {"ngram_size": 1 << 40}}, "ngram_size", "must not exceed"),
        ({"vllm_xargs": {"ngram_size": 3, "whitelist_token_ids": [512]}}, "whitelist_token_ids", "512 is not in the"),
        ({"custom_params": XARGS}, "custom_params", "custom_logit_processor"),
        ({"custom_logit_processor": SGLANG}, "custom_params", "must have ngram_size and window_size"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor", "not what"),
        (
            {"custom_logit_processor": serialized("Other")},
            "custom_logit_processor",
            "is not supported, except Deepseek",
        ),
    ],
)
def test_out_of_range(fields, param, message):
    with pytest.raises(BadRequest, match=message) as error:
        chat(**fields)
    assert error.value.param == param
