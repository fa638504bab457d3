"""SmolLM2 135M Instruct (GGUF, Q4_1) against transformers on the dequantized weights, and the loops of the dialects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import anthropic
import ollama
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import LlamaConfig

from tests.helpers.server.running import MODEL, RunningServer, running_server
from tests.real_models.conftest import PROSE, reference, reference_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HARD = (
    "",
    " ",
    "  leading and trailing  ",
    "tabs\tand\r\nnewlines\n\n\n  \n",
    "I'm, you're, WE'LL, it's 'quoted'",
    "1234567890 3.14159 0x1F 1e-10",
    "naïve façade Ångström ﬁ ½ ²",
    "e\u0301 against é",
    "日本語とにほんご、中文，한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "العربية עברית हिन्दी ไทย",
    "\u200b\u200d\ufeff\u00a0\u3000",
    "def f(x):\n    return x  # \\n not a newline\n\tif (a&&b)||c!=d: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start |> < |im_end|>",
    "a" * 300,
    " " * 50 + "x",
    "\x00\x01\x7f\x85",
    "https://example.org/a?b=c&d=%20#e",
    "The quick brown fox!!! ...???",
    PROSE,
)
QUESTIONS = (
    "Hello!",
    "What is the capital of France?",
    "Name a color.",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "What is 2 + 2?",
    "Translate 'good morning' into Spanish.",
    "List three fruits.",
    "Who wrote Hamlet?",
    "Write a Python function that adds two numbers.",
    "How many legs does a spider have?",
    "What does HTTP mean?",
    "Tell me a joke.",
    "Give me a name for a cat.",
    "What is photosynthesis?",
    "Write a haiku about snow.",
    "Is 17 a prime number?",
    "What is the largest planet?",
    "How do I boil an egg?",
    f"Summarize this text in one sentence: {PROSE}",
)


@pytest.fixture(scope="module")
def path(real_model) -> Path:
    return real_model("smollm2")


@pytest.fixture(scope="module")
def server(path, _kernels_in_the_cache) -> Iterator[RunningServer]:
    with running_server(
        str(path), distributed_executor_backend="uniproc", kv_cache_memory_bytes=128 << 20, max_model_len="2048"
    ) as running:
        yield running.wait_ready(120)


@pytest.fixture(scope="module")
def model(path):
    """By the configuration that its authors published."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return reference(path, config)


@pytest.fixture(scope="module")
def tokenizer(path):
    """transformers' reading of the file, plus the split of digits, which the model's tokenizer.json has."""
    tokenizer = reference_tokenizer(path)
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    return tokenizer


def tokens_of(server: RunningServer, text: str) -> list[int]:
    return server.http.post("/tokenize", json={"model": MODEL, "prompt": text}).raise_for_status().json()["tokens"]


@pytest.mark.parametrize("text", [text for text in HARD if text], ids=range(len(HARD) - 1))
def test_hard_texts_have_the_same_tokens(server, tokenizer, text):
    tokens = tokens_of(server, text)
    assert tokens == tokenizer.encode(text)
    back = server.http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()
    assert back["prompt"] == text


def test_the_perplexity_is_that_of_the_float32_weights(server, model, tokenizer):
    answer = server.openai.completions.create(model=MODEL, prompt=PROSE, max_tokens=0, echo=True, logprobs=1)
    ours = [value for value in answer.choices[0].logprobs.token_logprobs if value is not None]
    ids = torch.tensor([tokenizer.encode(PROSE)])
    with torch.no_grad():
        theirs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert len(ours) == len(theirs) > 150
    ratio = math.exp(theirs.mean().item() - sum(ours) / len(ours))
    assert 0.98 < ratio < 1.02, ratio  # of so few tokens, the rounding of activations moves a percent


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_chat_agrees_as_far_as_rounding_allows(server, model, tokenizer, question):
    """Each token is the reference's best, or one whose logit is within rounding (4-bit weights, 8-bit activations)."""
    messages = [{"role": "user", "content": question}]
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=20, extra_body={"return_token_ids": True}
    )
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer.usage.prompt_tokens == len(prompt)
    ids = answer.choices[0].model_dump()["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    behind = logits.max(-1).values - chosen
    assert behind.max() < 0.8 and (behind == 0).float().mean() > 0.7, behind


def test_every_dialect_gives_the_same_answer(server):
    """The vendors' clients, whole and streamed, and a second turn. The first request leaves the prompt in the cache, so
    that all others compute the same rows.
    """
    chat = [{"role": "user", "content": "Hello!"}]
    create = server.openai.with_options(timeout=120).chat.completions.create
    for _ in range(2):
        answer = create(model=MODEL, messages=chat, temperature=0, max_tokens=16)
    text = answer.choices[0].message.content
    assert "help" in text or "Hello" in text
    stream = create(model=MODEL, messages=chat, temperature=0, max_tokens=16, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == text
    response = server.openai.responses.create(model=MODEL, input="Hello!", temperature=0, max_output_tokens=16)
    assert response.output_text == text
    base = str(server.http.base_url)
    with anthropic.Anthropic(base_url=base, api_key="none") as client:
        message = client.messages.create(model=MODEL, messages=chat, max_tokens=16, extra_body={"temperature": 0})
        assert message.content[0].text == text
    client, greedy = ollama.Client(host=base), {"temperature": 0, "num_predict": 16, "repeat_penalty": 1.0}
    assert client.chat(model=MODEL, messages=chat, options=greedy).message.content == text
    parts = client.chat(model=MODEL, messages=chat, options=greedy, stream=True)
    assert "".join(part.message.content for part in parts) == text
    chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "Thank you!"}]
    second = create(model=MODEL, messages=chat, temperature=0, max_tokens=16)
    assert second.choices[0].message.content and second.usage.prompt_tokens > answer.usage.total_tokens


def test_structured_output_ends_by_itself(server):
    """Ollama's documented example: a country with its capital and languages."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "capital": {"type": "string"},
            "languages": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "capital", "languages"],
    }
    answer = ollama.Client(host=str(server.http.base_url)).chat(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me about Canada."}],
        format=schema,
        options={"temperature": 0, "num_predict": 256},
    )
    assert answer.done_reason == "stop"
    country = json.loads(answer.message.content)
    assert set(country) == set(schema["required"]) and "Canada" in country["name"]


def test_a_required_tool_is_called_in_the_generic_format(server):
    """The template of SmolLM2 knows no tools."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    chat = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=chat, tools=[tool], tool_choice="required", temperature=0, max_tokens=64
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    chat += [answer.choices[0].message.model_dump(exclude_none=True)]
    chat += [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
    last = server.openai.chat.completions.create(
        model=MODEL, messages=chat, tools=[tool], tool_choice="none", temperature=0, max_tokens=48
    )
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls
