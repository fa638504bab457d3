"""Models that transformers computes over our attention and engine (`--model-impl`), against transformers alone: ragged
prompts, chunks, preemption, prefix hits. And those that it cannot compute, with the reason.
"""

import random

import pytest
import torch

from quire.engine.messages import AddRequest, SamplingParams
from quire.worker.models.registry import DECODERS, model_class
from tests.end_to_end.test_equals_transformers import LENGTHS, engine_for
from tests.end_to_end.test_families import small_engine
from tests.helpers.models import families, judges
from tests.helpers.models.checkpoints import (
    CHECKPOINTS,
    MOE_CHECKPOINTS,
    TOKENIZER_SIZE,
    VOCAB_SIZE,
    build_checkpoint,
    load_reference,
)

pytestmark = pytest.mark.slow

NUM_TOKENS = 20

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": 2,
}
# model type -> differences from _BASE
FAMILIES = {
    "helium": {"head_dim": 16},  # interleaved rotary embedding
    "apertus": {},  # norms of q and k, xIELU
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},  # attention and MLP in parallel, fused q, k and v
    "phi": {"partial_rotary_factor": 0.5},  # biases everywhere, of the head as well
    "biogpt": {},  # learned positions
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
# the same, whose layers keep states
WITH_STATES = {
    "zamba": {  # all its hybrid layers share one module of attention
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_dt_rank": 4,
        "mamba_d_state": 8,
    }
}
POOLS = {"gemma2": 215, "gpt_oss": 215, "gemma4_text": 215}  # two groups of layers
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
# what a layer may ask of attention, by families that also have files of their own
FORCED = {
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 32, "sliding_window": 24},  # windows, soft caps, a scale
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2} | _WINDOWS,  # sinks
    "deepseek_v2": _LATENT | {"q_lora_rank": 48, "first_k_dense_replace": 9},  # values narrower than keys
    "gemma4_text": {  # layers of two shapes, which share keys and values
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": _WINDOWS["layer_types"] * 2,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
}


