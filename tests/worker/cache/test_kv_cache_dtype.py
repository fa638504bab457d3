"""`--kv-cache-dtype`: what it resolves to, the scales of checkpoints, the plan, and whole models with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.configs.config import Config
from quire.configs.sources import embedded_model
from quire.engine.messages import SamplingParams
from quire.worker.attention.scaled import FP8
from quire.worker.cpu.device import CpuPlatform
from quire.worker.limits import resolve_limits
from quire.worker.models.registry import read_model_spec
from quire.worker.startup.preview import preview
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import FAMILIES, build_family

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def with_scales(source: str, folder: Path, config: dict | None, names: tuple[str, str], value=0.02) -> str:
    """A copy of a checkpoint with scales for keys and values in every layer."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for i in range(3):
        for name in names:
            tensors[f"model.layers.{i}.self_attn.{name}"] = torch.as_tensor(value, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    if config:
        raw["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def resolve(folder: str, **settings):
    """(storage, reason) of a checkpoint."""
    config = Config.from_flat(model=folder, device="cpu", **settings)
    limits = resolve_limits(config, read_model_spec(folder), CpuPlatform())
    return limits.kv, next(reason for setting, _, reason in limits.choices if setting == "kv_cache_dtype")


def test_without_a_word_in_the_checkpoint(checkpoint):
    folder = checkpoint("qwen3", dtype="bfloat16")
    assert resolve(folder)[0].dtype == resolve(folder, kv_cache_dtype="bfloat16")[0].dtype == torch.bfloat16
    for name, dtype in (("int8", torch.int8), ("fp8", FP8), ("int8_per_token_head", torch.int8)):
        kv, reason = resolve(folder, kv_cache_dtype=name)
        assert (kv.dtype, kv.scales, kv.scale_bytes) == (dtype, "token", 4)
        assert reason == "as asked; one scale per token and head"


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**COMPRESSED, "kv_cache_scheme": SCHEME}, ("k_scale", "v_scale")),
        ({**COMPRESSED, "kv_cache_scheme": SCHEME}, ("k_proj.output_scale", "v_proj.output_scale")),
        (None, ("attn.k_scale", "attn.v_scale")),
        (None, ("kv_scale", "kv_scale")),
        (MODELOPT, ("k_proj.k_scale", "v_proj.v_scale")),
    ],
)
def test_scales_of_a_checkpoint(checkpoint, tmp_path, config, names):
    folder = with_scales(checkpoint("qwen3"), tmp_path / "m", config, names)
    kv, reason = resolve(folder, kv_cache_dtype="fp8")
    assert (kv.dtype, kv.scales, kv.scale_bytes) == (FP8, "layer", 0) and "the checkpoint's scale" in reason
    assert kv.constants == {i: (pytest.approx(0.02),) * 2 for i in range(3)}
    assert resolve(folder)[0].dtype == (FP8 if config else torch.float32)  # auto follows the configuration
    assert resolve(folder, kv_cache_dtype="float32")[0].dtype == torch.float32
    assert resolve(folder, kv_cache_dtype="int8")[0].scales == "token"  # e4m3's scales do not fit
    assert resolve(folder, kv_cache_dtype="fp8_per_token_head")[0].scales == "token"


def test_integer_scales_and_incomplete_ones(checkpoint, tmp_path):
    scheme = {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "type": "int"}}
    folder = with_scales(checkpoint("qwen3"), tmp_path / "int", scheme, ("k_scale", "v_scale"))
    assert (resolve(folder)[0].dtype, resolve(folder)[0].scales) == (torch.int8, "layer")
    assert resolve(folder, kv_cache_dtype="fp8")[0].scales == "token"
    folder = with_scales(checkpoint("qwen3"), tmp_path / "half", MODELOPT, ("k_scale",))
    kv, reason = resolve(folder)
    assert kv.scales == "token" and reason.endswith("one scale per token and head")
    per_head = with_scales(
        checkpoint("qwen3"), tmp_path / "heads", MODELOPT, ("k_scale", "v_scale"), [[[0.1]], [[0.2]]]
    )
    assert resolve(per_head)[0].scales == "token"


def test_latents_have_two_scales_per_token(checkpoint, tmp_path):
    folder = checkpoint("deepseek-v3")
    for name, dtype in (("int8", torch.int8), ("fp8", FP8), ("fp8_per_token_head", FP8)):
        kv, reason = resolve(folder, kv_cache_dtype=name)
        assert (kv.dtype, kv.scales, kv.scale_bytes) == (dtype, "token", 4)
        assert reason == "as asked; two scales per token, of its latent and of its rotary key"


