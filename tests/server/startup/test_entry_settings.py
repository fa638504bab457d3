"""A model served by a name of `quire create`, or from Ollama's store: the name's part in requests of each dialect."""

from __future__ import annotations

import json
import logging

import anthropic
import ollama
import pytest

from quire import LLM
from quire.checkpoints.library import aliases
from quire.checkpoints.library.entries import Entry
from quire.cli.main import main
from quire.configs.config import Config
from quire.server.request.preset import check_parameters, read_preset
from quire.server.startup.entry_settings import with_entry
from tests.helpers.library_stores import ollama_model
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf
from tests.helpers.models.lora import make_adapter
from tests.helpers.server.scripted import scripted_server, write_folder
from tests.helpers.server.templates import CHATML

FIRST = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy"})
PARAMETERS = {
    "temperature": 0.25, "top_k": 5, "stop": ["END"], "repeat_penalty": 1.2, "repeat_last_n": 33, "num_predict": 9,
    "seed": 4, "presence_penalty": 0.5, "num_ctx": 1024, "num_gpu": 99,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = write_folder(tmp_path_factory.mktemp("model"), CHATML)
        aliases.add("pirate", Entry(folder, "Be a pirate.", "", PARAMETERS, (), FIRST, ("MIT",)))
        with scripted_server("pirate", served_model_name=[], max_model_len="auto") as (server, script):
            yield server, script


def asked(server, script) -> str:
    return server.state.tokenizer.decode(script.requests[-1].prompt_token_ids, skip_special_tokens=False)


def begins(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


OWN = [("system", "Be a pirate."), ("user", "Hi"), ("assistant", "Ahoy"), ("user", "Who?")]
REPLACED = [("system", "Be brief."), *OWN[1:]]
MESSAGES = [{"role": "user", "content": "Who?"}]


@pytest.mark.slow
def test_the_system_prompt_and_first_messages_in_every_dialect(pair):
    server, script = pair
    script.says("Arr")
    brief = {"role": "system", "content": "Be brief."}
    client = ollama.Client(host=server.url)
    claude = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    for send, own in (
        (lambda: client.chat("pirate", MESSAGES), True),
        (lambda: client.chat("pirate:latest", [brief, *MESSAGES]), False),
        (lambda: client.generate("pirate", "Who?"), True),
        (lambda: client.generate("pirate", "Who?", system="Be brief."), False),
        (lambda: server.openai.chat.completions.create(model="pirate", messages=MESSAGES), True),
        (lambda: server.openai.chat.completions.create(model="pirate", messages=[brief, *MESSAGES]), False),
        (lambda: server.openai.responses.create(model="pirate", input="Who?"), True),
        (lambda: server.openai.responses.create(model="pirate", input="Who?", instructions="Be brief."), False),
        (lambda: claude.messages.create(model="pirate", messages=MESSAGES, max_tokens=9), True),
        (lambda: claude.messages.create(model="pirate", messages=MESSAGES, max_tokens=9, system="Be brief."), False),
    ):
        send()
        assert asked(server, script).startswith(begins(*(OWN if own else REPLACED))), own
    client.generate("pirate", "Once", raw=True)
    assert asked(server, script) == "Once"
    server.openai.completions.create(model="pirate", prompt="Once")
    assert asked(server, script) == "Once"


def test_parameters_are_defaults_of_requests(pair):
    server, script = pair
    script.says("one END two")
    answer = server.openai.chat.completions.create(model="pirate", messages=MESSAGES)
    assert answer.choices[0].message.content == "one "
    found = script.requests[-1].sampling
    assert (found.temperature, found.top_k, found.max_tokens, found.presence_penalty) == (0.25, 5, 9, 0.5)
    assert (found.repetition_penalty, found.repeat_last_n, found.seed) == (1.2, 33, 4)
    options = {"temperature": 0.5, "stop": ["two"], "num_predict": 30, "repeat_last_n": 0, "seed": 5}
    given = ollama.Client(host=server.url).chat("pirate", MESSAGES, options=options)
    assert given.message.content == "one END "
    found = script.requests[-1].sampling
    assert (found.temperature, found.top_k, found.max_tokens, found.repeat_last_n, found.seed) == (0.5, 5, 30, 0, 5)
    assert server.state.model.max_model_len == 1024


def test_show_has_what_the_name_adds(pair):
    server, _ = pair
    shown = server.http.post("/api/show", json={"model": "pirate"}).json()
    assert shown["system"] == "Be a pirate." and shown["license"] == "MIT" and shown["messages"] == list(FIRST)
    parameters = set(shown["parameters"].split("\n"))
    assert {"temperature 0.25", "repeat_penalty 1.2", 'stop "END"', "num_ctx 1024"} <= parameters
    assert 'SYSTEM """Be a pirate."""' in shown["modelfile"] and shown["modelfile"].startswith("FROM pirate\n")
    assert ollama.Client(host=server.url).show("pirate").parameters == shown["parameters"]


@pytest.mark.parametrize(
    "parameters,message",
    [
        ({"top_p": 7}, "PARAMETER top_p: Expected `float` <= 1.0"),
        ({"temperature": "warm"}, "PARAMETER temperature: Expected `float"),
        ({"tempreture": 1}, "PARAMETER tempreture is not known; there are .*temperature"),
        ({"num_ctx": 0}, "PARAMETER num_ctx must be a number of tokens, not 0"),
        ({"num_ctx": "big"}, "PARAMETER num_ctx must be a number of tokens, not big"),
    ],
)
def test_wrong_parameters(parameters, message, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        check_parameters(parameters)
    aliases.add("wrong", Entry("x", parameters=parameters))
    with pytest.raises(ValueError, match=f"model: {message}.* \\(wrong\\)"):
        read_preset("wrong")


def test_numbers_as_text_and_stops_as_one_text(caplog, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    aliases.add("mine", Entry("x", parameters={"top_k": "40", "stop": "END", "num_predict": -1, "num_gpu": 3}))
    with caplog.at_level(logging.WARNING):
        preset = read_preset("mine")
    assert preset.sampling == {"top_k": 40} and preset.options == {"stop": "END"}
    assert caplog.messages == ["mine: PARAMETER num_gpu: no effect here"]


@pytest.mark.slow
def test_settings_that_a_name_brings(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    build_checkpoint("qwen3", folder)
    trained = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    jinja = "{% for message in messages %}{{ message.content }}{% endfor %}"
    aliases.add("mine", Entry(str(folder), "", jinja, {"num_ctx": 64}, ("/a/lora", "org/b")))
    aliases.add("long", Entry(str(folder), "", "{{ .Prompt }}", {"num_ctx": trained + 1}))
    found = with_entry(Config.from_flat(model="mine"))
    assert found.model.max_model_len == "64" and found.server.chat_template == jinja
    assert [json.loads(one) for one in found.lora.lora_modules] == [
        {"name": "mine-adapter", "path": "/a/lora", "default_scale": 1.0},
        {"name": "mine-adapter1", "path": "org/b", "default_scale": 1.0},
    ]
    given = with_entry(Config.from_flat(model="mine", max_model_len="32", chat_template="x"))
    assert given.model.max_model_len == "32" and given.server.chat_template == "x"
    assert with_entry(Config.from_flat(model="long")).model.max_model_len == str(trained)
    assert f"PARAMETER num_ctx {trained + 1} is more than the model was trained for: {trained}" in caplog.text
    plain = Config.from_flat(model=str(folder))
    assert with_entry(plain) == plain


@pytest.mark.slow
def test_a_model_of_ollamas_store_as_it_is_there(tmp_path, monkeypatch, capsys, caplog):
    """Its weights with its system prompt, parameters and adapter, equal to the adapter named by a request."""
    for name in ("HOME", "QUIRE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    folder = tmp_path / "model"
    build_checkpoint("llama-tied", folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    write_gguf(folder, file := tmp_path / "m.gguf", {"default": "F32"}, "llama")
    kind = "application/vnd.ollama.image."
    layers = {kind + "params": b'{"temperature": 0}', kind + "system": b"Be kind.", kind + "template": b"{{ .Prompt }}"}
    root = tmp_path / "HOME/.ollama/models"
    ollama_model(root, "registry.ollama.ai/library/kind/1b", file.read_bytes(), layers)
    assert main(["show", "kind:1b"]) == 0
    shown = capsys.readouterr().out
    assert "Be kind." in shown and "temperature 0" in shown
    assert main(["check", "kind:1b", "--device", "cpu"]) == 0
    assert "temperature 0.0 (PARAMETER)" in capsys.readouterr().out


@pytest.mark.slow
def test_an_adapter_of_a_name_is_used(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = checkpoint("llama-tied")
    adapter = make_adapter(tmp_path / "a", folder, 4, seed=1)
    aliases.add("tuned", Entry(folder, parameters={"temperature": 0, "num_predict": 6}, adapters=(str(adapter),)))
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9]}
    with LLM("tuned", **settings) as llm:
        (found,) = llm.generate([prompt], use_tqdm=False)
    with LLM(folder, enable_lora=True, lora_modules=[f"x={adapter}"], **settings) as llm:
        from quire import LoRARequest, SamplingParams

        params = SamplingParams(temperature=0, max_tokens=6)
        (want,) = llm.generate([prompt], params, use_tqdm=False, lora_request=LoRARequest("one", 1, str(adapter)))
        (base,) = llm.generate([prompt], params, use_tqdm=False)
    assert found.outputs[0].token_ids == want.outputs[0].token_ids != base.outputs[0].token_ids
