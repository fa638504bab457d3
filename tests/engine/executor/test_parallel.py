"""Real workers in several processes generate the same tokens as one process, however the model is divided."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from quire.configs.config import Config
from quire.engine.executor.multiproc import MultiprocExecutor
from quire.engine.messages import EngineStats, SamplingParams
from quire.worker.messages import WorkerReady
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.checkpoints import CHECKPOINTS
from tests.helpers.models.families import build_family
from tests.worker.sampling.test_eagle3 import Twin, eagle_checkpoint

pytestmark = pytest.mark.slow

SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "num_gpu_blocks_override": 64,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": "128",
    "num_threads": 1,
    "debug_check_ranks": True,
}
# more requests than rows, and longer than a step
PROMPTS = [list(range(4, 4 + length)) for length in (5, 40, 17, 3, 30)]
SAMPLING = [
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.9, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, repetition_penalty=1.3, prompt_logprobs=1),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.8, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
]


class ParallelEngine(InProcessEngine):
    """The engine's loop over ranks that load one model after another."""

    def __init__(self, folder: str, **settings):
        self.settings = SETTINGS | settings
        self.config = Config.from_flat(model=folder, **self.settings)
        self.executor = MultiprocExecutor(self.config)
        self.executor.worker_class = "tests.helpers.engine.many_models:ManyModels"
        self.use(self.executor.initialize(lambda phase, fraction: None))

    def load(self, folder: str, rendezvous: str) -> None:
        self.config = Config.from_flat(model=folder, **self.settings)
        self.use(msgspec.convert(self.executor.call("load", msgspec.to_builtins(self.config), rendezvous), WorkerReady))


def run_all(checkpoint, tmp_path, names: list[str], **settings) -> None:
    """Generate with every model over several ranks, and compare with one rank."""
    engine = ParallelEngine(checkpoint(names[0]), **settings)
    try:
        for name in names:
            if name != names[0]:
                engine.load(checkpoint(name), f"file://{tmp_path}/{name}")
            for result, expected in zip(engine.generate(PROMPTS, SAMPLING), alone(checkpoint(name)), strict=True):
                assert result.error is None and (result.token_ids, result.finish_reason) == (
                    expected.token_ids,
                    expected.finish_reason,
                ), name
                for kind in ("logprobs", "prompt_logprobs"):
                    got, wanted = getattr(result, kind), getattr(expected, kind)
                    assert [entry.token_ids for entry in got] == [entry.token_ids for entry in wanted], (name, kind)
                    for ours, theirs in zip(got, wanted):
                        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Callable[[str], str]:
    """Returns the folder of a family's model, which all tests of this file share."""
    return cache(lambda name: build_family(name, tmp_path_factory.mktemp(name) / "model"))


@cache
def alone(folder: str) -> list[Result]:
    engine = InProcessEngine(folder, **SETTINGS)
    try:
        return engine.generate(PROMPTS, SAMPLING)
    finally:
        engine.close()


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_every_architecture_over_two_ranks(checkpoint, tmp_path, settings):
    run_all(checkpoint, tmp_path, list(CHECKPOINTS), **settings)


FORMS = [
    "cohere",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm4",
    "gpt2",
    "granite_swa",
    "hunyuan",
    "olmo2",
    "phi3",
    "starcoder2",
]
EXPERTS = ["gemma4-experts", "llama4", "axk1", "hy_v3", "mistral4"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tensor_parallel_size": 2}, [*FORMS, "gemma4-k-is-v", *EXPERTS]),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, EXPERTS),
        ({"pipeline_parallel_size": 2}, [*FORMS, *EXPERTS]),
    ],
    ids=["tp2", "ep2", "pp2"],
)
def test_every_form_over_two_ranks(family, tmp_path, settings, names):
    """Each arrangement of norms, kind of MLP, norm of q and k, and layout of the checkpoint."""
    run_all(family, tmp_path, names, **settings)


# several streams, states next to attention, compressed keys, latents that layers share
OF_AUTUMN = ["cohere2_moe", "deepseek_v4", "dots3_note", "glm5_next", "hy_v4", "laguna", "mimo_v2", "mistral_large4"]
OF_AUTUMN += ["inkling2", "qwen4_exp", "zaya"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tensor_parallel_size": 2}, [*OF_AUTUMN, "lfm3"]),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, OF_AUTUMN),
        ({"pipeline_parallel_size": 2}, [*OF_AUTUMN, "lfm3"]),
    ],
    ids=["tp2", "ep2", "pp2"],
)
def test_families_of_this_autumn_over_two_ranks(family, tmp_path, settings, names):
    run_all(family, tmp_path, names, **settings, num_gpu_blocks_override=256)


