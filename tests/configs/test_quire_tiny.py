"""The tokenizer and the chat template of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.sandbox
import pytest
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "configs" / "quire-tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def template():
    """chat_template.jinja in the environment that transformers gives it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((FOLDER / "chat_template.jinja").read_text())


def test_template_takes_what_clients_send():
    chat = template()
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]}]
    assert (
        chat.render(messages=parts, add_generation_prompt=True)
        == "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    bare = [{"type": "function", "function": {"name": "now"}}]
    assert "<tools>\nnow()\n</tools>" in chat.render(messages=parts, tools=bare)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {"zone": "é"}}}],
    }
    assert '{"name": "now", "arguments": {"zone": "é"}}' in chat.render(messages=[*parts, call])


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "größer  und\n\n schöner\t",
        "你好 🙂",
        "12345 + 6",
        "get_weather(city)",
        "\x00\x7f",
        "<|im_start|>user",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_unknown_words_are_letters_and_numbers_are_digits(tokenizer):
    assert tokenizer.encode(" zyxgrk 407").tokens == ["Ġ", "z", "y", "x", "g", "r", "k", "Ġ", "4", "0", "7"]


def test_special_tokens_and_markers(tokenizer):
    assert [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    ids = tokenizer.encode('<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>').ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == '<tool_call>\n{"name": "f"}\n</tool_call>'