def build(model_type: str, folder, dtype: str = "float32", **changes) -> str:
    import transformers

    config = transformers.CONFIG_MAPPING[model_type](**_BASE | (FAMILIES | FORCED | WITH_STATES)[model_type] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def _randomize(model) -> None:
    """Move every parameter away from its default, so that the best token wins by a clear margin."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            value = parameter.data + 0.2 * noise
        elif parameter.shape[0] in (VOCAB_SIZE, _BASE["max_position_embeddings"] + 2):
            value = 0.5 * noise
        else:
            value = 1.5 * noise / parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)
        if parameter.shape[0] == VOCAB_SIZE:
            parameter.data[TOKENIZER_SIZE:] = 0 if parameter.dim() > 1 else -100


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(4, TOKENIZER_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("model_type", [*FAMILIES, *FORCED])
def test_tokens_and_logprobs(model_type, tmp_path, prompts):
    folder = build(model_type, tmp_path)
    engine = engine_for(
        folder, POOLS.get(model_type, 190), model_impl="transformers" if model_type in FORCED else "auto"
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    first = engine.generate(prompts, sampling)
    again = engine.generate(prompts[::-1], sampling)[::-1]
    engine.close()
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    reference = load_reference(folder)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            assert result.error is None and len(result.token_ids) == NUM_TOKENS
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judges.judge(reference, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: {wrong} wrong, error {error}"


@pytest.mark.parametrize(("quantization", "most"), [(None, 0.02), ("int8", 0.05), ("int4", 0.5)])
def test_linear_layers_are_quires_own(quantization, most, tmp_path, monkeypatch):
    """The platform's kernels multiply all matrices, and quantize them at load; no weight stays in the mapped file."""
    from quire.worker.cpu import build as native_build
    from quire.worker.cpu import native
    from quire.worker.cpu.device import CpuPlatform
    from quire.worker.host.huge_pages import mappings_of
    from quire.worker.models.fallback import SwappedLinear
    from quire.worker.models.registry import build_model, read_model_spec
    from quire.worker.weights.loader import load_weights
    from tests.helpers.worker.dense_attention import PagedRunner

    if native_build.cpu_level() is None or native_build.compiler() is None:
        pytest.skip("no native kernels here")
    loaded = native.Kernels()
    assert loaded.load(background=False), loaded.status
    monkeypatch.setattr(native.KERNELS, "lib", loaded.lib)
    folder = build("helium", tmp_path, "bfloat16", hidden_size=128, intermediate_size=256, head_dim=32)
    spec, text = read_model_spec(folder), [7 * i % 120 + 4 for i in range(50)]
    model = build_model(spec, torch.bfloat16, torch.device("cpu"), 128, quantization, CpuPlatform().ops)
    load_weights(model, spec, folder)
    linears = [module for module in model.modules() if isinstance(module, SwappedLinear)]
    assert len(linears) == 2 * 7 + 1  # with the head
    assert all(linear.weight is None for linear in linears)  # repacked or quantized by the kernels
    mapped = mappings_of(tmp_path.glob("*.safetensors"))
    assert not any(parameter.data_ptr() in file for parameter in model.parameters() for file in mapped)
    logits = model.logits(PagedRunner(model, 1, 64).step({0: text})[0])
    with torch.inference_mode():
        exact = judges.load_family(folder)(torch.tensor([text])).logits[0]
    errors = (logits - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < most


# of each family that cannot run, what config.json says beyond _BASE, and a part of the reason
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_INDEXED = _LATENT | _EXPERTS | {"n_routed_experts": 4, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
REFUSED = {
    "llama4_text": (_EXPERTS | {"head_dim": 16, "attention_chunk_size": 16}, "masks attention in chunks"),
    "deepseek_v32": (_INDEXED, "sparse attention"),
    "glm_moe_dsa": (_INDEXED, "sparse attention"),
    "phi3": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}},
        "longrope.*longest sequence of a batch",
    ),
    "bloom": ({}, "0 of its 2 layers attend"),
    "gptj": ({}, "does not go through transformers' attention interface"),
    "t5gemma": ({}, "it has an encoder"),
    "cohere2_vision": ({}, "no causal language model of the model type 'cohere2_vision'; models with an encoder"),
    "hy_v4": (_EXPERTS | {"head_dim": 16}, "a pass without transformers' own cache .* ends with TypeError"),
    "minimax_m3_vl_text": (
        _EXPERTS | {"head_dim": 16, "layer_types": ["full_attention", "minimax_m3_sparse"]},
        "its attention takes block_indices",
    ),
    "xlstm": ({"num_heads": 4}, "recurrent state elsewhere"),
    "recurrent_gemma": ({}, "layer 0 neither attends .* nor keeps a state"),
    "rwkv": ({}, "recurrent state elsewhere"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_run_are_refused_with_the_reason(model_type, tmp_path):
    import transformers

    from quire.worker.models.registry import read_model_spec

    changes, reason = REFUSED[model_type]
    config = transformers.CONFIG_MAPPING[model_type](**_BASE | changes)
    config.architectures = ["SomeForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"SomeForCausalLM cannot run with transformers: .*({reason})"):
        read_model_spec(str(tmp_path), "transformers")


# of families that also have files of their own: why transformers cannot compute them
NOT_FORCED = {
    "hunyuan": "rope_type 'dynamic'",
    "phi3": "rope_type 'longrope'",
    "phi3-long": "rope_type 'longrope'",
    "llama4": "masks attention in chunks",
    "mistral4": "no causal language model of the model type 'mistral4'",
    "hy_v4": "a pass without transformers' own cache",
    "dots3_note": "a pass without transformers' own cache",
    "deepseek_v4": "(recurrent state elsewhere|no cache for)",
    "inkling2": "its attention takes position_bias, sinks",
    "qwen4_exp": "its cache has layers that are not implemented",
    "deepseek-v32": "sparse attention",
    "glm-5": "sparse attention",
}


# transformers bounds their time steps in the first tokens of a prompt, and not in those that pass one by one
UNEVEN = ("mamba2", "nemotron_h", "nemotron_h-experts", "zamba2")


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.BY_TRANSFORMERS, *CHECKPOINTS, *MOE_CHECKPOINTS])
def test_the_families_with_files_of_their_own(name, tmp_path):
    """Several requests at once in chunks, or a refusal."""
    from quire.worker.models.registry import build_model, read_model_spec
    from quire.worker.weights.loader import load_weights
    from tests.helpers.worker.dense_attention import PagedRunner

    checkpoints = CHECKPOINTS | MOE_CHECKPOINTS
    (build_checkpoint if name in checkpoints else families.build_family)(name, folder := str(tmp_path))
    if name in NOT_FORCED:
        with pytest.raises(ValueError, match=f"cannot run with transformers: .*{NOT_FORCED[name]}"):
            read_model_spec(folder, "transformers")
        return
    spec = read_model_spec(folder, "transformers")
    model = build_model(spec, torch.float32, torch.device("cpu"), 128)
    load_weights(model, spec, folder)
    rng = random.Random(0)
    texts = [[rng.randrange(4, families.VOCAB) for _ in range(length)] for length in (40, 1, 25)]
    runner, got = PagedRunner(model, len(texts), 64), [[] for _ in texts]
    for step in ({0: texts[0][:30], 2: texts[2][:9]}, {0: texts[0][30:], 1: texts[1], 2: texts[2][9:]}):
        for row, hidden in runner.step(step).items():
            got[row].append(model.logits(hidden))
    reference = judges.load_family(folder, bounded=False)
    for text, logits, first in zip(texts, got, (30, 1, 9)):
        with torch.inference_mode():
            wanted = reference(torch.tensor([text])).logits[0]
        compared = slice(first if name in UNEVEN else None)
        # later tokens pass a state one by one, not in the chunks of the reference
        atol = 5e-3 if spec.has_states else 1e-3
        torch.testing.assert_close(torch.cat(logits)[compared], wanted[compared], atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["zaya", "lfm3", "granite4-mamba", "mamba", "minimax", *WITH_STATES])
def test_models_with_states(name, tmp_path):
    """Requests at once, chunks, preemption, prefix hits, an abort; the states of one do not touch those of another."""
    folder = (build if name in WITH_STATES else families.build_family)(name, tmp_path)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, families.VOCAB) for _ in range(length)] for length in (1, 3, 17, 40, 70, 90)]
    engine = small_engine(folder, model_impl="transformers")
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    first = engine.generate(prompts, sampling)
    engine.scheduler.add(AddRequest("ended", prompts[-1][::-1], sampling))
    for _ in range(3):  # a request is aborted when it has a state, whose pages are used again
        step = engine.scheduler.schedule()
        engine.scheduler.update(step, engine.executor.execute(step.input).result())
    engine.scheduler.abort(["ended"])
    again = engine.generate(prompts[::-1], sampling)[::-1]
    engine.close()
    assert sum(result.num_cached_tokens for result in again) > 0, "no prefix was found again"
    reference = judges.load_family(folder)
    for results in (first, again):
        for prompt, result in zip(prompts, results):
            assert result.error is None
            logprobs = [entry.logprobs[0] for entry in result.logprobs]
            wrong, error = judges.judge(reference, prompt, result.token_ids, logprobs)
            assert (wrong, error < 1e-3) == (0, True), f"prompt of {len(prompt)} tokens: error {error}"


