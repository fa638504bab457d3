"""Disaggregated prefill at engine level: one engine computes a prompt and another goes on with its blocks. The fake
executor checks the contents of every block that a token reads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest

from quire.engine.kv import tiers
from quire.engine.messages import AddRequest, Choice, LoraUse, SamplingParams, Transfer
from quire.worker.cache.tiers import outbox, remote
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB, Engine, fake_config

PROMPT = list(range(1, 43))
SAMPLING = SamplingParams(max_tokens=5)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE", 0.3)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def engine_of(role: str, **settings) -> Engine:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port(), **settings.pop("more", {})}
    sizes = {"num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 4, "model": "same"}
    return Engine(fake_config(kv_transfer_config=json.dumps(transfer), **sizes | settings))


@pytest.fixture
def engines():
    """A function that makes (producer, consumer)."""
    made = []

    def make(**settings) -> tuple[Engine, Engine]:
        made.extend(engine_of(role, **settings) for role in ("kv_producer", "kv_consumer"))
        return made[-2], made[-1]

    yield make
    for one in made:
        one.core.executor.shutdown()


def prefill(producer: Engine, **fields) -> Transfer:
    """Compute the prompt and one token; the answer's transfer."""
    message = AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True), **fields)
    producer.put(message)
    producer.run()
    sent = producer.last("p").sent
    assert sent.send and sent.port == producer.core.config.cache.transfer.port
    assert not producer.scheduler.transfers.busy
    return sent


def decode(consumer: Engine, sent: Transfer, name: str = "d", **fields) -> int:
    """Go on with the prompt; the number of tokens that were not computed."""
    source = msgspec.structs.replace(sent, send=False)
    consumer.put(AddRequest(name, PROMPT, SAMPLING, transfer=source, **fields))
    consumer.run()
    assert consumer.tokens(name) == expected_tokens(PROMPT, SAMPLING, 4096, VOCAB)
    return next(one.counts.cached for one in consumer.outputs[b"server", name] if one.new_token_ids)


@pytest.mark.parametrize("local", [True, False], ids=["shared memory", "TCP"])
@pytest.mark.parametrize("groups", ["full", "full+window:8", "full+state", "window:24+state"])
def test_a_prompt_goes_on_at_another_engine(engines, monkeypatch, groups, local):
    monkeypatch.setenv("FAKE_EXECUTOR", f"groups={groups}")
    if not local:
        monkeypatch.setattr(remote, "this_host", lambda: "")
    places = []
    read_place = remote._read_place
    monkeypatch.setattr(remote, "_read_place", lambda *args: places.append(args) or read_place(*args))
    producer, consumer = engines()
    sent = prefill(producer)
    assert decode(consumer, sent) == 40
    assert bool(places) == local
    consumer.assert_at_rest()
    producer.assert_at_rest()
    assert decode(consumer, sent, "again") == 40  # the pool has them


def test_salts_and_adapters_decide_which_prompts_are_equal(engines):
    producer, consumer = engines()
    for engine in (producer, consumer):
        engine.scheduler.max_loras = engine.scheduler.room.max_loras = 1
    law, tax = ([LoraUse(key, "", name="law")] for key in ("1", "2"))
    sent = prefill(producer, cache_salt="tenant", adapters=law)
    consumer.put(AddRequest("x", PROMPT, SAMPLING, cache_salt="other", adapters=law, transfer=sent))
    consumer.put(AddRequest("y", PROMPT, SAMPLING, cache_salt="tenant", adapters=tax, transfer=sent))
    consumer.put(AddRequest("z", PROMPT, SAMPLING, cache_salt="tenant", adapters=law, transfer=sent))
    consumer.run()
    cached = {name: consumer.outputs[b"server", name][0].counts.cached for name in "xyz"}
    assert cached == {"x": 0, "y": 0, "z": 40}


def _gone(producer, monkeypatch):
    producer.tier("remote").stop()


def _silent(producer, monkeypatch):
    monkeypatch.setattr(producer.tier("remote")._outbox, "_answer", lambda *args: True)


def _never_done(producer, monkeypatch):
    """It says again and again that the blocks come."""
    monkeypatch.setattr(remote, "LONGEST", 0.7)
    monkeypatch.setattr(producer.tier("remote")._outbox, "_answer", lambda *args: False)


def _dies_half_way(producer, monkeypatch):
    box, left = producer.tier("remote")._outbox, [3]
    answer = box._answer

    def some(client, ask, known, may_wait):
        keys, ask.keys = ask.keys, ask.keys[: left[0]]
        left[0] -= len(ask.keys)
        answer(client, ask, known, may_wait)
        ask.keys = keys
        return True

    monkeypatch.setattr(box, "_answer", some)


