"""POST /generate as TGI's and SGLang's clients send it, /infill and `suffix`, and the smaller routes."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken

from quire.server.text.infill import infill_of
from quire.server.text.tokenizer import Tokenizer
from tests.helpers.server.running import MODEL
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import CHATML

FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with scripted_server(write_folder(tmp_path_factory.mktemp("plain"), CHATML)) as (server, script):
        yield server, script


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A server whose tokenizer has the tokens of Qwen-Coder."""
    folder = write_folder(tmp_path_factory.mktemp("coder"), CHATML)
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.add_special_tokens([AddedToken(text, special=True) for text in FIM])
    backend.save(f"{folder}/tokenizer.json")
    with open(f"{folder}/config.json", "w") as file:
        json.dump({"vocab_size": backend.get_vocab_size()}, file)
    with scripted_server(folder) as (server, script):
        yield server, script


def prompt(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def events(text: str) -> list[dict]:
    parts = [part.removeprefix("data: ") for part in text.strip().split("\n\n") if part.startswith("data: ")]
    return [json.loads(part) for part in parts if part != "[DONE]"]


# ---- TGI


def test_tgis_generate(pair):
    server, script = pair
    script.says("world!")
    body = {"inputs": "Hello ", "parameters": {"max_new_tokens": 9, "details": True, "return_full_text": True}}
    answer = server.http.post("/generate", json=body).json()
    assert answer["generated_text"] == "Hello world!"
    assert answer["details"]["finish_reason"] == "eos_token"
    assert answer["details"]["generated_tokens"] == len(answer["details"]["tokens"])
    sampling = script.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature) == (9, 0.0) and prompt(server, script) == "Hello "
    sampled = {"do_sample": True, "temperature": 0.5, "top_k": 4, "seed": 3, "stop": ["!"]}
    answer = server.http.post("/generate", json={"inputs": "x", "parameters": sampled}).json()
    assert answer == {"generated_text": "world"}
    sampling = script.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 4, 3, 100)


def test_tgis_stream(pair):
    server, script = pair
    script.says("a b c", seed=1)
    answer = server.http.post("/generate_stream", json={"inputs": "x"})
    parts = events(answer.text)
    assert "".join(part["token"]["text"] for part in parts[:-1]) in "a b c"
    assert parts[-1]["generated_text"] == "a b c" and parts[-1]["details"]["finish_reason"] == "eos_token"
    assert all(part["generated_text"] is None for part in parts[:-1])


# ---- SGLang


