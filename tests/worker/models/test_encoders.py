"""Encoders give the vectors and logits of sentence-transformers and transformers, whatever is computed beside them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.configs.config import Config
from quire.engine.messages import AddRequest
from quire.worker.messages import PoolingParams, SamplingParams
from quire.worker.models.registry import read_model_spec
from quire.worker.startup.preview import preview
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.embedders import TEXTS, reference_embeddings, reference_logits
from tests.helpers.models.encoders import EMBEDDERS, ENCODERS, MAX_POSITIONS, build_embedding_gemma, build_encoder
from tests.helpers.worker.dense_attention import PagedRunner
from tests.helpers.worker.ranks import run_ranks
from tests.worker.test_tensor_parallel import TEXT, build, build_ranks
from tests.worker.transformer.test_pooling import encode, pooled


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mean", "cls"])
@pytest.mark.parametrize("name", ENCODERS)
def test_equals_sentence_transformers(name, mode, tmp_path):
    folder = build_encoder(name, tmp_path / "model", mode=mode)
    engine = InProcessEngine(folder, dtype="float32")
    expected = reference_embeddings(folder, TEXTS)
    for _ in range(2):  # the second time nothing comes from a cache
        found = pooled(engine, encode(folder), normalize=True)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling.whole_prompts and not engine.ready.pooling.generates
    assert engine.scheduler.counts.prefix_cache_hits == 0


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embedding_gemma_equals_sentence_transformers(name, tmp_path):
    folder = build_embedding_gemma(tmp_path / "model", name)
    engine = InProcessEngine(folder, dtype="float32")
    expected = reference_embeddings(folder, TEXTS)
    torch.testing.assert_close(pooled(engine, encode(folder), normalize=True), expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.pooling.whole_prompts and engine.ready.pooling.num_dimensions == expected.shape[1]


@pytest.mark.parametrize("name", EMBEDDERS)
def test_two_ranks_agree_with_one(name, tmp_path):
    """The layers with full attention of EmbeddingGemma 2 have fewer KV heads than ranks."""
    folder = build_embedding_gemma(tmp_path / "model", name)
    expected = PagedRunner(build(folder), 1, 128).step({0: TEXT})[0]
    models = build_ranks(2, folder)
    for hidden in run_ranks(lambda rank: PagedRunner(models[rank], 1, 128).step({0: TEXT})[0], 2):
        torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=0)


def test_the_text_of_embedding_gemma_2(tmp_path):
    """As it is published: with encoders of images and sound, and the last layer's kind as transformers changes it."""
    import transformers

    folder = build_embedding_gemma(tmp_path / "model", "embedding-gemma-2")
    expected, path = reference_embeddings(folder, TEXTS), tmp_path / "model" / "config.json"
    text = json.loads(path.read_text())
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "gemma4_vision", **tower, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.EmbeddingGemma2Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.EmbeddingGemma2Model(config).eval()
    model.language_model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    model.save_pretrained(tmp_path / "model")
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert any("vision_tower" in name for name in names)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    written = json.loads(path.read_text())
    written["text_config"]["layer_types"] = kinds
    path.write_text(json.dumps(written))
    found = pooled(InProcessEngine(folder, dtype="float32"), encode(folder), normalize=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    written["text_config"]["embedding_dim"] = 0
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match="embedding_dim must be a positive integer, not 0"):
        read_model_spec(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_classifiers_equal_transformers(name, tmp_path):
    """Three labels, for texts and for pairs, whose second text has a token type of its own in BERT."""
    import transformers

    folder = build_encoder(name, tmp_path / "model", "ForSequenceClassification", num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    prompts = encode(folder)
    engine = InProcessEngine(folder, dtype="float32")
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([ids])).logits for ids in prompts])
    torch.testing.assert_close(pooled(engine, prompts, task="classify"), expected, rtol=1e-5, atol=1e-5)
    if ENCODERS[name][1]:
        types = torch.tensor([[0] * 3 + [1] * (len(prompts[0]) - 3)])
        with torch.inference_mode():
            expected = model(torch.tensor(prompts[:1]), token_type_ids=types).logits
        found = pooled(engine, [prompts[0]] * 2, task="classify", second_start=3)
        torch.testing.assert_close(found, expected.expand(2, 3), rtol=1e-5, atol=1e-5)


