"""Every family on a GPU, through the whole engine, says in float32 what it says on the CPU; so do formats, caches in 8
bits and adapters.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.engine.messages import LoraUse, SamplingParams
from quire.worker.models.registry import read_model_spec
from tests.checkpoints import test_gguf
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, WITHOUT_VARIANTS, build_family
from tests.helpers.models.lora import make_adapter, use

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SETTINGS = dict(
    dtype="float32", max_num_seqs=8, max_model_len="160", num_gpu_blocks_override=120, max_num_batched_tokens=48
)
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, prompt_logprobs=0, ignore_eos=True)
FORMATS = {
    "cache in fp8": (dict(kv_cache_dtype="fp8"), 0.1),
    "cache in int8": (dict(kv_cache_dtype="int8"), 0.02),
    "small steps": (dict(max_num_batched_tokens=8), 0.002),
    "eager": (dict(enforce_eager=True), 0.002),
}


def answers(folder: str, adapters: list[list[LoraUse]] | None = None, **settings) -> list[Result]:
    """The first prompts twice, so that the second time finds a part of each in the prefix cache."""
    engine = InProcessEngine(folder, **SETTINGS | settings)
    vocab = min(read_model_spec(folder).vocab_size, 500)
    prompts = [[(11 * i + 7 * j) % (vocab - 4) + 3 for j in range(1 + 17 * i)] for i in range(6)]
    try:
        while engine.executor.workers.work_idle():  # records graphs, if the platform has them
            pass
        results = engine.generate(prompts, SAMPLING, adapters=adapters)
        again = [prompt + result.token_ids[:3] for prompt, result in zip(prompts, results)]
        results += engine.generate(again, SAMPLING, adapters=adapters)
    finally:
        engine.close()
    assert not any(result.error for result in results), [result.error for result in results]
    return results


def check(found: list[Result], expected: list[Result], tolerance: float) -> None:
    """The log-probabilities agree, and so do the tokens up to one where two are as probable within the tolerance."""
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        scores = [[entry.logprobs[0] for entry in result.prompt_logprobs if entry] for result in (one, other)]
        if len(scores[0]) == len(scores[1]):  # prompts of the second round follow the first round's tokens
            assert scores[0] == pytest.approx(scores[1], abs=tolerance), i
        for entry, wanted in zip(one.logprobs, other.logprobs, strict=True):
            if entry.token_ids[0] != wanted.token_ids[0]:
                assert wanted.logprobs[1] - wanted.logprobs[2] < 2 * tolerance, i
                return  # another text from here on, in the second round too
            assert entry.logprobs[0] == pytest.approx(wanted.logprobs[0], abs=tolerance), i


@pytest.mark.parametrize("name", [*WITHOUT_VARIANTS, *CHECKPOINTS, *MOE_CHECKPOINTS])
def test_families(name, tmp_path):
    if name in FAMILIES and FAMILIES[name][0] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {FAMILIES[name][0]}")
    folder = str((build_family if name in FAMILIES else build_checkpoint)(name, tmp_path))
    # a norm directly after a state scales the rounding of small values up
    tolerance = 0.02 if read_model_spec(folder).has_states else 0.003
    check(answers(folder, device="cuda"), answers(folder), tolerance)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_formats(family, name, tmp_path):
    folder, (settings, tolerance) = str(build_checkpoint(family, tmp_path)), FORMATS[name]
    cpu = {} if "kv_cache_dtype" in settings else {"attention_backend": "cpu_paged"}
    if "enforce_eager" not in settings:
        cpu |= settings
    check(answers(folder, device="cuda", **settings), answers(folder, **cpu), tolerance)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_rounded_at_load(quantization, checkpoint):
    """In bfloat16, the only type of their activations, whose rounding moves what a random model says."""
    settings = dict(quantization=quantization, dtype="bfloat16")
    folder = checkpoint("qwen3")
    check(answers(folder, device="cuda", **settings), answers(folder, cpu_activation_bits="16", **settings), 0.5)


def test_adapters(checkpoint, tmp_path):
    """Rows with one of two adapters, with a scaled one and with none."""
    folder = checkpoint("llama3")
    one, two = (make_adapter(tmp_path / str(rank), folder, rank, seed=rank, strength=0.3) for rank in (4, 16))
    adapters = [[use(one)], [], [use(two)], [use(one, 0.5)], [use(two)], []]
    found, expected = (answers(folder, adapters, enable_lora=True, device=device) for device in ("cuda", "cpu"))
    check(found, expected, 0.003)


@pytest.mark.parametrize("name, arch, kinds", test_gguf.MODELS[:4])
def test_gguf_files(name, arch, kinds, tmp_path):
    """Weights of several block types, multiplied as they are stored, next to the weights that these stand for."""
    file, source = test_gguf.pair(name, tmp_path, kinds, arch, **test_gguf.SPECIAL.get(name, {}))
    check(answers(file, device="cuda"), answers(source), 0.01)
