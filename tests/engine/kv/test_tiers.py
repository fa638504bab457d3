"""The tiers below the pool at engine level: whatever is evicted, written, lost or damaged, texts are those of an engine
without a cache. The fake worker also checks every entry that a step reads.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from quire.engine.chores.base import seconds_until_due
from quire.engine.chores.save_hot import SaveHot
from quire.engine.messages import AddRequest, Call, CalledTools, CallResult, SamplingParams
from quire.worker.cache.tiers import store as store_module
from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.segments import read_places
from tests.helpers.engine.fake_executor import FakeOptions, expected_tokens
from tests.helpers.engine.harness import VOCAB, Engine, Idle, fake_config

GIB = 1 << 30


def engine_of(
    folder: Path | None = None, *, ram: int = 0, limit: int = 1 << 20, blocks: int = 64, **settings
) -> Engine:
    """Bytes of RAM and disk, and blocks of the pool."""
    return Engine(
        fake_config(
            num_gpu_blocks_override=blocks,
            block_size=4,
            max_num_seqs=4,
            kv_disk=str(folder) if folder else None,
            kv_disk_gib=limit / GIB,
            kv_offload_gib=ram / GIB,
            **settings,
        )
    )


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 5) -> int:
    """Run a request, check its text, and return the number of its cached tokens."""
    engine.add(name, prompt, max_tokens=max_tokens)
    engine.run()
    assert engine.tokens(name) == expected_tokens(prompt, SamplingParams(max_tokens=max_tokens), 4096, VOCAB)
    return next(o.counts.cached for o in engine.outputs[b"server", name] if o.new_token_ids)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def blocks_of(tier: DiskTier) -> set[bytes]:
    """The keys of all blocks in all files of a tier."""
    return {key for path in files_of(tier.folder) for key in read_places(path, tier.fingerprint)}


def test_a_block_seen_once_goes_nowhere_and_a_hot_one_survives_a_restart(tmp_path):
    folder, prompt = tmp_path / "kv", list(range(1, 42))
    engine = engine_of(folder)
    assert ask(engine, "a", prompt) == 0
    engine.core.stop()
    assert not files_of(folder)
    assert ask(engine, "b", prompt) == 40
    engine.core.stop()
    assert files_of(folder)
    again = engine_of(folder)
    assert ask(again, "c", prompt) == 40
    again.assert_at_rest()


@pytest.mark.parametrize("lowered", [True, False])
def test_the_end_of_a_prefix_leaves_the_disk_before_its_beginning(tmp_path, monkeypatch, lowered):
    """Half of a conversation fits into the limit, from the start or when it is lowered."""
    monkeypatch.setattr("quire.worker.cache.tiers.disk.SEGMENT_BYTES", 1)
    folder, prompt = tmp_path / "kv", list(range(1, 130))
    engine = engine_of(folder, limit=1 << 20 if lowered else 16 * 4096)
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    engine.core.stop()
    assert len(files_of(folder)) == (32 if lowered else 16)
    engine.core.executor.shutdown()
    half = engine_of(folder, limit=16 * 4096)
    assert len(files_of(folder)) == 16
    assert ask(half, "c", prompt) == 64


@pytest.mark.parametrize("n", [2, 3])
def test_choices_of_one_request_are_no_hits_of_each_other(tmp_path, n):
    from quire.engine.messages import Choice

    engine = engine_of(tmp_path / "kv")
    engine.add("a", list(range(1, 42)), max_tokens=3, siblings=[Choice(f"s{i}", i) for i in range(1, n)])
    engine.run()
    engine.core.stop()
    assert not files_of(tmp_path / "kv")


def test_ram_takes_what_the_pool_reuses(tmp_path):
    engine, prompt = engine_of(ram=1 << 20, blocks=32), list(range(1, 42))
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    for i in range(4):  # other traffic, several times the pool
        ask(engine, f"other {i}", [100 + i] * 90)
    assert ask(engine, "c", prompt) == 40
    counts = engine.scheduler.tiers.counts
    assert counts.hits == 40 and counts.reported == (counts.queries, 40)  # told with the statistics
    assert engine.scheduler.flush_stats().external_hits == 0  # since the last time


@pytest.mark.parametrize("groups", ["full", "full+state", "full+window:8"])
def test_freeing_a_conversation_frees_it_in_every_tier(tmp_path, monkeypatch, groups):
    monkeypatch.setenv("FAKE_EXECUTOR", f"groups={groups}")
    folder, mine, other = tmp_path / "kv", list(range(1, 42)), list(range(500, 541))
    engine = engine_of(folder, ram=1 << 20)
    for i in range(3):
        for name, prompt, key in (("mine", mine, "t/mine"), ("other", other, None)):
            engine.put(AddRequest(f"{name}{i}", prompt, SamplingParams(max_tokens=5), cache_key=key, cache_seconds=60))
            engine.run()
    engine.core.stop()
    disk, remove, freed = engine.tier("disk"), engine.scheduler.tiers.remove, []
    monkeypatch.setattr(engine.scheduler.tiers, "remove", lambda keys: (freed.extend(keys), remove(keys)))
    before = blocks_of(disk)
    assert engine.call("free_cache", "t/mine") is True
    assert [engine.call("free_cache", key) for key in ("t/mine", "t/never")] == [False, False]
    assert engine.scheduler.tiers.calls.flush(5.0)
    assert set(freed) & before and blocks_of(disk) == before - set(freed)
    assert ask(engine, "again", mine) == 0
    assert ask(engine, "others", other) >= 36
    engine.core.executor.shutdown()
    later = engine_of(folder)
    assert ask(later, "others", other) >= 36 and ask(later, "mine", mine) == 0


def test_blocks_that_are_freed_while_they_are_written_leave_the_disk(tmp_path):
    tier = DiskTier(tmp_path / "kv", 1 << 20, b"f" * 32)
    begun, go = threading.Event(), threading.Event()
    write = tier._write

    def slow(*args):
        begun.set()
        assert go.wait(5.0)
        write(*args)

    tier._write = slow
    for key in (b"a", b"b", b"c"):
        assert tier.offer(key, key * 100) is not None
    assert begun.wait(5.0)
    tier.remove([b"a", b"never seen"])
    assert b"a" not in tier and tier.read(b"a") is None and b"b" in tier
    go.set()
    assert tier.flush(5.0)
    assert b"a" not in tier and (tier.read(b"b"), tier.read(b"c")) == (b"b" * 100, b"c" * 100)
    again = DiskTier(tmp_path / "kv", 1 << 20, b"f" * 32)
    assert [key in again for key in (b"a", b"b", b"c")] == [False, True, True]
    for one in (tier, again):
        one.stop()


def test_what_moves_is_counted(tmp_path):
    engine, prompt = engine_of(tmp_path / "kv", ram=4000, blocks=32), list(range(1, 42))
    tiers = engine.scheduler.tiers
    assert tiers.stats(now=True).counts == {} and tiers.stats(now=False) is None
    told = []
    flush = engine.scheduler.flush_stats
    engine.scheduler.flush_stats = lambda: (told.append(flush()), told[-1])[1]
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    for i in range(4):
        ask(engine, f"other {i}", [100 + i] * 90)
    assert ask(engine, "c", prompt) == 40
    described = engine.call("describe_tiers")
    assert described["hit_tokens"] == 40 and described["load_bytes"] > 0 and described["store_bytes"] > 0
    assert described["ram_read_blocks"] + described["disk_read_blocks"] == 10
    assert described["used_bytes"]["ram"] <= 4000
    last = [stats.tiers for stats in told if stats.tiers]
    for name in ("load_bytes", "store_bytes", "ram_written_bytes", "disk_read_blocks"):
        assert sum(one.counts.get(name, 0) for one in last) == described[name]
    assert sum(size for one in last for size in one.load_sizes) == described["load_bytes"]
    assert sum(size for one in last for size in one.store_sizes) == described["store_bytes"]
    assert last[-1].used["ram"] == described["used_bytes"]["ram"]


def test_a_reset_clears_every_tier(tmp_path):
    engine, prompt = engine_of(tmp_path / "kv", ram=1 << 20), list(range(1, 42))
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    engine.core.stop()
    engine.put(Call(1, "reset_prefix_cache"))
    engine.core.receive()
    assert any(isinstance(m, CallResult) and m.value is True for _, m in engine.socket.sent)
    assert not files_of(tmp_path / "kv")
    assert ask(engine, "c", prompt) == 0
    assert ask(engine_of(tmp_path / "kv"), "d", prompt) == 0


def test_an_idle_engine_writes_hot_blocks(tmp_path):
    engine, prompt = engine_of(tmp_path / "kv"), list(range(1, 42))
    saver, chores = engine.chore(SaveHot), engine.core.chores
    saver._next = time.monotonic() + 0.5  # not while it is busy
    ask(engine, "a", prompt)
    ask(engine, "b", prompt)
    assert 0 <= seconds_until_due(chores, idle=True) <= 1  # it wakes up for them
    saver._next = 0
    saver.run(time.monotonic(), idle=True)
    assert engine.scheduler.tiers.calls.flush(5.0)
    assert files_of(tmp_path / "kv")
    saver._next = 0
    saver.run(time.monotonic(), idle=True)
    assert not engine.scheduler.tiers.num_unsaved
    assert 0 < seconds_until_due(chores, idle=True) <= 1  # it wakes up once more, to tell what was written
    told = []
    engine.core.stats._send = lambda: told.append(engine.scheduler.flush_stats().tiers)
    saver.run(time.monotonic() + 2, idle=True)
    with pytest.raises(Idle):
        engine.turn()
    assert told[0].used["disk"] > 0 and seconds_until_due(chores, idle=True) is None


def test_others_run_while_a_request_waits_for_its_blocks(tmp_path, monkeypatch):
    prompt = list(range(1, 42))
    first = engine_of(tmp_path / "kv")
    ask(first, "a", prompt)
    ask(first, "b", prompt)
    first.core.stop()
    engine = engine_of(tmp_path / "kv")
    read = engine.core.executor.tiers._read_one

    def slow(key):
        time.sleep(0.05)
        return read(key)

    monkeypatch.setattr(engine.core.executor.tiers, "_read_one", slow)
    engine.add("waits", prompt, max_tokens=3)
    engine.add("runs", [7, 8, 9], max_tokens=3)
    for _ in range(6):
        engine.turn()
    assert len(engine.tokens("runs")) == 3 and (b"server", "waits") not in engine.outputs
    engine.run()
    assert engine.last("waits").counts.cached == 40
    engine.assert_at_rest()


def test_a_disk_that_does_not_answer_ends_no_request(tmp_path, monkeypatch):
    prompt = list(range(1, 42))
    first = engine_of(tmp_path / "kv")
    ask(first, "a", prompt)
    ask(first, "b", prompt)
    first.core.stop()
    engine = engine_of(tmp_path / "kv")
    monkeypatch.setattr("quire.engine.kv.tiers.SILENCE", 0.2)
    monkeypatch.setattr(engine.core.executor.tiers, "_read_one", lambda key: time.sleep(1.0))
    assert ask(engine, "c", prompt) == 0
    engine.add("aborted", prompt)
    engine.turn()
    engine.abort("aborted")
    engine.run()
    engine.assert_at_rest()


def test_an_aborted_fetch_gives_its_blocks_back(tmp_path, monkeypatch):
    prompt = list(range(1, 42))
    first = engine_of(tmp_path / "kv")
    ask(first, "a", prompt)
    ask(first, "b", prompt)
    first.core.stop()
    engine = engine_of(tmp_path / "kv")
    read = engine.core.executor.tiers._read_one
    monkeypatch.setattr(engine.core.executor.tiers, "_read_one", lambda key: (time.sleep(0.02), read(key))[1])
    engine.add("x", prompt)
    engine.turn()
    assert engine.scheduler.tiers.busy
    engine.abort("x")
    engine.run()
    assert not engine.scheduler.tiers.busy
    engine.assert_at_rest()


DAMAGE = {
    "torn": lambda data: data[: len(data) // 2],
    "flipped in a block": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
    "flipped in the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "foreign": lambda data: b"something else",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
def test_damage_is_a_miss_and_a_log_line(tmp_path, caplog, how, when):
    prompt = list(range(1, 42))
    first = engine_of(tmp_path / "kv")
    ask(first, "a", prompt)
    ask(first, "b", prompt)
    first.core.stop()
    engine = engine_of(tmp_path / "kv") if when == "while it runs" else None
    for path in files_of(tmp_path / "kv"):
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    engine = engine or engine_of(tmp_path / "kv")
    cached = ask(engine, "c", prompt)
    # the header of a file is read once
    assert cached == 40 if (how, when) == ("flipped in the header", "while it runs") else cached < 40
    assert cached == 40 or "a miss" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["full", "full+window:24", "full+chunk:16", "full+state", "window:24+state"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_without_a_cache(tmp_path, monkeypatch, groups, seed):
    """Random trees of conversations over small tiers, with hints, tool calls, freed keys and slot files, and with
    crashes, orderly ends, damaged and removed files.
    """
    chance = random.Random(seed)
    monkeypatch.setenv("FAKE_EXECUTOR", f"groups={groups}")
    monkeypatch.setattr(store_module, "COPY_BYTES", 2000)
    limit, folder = 40_000, tmp_path / "kv"

    def start() -> Engine:
        return engine_of(
            folder,
            ram=chance.choice([0, 6000]),
            limit=limit,
            blocks=64,
            steps_in_flight=chance.choice([1, 2]),
            slot_save_path=str(tmp_path / "slots"),
        )

    engine, fetched, count = start(), 0, 0
    talks = [[chance.randrange(VOCAB) for _ in range(chance.randrange(10, 40))] for _ in range(4)]
    for _ in range(25):
        batch = []
        for _ in range(chance.randrange(1, 4)):
            talk, count = chance.choice(talks), count + 1
            name = f"r{count}"
            hints = {"cache_key": chance.choice([None, "t/", "t/a", "t/b"]), "cache_seconds": chance.choice([0.01, 60])}
            sampling = SamplingParams(max_tokens=4)
            engine.put(AddRequest(name, list(talk), sampling, may_call_tools=chance.random() < 0.5, **hints))
            batch.append((name, list(talk)))
            engine.turn()
            if chance.random() < 0.1:
                engine.abort(batch.pop()[0])
        engine.run()
        hint = chance.random()
        if hint < 0.3:
            engine.put(CalledTools([name for name, _ in batch]))
        elif hint < 0.4:
            engine.scheduler.contents.free_key(chance.choice(["t/a", "t/b"]))
        elif hint < 0.6:
            action = chance.choice(["save", "restore", "restore", "erase"])
            engine.put(Call(0, f"{action}_slot", [chance.randrange(2), *([] if action == "erase" else ["x"])]))
        for name, prompt in batch:
            assert engine.tokens(name) == expected_tokens(prompt, SamplingParams(max_tokens=4), 4096, VOCAB)
        for talk in talks:
            if chance.random() < 0.3 and len(talk) < 90:
                talk += [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))]
            elif chance.random() < 0.1 and len(talk) > 12:
                del talk[chance.randrange(8, len(talk)) :]
        if chance.random() < 0.1:  # a branch
            talks[chance.randrange(4)] = list(chance.choice(talks))
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= limit
        event = chance.random()
        if event < 0.35:
            engine.chore(SaveHot)._next = 0
            engine.chore(SaveHot).run(time.monotonic(), idle=True)
        elif event < 0.65:
            if event < 0.5:
                engine.core.stop()
            else:
                engine.scheduler.tiers.calls.flush(5.0)
            fetched += engine.scheduler.tiers.counts.hits
            engine.core.executor.shutdown()
            for path in files_of(folder):
                if chance.random() < 0.15 and path.stat().st_size > 100:
                    path.write_bytes(chance.choice(list(DAMAGE.values()))(path.read_bytes()))
                elif chance.random() < 0.1:
                    os.unlink(path)
            engine = start()
    engine.assert_at_rest()
    assert fetched + engine.scheduler.tiers.counts.hits > 0
    assert FakeOptions.from_text(f"groups={groups}").validate
