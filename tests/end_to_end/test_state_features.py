"""What works on other models works on those with recurrent states."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from quire.configs.config import Config
from quire.engine.messages import SamplingParams
from quire.worker.startup.preview import preview
from tests.end_to_end.test_recovery import SCRIPT, TINY, survive
from tests.end_to_end.test_structured_output import MIXED, PROMPTS, SETTINGS, check, start
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.checkpoints import VOCAB_SIZE
from tests.helpers.models.embedders import write_modules
from tests.helpers.models.families import build_family
from tests.server.test_launch import server_process
from tests.worker.transformer.test_pooling import pooled


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return build_family("qwen3_5", tmp_path_factory.mktemp("states"), vocab_size=VOCAB_SIZE)


def test_structured_output_in_chunks_at_any_depth(folder):
    found = []
    for settings in ({}, {"steps_in_flight": 2, "max_num_batched_tokens": 7}):
        engine = start(InProcessEngine(folder, **SETTINGS | settings))
        found.append(engine.generate(PROMPTS, MIXED))
        engine.close()
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
    for i in (0, 1, 5):
        check(found[0][i])


def test_keys_and_values_in_8_bits(folder):
    prompts, results = [[5 + i * 7 % 400 for i in range(90)]], []
    for dtype in ("auto", "int8"):
        engine = InProcessEngine(folder, **SETTINGS | {"kv_cache_dtype": dtype})
        (result,) = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
        results.append(dict(zip(result.logprobs[0].token_ids, result.logprobs[0].logprobs)))
        engine.close()
    exact, rounded = results
    errors = [abs(exact[token] - rounded[token]) for token in exact.keys() & rounded.keys()]
    assert len(errors) > 15 and 0 < max(errors) < 0.05


def test_the_memory_plan_counts_states(folder):
    sizes = {"model": folder, "device": "cpu", "max_model_len": "128", "kv_cache_memory_bytes": 1 << 20}
    ready = preview(Config.from_flat(**sizes, max_num_seqs=4))
    choices = {name: (value, reason) for name, value, reason in ready.choices}
    page = 3 * 4 * (4 * 16 * 24 + 3 * (2 * 2 * 16 + 4 * 24))  # bytes, of three layers: a state, a convolution
    value, reason = choices["recurrent states"]
    assert ready.num_states >= 8 and ready.plan.states == int(value) * page
    assert "two per request and the rest for cached prefixes" in reason
    with pytest.raises(ValueError, match="--max-num-seqs 64: the recurrent states of 64 requests need"):
        preview(Config.from_flat(**sizes, max_num_seqs=64))
    sizes |= {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 20}
    choices = {name: value for name, value, _ in preview(Config.from_flat(**sizes, max_num_seqs=4)).choices}
    assert choices["recurrent states"] == str(10 * 4 + 32)  # blocks that are not there take no room of states


@pytest.mark.parametrize("requests", [1, 4])
def test_states_take_a_tenth_of_the_pool_unless_there_is_room(folder, requests):
    """Of a pool that is too small for the blocks of all requests; one with room for these has ten states for each."""
    sizes = {"model": folder, "device": "cpu", "max_model_len": "2048", "max_num_seqs": requests}
    sizes |= {"speculative_config": json.dumps({"method": "none"}), "max_num_batched_tokens": 64}
    roomy = preview(Config.from_flat(**sizes, kv_cache_memory_bytes=1 << 28))
    assert roomy.num_states == 10 * requests
    state = roomy.plan.states // roomy.num_states
    blocks = requests * (2048 // roomy.block_size) * roomy.plan.bytes_per_block
    for share in (0.3, 0.6, 0.9):
        pool = int(blocks * share)
        tight = preview(Config.from_flat(**sizes | {"max_model_len": "auto"}, kv_cache_memory_bytes=pool))
        assert tight.plan.states + tight.plan.kv_cache <= pool
        assert tight.num_states == max(2 * requests, int(pool * 0.1) // state) < 10 * requests


@pytest.mark.parametrize("requests", [1, 4])
def test_drafts_leave_pages_for_checkpoints(folder, requests):
    """Drafts, on by default, have no more pages than checkpoints of prefixes, and no more than a step needs."""
    sizes = {"model": folder, "device": "cpu", "max_model_len": "2048", "max_num_seqs": requests}
    ready = preview(Config.from_flat(**sizes, kv_cache_memory_bytes=1 << 28))
    choices = {name: int(value) for name, value, _ in ready.choices if "states" in name}
    assert choices["spare states"] <= 32 and ready.num_states == choices["recurrent states"] - choices["spare states"]
    assert ready.num_states - 2 * requests >= choices["spare states"] > 0


def test_embeddings(tmp_path):
    from transformers import AutoModel

    source = build_family("lfm2", tmp_path / "lm")
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    write_modules(tmp_path / "model", model.config.hidden_size, "lasttoken", True)
    prompts = [[5 + i * 7 % 100 for i in range(length)] for length in (3, 40, 70)]
    engine = InProcessEngine(str(tmp_path / "model"), dtype="float32", max_num_batched_tokens=32, max_num_seqs=4)
    found = pooled(engine, prompts, normalize=True)
    engine.close()
    with torch.inference_mode():
        last = torch.stack([model(torch.tensor([one])).last_hidden_state[0, -1] for one in prompts])
    torch.testing.assert_close(found, torch.nn.functional.normalize(last, dim=-1), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_engine_killed_beside_open_streams(folder, checkpoint, tmp_path):
    for pattern in ("*token*", "*template*"):
        for path in Path(checkpoint("qwen3")).glob(pattern):
            shutil.copy(path, folder)
    with server_process(folder, tmp_path, script=SCRIPT, **TINY) as server:
        survive(server.wait_ready(), 1, 6, num_tokens=40, seed=3)
