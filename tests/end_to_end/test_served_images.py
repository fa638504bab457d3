"""A model that reads images behind the server: pictures in, texts out, and the same texts when the engine dies."""

from __future__ import annotations

import base64
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from quire.server.media.registry import load_processor
from tests.end_to_end.test_recovery import SCRIPT, TINY, check, crowd, wait_for_death
from tests.helpers.models import ocr_models
from tests.helpers.models.checkpoints import _byte_level
from tests.helpers.models.image_prompts import PREPROCESSORS, Reference, picture
from tests.helpers.models.judges import judge
from tests.helpers.models.qwen_gemma_models import build_model
from tests.helpers.server.running import poll
from tests.server.media.conftest import IMAGE_ID, TEMPLATE
from tests.server.test_launch import CHAT, server_process

pytestmark = pytest.mark.slow

PAD = "<|image_pad|>"
PICTURES = [picture(0, 40, 30), picture(1, 25, 61), picture(2, 90, 31)]


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory) -> tuple[str, Any]:
    """(folder, transformers' model) of a tiny Qwen3-VL with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return str(folder), complete(folder, "qwen3_vl", build_model("qwen3_vl", folder, image_token_id=IMAGE_ID), PAD)


def complete(folder: Path, name: str, model: Any, token: str) -> Any:
    """Add a tokenizer whose image token is `token`, a chat template and a preprocessor. Returns the model."""
    model.lm_head.weight.data[IMAGE_ID] = 0.0  # transformers would take it for a placeholder
    model.save_pretrained(folder)
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True)])
    assert tokenizer.token_to_id(token) == IMAGE_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE.replace("<image>", f"<{token}>")}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))
    return model


def part(image: Image.Image) -> dict[str, Any]:
    out = io.BytesIO()
    image.save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def body(number: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request with 0 to 3 images; every third streams, every fourth is seeded."""
    chosen = [PICTURES[(number + k) % 3] for k in range(number % 4)]
    content = [{"type": "text", "text": f"Look at number {number}. " + "It is long. " * (number % 5)}]
    content[number % 2 : 0] = [part(image) for image in chosen]
    kind = {"temperature": 0.8, "seed": number} if number % 4 == 1 else {"temperature": 0.0}
    messages = [{"role": "user", "content": content}]
    return (
        {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": number % 3 == 0} | kind | fields
    )


def test_answers_equal_transformers(seeing_model, tmp_path):
    """From the pictures in a request to the log-probabilities of its tokens."""
    folder, model = seeing_model
    processor = load_processor(folder)
    with server_process(folder, tmp_path, **TINY) as server:
        server.wait_ready()
        for number in range(4):
            asked = body(number, 8, stream=False, temperature=0.0, logprobs=True, return_token_ids=True)
            answer = server.http.post(CHAT, json=asked).json()
            choice, usage = answer["choices"][0], answer["usage"]
            chosen = [PICTURES[(number + k) % 3] for k in range(number % 4)]
            images = [processor([image], {})[0] for image in chosen]
            num_image_tokens = sum(sum(image.counts) for image in images)
            assert answer["prompt_token_ids"].count(IMAGE_ID) == num_image_tokens
            assert (usage["prompt_tokens_details"] or {}).get("image_tokens", 0) == num_image_tokens
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            reference = Reference("qwen3_vl", model, images)
            wrong, error = judge(reference, answer["prompt_token_ids"], choice["token_ids"], logprobs)
            assert (wrong, error < 1e-3) == (0, True), (number, wrong, error)


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}], ids=["uniproc", "tp2"])
def test_an_engine_that_is_killed(seeing_model, tmp_path, settings):
    """Requests with images continue in the next engine, which encodes the images again."""
    bodies = [body(number, 60) for number in range(16)]
    with server_process(seeing_model[0], tmp_path, script=SCRIPT, **TINY | settings) as server:
        expected, duration = crowd(server.wait_ready(), bodies)
        engine = server.engine()
        workers = [child for child in engine.children() if child.name().startswith("quire-worker")]

        def disturb() -> None:
            (workers[-1] if workers else engine).send_signal(signal.SIGKILL)
            wait_for_death(server, engine, serving=False)

        answers, _ = crowd(server, bodies, disturb, after=0.3 * duration)
        check(answers, expected)
        poll(lambda: server.log.count("the engine is ready again") == 1, 60)


def banned(outputs: list[int], size: int, window: int, exempt: set[int]) -> set[int]:
    """The loop of vLLM's logits processor for DeepSeek-OCR."""
    found = {
        outputs[i + size - 1]
        for i in range(max(0, len(outputs) - window), len(outputs) - size + 1)
        if outputs[i : i + size - 1] == outputs[len(outputs) - size + 1 :]
    }
    return found - exempt


def test_deepseek_ocr_without_repeated_ngrams(tmp_path):
    """A page with the arguments of vLLM's processor: every token is the best of those that its loop allows."""
    model = complete(tmp_path, "unlimited_ocr", ocr_models.build_model("unlimited_ocr", tmp_path), "<image>")
    model.config.image_token_id = IMAGE_ID
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["DeepseekOCRForCausalLM"], "image_token_id": IMAGE_ID}
    config["text_config"] |= {"layer_types": None, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = picture(0, 130, 200)
    images = load_processor(str(tmp_path))([page], {})
    messages = [{"role": "user", "content": [part(page), {"type": "text", "text": "Free OCR."}]}]
    asked = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True}
    with server_process(str(tmp_path), tmp_path, **TINY) as server:
        server.wait_ready()
        plain = server.http.post(CHAT, json=asked).json()["choices"][0]["token_ids"]
        exempt = {plain[-1]}
        xargs = {"ngram_size": 1, "window_size": 20, "whitelist_token_ids": list(exempt)}
        answer = server.http.post(CHAT, json=asked | {"vllm_xargs": xargs}).json()
    tokens, prompt = answer["choices"][0]["token_ids"], answer["prompt_token_ids"]
    assert tokens != plain and any(banned(plain[:i], 1, 20, exempt) & {plain[i]} for i in range(60))
    with torch.no_grad():
        logits = Reference("unlimited_ocr", model, images)(torch.tensor([prompt + tokens[:-1]])).logits
    for i, row in enumerate(logits[0, len(prompt) - 1 :].float()):
        excluded = banned(tokens[:i], 1, 20, exempt)
        assert tokens[i] not in excluded
        row[list(excluded)] = -torch.inf
        assert row.max() - row[tokens[i]] < 1e-3
