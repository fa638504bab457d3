"""Rows with LoRA adapters against transformers with the adapter merged into the weights: tokens and
log-probabilities.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoints.gguf.folder import gguf_folder
from quire.engine.messages import SamplingParams
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import TOKENIZER_SIZE, greedy
from tests.helpers.models.lora import ALL, ATTENTION, as_gguf, make_adapter, make_expert_adapter, merged, use
from tests.helpers.worker import quantized_checkpoints

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(4, TOKENIZER_SIZE) for _ in range(length)] for length in (1, 5, 17, 40, 90)]


def engine_for(folder, **settings):
    defaults = {"block_size": 4, "num_gpu_blocks_override": 200, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    return InProcessEngine(folder, **defaults | {"max_model_len": "120", "enable_lora": True} | settings)


def check(results, prompts, references):
    for prompt, result, reference in zip(prompts, results, references, strict=True):
        assert result.error is None and result.finish_reason == "length"
        tokens, logprobs, _ = greedy(reference, prompt, NUM_TOKENS)
        assert result.token_ids == tokens
        torch.testing.assert_close([entry.logprobs[0] for entry in result.logprobs], logprobs, atol=1e-3, rtol=0)


def test_ranks_and_none_in_one_batch(checkpoint, tmp_path, prompts):
    """Chunked prompts, GQA, and preemption, since the pool is small; then again from the prefix cache."""
    folder = checkpoint("llama3")
    adapters = [make_adapter(tmp_path / str(rank), folder, rank, seed=rank) for rank in (4, 16, 64)]
    references = [merged(folder), *(merged(folder, (one, 1.0)) for one in adapters), merged(folder)]
    uses = [[], *([use(one)] for one in adapters), []]
    engine = engine_for(folder, num_gpu_blocks_override=46)
    first = engine.generate(prompts, GREEDY, adapters=uses)
    again = engine.generate(prompts, GREEDY, adapters=uses)
    engine.close()
    check(first, prompts, references)
    check(again, prompts, references)
    assert sum(result.num_preemptions for result in first) > 0, "the pool was not small enough"
    assert sum(result.num_cached_tokens for result in again) > 0


def test_one_prompt_with_every_adapter_shares_no_prefix(checkpoint, tmp_path, prompts):
    """The keys of an adapter's blocks begin with its hash: the base model's and others' are never found."""
    folder = checkpoint("qwen2")  # biases of q, k and v
    one, other = (make_adapter(tmp_path / str(seed), folder, 8, seed=seed) for seed in (1, 2))
    engine = engine_for(folder)
    for uses in ([], [use(one)], [use(other)], [use(one, 0.5)], [use(one, -1.0), use(other, 2.0)]):
        (result,) = engine.generate([prompts[-1]], GREEDY, adapters=[uses])
        assert result.num_cached_tokens == 0
        factors = [(one if each.key == use(one).key else other, each.scale) for each in uses]
        check([result], prompts[-1:], [merged(folder, *factors)])
    (again,) = engine.generate([prompts[-1]], GREEDY, adapters=[[use(one)]])
    engine.close()
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("name", "targets", "config"),
    [
        ("llama-bias", ALL, {"use_rslora": True}),
        ("qwen3", ("q_proj", "down_proj"), {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 5}}),
        ("mistral", ATTENTION, {"target_modules": r".*layers\.\d+\.self_attn\..*"}),
        ("qwen3-moe", ATTENTION, {"target_modules": "all-linear"}),
    ],
)
def test_families_and_settings(name, targets, config, checkpoint, tmp_path, prompts):
    folder = checkpoint(name)
    adapter = make_adapter(tmp_path / "one", folder, 8, targets=targets, **config)
    engine = engine_for(folder)
    results = engine.generate(prompts, GREEDY, adapters=[[], [use(adapter)], [use(adapter)], [], [use(adapter)]])
    engine.close()
    adapted = merged(folder, (adapter, 1.0))
    check(results, prompts, [merged(folder), adapted, adapted, merged(folder), adapted])