def test_the_one_scale_of_latents_in_a_checkpoint(checkpoint, tmp_path):
    """It is that of keys, which the values are a part of. Integers do not use it."""
    scheme = {**COMPRESSED, "kv_cache_scheme": SCHEME}
    for name, names in (("both", ("attn.k_scale", "attn.v_scale")), ("keys", ("k_scale",) * 2)):
        folder = with_scales(checkpoint("deepseek-v3"), tmp_path / name, scheme, names)
        kv, reason = resolve(folder)
        assert (kv.dtype, kv.scales) == (FP8, "layer") and "the checkpoint's scale of each layer" in reason
        assert kv.constants == {i: (pytest.approx(0.02),) * 2 for i in range(3)}
    assert resolve(folder, kv_cache_dtype="fp8_per_token_head")[0].scales == "token"
    folder = with_scales(checkpoint("deepseek-v3"), tmp_path / "values", scheme, ("v_scale",) * 2)
    assert resolve(folder)[0].scales == "token"
    scheme = {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "type": "int"}}
    kv, reason = resolve(with_scales(checkpoint("deepseek-v3"), tmp_path / "int", scheme, ("k_scale", "v_scale")))
    assert (kv.dtype, kv.scales) == (torch.int8, "token") and "would leave the smaller few bits" in reason


def test_a_scheme_that_is_not_supported_is_named(checkpoint, tmp_path):
    folder = with_scales(
        checkpoint("qwen3"), tmp_path / "m", {**MODELOPT, "kv_cache_quant_algo": "NVFP4"}, ("k_scale", "v_scale")
    )
    kv, reason = resolve(folder)
    assert kv.dtype == torch.float32 and "kv_cache_quant_algo NVFP4 is not followed: fp8 and int8 are" in reason


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("qwen3", {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16: keys and values are stored in float32"),
    ],
)
def test_refusals(checkpoint, name, settings, words):
    with pytest.raises(ValueError, match=words):
        resolve(checkpoint(name), **settings)


def test_a_scale_that_is_none(checkpoint, tmp_path):
    folder = with_scales(checkpoint("qwen3"), tmp_path / "m", MODELOPT, ("k_scale", "v_scale"), -1.0)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.k_scale is -1.0, but a scale must be positive"):
        resolve(folder)


def blocks_of(folder: str, kv_cache_dtype: str) -> int:
    config = Config.from_flat(
        model=folder, device="cpu", kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=32 << 20, block_size=16
    )
    return preview(config).num_blocks


@pytest.mark.slow
def test_about_twice_the_tokens_in_the_same_memory(checkpoint, tmp_path):
    folder = checkpoint("qwen3", dtype="bfloat16", head_dim=128)
    plain = blocks_of(folder, "auto")
    assert blocks_of(folder, "int8") == blocks_of(folder, "fp8") == pytest.approx(plain * 256 / 132, abs=1)
    scaled = with_scales(folder, tmp_path / "m", None, ("k_scale", "v_scale"))
    assert blocks_of(scaled, "fp8") == pytest.approx(2 * plain, abs=1)
    latent = checkpoint("deepseek-v3", dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64)
    plain = blocks_of(latent, "auto")
    assert blocks_of(latent, "int8") == blocks_of(latent, "fp8") == pytest.approx(plain * 1152 / 584, abs=2)


LONG = [(7 * i) % 480 + 4 for i in range(300)]


