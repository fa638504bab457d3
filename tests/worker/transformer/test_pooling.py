"""Vectors of prompts, equal to those of sentence-transformers, however the prompts are scheduled."""

from __future__ import annotations

import json

import pytest
import torch

from quire.engine.messages import AddRequest
from quire.worker.messages import PoolingParams, SamplingParams
from quire.worker.models.registry import read_model_spec
from quire.worker.transformer.pooling import Pooler, PoolingSpec, read_pooling
from quire.worker.weights.gguf_tensors import read_tensor
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.embedders import TEXTS, build_embedder, reference_embeddings

pytestmark = pytest.mark.slow

MODES = ["lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"]


def encode(folder: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    return [encoding.ids for encoding in Tokenizer.from_file(f"{folder}/tokenizer.json").encode_batch(TEXTS)]


def pooled(engine: InProcessEngine, prompts: list[list[int]], **params) -> torch.Tensor:
    """The vectors of all prompts, computed together."""
    for i, prompt in enumerate(prompts):
        engine.scheduler.add(AddRequest(str(i), prompt, SamplingParams(max_tokens=0), pooling=PoolingParams(**params)))
    found = {}
    while step := engine.scheduler.schedule():
        for output in engine.scheduler.update(step, engine.executor.execute(step.input).result()).get(b"", []):
            assert output.error is None and output.finish_reason == "length"
            found[int(output.request_id)] = torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
    return torch.stack([found[i] for i in range(len(prompts))])


@pytest.fixture(scope="module", params=MODES)
def embedder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return build_embedder("qwen3", folder, mode=request.param, normalize=request.param in ("lasttoken", "mean"))


@pytest.mark.parametrize("chunk", [2048, 7])
def test_equals_sentence_transformers(embedder, chunk):
    engine = InProcessEngine(embedder, dtype="float32", max_num_batched_tokens=chunk, max_num_seqs=4)
    normalize = engine.ready.pooling.normalize
    found = pooled(engine, encode(embedder), normalize=normalize)
    torch.testing.assert_close(found, reference_embeddings(embedder, TEXTS), rtol=1e-5, atol=1e-5)
    assert not engine.ready.pooling.generates and engine.ready.pooling.tasks == ["embed"]


@pytest.mark.parametrize("name", ["mistral", "llama3", "qwen2"])
def test_other_decoders(name, tmp_path):
    folder = build_embedder(name, tmp_path / "model")
    found = pooled(InProcessEngine(folder, dtype="float32"), encode(folder), normalize=True)
    torch.testing.assert_close(found, reference_embeddings(folder, TEXTS), rtol=1e-5, atol=1e-5)


def test_bfloat16(tmp_path):
    folder = build_embedder("qwen3", tmp_path / "model", dtype="bfloat16")
    found = pooled(InProcessEngine(folder, dtype="bfloat16"), encode(folder), normalize=True)
    expected = reference_embeddings(folder, TEXTS)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.999


def test_prefix_cache_and_dimensions(tmp_path):
    """The last token may take its prefix from the cache; other methods need all tokens and must not."""
    folder = build_embedder("qwen3", tmp_path / "model")
    engine = InProcessEngine(folder, dtype="float32")
    prompts = encode(folder)
    first = pooled(engine, prompts)
    again = pooled(engine, prompts)
    torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-5)
    assert engine.scheduler.counts.prefix_cache_hits > 0
    cut = pooled(engine, prompts, num_dimensions=8, normalize=True)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(first[:, :8], dim=1), rtol=1e-5, atol=1e-5)
    mean = InProcessEngine(folder, dtype="float32", pooling="mean")
    expected = pooled(mean, prompts)
    torch.testing.assert_close(pooled(mean, prompts), expected, rtol=1e-6, atol=1e-6)
    assert mean.scheduler.counts.prefix_cache_hits == 0


def test_what_the_model_cannot_do_is_refused(tmp_path):
    engine = InProcessEngine(build_embedder("qwen3", tmp_path / "model"), dtype="float32")
    with pytest.raises(ValueError, match="cannot generate text"):
        engine.scheduler.add(AddRequest("a", [1], SamplingParams(max_tokens=1)))
    for params, message in [
        (PoolingParams("classify"), "'classify' is not supported by this model; supported: embed"),
        (PoolingParams(num_dimensions=65), "num_dimensions is 65, the model has 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.scheduler.add(AddRequest("a", [1], SamplingParams(max_tokens=0), pooling=params))


def test_modules_are_read_in_both_spellings(tmp_path):
    folder = tmp_path / "model"
    spec = read_model_spec(build_embedder("qwen3", folder))
    assert read_pooling(str(folder), spec) == PoolingSpec(("lasttoken",), matryoshka=True, reason="modules.json")
    config = folder / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode": ["cls", "mean"], "embedding_dimension": 64}))
    assert read_pooling(str(folder), spec).methods == ("cls", "mean")
    assert read_pooling(str(folder), spec, "mean").methods == ("mean",)
    assert read_pooling(str(folder), spec, "none") is None
    config.write_text(json.dumps({"pooling_mode": "attention"}))
    with pytest.raises(ValueError, match="pooling_mode attention is not supported"):
        read_pooling(str(folder), spec)
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (folder / "modules.json").write_text(json.dumps(modules))
    config.write_text(json.dumps({"pooling_mode": "mean"}))
    with pytest.raises(ValueError, match="the step 'LSTM' is not supported"):
        read_pooling(str(folder), spec)


@pytest.mark.parametrize("method", MODES)
def test_chunks_do_not_matter(method):
    hidden = torch.randn(23, 8)
    pooler = Pooler(PoolingSpec((method,)), 8, torch.device("cpu"), read_tensor)
    whole = pooler.finish([pooler.update(None, hidden, 0)], [23])
    state = None
    for start in range(0, 23, 5):
        state = pooler.update(state, hidden[start : start + 5], start)
    torch.testing.assert_close(pooler.finish([state], [23]), whole)


def test_a_step_that_is_computed_again_counts_once(tmp_path, monkeypatch):
    """Memory runs out after the chunk was pooled: the step runs again, in two halves."""
    folder = build_embedder("qwen3", tmp_path / "model", mode="mean")
    engine = InProcessEngine(folder, dtype="float32", max_num_batched_tokens=8, max_num_seqs=4)
    prompts = encode(folder)
    expected = pooled(engine, prompts)
    platform, events = engine.executor._worker.runner.platform, iter(range(1000))

    def event():
        if len(engine.executor._worker.runner.pooling._pending) and next(events) % 4 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original()

    original = platform.event
    monkeypatch.setattr(platform, "event", event)
    torch.testing.assert_close(pooled(engine, prompts), expected, rtol=1e-5, atol=1e-5)
    assert next(events) > 8
