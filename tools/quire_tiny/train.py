"""Train quire-tiny on CPU from generated data.

    python -m tools.quire_tiny.tokenizer                      # tokenizer.json, once
    python -m tools.quire_tiny.train --work runs/tiny         # train; the same command resumes
    python -m tools.quire_tiny.train --work runs/tiny --export configs/quire-tiny

The run is a function of the seed and the number of steps: data, order and skill weights depend on nothing else (up to
the rounding of the machine's matmuls).
Skill weights follow the accuracy on the training stream itself, which is fresh data: the share of a skill shrinks as
its answers become exact.
"""

from __future__ import annotations

import argparse
import csv
import math
import pickle
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.quire_tiny import data, skills
from tools.quire_tiny.data import Batch
from tools.quire_tiny.model import Shape, Trunk, export
from tools.quire_tiny.optimizer import Optimizer
from tools.quire_tiny.tokenizer import FOLDER, byte_symbols, vocabulary_words
from tools.quire_tiny.word_skills import Words

# skill of a turn -> skill function whose share it moves
FUNCTION = {
    "greeting": "identity",
    "memory": "introduction",
    **dict.fromkeys(("tool-call", "tool-none", "tool-answer", "tool-parallel"), "tools"),
}
ROWS = 256  # the output projection runs on a multiple of this many positions
LOSS_WEIGHT = {
    "addition": 3.0,
    "subtraction": 4.0,
    "multiplication": 2.0,
    "calendar": 1.5,
    "capitals": 1.5,
    "spelling": 2.0,
    "reversing": 2.0,
    "casing": 1.5,
    "letters": 1.5,
    "paragraphs": 0.7,
    "tool-call": 2.0,
}  # few of the tokens of a sum are hard


def turn_accuracy(correct: torch.Tensor, turn: torch.Tensor, names: list[str]) -> dict[str, list[int]]:
    """Per skill, [turns whose every token was predicted, turns]. Given the right prefix, that is the same as greedy
    generation giving exactly the answer.
    """
    wrong = torch.zeros(len(names), dtype=torch.long).index_add_(0, turn, (~correct).long())
    seen = torch.zeros(len(names), dtype=torch.long).index_add_(0, turn, torch.ones_like(turn))
    counts: dict[str, list[int]] = {}
    for name, w, n in zip(names, wrong.tolist(), seen.tolist()):
        if n:
            entry = counts.setdefault(name, [0, 0])
            entry[0] += w == 0
            entry[1] += 1
    return counts


