"""The files of the disk tier: their limit, their rights, several engines on one folder."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path
from zlib import crc32

import pytest

from quire.worker.cache.tiers import unusable
from quire.worker.cache.tiers.disk import DiskTier
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.cache.tiers.segments import MAGIC, encode

ONE, OTHER = b"\x01" * 32, b"\x02" * 32


def sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def used(folder: Path) -> int:
    return sum(sizes(folder).values())


def fill(tier: DiskTier, name: str, count: int, size: int = 10_000) -> None:
    for i in range(count):
        tier.offer(f"{name} {i}".encode(), bytes([i % 251]) * size)
        if i % 8 == 0:
            assert tier.flush(5.0)
    assert tier.flush(5.0)


def test_the_limit_holds_over_all_engines_and_at_every_instant(tmp_path):
    limit, seen, ended = 300_000, [], threading.Event()
    tiers = [DiskTier(tmp_path / "kv", limit, mark) for mark in (ONE, OTHER, ONE)]

    def watch():
        while not ended.is_set():
            try:
                first, second = sizes(tmp_path / "kv"), sizes(tmp_path / "kv")
            except FileNotFoundError:  # removed between the list and the look
                continue
            if first == second:  # all of them were there at one instant: one look takes longer than a removal
                seen.append(sum(first.values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [threading.Thread(target=fill, args=(tier, f"t{i}", 40)) for i, tier in enumerate(tiers)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    ended.set()
    watcher.join()
    assert 100_000 < max(seen) <= limit
    for tier in tiers:
        tier.stop()
    lower = DiskTier(tmp_path / "kv", 50_000, ONE)
    assert used(tmp_path / "kv") <= 50_000
    lower.stop()


def test_the_least_recently_used_go_first(tmp_path):
    tier = DiskTier(tmp_path, 400_000, ONE)
    fill(tier, "a", 8, 40_000)
    tier.touch([b"a 0"])
    fill(tier, "b", 4, 40_000)
    assert b"a 0" in tier and b"b 3" in tier and b"a 1" not in tier
    assert tier.read(b"a 0") == bytes(40_000) and tier.read(b"a 1") is None
    tier.stop()


def test_a_folder_that_exists_keeps_its_mode_and_ours_are_closed(tmp_path):
    tmp_path.chmod(0o755)
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    fill(tier, "a", 3)
    tier.stop()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    for path in tmp_path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    tier = DiskTier(tmp_path / "file", 1 << 20, ONE)
    assert "only read" in caplog.text and tier.offer(b"k", b"x") is None and tier.read(b"k") is None
    tier.clear()
    tier.stop()


def with_header(header: bytes) -> bytes:
    return MAGIC + len(header).to_bytes(4, "little") + crc32(header).to_bytes(4, "little") + header


def test_each_kind_of_unusable_file_is_counted_and_has_one_line(tmp_path, caplog):
    """A line per reason, however many files there are; the rest is told a minute later."""
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    fill(tier, "a", 1)
    tier.stop()
    (good,) = tier.folder.glob("*.kv")
    content, noise = good.read_bytes(), bytes(range(7, 250)) * 20
    contents = {
        "it is empty": [b""] * 5,
        "it is not a file of this format": [noise, b"x", b"\0" * 5000],
        "its header is damaged": [content[:30], with_header(b"\x91\x05"), content[:20] + b"?" + content[21:]],
        "it is torn: its size is not that of its blocks": [content[:-1], content + b"x"],
        "it belongs to another model or format": [b"".join(encode(OTHER, [(b"k", b"content")]))],
    }
    for i, one in enumerate(one for each in contents.values() for one in each):
        (tier.folder / f"{i}.kv").write_bytes(one)
    others = [tmp_path / "noise.kv", tmp_path / "notes.txt", tier.folder / "notes"]
    for path in others:
        path.write_bytes(noise)
    os.mkfifo(tier.folder / "pipe.kv")
    (tier.folder / "folder.kv").mkdir()
    (tmp_path / "lost+found").mkdir()

    tier = DiskTier(tmp_path, 1 << 20, ONE)
    lines = [record.getMessage() for record in caplog.records if "each is a miss" in record.getMessage()]
    assert len(lines) == len(contents)
    for reason, found in contents.items():
        (line,) = [line for line in lines if f"cannot be used: {reason}; each" in line]
        more = len(found) - 1 + (5 if "of this format" in reason else 0)
        assert str(tmp_path) in line and (f" and {more} more" in line if more else "more" not in line)
    assert tier.unusable.count == sum(map(len, contents.values())) + 5
    assert tier.read(b"a 0") == bytes(10_000) and tier.read(b"k") is None
    assert set(tier._files(tier.folder)) and all(path.exists() for path in others)
    tier._refresh()
    assert tier.unusable.count == sum(map(len, contents.values())) + 5  # each was counted once
    tier.stop()


def test_changed_blocks_are_counted_and_told_once_a_minute(tmp_path, caplog, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    for i in range(3):
        fill(tier, f"{i}", 1)
    for path in tier.folder.glob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert [tier.read(f"{i} 0".encode()) for i in range(3)] == [None] * 3
    assert caplog.text.count("a block has another checksum") == 1 and tier.unusable.count == 3
    monkeypatch.setattr(unusable, "INTERVAL", 0.0)
    tier._refresh()
    assert caplog.text.count("a block has another checksum") == 2 and " and 1 more" in caplog.text
    tier.stop()


def held(tier: DiskTier, method: str) -> tuple[threading.Event, threading.Event]:
    """Stop the writer before its next call of a method: (it is there, it may go on)."""
    there, go, call = threading.Event(), threading.Event(), getattr(tier, method)

    def wait(*args):
        there.set()
        assert go.wait(5.0)
        return call(*args)

    setattr(tier, method, wait)
    return there, go


def left(folder: Path) -> set[bytes]:
    """The blocks that an engine that starts now finds."""
    tier = DiskTier(folder, 1 << 20, ONE)
    tier.stop()
    return {f"a {i}".encode() for i in range(9) if tier.read(f"a {i}".encode()) is not None}


@pytest.mark.parametrize("method", ["_shrink", "_remove", "_write"])
def test_a_block_that_is_removed_while_the_writer_erases_another_is_erased(tmp_path, method):
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    for i in range(3):
        tier.offer(f"a {i}".encode(), bytes(100))
    assert tier.flush(5.0)
    there, go = held(tier, method)
    tier.remove([b"a 0"])
    assert there.wait(5.0)
    tier.remove([b"a 1"])
    assert b"a 1" not in tier and tier.offer(b"a 1", bytes(100)) is None
    go.set()
    assert tier.flush(5.0)
    assert left(tmp_path) == {b"a 2"} and tier.read(b"a 2") == bytes(100)
    assert tier.offer(b"a 1", bytes(100)) is not None and tier.flush(5.0)  # computed and found again
    assert left(tmp_path) == {b"a 1", b"a 2"}
    tier.stop()


def test_a_removed_block_is_erased_from_other_engines_files_and_before_the_end(tmp_path):
    first, second = DiskTier(tmp_path, 1 << 20, ONE), DiskTier(tmp_path, 1 << 20, ONE)
    fill(first, "a", 2)
    fill(second, "a", 3)
    first.remove([b"a 0"])
    first.stop()
    second.stop()
    assert left(tmp_path) == {b"a 1", b"a 2"}


def test_what_was_cleared_while_a_file_is_rewritten_stays_away(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    fill(tier, "a", 3)
    there, go = held(tier, "_write")
    tier.remove([b"a 1"])
    assert there.wait(5.0)
    tier.clear()
    go.set()
    assert tier.flush(5.0)
    assert not left(tmp_path) and not sizes(tier.folder)
    tier.stop()


def test_an_erasure_that_fails_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.worker.cache.tiers.disk.PAUSE", 0.1)
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    fill(tier, "a", 2)
    shrink, failed = tier._shrink, threading.Event()

    def fail_once(name):
        if not failed.is_set():
            failed.set()
            raise OSError(5, "Input/output error")
        shrink(name)

    tier._shrink = fail_once
    tier.remove([b"a 0"])
    assert failed.wait(5.0)
    assert b"a 0" not in tier
    while tier._doomed:
        time.sleep(0.02)
    assert left(tmp_path) == {b"a 1"}
    tier.stop()


def test_a_full_disk_pauses_writing(tmp_path, caplog, monkeypatch):
    tier = DiskTier(tmp_path, 1 << 20, ONE)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier, "_write", full)
    tier.offer(b"k", b"x")
    assert tier.flush(5.0)
    assert "No space left" in caplog.text and not tier.accepts and b"k" not in tier
    tier.stop()


def test_what_another_engine_writes_is_found_later_and_foreign_models_stay(tmp_path):
    first, second = DiskTier(tmp_path, 1 << 20, ONE), DiskTier(tmp_path, 1 << 20, ONE)
    fill(first, "a", 2)
    second._refresh()
    assert second.contains([b"a 0", b"a 1", b"a 2"]) == [True, True, False]
    foreign = DiskTier(tmp_path, 1 << 20, OTHER)
    assert b"a 0" not in foreign
    foreign.clear()
    assert first.read(b"a 0") is not None
    first.clear()
    assert second.read(b"a 0") is None
    for tier in (first, second, foreign):
        tier.stop()


def test_an_unfinished_file_of_a_killed_engine_is_removed(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20, ONE)
    tier.stop()
    (tier.folder / "dead.tmp").write_bytes(b"x" * 1000)
    DiskTier(tmp_path, 1 << 20, ONE).stop()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("limit", [0, 25])
def test_ram_keeps_its_limit(limit):
    ram = RamTier(limit)
    left = [one for i in range(5) for one in ram.offer(bytes([i]), bytes(10))]
    assert ram.used <= limit and len(left) == 5 - limit // 10 and left[0][0] == b"\x00"