@pytest.mark.parametrize(
    "settings",
    [{"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"pipeline_parallel_size": 2}],
    ids=["ep2", "pp2"],
)
def test_mixtures_of_experts_over_two_ranks(checkpoint, tmp_path, settings):
    run_all(checkpoint, tmp_path, ["qwen2-moe", "gpt-oss", "deepseek-v3"], **settings)


def test_four_ranks(checkpoint, tmp_path):
    """Two stages of two ranks each. With one step in flight no steps overlap; with five they may."""
    run_all(
        checkpoint,
        tmp_path,
        ["qwen3", "llama-tied"],
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        steps_in_flight=5,
    )


def test_three_stages_of_unequal_size(checkpoint, tmp_path):
    run_all(checkpoint, tmp_path, ["llama2"], pipeline_parallel_size=3)


def spec_of(method: str, checkpoint, tmp_path) -> str:
    """`--speculative-config` of a method, and what it needs."""
    more = {}
    if method == "itself":
        method, more = "draft_model", {"model": checkpoint("qwen3")}
    elif method == "draft_model":
        more = {"model": checkpoint("qwen3", seed=1, num_hidden_layers=1, head_dim=16)}
    if method == "eagle3":
        eagle_checkpoint(tmp_path / "head")
        more = {"model": str(tmp_path / "head")}
    return json.dumps({"method": method, "num_speculative_tokens": 4} | more)


@pytest.mark.parametrize(
    ("settings", "methods"),
    [
        ({"tensor_parallel_size": 2}, ["draft_model", "eagle3"]),
        ({"pipeline_parallel_size": 2}, ["suffix", "itself"]),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ["suffix"]),
    ],
    ids=["tp2", "pp2", "tp2-pp2"],
)
def test_drafts_over_several_ranks(checkpoint, tmp_path, settings, methods):
    """All ranks draft and verify the same tokens, which are those without drafts."""
    for method in methods:
        config = spec_of(method, checkpoint, tmp_path)
        stats = check_drafts(checkpoint("qwen3"), settings | {"speculative_config": config})
        num_accepted = sum(stats.accepted_per_position)
        if method == "itself":
            # not all: its own choice has no penalties
            assert num_accepted >= 0.7 * stats.num_draft_tokens > 30
        else:
            assert (5 if method == "suffix" else 0) <= num_accepted < stats.num_draft_tokens


def test_an_eagle_head_reads_streams_of_two_stages(checkpoint, tmp_path):
    target, head = checkpoint("qwen3"), tmp_path / "head"
    twin = Twin(target, eagle_checkpoint(head), False)
    config = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    engine = ParallelEngine(target, pipeline_parallel_size=2, speculative_config=config, dtype="float32")
    try:
        prompts = [[3, 9, 7, 4] * 9, [(7 * i) % 500 + 4 for i in range(23)], [5, 6]]
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
        engine.executor.call("record_drafts")
        assert [one.token_ids for one in engine.generate(prompts, sampling)] == [one.token_ids for one in plain]
        seen = engine.executor.call("recorded")
    finally:
        engine.close()
    assert len(seen) > 30
    for tokens, draft in seen[::3]:
        assert draft == twin.drafts(tokens, len(draft))


def check_drafts(folder: str, settings: dict) -> EngineStats:
    """Returns the counts with drafts."""
    prompts = [[17, 40, 99, 23] * 7, PROMPTS[1], [9, 9, 9, 9], PROMPTS[3]]
    sampling = [msgspec.structs.replace(one, max_tokens=24) for one in SAMPLING[:4]]
    engine = ParallelEngine(folder, **settings)
    try:
        plain = engine.generate(prompts, [msgspec.structs.replace(one, speculation=False) for one in sampling])
        engine.scheduler.flush_stats()
        drafted = engine.generate(prompts, sampling)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        return engine.scheduler.flush_stats()
    finally:
        engine.close()


def test_ranks_that_drift_apart_are_noticed(checkpoint):
    engine = ParallelEngine(checkpoint("qwen3"), tensor_parallel_size=2)
    try:
        engine.executor.call("drift")
        with pytest.raises(RuntimeError, match="the tensor-parallel ranks sampled different tokens"):
            engine.generate(PROMPTS, SAMPLING)
    finally:
        engine.executor.kill()
        engine.close()