def _forgot(producer, monkeypatch):
    producer.tier("remote").clear()


def _another_model(producer, monkeypatch):
    producer.tier("remote")._digest = b"other"


def _damaged(producer, monkeypatch):
    monkeypatch.setattr(remote, "crc32", lambda content: 1)


def _nonsense(producer, monkeypatch):
    box = producer.tier("remote")._outbox
    monkeypatch.setattr(box, "_answer", lambda client, *args: box._socket.send_multipart([client, b"x", b""]) or True)


def _one_frame(producer, monkeypatch):
    box = producer.tier("remote")._outbox
    monkeypatch.setattr(box, "_answer", lambda client, *args: box._socket.send_multipart([client, b"x"]) or True)


def _of_another_size(producer, monkeypatch):
    found = producer.tier("remote")._outbox
    for entry in found._entries.values():
        entry.size -= 1
        fd = found._segments[entry.segment].fd
        entry.crc = outbox.crc32(outbox.os.pread(fd, entry.size, entry.offset))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        _gone, _silent, _never_done, _dies_half_way, _forgot, _another_model, _damaged, _of_another_size, _nonsense,
        _one_frame,
    ],
)  # fmt: skip
def test_without_the_producer_the_prompt_is_computed(engines, monkeypatch, fault):
    producer, consumer = engines()
    sent = prefill(producer)
    fault(producer, monkeypatch)
    consumer.add("other", [7] * 9, max_tokens=20)  # goes on meanwhile
    assert decode(consumer, sent) < 40
    assert len(consumer.tokens("other")) == 20
    consumer.assert_at_rest()
    assert consumer.tier("remote").contains([b"x"]) == [False]


