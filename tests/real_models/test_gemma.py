"""Gemma 3 270M (GGUF, Q4_K_M): layers with windows, over a prompt that is longer than two windows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig

from tests.helpers.server.running import MODEL, running_server
from tests.real_models.conftest import PROSE, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def published_config() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        tie_word_embeddings=True,
    )


def text() -> str:
    """Words in random order, which come again in the same order only after more tokens than a window has."""
    words = [str(word) for word in np.random.default_rng(0).permutation(np.array(PROSE.split() * 5))]
    return " ".join(words * 5)


def test_windows_at_1300_tokens(real_model, _kernels_in_the_cache):
    """Log-probabilities of the last tokens, whose windows have moved on, equal those of the float32 reference."""
    path = real_model("gemma3-270m")
    with running_server(
        str(path), distributed_executor_backend="uniproc", kv_cache_memory_bytes=256 << 20, max_model_len="2048"
    ) as server:
        server.wait_ready(120)
        ids = server.http.post("/tokenize", json={"model": MODEL, "prompt": text()}).json()["tokens"][:1300]
        create = server.openai.with_options(timeout=120).completions.create
        answer = create(model=MODEL, prompt=ids, max_tokens=0, echo=True, logprobs=1)
    ours = torch.tensor(answer.choices[0].logprobs.token_logprobs[-300:])
    with torch.no_grad():
        model = reference(path, published_config())
        logits = model(torch.tensor([ids]), logits_to_keep=301).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[-300:])[:, None])[:, 0]
    assert len(ids) == 1300 and len(ours) == len(theirs) == 300
    assert math.isclose(math.exp(theirs.mean() - ours.mean()), 1, abs_tol=0.02)
    assert (ours - theirs).abs().mean() < 0.15