def run_batch(trunk: Trunk, forward, batch: Batch) -> tuple[torch.Tensor, dict[str, list[int]]]:
    """Loss and accuracy of one batch. A token weighs the less the longer its answer is, so that short answers are not
    drowned by long ones.
    """
    hidden = forward(torch.from_numpy(batch.tokens), torch.from_numpy(batch.document))
    targets, turn = torch.from_numpy(batch.targets).flatten(), torch.from_numpy(batch.turn).flatten()
    learnt = (targets >= 0).nonzero()[:, 0]
    padded = F.pad(
        learnt, (0, -len(learnt) % ROWS)
    )  # few distinct shapes: oneDNN builds its kernels per shape, which takes seconds
    logits, targets, turn = trunk.logits(hidden.flatten(0, 1)[padded])[: len(learnt)], targets[learnt], turn[learnt]
    length = torch.bincount(turn, minlength=len(batch.turn_skills)).clamp(min=1)
    weight = (torch.tensor([LOSS_WEIGHT.get(name, 1.0) for name in batch.turn_skills]) * length**-0.5)[turn]
    loss = (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()
    return loss, turn_accuracy(logits.detach().argmax(-1) == targets, turn, batch.turn_skills)


HEIGHTS = (0.5, 0.15, 0.05)  # at which later cycles begin


def learning_rate(step: int, cycles: list[int], warmup: int, decay_from: float) -> float:
    """Linear warm-up, a plateau, and from `decay_from` of the first cycle a linear way down to zero. Later cycles fall
    at once, from a half and then lower (`HEIGHTS`).
    """
    if step < warmup:
        return (step + 1) / warmup
    first, *later = cycles
    if step < first:
        start = first * decay_from
        return 1.0 if step < start else (first - step) / (first - start)
    for height, steps in zip(HEIGHTS, later):
        if step < first + steps:
            return height * (first + steps - step) / steps
        first += steps
    return 0.0


class Shares:
    """The mixture: base shares, raised for skills that still fail."""

    def __init__(self) -> None:
        self.base = {name: w for name, (w, _) in skills.SKILLS.items()}
        self.accuracy = dict.fromkeys([*self.base, "tools"], 0.0)
        self.weights: dict[str, float] = {}
        self.update({})

    def update(self, counts: dict[str, list[int]]) -> None:
        for skill, (right, n) in counts.items():
            keep = 0.99**n
            name = FUNCTION.get(skill, skill)
            if name in self.accuracy and skill != "tool-none":
                self.accuracy[name] = keep * self.accuracy[name] + (1 - keep) * right / n
        need = {name: 0.35 + (1 - a) ** 0.5 for name, a in self.accuracy.items()}
        self.weights.update({name: w * need[name] for name, w in self.base.items()})
        mean = sum(self.weights[name] for name in self.base) / sum(self.base.values())
        self.weights["tools"] = min(0.6, max(0.2, data.TOOL_SHARE * need["tools"] / mean))


@torch.no_grad()
def validate(trunk: Trunk, forward, batches: list[Batch]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for batch in batches:
        merge(total, run_batch(trunk, forward, batch)[1])
    return total


def merge(total: dict[str, list[int]], counts: dict[str, list[int]]) -> None:
    for name, (right, n) in counts.items():
        entry = total.setdefault(name, [0, 0])
        entry[0] += right
        entry[1] += n


def table(counts: dict[str, list[int]]) -> str:
    return " ".join(f"{name}={100 * right / n:.0f}" for name, (right, n) in sorted(counts.items()))


def save(path: Path, state: object) -> None:
    """Write a temporary file and rename it, so that the file is always complete."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


class Stream:
    """One of the parallel sources of batches: its own random numbers, mixture and half-filled rows."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.rng, self.shares, self.packer = random.Random(seed), Shares(), data.Packer(tokenizer)

    def next_batch(self) -> Batch:
        while True:
            plain = {k: v for k, v in self.shares.weights.items() if k != "tools"}
            if (
                batch := self.packer.add(data.conversation(self.rng, False, plain, self.shares.weights["tools"]))
            ) is not None:
                return batch

    def state(self) -> bytes:
        return pickle.dumps((self.rng, self.shares, self.packer.rows))

    def restore(self, state: bytes) -> None:
        self.rng, shares, self.packer.rows = pickle.loads(state)
        self.shares.accuracy.update(shares.accuracy)
        self.shares.update({})


def warm_start(trunk: Trunk, tokenizer: Tokenizer, folder: Path) -> None:
    """Take the weights of an exported model of the same shape, the rows of its tokens by their text.

    Tokens that it lacks, and bytes above 127, which ASCII data never held, begin like the ASCII letters: with their
    mean and spread, so that what copies letters copies them."""
    weights = {name.removeprefix("model."): w.float() for name, w in load_file(folder / "model.safetensors").items()}
    old, new = weights.pop("embed_tokens.weight"), trunk.embed_tokens.weight.data
    rows, vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(), tokenizer.get_vocab()
    letters = old[[rows[letter] for letter in "abcdefghijklmnopqrstuvwxyz"]]
    new.copy_(letters.mean(0) + letters.std(0) * torch.randn(new.shape))
    for token, row in rows.items():
        if token in vocab and token not in byte_symbols()[128:]:
            new[vocab[token]] = old[row]
    missing = trunk.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"] and not missing.unexpected_keys, missing


@torch.no_grad()
def blend(trunk: Trunk, tokenizer: Tokenizer, folder: Path, share: float) -> None:
    """Move the weights that both have back by `share` of the way to those of `folder`: what the run forgot returns, and
    rows of new tokens stay.
    """
    earlier = Trunk(trunk.s)
    warm_start(earlier, tokenizer, folder)
    vocab, known = tokenizer.get_vocab(), Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    fresh = [row for token, row in vocab.items() if token not in known or token in byte_symbols()[128:]]
    learnt = trunk.embed_tokens.weight[fresh].clone()
    for p, q in zip(trunk.parameters(), earlier.parameters()):
        p.lerp_(q, share)
    trunk.embed_tokens.weight[fresh] = learnt


def load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    Words.vocabulary = vocabulary_words(tokenizer)
    return tokenizer


def compute(rank: int, trunk: Trunk, args: argparse.Namespace, pipe: Connection) -> None:
    """A process of one thread: for every "step" it receives, the gradient of one batch, left in shared memory; for
    every "update", new values for its part of the parameters.

    Parameters live in shared memory, too. Processes of one thread each suffer far less than two threads from other load
    on the machine: they wait for each other
    twice a step, not at every matrix product.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = Stream(load_tokenizer(args.tokenizer), args.seed * 1000 + rank)
    forward = torch.compile(trunk, dynamic=False) if args.compile else trunk
    all_grads = pipe.recv()
    parameters = list(trunk.parameters())
    optimizer = Optimizer(trunk, args.matrix_lr, args.other_lr, args.weight_decay, rank, args.workers, trunk.dtype)
    own = {id(p) for p in optimizer.parameters}
    batch = None
    while True:
        command, value = pipe.recv()
        if command == "stop":
            return
        if command == "restore":
            stream.restore(value[0])
            optimizer.load_state_dict(value[1])
        elif command == "state":
            pipe.send((stream.state(), optimizer.state_dict()))
        elif command == "validate":
            pipe.send(validate(trunk, forward, value))
        elif command == "update":
            scale, clip = value
            for p, *parts in zip(parameters, *all_grads):
                if id(p) in own:
                    p.grad = torch.stack(parts).mean(0).mul_(clip)
            optimizer.step(scale)
            pipe.send(None)
        else:
            batch = batch or stream.next_batch()
            loss, counts = run_batch(trunk, forward, batch)
            loss.backward()
            stream.shares.update(counts)
            with torch.no_grad():
                for shared, p in zip(all_grads[rank], parameters):
                    shared.copy_(p.grad)
                    p.grad = None
            pipe.send((float(loss.detach()), counts))
            batch = None


class Workers:
    """The compute processes and the pipes to them."""

    def __init__(self, trunk: Trunk, args: argparse.Namespace):
        context = torch.multiprocessing.get_context("spawn")
        self.grads = [[torch.zeros_like(p).share_memory_() for p in trunk.parameters()] for _ in range(args.workers)]
        self.pipes, self.processes = [], []
        for rank in range(args.workers):
            here, there = context.Pipe()
            process = context.Process(target=compute, args=(rank, trunk, args, there), daemon=True)
            process.start()
            there.close()
            here.send(self.grads)
            self.pipes.append(here)
            self.processes.append(process)

    def call(self, command: str, values: list | None = None) -> list:
        """Send a command to every worker and collect the answers, in order of rank. Raises EOFError when one has died.
        """
        for i, pipe in enumerate(self.pipes):
            pipe.send((command, values[i] if values else None))
        return [pipe.recv() for pipe in self.pipes] if command not in ("stop", "restore") else []


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.tokenizer)
    trunk = Trunk(
        Shape(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=args.hidden_size,
            num_layers=args.layers,
            intermediate_size=args.intermediate_size,
        ),
        getattr(torch, args.dtype),
    )
    checkpoint = args.work / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
    if state:
        trunk.load_state_dict(state["trunk"])
    elif args.warm_start:
        warm_start(trunk, tokenizer, args.warm_start)
    if args.export:
        if args.keep_share:
            blend(trunk, tokenizer, args.warm_start, args.keep_share)
        export(trunk, args.export)
        return
    step, steps, seconds = 0, sum(args.cycles), 0.0
    trunk.share_memory()
    workers = Workers(trunk, args)
    if state:
        step, seconds = state["step"], state["seconds"]
        workers.call("restore", state["workers"])
    print(
        f"{sum(p.numel() for p in trunk.parameters()) / 1e6:.2f} M parameters, from step {step} of {steps}", flush=True
    )
    held = held_out_batches(tokenizer, args.seed, 3 * args.workers)
    started = time.monotonic() - seconds
    reported, recent = time.monotonic(), []
    seen: dict[str, list[int]] = {}
    drop_later_rows(args.work / "loss.csv", step)
    with (args.work / "loss.csv").open("a", newline="") as log:
        while step < steps:
            for loss, counts in workers.call("step"):
                recent.append(loss)
                merge(seen, counts)
            if not math.isfinite(recent[-1]):
                raise RuntimeError(f"the loss is {recent[-1]} at step {step}")
            norm = torch.nn.utils.get_total_norm([sum(parts) / len(parts) for parts in zip(*workers.grads)])
            workers.call(
                "update",
                [(learning_rate(step, args.cycles, args.warmup, args.decay_from), min(1.0, 1.0 / (float(norm) + 1e-6)))]
                * args.workers,
            )
            step += 1
            if step % 20 == 0 or step == steps:
                now = time.monotonic()
                mean, speed = sum(recent) / len(recent), len(recent) * data.TOKENS_PER_BATCH / (now - reported)
                print(
                    f"step {step}/{steps} {now - started:.0f}s loss {mean:.4f} norm {float(norm):.2f} "
                    f"{speed:.0f} tokens/s",
                    flush=True,
                )
                csv.writer(log).writerow([step, f"{now - started:.0f}", f"{mean:.5f}"])
                log.flush()
                reported, recent = now, []
            if step % args.save_every == 0 or step == steps:
                counts = {}
                for part in workers.call("validate", [held[i :: args.workers] for i in range(args.workers)]):
                    merge(counts, part)
                print(f"held out at {step}: {table(counts)}\n  training stream: {table(seen)}", flush=True)
                seen = {}
                save(
                    checkpoint,
                    {
                        "trunk": trunk.state_dict(),
                        "step": step,
                        "seconds": time.monotonic() - started,
                        "workers": workers.call("state"),
                    },
                )
    workers.call("stop")
    plot(args.work)


def held_out_batches(tokenizer: Tokenizer, seed: int, count: int) -> list[Batch]:
    rng, packer, found = random.Random(seed + 1_000_003), data.Packer(tokenizer, (512,)), []
    while len(found) < count:
        if (batch := packer.add(data.conversation(rng, held=True))) is not None:
            found.append(batch)
    return found


def drop_later_rows(path: Path, step: int) -> None:
    """Forget the losses of steps that the checkpoint does not have."""
    if path.exists():
        path.write_text(
            "".join(line for line in path.read_text().splitlines(keepends=True) if int(line.split(",")[0]) <= step)
        )


def plot(work: Path) -> None:
    """Draw loss.png from loss.csv, if matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no loss.png, see loss.csv")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (work / "loss.csv").open() as file:
        rows = [(int(step), float(loss)) for step, _, loss in csv.reader(file)]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(*zip(*rows), linewidth=1)
    axes.set(xlabel="step", ylabel="loss (assistant tokens)", yscale="log")
    axes.grid(alpha=0.3)
    figure.savefig(work / "loss.png", dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint, the loss and its plot")
    parser.add_argument("--tokenizer", type=Path, default=FOLDER)
    parser.add_argument("--export", type=Path, help="write the checkpoint as a Hugging Face folder and exit")
    parser.add_argument(
        "--warm-start",
        type=Path,
        metavar="FOLDER",
        help="begin with the weights of this exported model; lower the learning rates, as the README does",
    )
    parser.add_argument(
        "--keep-share",
        type=float,
        default=0.0,
        help="with --export: the share of the --warm-start weights in what is written",
    )
    parser.add_argument(
        "--cycles",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[9000, 4500, 2000],
        metavar="STEPS[,STEPS...]",
        help="how many steps from a high learning rate to zero, and again",
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of one thread; each adds a batch of 2048 tokens to every step"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=0.004)
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="data type of the arithmetic; bfloat16 is faster only if the CPU multiplies it (AMX, AVX512_BF16)",
    )
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument(
        "--decay-from", type=float, default=0.4, help="fraction of the first cycle after which the learning rate falls"
    )
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
