"""What it costs to hand a step to every rank: a pipe each, as the multiprocess executor has it, against one ring in
shared memory.

python benchmarks/step_broadcast.py [--ranks 2,4] [--steps 2000]

Every rank decodes the message, and rank 0 answers with a byte, as it would with the sampled tokens. Per step: the time
until the sender is free again, the time until the answer is there, and the CPU time that sender and ranks spend
together. The ring's readers cannot sleep on memory, so they look, yield, and look again.

On 2 busy cores of an x86-64 server (load 4):
    ranks  step             bytes           send us  answer us  CPU us
        2  decode of 64       480   pipe          3         21      27
        2  decode of 64       480   ring          1         11      20
        2  decode of 256     2116   pipe          3         48      52
        2  decode of 256     2116   ring          1         24      47
        2  prompt of 8192   42223   pipe         16        142     338
        2  prompt of 8192   42223   ring          4        113     468
        4  decode of 64       480   pipe         17         44      46
        4  decode of 64       480   ring          1         11      53
        4  decode of 256     2116   pipe          9         99     133
        4  decode of 256     2116   ring          2         26     175
        4  prompt of 8192   42223   pipe         26        280     593
        4  prompt of 8192   42223   ring          7        372     690
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # works uninstalled, too

from quire.worker.messages import NewRequest, SamplingParams, StepInput

SLOTS, SLOT_SIZE, HEADER = 8, 1 << 18, 16  # bytes: the step's number and the message's length, then the message
NUMBER = struct.Struct("Q")  # written at once, unlike what has an explicit byte order
IDLE = 200  # looks without success after which a reader sleeps a little


def messages() -> dict[str, bytes]:
    """Encoded steps as the scheduler makes them."""
    encode = msgspec.msgpack.Encoder().encode
    found = {}
    for size in (1, 64, 256):
        rows = list(range(size))
        found[f"decode of {size}"] = encode(
            StepInput(
                12345,
                [],
                rows,
                [1000 + row for row in rows],
                [1] * size,
                [[5000 + row] if row % 16 == 0 else [] for row in rows],
                rows,
            )
        )
    new = NewRequest(7, list(range(100000, 108192)), 8192, list(range(512)), SamplingParams(seed=1))
    found["prompt of 8192"] = encode(StepInput(12345, [new], [7], [0], [8192], [[]], [0]))
    return found


class Ring:
    """One writer, and readers that all read everything.

    Behind the slots is a counter for each reader, so that the writer does not overtake one.
    """

    def __init__(self, num_readers: int, rank: int | None = None, memory: SharedMemory | None = None):
        self.memory = memory or SharedMemory(create=True, size=SLOTS * SLOT_SIZE + 8 * num_readers)
        self.step, self.num_readers, self.rank = 0, num_readers, rank

    def write(self, message: bytes) -> None:
        self.step += 1
        while (
            self.step > SLOTS
            and min(struct.unpack_from(f"{self.num_readers}Q", self.memory.buf, SLOTS * SLOT_SIZE)) <= self.step - SLOTS
        ):
            os.sched_yield()
        start = self.step % SLOTS * SLOT_SIZE
        self.memory.buf[start + HEADER : start + HEADER + len(message)] = message
        NUMBER.pack_into(self.memory.buf, start + 8, len(message))
        NUMBER.pack_into(self.memory.buf, start, self.step)  # last: it makes the message valid

    def read(self) -> bytes:
        self.step += 1
        start, looks = self.step % SLOTS * SLOT_SIZE, 0
        while NUMBER.unpack_from(self.memory.buf, start)[0] != self.step:
            looks += 1
            os.sched_yield() if looks < IDLE else time.sleep(5e-5)
        (length,) = NUMBER.unpack_from(self.memory.buf, start + 8)
        message = bytes(self.memory.buf[start + HEADER : start + HEADER + length])
        NUMBER.pack_into(self.memory.buf, SLOTS * SLOT_SIZE + 8 * self.rank, self.step)
        return message


def rank_main(rank: int, num_ranks: int, pipe: Connection, memory: SharedMemory | None) -> None:
    decode = msgspec.msgpack.Decoder(StepInput).decode
    ring = Ring(num_ranks, rank, memory) if memory else None
    while message := (ring.read() if ring else pipe.recv_bytes()):
        if message == b"end":
            break
        decode(message)
        if rank == 0:
            pipe.send_bytes(b"x")
    pipe.send_bytes(struct.pack("<d", time.process_time()))


def measure(kind: str, num_ranks: int, message: bytes, num_steps: int) -> tuple[float, float, float]:
    """Medians in microseconds of (sending, until the answer), and the mean CPU time."""
    context = multiprocessing.get_context("fork")
    ring = Ring(num_ranks) if kind == "ring" else None
    pairs = [context.Pipe() for _ in range(num_ranks)]
    pipes = [ours for ours, _ in pairs]
    processes = [
        context.Process(target=rank_main, args=(rank, num_ranks, theirs, ring.memory if ring else None))
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    send: Callable[[bytes], object] = ring.write if ring else lambda data: [pipe.send_bytes(data) for pipe in pipes]
    sending, answering, cpu = [], [], time.process_time()
    for _ in range(num_steps):
        start = time.perf_counter()
        send(message)
        sent = time.perf_counter()
        pipes[0].recv_bytes()
        sending.append(sent - start)
        answering.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    send(b"end")
    cpu += sum(struct.unpack("<d", pipe.recv_bytes())[0] for pipe in pipes)
    for process in processes:
        process.join()
    if ring:
        ring.memory.close()
        ring.memory.unlink()
    return 1e6 * statistics.median(sending), 1e6 * statistics.median(answering), 1e6 * cpu / num_steps


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas (default: 2,4)")
    parser.add_argument("--steps", type=int, default=2000, help="of each kind (default: 2000)")
    arguments = parser.parse_args(argv)
    print(f"{'ranks':>5}  {'step':<15} {'bytes':>6}   {'':5} {'send us':>8} {'answer us':>10} {'CPU us':>7}")
    for num_ranks in map(int, arguments.ranks.split(",")):
        for name, message in messages().items():
            for kind in ("pipe", "ring"):
                send, answer, cpu = measure(kind, num_ranks, message, arguments.steps)
                print(
                    f"{num_ranks:>5}  {name:<15} {len(message):>6}   {kind:5} {send:>8.0f} {answer:>10.0f} {cpu:>7.0f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
