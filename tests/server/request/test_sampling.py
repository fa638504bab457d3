"""Request fields -> SamplingParams: every parameter arrives, defaults apply in order, and settings that the model does
not support are refused by name.
"""

from __future__ import annotations

import json

import pytest

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.server.api.ollama import protocol as ollama_protocol
from quire.server.api.ollama import translate as ollama_translate
from quire.server.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.api.openai.translate import chat_spec, completion_spec
from quire.server.errors import BadRequest, ContextLengthExceeded
from quire.server.http.parse_body import parse
from quire.server.model_info import ModelInfo, known_token_ids
from quire.server.request.request import GenerationSpec
from quire.server.request.sampling import (
    MAX_BAD_WORD_TOKENS,
    check_max_tokens,
    fit,
    read_sampling_defaults,
    to_sampling_params,
)

MODEL = ModelInfo(
    max_model_len=100, vocab_size=512, eos_token_ids=[2, 0], sampling_defaults={}, max_logprobs=20, priorities=False
)


class Words:
    """Two ids per word: one for a leading space, one for the letters."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        return [[300 * text.startswith(" ") + len(text.strip()), 7] for text in texts]


def chat(model: ModelInfo = MODEL, **fields) -> SamplingParams:
    return convert(ChatCompletionRequest, model, {"messages": [{"role": "user", "content": "x"}], **fields})


def text(model: ModelInfo = MODEL, **fields) -> SamplingParams:
    return convert(CompletionRequest, model, {"prompt": "x", **fields})


def convert(cls, model, data) -> SamplingParams:
    request, ignored = parse(json.dumps(data).encode(), cls)
    assert not ignored
    return to_sampling_params(spec_of(request), model, Words())


def spec_of(request: ChatCompletionRequest | CompletionRequest) -> GenerationSpec:
    return (completion_spec if isinstance(request, CompletionRequest) else chat_spec)(request, request_id="x")


PASSED_ON = [
    ("temperature", 0.3, 0.3),
    ("temperature", 0, 0.0),
    ("temperature", 1e-6, 0.0),
    ("temperature", 0.001, 0.001),
    ("top_p", 0.5, 0.5),
    ("top_k", 5, 5),
    ("top_k", -1, 0),
    ("min_p", 0.2, 0.2),
    ("seed", 17, 17),
    ("seed", -2, -2),
    ("presence_penalty", -1.5, -1.5),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 1.2, 1.2),
    ("max_tokens", 5, 5),
    ("min_tokens", 3, 3),
    ("stop_token_ids", [4, 5], [4, 5]),
    ("ignore_eos", True, True),
    ("allowed_token_ids", [1, 511], [1, 511]),
    ("prompt_logprobs", 3, 3),
    ("prompt_logprobs", 0, 0),
]


@pytest.mark.parametrize("make", [chat, text])
@pytest.mark.parametrize("name,value,expected", PASSED_ON)
def test_parameters_arrive(make, name, value, expected):
    assert getattr(make(**{name: value}), name) == expected


def test_logit_bias_and_bad_words():
    params = chat(logit_bias={"5": -100, "511": 1.5}, bad_words=["abc", " de"])
    assert params.logit_bias == {5: -100.0, 511: 1.5}
    # as a text begins, and after a space; " de" is its own second form
    assert params.bad_words_ids == [[3, 7], [303, 7], [302, 7]]
    assert chat().logit_bias is None and chat(logit_bias={}).logit_bias is None and chat().bad_words_ids is None


def test_openai_defaults_and_a_random_seed():
    params = chat()
    assert params == SamplingParams(max_tokens=100, seed=params.seed, eos_token_ids=[2, 0])
    assert text().max_tokens == 16
    seeds = {chat().seed for _ in range(20)} | {chat(seed=-1).seed for _ in range(20)}
    assert len(seeds) == 40 and all(0 <= seed < 2**63 for seed in seeds)


def test_request_then_model_then_openai(tmp_path):
    file = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 30,
        "repetition_penalty": 1.1,
        "max_new_tokens": 40,
        "do_sample": True,
        "eos_token_id": 2,
        "min_p": None,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    defaults = read_sampling_defaults(Config(), str(tmp_path)).declared
    assert defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1, "max_tokens": 40}
    model = ModelInfo(100, 512, [2], defaults, 20, False)
    for make in (chat, text):
        params = make(model, top_p=0.5)
        assert (
            params.temperature,
            params.top_p,
            params.top_k,
            params.min_p,
            params.repetition_penalty,
            params.max_tokens,
        ) == (0.6, 0.5, 30, 0.0, 1.1, 40)
        assert make(model, max_tokens=7).max_tokens == 7


def test_where_the_defaults_come_from(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')

    def read(source: str, folder=tmp_path) -> dict:
        return read_sampling_defaults(Config.from_flat(generation_config=source), str(folder)).declared

    assert read("auto") == {"top_k": 5} and read("vllm") == {} and read(str(tmp_path / "other")) == {"top_k": 7}
    assert read("auto", tmp_path / "other") == {"top_k": 7} and read("auto", tmp_path / "nowhere") == {}
    with pytest.raises(ValueError, match="generation_config"):
        read(str(tmp_path / "nowhere"))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config"):
        read("auto")


def test_overrides_of_the_defaults(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "top_p": 0.5}')

    def read(text: str, **settings):
        return read_sampling_defaults(Config.from_flat(override_generation_config=text, **settings), str(tmp_path))

    found = read('{"top_k": 7, "max_new_tokens": 9}')
    assert found.declared == {"top_k": 7, "top_p": 0.5, "max_tokens": 9}
    assert found.describe() == "top_k 7, max_tokens 9 (--override-generation-config); top_p 0.5 (the model's)"
    assert read('{"top_k": 7}', generation_config="vllm").declared == {"top_k": 7}
    with pytest.raises(ValueError, match="--override-generation-config: top_p must be"):
        read('{"top_p": 2}')
    with pytest.raises(ValueError, match="unknown key top_kk; the keys are temperature, "):
        read('{"top_kk": 2}')


REFUSED = [
    (chat, {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "4"),
    (chat, {"max_tokens": 0}, "max_tokens", "1"),
    (text, {"max_tokens": 0}, "max_tokens", "echo"),
    (chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_completion_tokens"),
    (chat, {"stop_token_ids": [512]}, "stop_token_ids", "512"),
    (chat, {"allowed_token_ids": [600]}, "allowed_token_ids", "512"),
    (chat, {"logit_bias": {"512": 1}}, "logit_bias", "512"),
    (chat, {"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    (chat, {"logit_bias": {"x": 1}}, "logit_bias", "ids"),
    (chat, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "20"),
    (text, {"logprobs": 21}, "logprobs", "20"),
    (text, {"logprobs": -1}, "logprobs", "20"),
    (text, {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
    (text, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
]


@pytest.mark.parametrize("make,fields,param,word", REFUSED)
def test_refused_with_the_limit(make, fields, param, word):
    with pytest.raises(BadRequest) as caught:
        make(**fields)
    assert caught.value.param == param and param in caught.value.message and word in caught.value.message


def test_logprobs():
    assert (
        chat().logprobs is None
        and chat(logprobs=False).logprobs is None
        and chat(logprobs=False, top_logprobs=0).logprobs is None
    )
    assert chat(logprobs=True).logprobs == 0 and chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert text(logprobs=0).logprobs == 0 and text(logprobs=5).logprobs == 5 and text().logprobs is None
    unlimited = ModelInfo(100, 512, [2], {}, -1, False)
    assert (
        chat(unlimited, logprobs=True, top_logprobs=-1).logprobs == -1 and text(unlimited, logprobs=400).logprobs == 400
    )


def test_echo_asks_for_logprobs_of_the_prompt():
    assert text(echo=True).prompt_logprobs is None and text(echo=True, logprobs=3).prompt_logprobs == 3
    assert text(echo=True, logprobs=0, prompt_logprobs=2).prompt_logprobs == 2
    unlimited = ModelInfo(100, 512, [2], {}, -1, False)
    assert text(unlimited, echo=True, logprobs=-1, prompt_logprobs=2).prompt_logprobs == -1
    assert text(echo=True, logprobs=1, max_tokens=0).max_tokens == 0


@pytest.mark.parametrize(
    "cls,name",
    [
        (ChatCompletionRequest, "max_tokens"),
        (ChatCompletionRequest, "max_completion_tokens"),
        (CompletionRequest, "max_tokens"),
    ],
)
def test_a_max_tokens_beyond_the_context_is_told_what_fits_now(cls, name):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if cls is ChatCompletionRequest else {"prompt": "x"}
    request, _ = parse(json.dumps(prompt | {name: 101}).encode(), cls)
    with pytest.raises(BadRequest) as caught:
        check_max_tokens(spec_of(request), 60, MODEL)
    assert caught.value.param == name and all(word in caught.value.message for word in (name, "101", "100", "60", "40"))
    check_max_tokens(spec_of(parse(json.dumps(prompt | {name: 100}).encode(), cls)[0]), 60, MODEL)


def test_ids_count_once_and_bias_is_clamped():
    params = chat(stop_token_ids=[4, 4, 3, 4], allowed_token_ids=[7, 7], logit_bias={"5": 1000, "6": -101, "7": 2})
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == (
        [4, 3],
        [7],
        {5: 100.0, 6: -100.0, 7: 2.0},
    )


def test_bad_words_are_bounded_in_all():
    class Long(Words):
        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            return [[i % 512] * (MAX_BAD_WORD_TOKENS // 4) for i, _ in enumerate(texts)]

    def convert(words: list[str]) -> SamplingParams:
        return to_sampling_params(
            spec_of(parse(json.dumps({"prompt": "x", "bad_words": words}).encode(), CompletionRequest)[0]),
            MODEL,
            Long(),
        )

    assert len(convert(["a", "b"]).bad_words_ids) == 4
    with pytest.raises(BadRequest) as caught:
        convert(["a", "b", "c"])
    assert caught.value.param == "bad_words" and str(MAX_BAD_WORD_TOKENS) in caught.value.message


def test_a_bad_word_that_the_model_does_not_have_is_refused():
    class Beyond(Words):
        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            return [[512]] * len(texts)

    with pytest.raises(BadRequest) as caught:
        request = parse(b'{"prompt": "x", "bad_words": ["<extra>"]}', CompletionRequest)[0]
        to_sampling_params(spec_of(request), MODEL, Beyond())
    assert caught.value.param == "bad_words" and "512" in caught.value.message


def test_fit_clips_to_the_context():
    assert fit(chat(), 60, MODEL, "messages").max_tokens == 40
    assert fit(chat(max_tokens=10), 60, MODEL, "messages").max_tokens == 10
    clipped = fit(chat(max_tokens=80, min_tokens=70), 60, MODEL, "messages")
    assert (clipped.max_tokens, clipped.min_tokens) == (40, 40)
    # no token is sampled: the prompt may fill the context
    assert fit(text(echo=True, max_tokens=0), 100, MODEL, "prompt").max_tokens == 0
    assert fit(chat(), 99, MODEL, "messages").max_tokens == 1


@pytest.mark.parametrize("num_tokens", [100, 101, 5000])
def test_too_long_a_prompt_names_both_numbers(num_tokens):
    with pytest.raises(ContextLengthExceeded) as caught:
        fit(chat(), num_tokens, MODEL, "messages")
    error = caught.value
    assert (
        (error.status, error.param, error.code) == (400, "messages", "context_length_exceeded")
        and "100" in error.message
        and str(num_tokens) in error.message
    )


def test_bad_words_beyond_the_models_vocabulary_are_a_bad_request():
    """Many fine-tunes add a token to the tokenizer, such as [PAD], for which the model has no row."""
    model = ModelInfo(
        max_model_len=100, vocab_size=300, eos_token_ids=[], sampling_defaults={}, max_logprobs=20, priorities=False
    )
    with pytest.raises(
        BadRequest, match="bad_words: token id 303 is not in the vocabulary, which has 300 entries"
    ) as caught:
        text(model, bad_words=["abc"])
    assert caught.value.param == "bad_words"


def test_end_of_sequence_ids_beyond_the_vocabulary_are_ignored(caplog):
    assert known_token_ids([2, 32000, 7], 32000) == [2, 7]
    assert len(caplog.records) == 1 and "ignoring the end-of-sequence ids [32000]" in caplog.text
    caplog.clear()
    assert known_token_ids([2, 7], 32000) == [2, 7] and not caplog.records


GGUF = '{"quantization_config": {"quant_method": "gguf"}}'


def test_defaults_of_the_format_and_of_the_dialect(tmp_path):
    """What neither the request nor the model's files set is llama.cpp's for GGUF files, and Ollama's on its routes."""
    (tmp_path / "config.json").write_text(GGUF)
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "suppress_tokens": [7, 9999]}')
    found = read_sampling_defaults(Config(), str(tmp_path))
    assert found.describe().endswith("temperature 0.8, top_k 40, min_p 0.05 (llama.cpp's)")
    model = ModelInfo(100, 512, [2], found.declared, 20, False, other_defaults=found.others)
    params = chat(model)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.5, 0.05)
    assert params.bad_words_ids == [[7]] and chat(model, temperature=0.3).temperature == 0.3
    body, _ = parse(b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}', ollama_protocol.ChatRequest)
    spec = ollama_translate.chat_spec(body, request_id="r")
    params = to_sampling_params(spec, model, Words())
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.5, 0.0)
    params = to_sampling_params(spec, MODEL, Words())
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.8, 40, 0.9, 1.0)
    (tmp_path / "config.json").write_text("{}")
    assert read_sampling_defaults(Config(), str(tmp_path)).others == {}
    (tmp_path / "config.json").write_text(GGUF)
    assert read_sampling_defaults(Config.from_flat(generation_config="vllm"), str(tmp_path)).others == {}


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", 2), ("min_p", []), ("suppress_tokens", ["a"])]
)
def test_wrong_values_of_a_file_are_refused_by_name(key, value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {key} must be "):
        read_sampling_defaults(Config(), str(tmp_path))
