"""llama.cpp's slots at engine level: what a row left is saved to a file and restored, in this engine or the next."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

from quire.engine.messages import AddRequest, Call, CallResult, SamplingParams
from quire.worker.cache.tiers import slots as slots_module
from tests.helpers.engine.fake_executor import expected_tokens
from tests.helpers.engine.harness import VOCAB, Engine, fake_config

NUMBERS = itertools.count(1)
PROMPT = list(range(1, 42))


def engine_of(folder, **settings) -> Engine:
    sizes = {"num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 4, "slot_save_path": str(folder)}
    return Engine(fake_config(**sizes | settings))


def ask(engine: Engine, name: str, prompt: list[int] = PROMPT, **fields) -> int:
    engine.put(AddRequest(name, prompt, SamplingParams(max_tokens=5), **fields))
    engine.run()
    assert engine.tokens(name) == expected_tokens(prompt, SamplingParams(max_tokens=5), 4096, VOCAB)
    return next(o.counts.cached for o in engine.outputs[b"server", name] if o.new_token_ids)


def act(engine: Engine, *args):
    answer = begin(engine, *args)
    while not answer:
        engine.core.jobs.run(0.0, idle=True)
        engine.scheduler.tiers.poll()  # which goes on with fetches
    return answer[0]


def begin(engine: Engine, action: str, *args) -> list:
    """Begin an action; the list gets its answer."""
    answers, number = [], next(NUMBERS)
    send = engine.socket.send

    def taken(client, message):
        if isinstance(message, CallResult) and message.call_id == number:
            assert message.error is None
            answers.append(message.value)
        return send(client, message)

    engine.socket.send = taken
    engine.core.handle(b"server", Call(number, f"{action}_slot", list(args)))
    return answers


@pytest.mark.parametrize("groups", ["full", "full+window:8", "full+state", "window:24+state"])
def test_a_slot_survives_the_engine(tmp_path, monkeypatch, groups):
    monkeypatch.setenv("FAKE_EXECUTOR", f"groups={groups}")
    engine = engine_of(tmp_path / "slots")
    ask(engine, "a", cache_salt="tenant")
    saved = act(engine, "save", 0, "mine.bin")
    assert saved["n_saved"] >= 40 and saved["n_written"] == (tmp_path / "slots" / "mine.bin").stat().st_size
    again = engine_of(tmp_path / "slots")
    restored = act(again, "restore", 2, "mine.bin")
    assert restored == {"n_restored": saved["n_saved"], "n_read": saved["n_written"]}
    assert ask(again, "b") == 0  # another salt
    assert ask(again, "c", cache_salt="tenant") == 40
    assert act(again, "save", 2, "copy.bin")["n_saved"] == saved["n_saved"]
    again.assert_at_rest()


def test_erasing_a_slot_and_restoring_it(tmp_path):
    engine = engine_of(tmp_path)
    ask(engine, "a")
    saved = act(engine, "save", 0, "x")
    assert act(engine, "erase", 0) == {"n_erased": saved["n_saved"]}
    assert act(engine, "erase", 0) == {"n_erased": 0}
    assert ask(engine, "b") == 0
    assert act(engine, "erase", 0) == {"n_erased": 44}
    assert act(engine, "restore", 0, "x")["n_restored"] == saved["n_saved"]
    assert ask(engine, "c") == 40
    assert act(engine, "save", 1, "empty")["n_saved"] == 0 and act(engine, "restore", 1, "empty")["n_restored"] == 0
    assert act(engine, "save", 4, "x") is None  # there is no such slot
    engine.assert_at_rest()


def test_a_file_that_is_not_whole_or_of_another_model_is_refused(tmp_path):
    engine = engine_of(tmp_path)
    ask(engine, "a")
    act(engine, "save", 0, "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "torn").write_bytes(data[:-7])
    (tmp_path / "flipped").write_bytes(data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    (tmp_path / "link").symlink_to(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")  # which nothing writes
    (tmp_path / "folder").mkdir()
    for name in ("torn", "flipped", "link", "missing", "pipe", "folder"):
        assert act(engine, "restore", 0, name) == {}
    assert ask(engine, "b") == 40  # what is cached stays as it was
    other = engine_of(tmp_path, block_size=8)
    assert act(other, "restore", 0, "x") == {}
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_restoring_needs_room_and_evicts_what_goes_to_lower_tiers(tmp_path):
    engine = engine_of(tmp_path / "slots", kv_offload_gib=0.001, num_gpu_blocks_override=24)
    ask(engine, "a")
    act(engine, "save", 0, "x")
    act(engine, "erase", 0)
    hot = list(range(300, 365))
    ask(engine, "b", hot)
    ask(engine, "c", hot)
    engine.add("long", list(range(500, 560)), max_tokens=30)
    for _ in range(3):
        engine.turn()
    assert act(engine, "restore", 0, "x") == {}  # a running request holds the room
    engine.run()
    assert ask(engine, "d", hot) >= 60
    assert act(engine, "restore", 0, "x")["n_restored"] == 44
    assert ask(engine, "e") == 40
    assert ask(engine, "f", hot) >= 32 and engine.scheduler.tiers.counts.hits  # from RAM, with their own contents
    engine.assert_at_rest()


@pytest.mark.parametrize("action", ["save", "restore"])
def test_other_requests_run_while_a_slot_is_copied(tmp_path, monkeypatch, action):
    """Also a reset of the cache, a second action and a file that the disk holds up."""
    monkeypatch.setattr(slots_module, "COPY_BYTES", 1)  # a block per poll
    engine, go = engine_of(tmp_path / "slots"), threading.Event()
    ask(engine, "a")
    act(engine, "save", 0, "x")
    if action == "restore":
        act(engine, "erase", 0)
    files = engine.core.executor.slots
    for name in ("_write", "_read"):
        work = getattr(files, name)
        monkeypatch.setattr(files, name, lambda *args, work=work: go.wait(5.0) and work(*args))
    first, second = begin(engine, action, 0, "x"), begin(engine, "erase", 3)
    for i, prompt in enumerate((list(range(300, 340)), PROMPT)):
        engine.add(str(i), prompt, max_tokens=30)
        while (b"server", str(i)) not in engine.outputs or not engine.last(str(i)).finish_reason:
            engine.turn()
        assert engine.tokens(str(i)) == expected_tokens(prompt, SamplingParams(max_tokens=30), 4096, VOCAB)
    if action == "save":  # the blocks are held
        assert not engine.call("reset_prefix_cache")
    assert not first and not second
    go.set()
    engine.run()
    assert first and first[0][f"n_{action}d"] == 44 and second == [{"n_erased": 0}]
    assert act(engine, "restore", 2, "x")["n_restored"] == 44
    engine.assert_at_rest()
