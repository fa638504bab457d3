"""SmolLM2 135M Instruct (GGUF, Q4_1): its tokenizer against transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from tests.real_models.conftest import PROSE, reference_tokenizer
from tests.server.conftest import MODEL, RunningServer, running_server

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