def test_names_of_older_checkpoints(tmp_path):
    """Names of norms as TensorFlow's, the encoder inside a masked language model, without modules.json."""
    import transformers

    folder = build_encoder("bert", tmp_path / "model", "ForMaskedLM")
    path = tmp_path / "model" / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in encode(folder)]
    expected = torch.stack([states.mean(0) for states in hidden])
    tensors = load_file(path)
    for ours, theirs in old.items():
        tensors = {name.replace(ours, theirs): tensor.clone() for name, tensor in tensors.items()}
    assert any("bert.embeddings.LayerNorm.gamma" in name for name in tensors)
    save_file(tensors, path, {"format": "pt"})
    found = pooled(InProcessEngine(folder, dtype="float32"), encode(folder))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_prompts_are_not_divided(tmp_path):
    """Steps of 40 tokens: prompts wait until they fit, and a batch's lines are not starved by others."""
    folder = build_encoder("roberta", tmp_path / "model")
    engine = InProcessEngine(folder, dtype="float32", max_num_batched_tokens=40, long_prefill_token_threshold=8)
    assert engine.ready.max_model_len == 40
    prompts = [[5] * count for count in (30, 9, 2, 40, 17, 23)]
    for i, prompt in enumerate(prompts):
        message = AddRequest(str(i), prompt, SamplingParams(max_tokens=0), pooling=PoolingParams(), background=i > 2)
        engine.scheduler.add(message)
    steps = []
    while step := engine.scheduler.schedule():
        steps.append(step.input.num_scheduled)
        engine.scheduler.update(step, engine.executor.execute(step.input).result())
    assert steps == [[30, 9], [2], [40], [17], [23]]
    with pytest.raises(ValueError, match="the prompt has 41 tokens, but a request may have at most 40"):
        engine.scheduler.add(AddRequest("long", [5] * 41, SamplingParams(max_tokens=0), pooling=PoolingParams()))


def test_limits(tmp_path):
    folder = build_encoder("roberta", tmp_path / "model")
    assert InProcessEngine(folder, dtype="float32").ready.max_model_len == MAX_POSITIONS - 2
    with pytest.raises(ValueError, match="--max-num-batched-tokens 40: an encoder computes a prompt in one step"):
        InProcessEngine(folder, dtype="float32", max_num_batched_tokens=40, max_model_len="100")
    with pytest.raises(ValueError, match="--pipeline-parallel-size must be 1"):
        preview(Config.from_flat(model=folder, device="cpu", pipeline_parallel_size=2))


def test_a_step_without_memory_is_divided_between_prompts(tmp_path, monkeypatch):
    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    engine = InProcessEngine(folder, dtype="float32")
    prompts = encode(folder)
    expected = pooled(engine, prompts)
    runner = engine.executor._worker.runner
    original, sizes = runner.forward, []

    def forward(batch):
        sizes.append(len(batch.step.rows))
        if len(batch.step.rows) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return original(batch)

    monkeypatch.setattr(runner, "forward", forward)
    torch.testing.assert_close(pooled(engine, prompts), expected, rtol=1e-5, atol=1e-5)
    assert sizes.count(1) == len(prompts)


def test_modernbert_classifies_the_mean(tmp_path):
    folder = build_encoder("modernbert", tmp_path / "model", "ForSequenceClassification", classifier_pooling="mean")
    engine, prompts = InProcessEngine(folder, dtype="float32"), encode(folder)
    expected = reference_logits(folder, prompts)
    torch.testing.assert_close(pooled(engine, prompts, task="classify"), expected, rtol=1e-5, atol=1e-5)


def test_settings_of_nomics_own_code(tmp_path):
    """The published config.json has other names than transformers'."""
    folder = build_encoder("nomic", tmp_path / "model", mode="mean")
    expected = reference_embeddings(folder, TEXTS)
    path = tmp_path / "model" / "config.json"
    theirs = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_inner": 160,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 8192,
        "max_trained_positions": MAX_POSITIONS,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "prenorm": False,
        "causal": False,
    }
    path.write_text(json.dumps(theirs))
    engine = InProcessEngine(folder, dtype="float32")
    torch.testing.assert_close(pooled(engine, encode(folder), normalize=True), expected, rtol=1e-5, atol=1e-5)
    assert engine.ready.max_model_len == MAX_POSITIONS
    path.write_text(json.dumps(theirs | {"num_experts": 8}))
    with pytest.raises(ValueError, match="num_experts 8 is not supported"):
        read_model_spec(folder)


def test_a_gemma_that_generates_attends_to_earlier_tokens_only(tmp_path):
    build_embedding_gemma(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Gemma3ForCausalLM"]}))
    with pytest.raises(ValueError, match="the architecture must be Gemma3TextModel"):
        read_model_spec(str(tmp_path / "model"))
