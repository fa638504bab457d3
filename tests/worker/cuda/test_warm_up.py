"""No request after the warm-up needs a kernel that was not compiled by then, shown by the variants of kernels that
launches on a stand-in for a GPU ask for.
"""

import random
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.helpers.gpu import has_gpu

pytest.importorskip("triton")
if has_gpu():  # what it imports selects the interpreter for all tests of this process
    pytest.skip("records calls under Triton's interpreter", allow_module_level=True)
from quire.engine.messages import SAMPLERS, Dry, NoRepeatNgram, SamplerChain, SamplingParams
from quire.engine.startup import warm_up
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import config_of
from tests.helpers.models.families import FAMILIES, build_family
from tests.helpers.models.lora import ALL, ATTENTION, make_adapter, make_expert_adapter, use
from tests.helpers.worker.variants import Variants, variant

pytestmark = pytest.mark.slow

BASE = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)
# 40 kinds of requests: prompts of 18 lengths, and 22 ways to sample
LENGTHS = (1, 2, 3, 5, 9, 16, 17, 31, 32, 63, 64, 65, 100, 127, 128, 129, 200, 250)
WAYS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"presence_penalty": 0.4},
    {"frequency_penalty": 0.4, "temperature": 1.0},
    {"repetition_penalty": 1.2, "temperature": 1.0, "top_k": 3},
    {"repetition_penalty": 1.2, "repeat_last_n": 5},
    {"logit_bias": {7: 2.0, 9: -1.0}},
    {"bad_words_ids": [[7], [8, 9, 10]]},
    {"allowed_token_ids": [0, 5, 6, 7]},
    {"min_tokens": 2, "eos_token_ids": [3]},
    {"no_repeat_ngram": NoRepeatNgram(2, window=9)},
    {"logprobs": 0},
    {"logprobs": 5, "temperature": 1.0},
    {"logprobs": -1, "presence_penalty": 0.1},
    {"logprobs": 2, "logprobs_mode": "processed_logprobs", "temperature": 1.0, "top_p": 0.5},
    {"prompt_logprobs": 2},
    {"prediction": [5, 6, 7, 8, 9]},
    {"chain": SamplerChain(SAMPLERS, typical_p=0.5, xtc_probability=0.5, dry=Dry(0.5)), "temperature": 1.0},
    {"chain": SamplerChain(SAMPLERS, mirostat=1), "temperature": 1.0},
)
SETTINGS = dict(
    load_format="dummy", dtype="bfloat16", block_size=16, num_gpu_blocks_override=120, max_num_batched_tokens=128,
    max_num_seqs=6, max_model_len="260",
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of_all_kinds(engine: InProcessEngine, adapters=None) -> None:
    """Run requests of every kind, alone and together."""
    numbers = random.Random(0)

    def prompts(*lengths: int) -> list[list[int]]:
        return [[numbers.randrange(engine.ready.vocab_size) for _ in range(length)] for length in lengths]

    for length in LENGTHS:
        engine.generate(prompts(length), BASE, adapters=adapters and [adapters[:1]])
    for i, way in enumerate(WAYS):
        engine.generate(prompts(*range(3, 4 + i % 7)), msgspec.structs.replace(BASE, **way))
    many = [[], *([one] for one in adapters), adapters, []] if adapters else None
    engine.generate(prompts(100, 7, 1, 40, 150), BASE, adapters=many)
    engine.generate(prompts(6, 5), msgspec.structs.replace(BASE, temperature=1.0), n=3)


def libraries() -> set[str]:
    """Shared libraries in this process, which code loads at its first use."""
    if sys.platform != "linux":
        return set()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line.rpartition("/")[2]}


def missing(folder: str, adapters=None, **settings) -> tuple[set, set]:
    """Return (variants that the warm-up asked for, those and the libraries that only later requests did)."""
    variants = Variants()
    with variants.recording():
        engine = InProcessEngine(folder, **SETTINGS | settings)
        warm_up(engine.scheduler, engine.executor, compiles_at_use=True)
        warm, loaded = set(variants.seen), libraries()
        of_all_kinds(engine, adapters)
        late = libraries() - loaded
        engine.close()
    return warm, (set(variants.seen) - warm) | late


@pytest.mark.parametrize(
    "name, settings",
    [
        ("llama3", {}),
        ("qwen3-moe", {"kv_cache_dtype": "int8"}),
        ("qwen3", {"quantization": "int4"}),
        ("qwen3", {"quantization": "int8"}),
        ("gpt-oss", {}),
        ("qwen3_next", {"enforce_eager": True}),
        ("deepseek-v3", {"enforce_eager": True}),
        ("falcon_h1", {}),
    ],
)
def test_requests_after_the_warm_up_compile_nothing(name, settings, tmp_path):
    if name in FAMILIES:
        build_family(name, tmp_path)
    else:
        config_of(name, num_hidden_layers=2).save_pretrained(tmp_path)
    warm, late = missing(str(tmp_path), **settings)
    assert len(warm) > 10 and not late, late


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe"])
def test_adapters_after_the_warm_up_compile_nothing(name, checkpoint, tmp_path):
    folder = checkpoint(name)
    targets = (ALL if name == "llama3" else ATTENTION, ("o_proj", "q_proj"))
    adapters = [
        use(make_adapter(tmp_path / str(i), folder, seed=i, rank=4 + 4 * i, targets=some))
        for i, some in enumerate(targets)
    ]
    if name == "qwen3-moe":
        adapters[1] = use(make_expert_adapter(tmp_path / "experts", folder))
    warm, late = missing(folder, adapters, enable_lora=True)
    assert {"_shrink_kernel", "_expand_kernel"} <= {name for name, *_ in warm} and not late, late


def test_what_a_short_request_leaves_out(tmp_path):
    """The test sees what is missing: a CPU's warm-up leaves most of it."""
    config_of("qwen3-moe", num_hidden_layers=1).save_pretrained(tmp_path)
    variants = Variants()
    with variants.recording():
        engine = InProcessEngine(str(tmp_path), **SETTINGS)
        warm_up(engine.scheduler, engine.executor)
        short = set(variants.seen)
        warm_up(engine.scheduler, engine.executor, compiles_at_use=True)
        assert engine.scheduler.kv.usage == 0 and engine.scheduler.counts.num_encoded == 0
        assert engine.scheduler.flush_stats().iteration_tokens == []
        engine.close()
    left = set(variants.seen) - short
    assert {"_exclude_kernel", "_gate_up_kernel", "_choose_kernel"} <= {name for name, *_ in left}, left


def test_variants_are_what_triton_compiles():
    """Integers that are 1 or multiples of 16, types and alignment make variants; other values do not."""
    from quire.worker.cuda.kernels.triton_step import _append_kernel as kernel

    numbers, tokens = torch.zeros(40, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int32)

    def of(num=3, stride=64, first=0, of_tokens=0, block=512):
        views = tokens.view(-1)[of_tokens:], numbers[first:], numbers, numbers
        names = ("tokens", "rows", "positions", "token_ids", "num", "length", "stride", "BLOCK")
        return variant(kernel, dict(zip(names, (*views, num, 9, stride, block))))

    assert of() == of(num=1) == of(num=16) == of(first=1) == of(stride=32)
    assert len({of(), of(stride=1), of(stride=8), of(of_tokens=1), of(block=64)}) == 5