@pytest.mark.parametrize(("name", "stacked"), [("qwen3-moe", False), ("qwen3-moe", True), ("gpt-oss", True)], ids=str)
def test_experts(name, stacked, checkpoint, tmp_path, prompts):
    """Adapters of experts, as modules of their own and of the tensors of all experts, which gpt-oss has transposed and
    with alternating rows; rows with one of experts, one of attention, both and none.
    """
    folder = checkpoint(name)
    experts = make_expert_adapter(tmp_path / "experts", folder, stacked=stacked)
    dense = make_adapter(tmp_path / "dense", folder, 8, targets=ATTENTION)
    uses = [[], [use(experts)], [use(dense)], [use(experts, 0.5), use(dense)], [use(experts)]]
    engine = engine_for(folder)
    results = engine.generate(prompts, GREEDY, adapters=uses)
    engine.close()
    both = (experts, 0.5), (dense, 1.0)
    adapted = merged(folder, (experts, 1.0))
    references = [merged(folder), adapted, merged(folder, (dense, 1.0)), merged(folder, *both), adapted]
    check(results, prompts, references)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}])
def test_experts_in_other_formats(settings, checkpoint, tmp_path, prompts):
    folder = checkpoint("qwen3-moe", dtype="bfloat16")
    adapter = make_expert_adapter(tmp_path / "one", folder)
    check_scores(folder, adapter, prompts, settings)


@pytest.mark.parametrize(("name", "arch"), [("llama3", "llama"), ("qwen3-moe", "qwen3moe")], ids=str)
def test_gguf_adapters(name, arch, checkpoint, tmp_path, prompts):
    """llama.cpp's files stand for the same adapters: rows of q and k in another order, experts in one tensor."""
    pytest.importorskip("gguf")
    folder = checkpoint(name)
    make, options = (make_expert_adapter, {"some": False}) if name == "qwen3-moe" else (make_adapter, {})
    peft = make(tmp_path / "peft", folder, 8, **options)
    config = merged(folder).config
    file = as_gguf(peft, tmp_path / "one.gguf", arch, (config.num_attention_heads, config.num_key_value_heads))
    adapter = tmp_path / "copy"
    adapter.mkdir()
    file.rename(adapter / "adapter.gguf")
    engine = engine_for(folder)
    results = engine.generate(prompts[:2], GREEDY, adapters=[[use(adapter)], []])
    engine.close()
    check(results, prompts[:2], [merged(folder, (peft, 1.0)), merged(folder)])


def test_more_adapters_than_run_at_once(checkpoint, tmp_path, prompts):
    """Requests wait for a slot, requests without an adapter do not, and adapters are read again after they were
    dropped from RAM.
    """
    folder = checkpoint("llama-tied")
    adapters = [make_adapter(tmp_path / str(seed), folder, 4, seed=seed) for seed in range(5)]
    engine = engine_for(folder, max_loras=1, max_cpu_loras=2)
    several = prompts[1:2] * 11
    uses = [[use(adapters[i % 5])] for i in range(10)] + [[]]
    results = engine.generate(several, GREEDY, adapters=uses)
    assert len(engine.executor._worker.runner.adapters._loaded) <= 2
    engine.close()
    check(results, several, [*[merged(folder, (one, 1.0)) for one in adapters] * 2, merged(folder)])


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8", "dtype": "bfloat16"}])
def test_bfloat16_and_quantized_bases(settings, checkpoint, tmp_path, prompts):
    """The base product keeps its own format and rounding; the reference is in float32. What the adapter adds is several
    times as large as the tolerance.
    """
    folder = checkpoint("llama3", dtype="bfloat16")
    check_scores(folder, make_adapter(tmp_path / "one", folder, 16), prompts, settings)


def check_scores(folder, adapter, prompts, settings):
    engine = engine_for(folder, **settings)
    score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    several = [prompts[3]] * 2 + [prompts[4]] * 2
    results = engine.generate(several, score, adapters=[[use(adapter)], []] * 2)
    engine.close()
    adapted, base = merged(folder, (adapter, 1.0)), merged(folder)
    for i, (prompt, result) in enumerate(zip(several, results)):
        found = torch.tensor([entry.logprobs[0] for entry in result.prompt_logprobs])
        right, wrong = (_scores(model, prompt) for model in ((adapted, base) if i % 2 == 0 else (base, adapted)))
        assert (found - right).abs().mean() < 0.25 * (found - wrong).abs().mean()


@pytest.mark.parametrize("kind", ["int4", "gguf"])
def test_quantized_bases(kind, checkpoint, tmp_path, prompts):
    """The reference has the values that the quantized weights stand for."""
    source = checkpoint("llama3", hidden_size=128, intermediate_size=256)
    if kind == "int4":
        form = quantized_checkpoints.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32)
        quantized_checkpoints.write(source, tmp_path / "made", *form)
        folder, plain = tmp_path / "made" / "quantized", tmp_path / "made" / "plain"
    else:
        files = pytest.importorskip("tests.helpers.models.gguf_files")
        plain = tmp_path / "plain"
        shutil.copytree(source, plain)
        weights = files.write_gguf(source, tmp_path / "model.gguf", {"default": "Q4_0"}, "llama")
        save_file(weights, plain / "model.safetensors", {"format": "pt"})
        folder = gguf_folder(str(tmp_path / "model.gguf"))
    adapter = make_adapter(tmp_path / "one", str(plain), 16)
    engine = engine_for(str(folder), dtype="float32")
    results = engine.generate(prompts[:2], GREEDY, adapters=[[use(adapter)], []])
    engine.close()
    check(results, prompts[:2], [merged(str(plain), (adapter, 1.0)), merged(str(plain))])


def _scores(model, prompt):
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    return logits[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama3", {"tensor_parallel_size": 2}),
        ("llama3", {"pipeline_parallel_size": 2}),
        ("qwen3-moe", {"tensor_parallel_size": 2}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_several_ranks(name, ranks, checkpoint, tmp_path, prompts):
    """A rank multiplies by its share of A or B, and a stage by the matrices of its layers."""
    folder = checkpoint(name)
    make, options = (make_expert_adapter, {"stacked": True}) if name == "qwen3-moe" else (make_adapter, {})
    adapter = make(tmp_path / "one", folder, 8, **options)
    engine = engine_for(folder, **ranks)
    results = engine.generate(prompts[1:4], GREEDY, adapters=[[use(adapter)], [], [use(adapter)]])
    engine.close()
    adapted = merged(folder, (adapter, 1.0))
    check(results, prompts[1:4], [adapted, merged(folder), adapted])


def test_one_adapter_of_the_largest_rank_fits_the_plan(checkpoint, tmp_path, prompts):
    folder = checkpoint("llama3")
    adapter = make_adapter(tmp_path / "one", folder, 24)
    engine = engine_for(folder, max_loras=1, max_cpu_loras=1, max_lora_rank=24)
    (result,) = engine.generate(prompts[:1], GREEDY, adapters=[[use(adapter)]])
    adapters = engine.executor._worker.runner.adapters
    assert adapters._most_bytes == sum(weights.nbytes for _, weights in adapters._loaded[use(adapter).key])
    engine.close()
    check([result], prompts[:1], [merged(folder, (adapter, 1.0))])


def test_what_does_not_fit_the_model_is_refused(checkpoint, tmp_path):
    folder, other = checkpoint("llama3"), checkpoint("qwen3")
    engine = engine_for(folder, max_lora_rank=8)
    load = engine.executor._worker.load_lora
    assert load("a", str(make_adapter(tmp_path / "a", folder, 8))) == ""
    assert "rank 16, more than --max-lora-rank 8" in load("b", str(make_adapter(tmp_path / "b", folder, 16)))
    assert "the model's is" in load("c", str(make_adapter(tmp_path / "c", other, 8)))
    nan = make_adapter(tmp_path / "nan", folder, 8, strength=float("nan"))
    assert "not a number" in load("nan", str(nan))
    targets = ("lm_head",)
    assert "output head" in load("d", str(make_adapter(tmp_path / "d", folder, 8, targets=targets)))
    engine.close()
