"""Disaggregated prefill with real models: a prompt that one engine computed goes on at another one with the tokens of a
single engine, or is computed.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from quire.engine.messages import SamplingParams, Transfer
from quire.worker.cache.tiers import remote
from tests.helpers.in_process import InProcessEngine, Result
from tests.helpers.models.families import VOCAB, build_family
from tests.helpers.models.lora import make_adapter, use

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FIRST = msgspec.structs.replace(GREEDY, max_tokens=1)
BLOCK = 16

KINDS = {
    "full": ("arcee", {}),
    "window": ("gemma3", {}),
    "latent": ("kimi_k2", {}),
    "latent and states": ("kimi_linear", {}),
    "delta states": ("qwen3_next", {}),
    "convolutions": ("lfm2", {}),
    "mamba": ("granite4-mamba", {}),
    "only states": ("mamba2", {}),
    "8 bits": ("arcee", {"kv_cache_dtype": "int8"}),
    "8 bits, window": ("gemma3", {"kv_cache_dtype": "fp8"}),
    "8 bits, latent": ("kimi_k2", {"kv_cache_dtype": "fp8"}),
}


def free_ports(count: int = 2) -> int:
    """The first of some ports in a row that are free."""
    for port in range(random.randrange(20_000, 30_000), 32_000, count):
        with socket.socket() as one, socket.socket() as other:
            try:
                for i, taken in enumerate((one, other)[:count]):
                    taken.bind(("127.0.0.1", port + i))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def engine_for(folder: str, role: str, **settings) -> InProcessEngine:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_ports()}
    sizes = {"block_size": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": "512"}
    return InProcessEngine(folder, kv_transfer_config=json.dumps(transfer), **sizes | settings)


@pytest.fixture
def engines() -> Iterator[Callable[..., InProcessEngine]]:
    made = []

    def make(*args, **settings) -> InProcessEngine:
        made.append(engine_for(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def words(seed: int, count: int = 150) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def prefill(producer: InProcessEngine, prompt: list[int], **fields) -> Transfer:
    (result,) = producer.generate([prompt], FIRST, transfers=[Transfer(send=True)], **fields)
    return msgspec.structs.replace(result.sent, send=False)


def decode(consumer: InProcessEngine, prompt: list[int], sent: Transfer, **fields) -> Result:
    """Go on at another engine, as soon as it knows its model's files."""
    tiers, end = consumer.scheduler.tiers, time.monotonic() + 10
    while True:
        (result,) = consumer.generate([prompt], GREEDY, transfers=[sent], **fields)
        if tiers.counts.num_fetches or time.monotonic() > end:
            return result
        assert consumer.scheduler.kv.reset_prefix_cache()
        time.sleep(0.02)


def alone(engine: InProcessEngine, prompt: list[int], **fields) -> list[int]:
    """The tokens without any cached prefix."""
    engine.cache_salt = "alone"
    (result,) = engine.generate([prompt], GREEDY, **fields)
    engine.cache_salt = None
    assert result.num_cached_tokens == 0
    return result.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache_goes_on_at_another_engine(engines, tmp_path, kind):
    family, settings = KINDS[kind]
    folder = build_family(family, tmp_path / "model")
    prompt = words(1)
    producer, consumer = (engines(folder, role, **settings) for role in ("kv_producer", "kv_consumer"))
    sent = prefill(producer, prompt)
    result = decode(consumer, prompt, sent)
    assert result.num_cached_tokens >= 128 and result.token_ids == alone(consumer, prompt)
    consumer.cache_salt = "other"
    assert consumer.generate([prompt], GREEDY, transfers=[sent])[0].num_cached_tokens == 0


@pytest.mark.slow
def test_blocks_of_an_adapter_are_only_those_of_this_adapter(engines, tmp_path):
    folder, prompt = build_family("arcee", tmp_path / "model"), words(2)
    law, tax = ([use(make_adapter(tmp_path / name, folder, seed=i))] for i, name in enumerate(("law", "tax")))
    settings = {"enable_lora": True, "max_loras": 2}
    producer, consumer = (engines(folder, role, **settings) for role in ("kv_producer", "kv_consumer"))
    for engine in (producer, consumer):
        for (adapter,) in (law, tax):
            assert engine.executor.workers.load_lora(adapter.key, adapter.path) == ""
    sent = prefill(producer, prompt, adapters=[law])
    with_law, with_tax, bare = (alone(consumer, prompt, adapters=[one]) for one in (law, tax, []))
    assert with_law != with_tax and with_law != bare
    result = decode(consumer, prompt, sent, adapters=[law])
    assert result.num_cached_tokens == 144 and result.token_ids == with_law
    for adapters, expected in ((tax, with_tax), ([], bare)):
        (result,) = consumer.generate([prompt], GREEDY, transfers=[sent], adapters=[adapters])
        assert result.num_cached_tokens == 0 and result.token_ids == expected


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_size": 32}, "block size 16, here block size 32"),
        ({"kv_cache_dtype": "int8"}, "KV cache float32, no draft model, here KV cache int8"),
        ({"dtype": "bfloat16"}, "here activations bfloat16"),
        ({"model": {"rope_theta": 1e5}}, "another model"),
        pytest.param({"tensor_parallel_size": 2}, "here rank 0 of 2 (tensor parallel 2)", marks=pytest.mark.slow),
    ],
    ids=["block size", "KV cache", "type", "model", "ranks"],
)
def test_blocks_of_another_format_are_refused_and_the_log_says_why(engines, tmp_path, caplog, capfd, change, told):
    settings = dict(change)
    folder = build_family("arcee", tmp_path / "model")
    other = build_family("arcee", tmp_path / "other", **settings.pop("model", {}))
    prompt = words(3)
    sent = prefill(engines(folder, "kv_producer"), prompt)
    consumer = engines(other, "kv_consumer", **settings)
    with caplog.at_level(logging.WARNING):
        result = decode(consumer, prompt, sent)
    assert result.num_cached_tokens == 0 and result.token_ids == alone(consumer, prompt)
    log = caplog.text + capfd.readouterr().err  # of ranks in processes
    assert "its blocks cannot be used here" in log and told in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "split"),
    [("arcee", "tensor_parallel_size"), ("qwen3_next", "tensor_parallel_size"), ("arcee", "pipeline_parallel_size")],
)
def test_ranks_go_on_with_those_of_another_engine(engines, tmp_path, family, split):
    folder, prompt = build_family(family, tmp_path / "model"), words(4)
    producer, consumer = (engines(folder, role, **{split: 2}) for role in ("kv_producer", "kv_consumer"))
    result = decode(consumer, prompt, prefill(producer, prompt))
    assert result.num_cached_tokens >= 128 and result.token_ids == alone(consumer, prompt)


def test_a_loss_while_blocks_come_leaves_the_rest_to_be_computed(engines, tmp_path, monkeypatch):
    """The producer forgets its copies after the first blocks were read."""
    folder, prompt = build_family("gemma3", tmp_path / "model"), words(5)
    producer, consumer = (engines(folder, role) for role in ("kv_producer", "kv_consumer"))
    sent = prefill(producer, prompt)
    monkeypatch.setattr(remote, "AHEAD", 1)
    read, reads = remote.RemoteTier.read, []

    def some(tier, key):
        reads.append(key)
        if len(reads) == 4:
            producer.executor.tiers.clear()
        return read(tier, key)

    monkeypatch.setattr(remote.RemoteTier, "read", some)
    result = decode(consumer, prompt, sent)
    assert len(reads) > 4 and result.token_ids == alone(consumer, prompt)