def test_sglangs_generate(pair):
    server, script = pair
    script.says("one", "two")
    body = {"text": "Hi", "sampling_params": {"max_new_tokens": 5, "temperature": 0.3, "n": 2}, "rid": "mine"}
    answer = server.http.post("/generate", json=body).json()
    assert [one["text"] for one in answer] == ["one", "two"]
    meta = answer[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": None} and meta["completion_tokens"] > 1
    assert meta["prompt_tokens"] == len(script.requests[-1].prompt_token_ids) and "mine" in meta["id"]
    ids = server.state.tokenizer.encode("Hi", False)
    assert server.http.post("/generate", json={"input_ids": ids}).json()["text"] == "one"
    many = server.http.post("/generate", json={"text": ["a", "b"]}).json()
    assert [one["text"] for one in many] == ["one", "one"]
    assert server.http.post("/generate", json={"input_ids": [ids, ids]}).json()[1]["text"] == "one"
    schema = json.dumps({"type": "object"})
    server.http.post("/generate", json={"text": "x", "sampling_params": {"json_schema": schema}})
    assert script.requests[-1].sampling.grammar is not None


def test_sglangs_stream_has_the_whole_text_each_time(pair):
    server, script = pair
    script.says("a b c", finish_reason="length", seed=2)
    parts = events(server.http.post("/generate", json={"text": "x", "stream": True}).text)
    assert all("a b c".startswith(part["text"]) for part in parts)
    assert parts[-1]["text"] == "a b c" and parts[-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": "x", "text": "y"}, "inputs"),
        ({"inputs": "x", "parameters": {"watermark": True}}, "parameters.watermark"),
        ({"inputs": "x", "parameters": {"max_new_tokens": -1}}, "parameters.max_new_tokens"),
        ({"inputs": "x", "parameters": {"truncate": 9999}}, "truncate_prompt_tokens"),
        ({"text": "x", "return_logprob": True}, "return_logprob"),
        ({"text": "x", "sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "x", "sampling_params": {"json_schema": "{}", "regex": "a"}}, "sampling_params"),
        ({"input_ids": [1, [2]]}, "input_ids"),
    ],
)
def test_wrong_bodies(pair, body, param):
    server, _ = pair
    answer = server.http.post("/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# ---- the middle of a text


def test_a_suffix_asks_for_the_middle(coder):
    server, script = coder
    script.says("return a")
    body = {"model": MODEL, "prompt": "def f(a):\n    ", "suffix": "\n\nf(1)", "max_tokens": 9}
    answer = server.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "return a"
    assert prompt(server, script) == "<|fim_prefix|>def f(a):\n    <|fim_suffix|>\n\nf(1)<|fim_middle|>"
    ends = {server.state.tokenizer.token_to_id(text) for text in ("<|fim_pad|>", "<|file_sep|>")}
    assert ends <= set(script.requests[-1].sampling.stop_token_ids)
    for change, param in (({"echo": True}, "suffix"), ({"prompt": [1, 2]}, "prompt")):
        refused = server.http.post("/v1/completions", json=body | change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_llamacpps_infill(coder):
    server, script = coder
    script.says("pass", seed=3)
    body = {
        "input_prefix": "if x:\n  ",
        "input_suffix": "",
        "prompt": "y",
        "n_predict": 7,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
    }
    answer = server.http.post("/infill", json=body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("pass", True, "eos")
    assert answer["tokens_evaluated"] == len(script.requests[-1].prompt_token_ids)
    expected = "<|file_sep|>a.py\nx = 1\n<|file_sep|><|fim_prefix|>if x:\n  y<|fim_suffix|><|fim_middle|>"
    assert prompt(server, script) == expected
    parts = events(server.http.post("/infill", json=body | {"stream": True}).text)
    assert "".join(part["content"] for part in parts) == "pass"
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_a_model_without_the_tokens_says_so(pair):
    server, _ = pair
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400 and "filling in the middle" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == param
    assert server.http.post("/v1/completions", json={"prompt": "a", "suffix": "", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>A<fim_suffix>B<fim_middle>"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<PRE>A▁<SUF>B▁<MID>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"),
        (["[SUFFIX]", "[PREFIX]"], "[SUFFIX]B[PREFIX]A"),
    ],
)
def test_formats_are_known_by_their_tokens(tmp_path, marks, expected):
    folder = write_folder(tmp_path, CHATML)
    assert infill_of(Tokenizer.load(folder)) is None
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.add_special_tokens(marks)
    backend.save(f"{folder}/tokenizer.json")
    tokenizer = Tokenizer.load(folder)
    ids = infill_of(tokenizer).prompt(tokenizer.encode("A", False), tokenizer.encode("B", False))
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


# ---- smaller ones


def test_prompts_without_answers(pair):
    server, _ = pair
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    rendered = server.http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["prompt"].endswith("<|im_start|>assistant\n") and "user\nHi" in rendered["prompt"]
    assert rendered["count"] == len(rendered["prompt_token_ids"])
    assert rendered["prompt_token_ids"] == server.state.tokenizer.encode(rendered["prompt"], False)
    assert server.http.post("/apply-template", json=body).json() == {"prompt": rendered["prompt"]}
    assert server.http.post("/apply-template", json={"messages": []}).status_code == 400


def test_sagemakers_contract(pair):
    server, script = pair
    assert server.http.get("/ping").status_code == 200
    script.says("ok")
    for body, key in (
        ({"messages": [{"role": "user", "content": "Hi"}]}, "choices"),
        ({"prompt": "Hi"}, "choices"),
        ({"inputs": "Hi"}, "generated_text"),
    ):
        answer = server.http.post("/invocations", json=body)
        assert answer.status_code == 200 and key in answer.json(), answer.text
    assert server.http.post("/invocations", json={"input": "Hi"}).status_code == 400  # the model makes no embeddings
    assert server.http.post("/invocations", json={"x": 1}).status_code == 400
    assert (
        server.http.post("/invocations", content=b"[", headers={"content-type": "application/json"}).status_code == 400
    )


@pytest.mark.slow
def test_tokenizer_info_and_what_is_not_here(pair):
    server, _ = pair
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "im_start" in info["chat_template"]
    for path in ("/v1/audio/speech", "/v1/images/generations", "/v1/moderations"):
        answer = server.http.post(path, json={})
        assert answer.status_code == 404 and "/v1/chat/completions" in answer.json()["error"]["message"]
