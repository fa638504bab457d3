"""all-MiniLM-L6-v2 against sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.server.running import MODEL, running_server
from tests.real_models.conftest import PROSE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = [*PROSE.replace(".", " .").split(), "日本語", "naïve", "🙂", "3.14", "don't", "ÜBER"]


def texts() -> list[str]:
    """200 texts of 1 to 600 words; the longest exceed the model's 256 tokens, where both truncate."""
    draw = np.random.default_rng(0)
    lengths = [1, 2, 3] * 20 + [int(n) for n in draw.integers(4, 40, 128)] + [150, 200, 240, 250, 256, 260] + [600] * 6
    return [" ".join(WORDS[i] for i in draw.integers(0, len(WORDS), length)) for length in lengths]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_embeddings_equal_those_of_sentence_transformers(real_model, _kernels_in_the_cache, dtype):
    """In float32; by default the direction is the same within 1e-3, in bfloat16 where the CPU has kernels for it."""
    from sentence_transformers import SentenceTransformer

    path = str(real_model("minilm"))
    given = texts()
    assert len(given) == 200
    theirs = SentenceTransformer(path, device="cpu").encode(given, batch_size=8, normalize_embeddings=True)
    with running_server(path, distributed_executor_backend="uniproc", dtype=dtype) as server:
        server.wait_ready(120)
        answer = server.openai.embeddings.create(model=MODEL, input=given, extra_body={"truncate_prompt_tokens": -1})
    ours = np.array([entry.embedding for entry in answer.data])
    if dtype == "float32":
        assert np.abs(ours - theirs).max() < 1e-4
    assert (1 - (ours * theirs).sum(axis=1)).max() < 1e-3
