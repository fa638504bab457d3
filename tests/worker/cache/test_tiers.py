"""Blocks of real models in RAM and on disk: every kind of cache group and storage comes back bit for bit."""

from __future__ import annotations

import random
import stat

import pytest

from quire.engine.messages import SamplingParams
from quire.worker.cache.tiers.fingerprint import model_identity
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import VOCAB, build_family

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
BLOCK = 16


def engine_for(folder: str, **settings) -> InProcessEngine:
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": "512"}
    return InProcessEngine(folder, **sizes | settings)


def save(engine: InProcessEngine) -> None:
    while engine.scheduler.contents.save(64):
        pass
    assert engine.scheduler.tiers.calls.flush(10.0)


KINDS = {
    "full": ("arcee", {}),
    "window": ("gemma3", {}),
    "latent": ("axk1", {}),
    "states": ("qwen3_5", {}),
    "8 bits": ("arcee", {"kv_cache_dtype": "int8"}),
    "8 bits, latent": ("axk1", {"kv_cache_dtype": "fp8"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_continues_from_disk_after_a_restart(tmp_path, kind):
    family, settings = KINDS[kind]
    folder = build_family(family, tmp_path / "model")
    settings = settings | {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 0.01}
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB) for _ in range(150)]
    engine = engine_for(folder, **settings)
    first = engine.generate([prompt], GREEDY)[0]
    hit = engine.generate([prompt], GREEDY)[0]
    assert hit.num_cached_tokens > 0
    save(engine)
    engine.close()
    again = engine_for(folder, **settings)
    result = again.generate([prompt], GREEDY)[0]
    assert result.num_cached_tokens == hit.num_cached_tokens
    assert result.token_ids == first.token_ids
    assert result.logprobs == hit.logprobs  # the same bits
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_rank_keeps_its_part(tmp_path, split):
    folder, rng = build_family("arcee", tmp_path / "model"), random.Random(4)
    prompt = [rng.randrange(3, VOCAB) for _ in range(100)]
    settings = {split: 2, "kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 0.01}
    engine = engine_for(folder, **settings)
    first = engine.generate([prompt], GREEDY)[0]
    engine.generate([prompt], GREEDY)
    save(engine)
    engine.close()
    assert len(list((tmp_path / "kv").glob("v1-*"))) == 2
    again = engine_for(folder, **settings)
    result = again.generate([prompt], GREEDY)[0]
    assert result.num_cached_tokens == 96 and result.token_ids == first.token_ids
    again.close()


def test_ram_brings_back_what_other_traffic_evicted(tmp_path):
    folder = build_family("arcee", tmp_path / "model")
    rng = random.Random(2)
    prompt, *others = ([rng.randrange(3, VOCAB) for _ in range(200)] for _ in range(9))
    engine = engine_for(folder, num_gpu_blocks_override=40, kv_offload_gib=0.01)
    first = engine.generate([prompt], GREEDY)[0]
    engine.generate([prompt], GREEDY)
    for other in others:
        engine.generate([other], GREEDY)
    result = engine.generate([prompt], GREEDY)[0]
    assert engine.scheduler.tiers.counts.num_fetches == 1
    assert result.num_cached_tokens == 192 and result.token_ids == first.token_ids
    engine.close()


@pytest.mark.slow
def test_entries_of_another_model_type_or_format_are_no_hit_and_stay(tmp_path):
    rng = random.Random(3)
    prompt = [rng.randrange(3, VOCAB) for _ in range(100)]
    one, other = (build_family("arcee", tmp_path / name, rope_theta=theta) for name, theta in (("a", 1e4), ("b", 1e5)))
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 0.01}
    for folder, settings in ((one, {}), (other, {}), (one, {"kv_cache_dtype": "int8"}), (one, {"block_size": 32})):
        engine = engine_for(folder, **disk | settings)
        assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 0
        engine.generate([prompt], GREEDY)
        save(engine)
        engine.close()
    assert len(list((tmp_path / "kv").glob("v1-*"))) == 4
    assert len(list((tmp_path / "kv").rglob("*.kv"))) >= 4
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_the_identity_of_a_model_is_that_of_its_weights(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"x" * 100_000)
    before = model_identity(str(folder))
    assert model_identity(str(folder)) == before
    (folder / "a.safetensors").write_bytes(b"x" * 99_999 + b"y")
    assert model_identity(str(folder)) != before


@pytest.mark.parametrize("kind", ["full", "states"])
def test_a_slot_file_brings_the_same_bits_to_the_next_engine(tmp_path, kind):
    folder, rng = build_family(KINDS[kind][0], tmp_path / "model"), random.Random(5)
    prompt = [rng.randrange(3, VOCAB) for _ in range(150)]

    def start() -> InProcessEngine:
        engine = engine_for(folder, slot_save_path=str(tmp_path / "slots"))
        engine.scheduler.contents.open_slots(engine.executor.slots, 0)
        return engine

    def act(engine: InProcessEngine, action: str) -> dict[str, int]:
        job = getattr(engine.scheduler.contents.slots, action)(0, "x")
        while True:
            engine.scheduler.tiers.poll()  # which goes on with fetches
            try:
                next(job)
            except StopIteration as end:
                return end.value

    engine = start()
    engine.generate([prompt], GREEDY)
    hit = engine.generate([prompt], GREEDY)[0]
    saved = act(engine, "save")
    engine.close()
    again = start()
    assert act(again, "restore")["n_restored"] == saved["n_saved"] >= 144
    result = again.generate([prompt], GREEDY)[0]
    assert result.num_cached_tokens == hit.num_cached_tokens == 144
    assert (result.token_ids, result.logprobs) == (hit.token_ids, hit.logprobs)
    again.close()