# families that people run: computed and compared, or refused with the reason (REFUSED)
WANTED = """
gemma gemma2 gemma3_text gemma3n_text gemma4_text phi3 glm glm4 granite olmo2 olmo3 starcoder2 exaone4 cohere cohere2
smollm3 nemotron seed_oss hunyuan_v1_dense ernie4_5 internlm3 ministral3 gpt2 opt mixtral granitemoe qwen2_moe
qwen3_moe gpt_oss deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 deepseek_v32 glm_moe_dsa glm4_moe minimax_m2 olmoe
llama4_text ernie4_5_moe hunyuan_v1_moe qwen3_next qwen3_5_text qwen3_5_moe_text nemotron_h granitemoehybrid falcon_h1
jamba lfm2 lfm2_moe kimi_linear minimax zamba2 helium apertus stablelm gpt_neox phi biogpt phimoe
"""


@pytest.mark.parametrize("model_type", WANTED.split())
def test_every_family_is_compared_with_transformers_or_refused(model_type):
    import transformers

    compared = {kind for kind, _ in families.FAMILIES.values()} | FAMILIES.keys()
    for prefix, _ in (CHECKPOINTS | MOE_CHECKPOINTS).values():
        compared.add(getattr(transformers, f"{prefix}Config").model_type)
    native = {kind for name in DECODERS if (kind := model_class(name).config_defaults["model_type"])}
    assert model_type in (compared if model_type in native | FAMILIES.keys() else REFUSED)


def test_who_computes_a_model(tmp_path):
    from quire.worker.models.registry import read_model_spec

    def implementation(model_type: str, architecture: str, requested: str = "auto") -> str:
        import transformers

        config = transformers.CONFIG_MAPPING[model_type](**_BASE)
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        return read_model_spec(str(tmp_path), requested).implementation

    assert implementation("llama", "LlamaForCausalLM") == "quire"
    assert implementation("llama", "LlamaForCausalLM", "transformers") == "transformers"
    assert implementation("apertus", "ApertusForCausalLM") == "transformers"
    with pytest.raises(ValueError, match="architecture not supported: ApertusForCausalLM"):
        implementation("apertus", "ApertusForCausalLM", "quire")
    assert implementation("llama", "LlavaForConditionalGeneration") == "quire"  # the text part of a wrapper