DYING = """
import os, signal, sys, time
from tests.engine.kv.test_transfers import engine_of, prefill
producer = engine_of("kv_producer")
sent = prefill(producer)
box, sends = producer.tier("remote")._outbox, []
send = box._send
box._send = lambda *args: (sends.append(1), len(sends) > 3 and os.kill(os.getpid(), signal.SIGKILL), send(*args))
print(sent.port, sent.blocks, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False], ids=["shared memory", "TCP"])
def test_a_producer_that_is_killed_while_it_sends(monkeypatch, local):
    if not local:
        monkeypatch.setattr(remote, "this_host", lambda: "")
    consumer = engine_of("kv_consumer")
    with subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True) as process:
        port, blocks = process.stdout.readline().split(maxsplit=1)
        assert decode(consumer, Transfer(False, "127.0.0.1", int(port), json.loads(blocks))) < 40
        assert process.wait(10) == -signal.SIGKILL
    consumer.assert_at_rest()
    consumer.core.executor.shutdown()


def answered_before_copies(producer, monkeypatch):
    """Have the producer answer a prompt and copy none of its blocks. Returns its tier."""
    tier = producer.tier("remote")
    monkeypatch.setattr(tier, "_copy_bytes", 0)
    producer.put(AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True)))
    while (b"server", "p") not in producer.outputs:
        producer.turn()
    return tier


@pytest.mark.slow
def test_a_long_step_of_the_producer_is_no_silence(engines, monkeypatch):
    """The copies of a prompt come long after the answer."""
    producer, consumer = engines()
    tier = answered_before_copies(producer, monkeypatch)
    sent, begun = producer.last("p").sent, []

    def copy_late():
        begun.append(time.monotonic())
        if begun[-1] - begun[0] > 3 * remote.PATIENCE:
            tier._copy_bytes = 1 << 30
            producer.run()

    consumer.put(AddRequest("d", PROMPT, SAMPLING, transfer=msgspec.structs.replace(sent, send=False)))
    consumer.run(copy_late)
    assert consumer.outputs[b"server", "d"][0].counts.cached == 40
    producer.assert_at_rest()


@pytest.mark.slow
def test_blocks_that_drip_are_not_waited_for(engines, monkeypatch):
    monkeypatch.setattr(tiers, "SILENCE", 0.2)
    monkeypatch.setattr(tiers, "LONGEST", 0.4)
    producer, consumer = engines()
    sent = prefill(producer)
    box = producer.tier("remote")._outbox
    send = box._send
    monkeypatch.setattr(box, "_send", lambda *args: (time.sleep(0.25), send(*args)))
    assert decode(consumer, sent) == 0
    consumer.assert_at_rest()


def test_a_full_cache_delays_the_fetch(engines):
    """The blocks come when running requests leave room for them."""
    producer, consumer = engines()
    sent = prefill(producer)
    consumer.add("long", [7] * 180, max_tokens=40)
    consumer.turn()
    consumer.turn()
    assert decode(consumer, sent) >= 32  # running requests may take the last ones


def test_a_prompt_that_is_sent_again_and_again(engines):
    """It is kept once, and stays among the newest."""
    producer, consumer = engines(more={"kv_buffer_size": 3000})
    prefill(producer)
    box, num_files = producer.tier("remote")._outbox, len(os.listdir("/proc/self/fd"))
    count = 0
    for i in range(60):
        message = AddRequest(f"q{i}", [i + 50] * 42, SamplingParams(max_tokens=1), transfer=Transfer(send=True))
        producer.put(message)
        producer.run()
        sent = prefill(producer)
        count = max(count, len(os.listdir("/proc/self/fd")))
    assert box.num_evicted and box.used <= 3000
    assert count - num_files <= 2 * outbox.SEGMENTS
    assert decode(consumer, sent) == 40


def test_copies_do_not_open_more_and_more_files():
    box = outbox.Outbox("127.0.0.1", free_port(), 1 << 20, lambda: b"")
    before = len(os.listdir("/proc/self/fd"))
    for i in range(300):
        for key in box.announce([b"same", str(i).encode()]):
            box.add(key, b"some content")
    assert len(os.listdir("/proc/self/fd")) - before <= 1
    box.stop()


def test_contents_of_earlier_weights_are_not_sent(engines, monkeypatch):
    producer, consumer = engines()
    tier = answered_before_copies(producer, monkeypatch)
    tier.clear()  # as when weights or adapters change
    producer.run()
    assert decode(consumer, msgspec.structs.replace(producer.last("p").sent, send=False)) == 0
    producer.assert_at_rest()


def test_a_server_that_does_not_answer_is_not_asked_again_for_a_while(engines, monkeypatch):
    producer, consumer = engines()
    sent, asked = prefill(producer), []
    producer.tier("remote").stop()
    monkeypatch.setattr(remote._Server, "_ask", lambda self, keys, fingerprint: asked.append(keys))
    assert decode(consumer, sent) == 0
    consumer.scheduler.kv.reset_prefix_cache()
    assert decode(consumer, sent, "next") == 0
    assert len(asked) == 1


def test_what_waits_to_be_read_is_bounded_and_the_newest_stays(engines):
    producer, consumer = engines(more={"kv_buffer_size": 3000})
    first = prefill(producer)
    for i in range(8):
        message = AddRequest(f"p{i}", [i + 50] * 42, SamplingParams(max_tokens=1), transfer=Transfer(send=True))
        producer.put(message)
    producer.run()
    box = producer.tier("remote")._outbox
    assert 0 < box.used <= 3000 and box.num_evicted
    assert decode(consumer, first) == 0


def test_roles(engines):
    producer, consumer = engines()
    consumer.put(AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True)))
    consumer.run()
    assert consumer.last("p").sent is None
    both = engine_of("kv_both")
    sent = prefill(producer)
    assert decode(both, sent) == 40
    both.put(AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True)))
    both.run()
    assert decode(consumer, both.last("p").sent) == 40
    both.core.executor.shutdown()


def test_an_address_in_use_ends_the_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1"):
            engine_of("kv_producer", more={"kv_port": taken.getsockname()[1]})


# ---- what public reports about vLLM's connectors describe: issues and pull requests 18631, 41180, 41269, 42839, 48141,
# 49796, 50559, 51786, 52617 and 53250 of vllm-project/vllm, and 400 of llm-d/llm-d-router; ranks (11247, 14952) are in
# `tests/worker/cache/test_transfers.py`


def test_odd_requests_go_on_like_others(engines):
    """One token, two choices, a stop token first, log probabilities of the prompt, an extended prompt, half of it."""
    producer, consumer = engines()
    sent = msgspec.structs.replace(prefill(producer), send=False)
    first = expected_tokens(PROMPT, SAMPLING, 4096, VOCAB)[0]
    one, stop = SamplingParams(max_tokens=1), SamplingParams(max_tokens=5, stop_token_ids=[first])
    for name, sampling in (("one", one), ("stop", stop), ("prompt", SamplingParams(max_tokens=2, prompt_logprobs=1))):
        consumer.put(AddRequest(name, PROMPT, sampling, transfer=sent))
    siblings = [Choice("n.1", 1)]
    consumer.put(AddRequest("n", PROMPT, SAMPLING, transfer=sent, siblings=siblings))
    consumer.put(AddRequest("longer", [*PROMPT, *range(500, 530)], SAMPLING, transfer=sent))
    consumer.put(AddRequest("half", PROMPT[:21], SAMPLING, transfer=sent))
    consumer.run()
    cached = {name: consumer.outputs[b"server", name][0].counts.cached for name in ("one", "stop", "longer", "half")}
    assert cached == {"one": 40, "stop": 40, "longer": 40, "half": 20}
    assert consumer.tokens("one") == [first] and consumer.last("stop").finish_reason == "stop"
    assert len(consumer.tokens("prompt")) == 2 and consumer.outputs[b"server", "prompt"][0].counts.cached == 0
    for name in ("n", "n.1"):
        assert len(consumer.tokens(name)) == 5
    consumer.assert_at_rest()


def test_a_producer_with_two_choices_sends_the_prompt_once(engines):
    producer, consumer = engines()
    message = AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True))
    producer.put(msgspec.structs.replace(message, siblings=[Choice("p.1", 1)]))
    producer.run()
    assert producer.tier("remote").used == producer.tier("remote")._outbox.used > 0
    assert decode(consumer, msgspec.structs.replace(producer.last("p").sent, send=False)) == 40
    producer.assert_at_rest()


def test_a_request_that_ends_while_its_blocks_come(engines, monkeypatch):
    producer, consumer = engines()
    sent = msgspec.structs.replace(prefill(producer), send=False)
    answers = producer.tier("remote")._outbox
    monkeypatch.setattr(answers, "_answer", lambda *args: False)  # the blocks are always about to come
    consumer.put(AddRequest("d", PROMPT, SAMPLING, transfer=sent))
    while not consumer.scheduler.is_fetching:
        consumer.turn()
    consumer.abort("d")
    consumer.run()
    consumer.assert_at_rest()


@pytest.mark.parametrize("when", [0, 1, 2], ids=["waiting", "first chunk", "second chunk"])
def test_a_prefill_that_ends_early_sends_nothing_and_keeps_nothing(engines, when):
    producer, _ = engines(max_num_batched_tokens=16)
    message = AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True))
    producer.put(message)
    for _ in range(when):
        producer.turn()
    producer.abort("p")
    producer.run()
    assert not producer.tier("remote")._outbox.used and not producer.scheduler.transfers.busy
    producer.assert_at_rest()


def test_a_preempted_request_goes_on_with_what_is_left(engines):
    """Its blocks were read once, and another server may still have them."""
    producer, consumer = engines(num_gpu_blocks_override=24, scheduling_policy="priority")
    sent = msgspec.structs.replace(prefill(producer), send=False)
    long = SamplingParams(max_tokens=30)
    consumer.put(AddRequest("d", PROMPT, long, transfer=sent, priority=5))
    while (b"server", "d") not in consumer.outputs:
        consumer.turn()
    consumer.add("urgent", [7] * 60, max_tokens=5)
    consumer.run()
    assert consumer.last("d").timing.num_preemptions > 0
    assert consumer.tokens("d") == expected_tokens(PROMPT, long, 4096, VOCAB)
    consumer.assert_at_rest()


def test_blocks_of_other_servers_and_of_a_tier_together(engines):
    producer, consumer = engines(kv_offload_gib=0.01)
    sent = prefill(producer)
    assert decode(consumer, sent) == 40
    assert decode(consumer, sent, "hit") == 40  # hot: it goes to RAM when it leaves the pool
    for i in range(12):
        consumer.add(f"other {i}", [i + 60] * 42, max_tokens=2)
    consumer.run()
    producer.tier("remote").clear()
    assert decode(consumer, sent, "later") == 40
    consumer.assert_at_rest()


def test_the_same_request_at_once_from_two_routers(engines):
    producer, consumer = engines()
    for client in (b"a", b"b"):
        producer.put(AddRequest("p", PROMPT, SamplingParams(max_tokens=1), transfer=Transfer(send=True)), client)
    producer.run()
    for client in (b"a", b"b"):
        sent = msgspec.structs.replace(producer.last("p", client).sent, send=False)
        consumer.put(AddRequest("d", PROMPT, SAMPLING, transfer=sent), client)
    consumer.run()
    for client in (b"a", b"b"):
        assert consumer.tokens("d", client) == expected_tokens(PROMPT, SAMPLING, 4096, VOCAB)
        assert consumer.outputs[client, "d"][0].counts.cached == 40
    producer.assert_at_rest()
    consumer.assert_at_rest()