def scored(folder: str, **settings) -> list[float]:
    """Log-probabilities of a prompt's tokens."""
    settings = dict(max_num_seqs=4, max_model_len="400", kv_cache_memory_bytes=32 << 20, **settings)
    engine = InProcessEngine(folder, **settings)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    (result,) = engine.generate([LONG], sampling)
    engine.close()
    assert result.error is None
    return [entry.logprobs[0] for entry in result.prompt_logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gpt-oss"])  # full attention, windows, sinks
def test_log_probabilities_stay_close(checkpoint, name):
    """Random weights make the least likely of tokens likely by chance: this prompt's have e^-13."""
    exact = torch.tensor(scored(checkpoint(name)))
    distance = {
        kind: (torch.tensor(scored(checkpoint(name), kv_cache_dtype=kind)) - exact).abs() for kind in ("int8", "fp8")
    }
    assert 0 < distance["int8"].mean() < 0.15 and 0 < distance["fp8"].mean() < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v3", "deepseek-v32", "glm-5", "glm4-moe-lite", "minicpm3", "axk1", "mistral4"]
)
def test_log_probabilities_with_latents_stay_close(checkpoint, tmp_path, name):
    """Every form of latent attention, with prompts expanded and, below, tokens absorbed. A router of random weights may
    choose other experts, which changes a token's log-probabilities by any amount: hence medians.
    """
    all_keys = {"index_topk": 800} if name in ("deepseek-v32", "glm-5") else {}
    folder = build_family(name, tmp_path, vocab_size=512) if name in FAMILIES else checkpoint(name, **all_keys)
    exact = torch.tensor(scored(folder))
    distance = {kind: (torch.tensor(scored(folder, kv_cache_dtype=kind)) - exact).abs() for kind in ("int8", "fp8")}
    assert 0 < distance["int8"].median() < 0.15 and 0 < distance["fp8"].median() < 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config"),
    [("qwen3", None), ("qwen3", {**COMPRESSED, "kv_cache_scheme": SCHEME}), ("minicpm3", None)],
    ids=["plain", "declared", "latents"],
)
def test_log_probabilities_with_the_scales_of_a_checkpoint(checkpoint, tmp_path, model, config):
    """With a good scale they are about as close as with a scale per token, with one that is far too large they are
    not.
    """
    exact = torch.tensor(scored(checkpoint(model)))
    distance = []
    for name, scale in (("good", 0.02), ("large", 1000.0)):
        folder = with_scales(checkpoint(model), tmp_path / name, config, ("k_scale", "v_scale"), scale)
        distance.append((torch.tensor(scored(folder, kv_cache_dtype="fp8")) - exact).abs().mean())
    assert 0 < distance[0] < 0.6 and distance[1] > 2 * distance[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "minicpm3"])
def test_chunks_hits_and_preemption_change_nothing(checkpoint, name, kind):
    """A token's numbers in the cache depend on that token alone, so greedy tokens are the same however it got there."""
    settings = dict(kv_cache_dtype=kind, block_size=4, max_num_seqs=4, max_model_len="220")
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [LONG[:203], LONG[90:250], LONG[40:160]]
    whole = InProcessEngine(checkpoint(name), max_num_batched_tokens=512, enable_prefix_caching=False, **settings)
    expected = [whole.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    whole.close()
    # too few blocks for two of the requests at once
    small = InProcessEngine(checkpoint(name), max_num_batched_tokens=64, num_gpu_blocks_override=94, **settings)
    first, again = small.generate(prompts, sampling), small.generate(prompts, sampling)
    small.close()
    assert [result.token_ids for result in first] == [result.token_ids for result in again] == expected
    assert sum(result.num_cached_tokens for result in again) > 0
    assert sum(result.num_preemptions for result in first + again) > 0 or name == "mistral"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "minicpm3"])
def test_two_stages_or_ranks_give_the_same_tokens(checkpoint, name):
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    tokens = []
    for parallel in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        engine = InProcessEngine(
            checkpoint(name), kv_cache_dtype="int8", max_num_seqs=4, max_model_len="400", num_threads=1, **parallel
        )
        tokens.append([result.token_ids for result in engine.generate([LONG[:90], LONG[40:60]], sampling)])
        engine.close()
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.slow
def test_log_probabilities_of_a_trained_model(native_kernels):
    """The bounds in docs/quantization.md, over the assistant's words in conversations that the model was not trained
    on.
    """
    folder = embedded_model()
    if folder is None:
        pytest.skip("the embedded model has no weights in this tree")
    from tokenizers import Tokenizer

    from tests.helpers.models.tiny_conversations import tiny_conversations

    texts = tiny_conversations(Tokenizer.from_file(str(Path(folder) / "tokenizer.json")), count=30)
    learnt = torch.cat([torch.tensor(by_assistant[1:]) for _, by_assistant in texts])

    def scores(kind: str) -> torch.Tensor:
        engine = InProcessEngine(
            folder, kv_cache_dtype=kind, max_num_seqs=8, max_model_len="2048", kv_cache_memory_bytes=64 << 20
        )
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
        results = engine.generate([ids for ids, _ in texts], sampling)
        engine.close()
        return torch.tensor([entry.logprobs[0] for result in results for entry in result.prompt_logprobs])[learnt]

    exact = scores("auto")
    for kind, most in (("int8", 0.001), ("fp8", 0.002)):
        got = scores(kind)
        assert 0 < (got - exact).abs().mean() < most
        assert abs(float((exact - got).mean().exp()) - 1) < 0.001  # the ratio of perplexities
