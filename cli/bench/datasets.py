"""Makes prompts for measurements from a seed, so that two servers get the same prompts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.cli.bench.images import add_image_flags, random_images

_NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea kid body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""
WORDS = _NOUNS.split()
# ShareGPT samples skip conversations outside these bounds, as in vLLM
MIN_LEN, MAX_PROMPT_LEN, MAX_TOTAL_LEN = 4, 1024, 2048


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes one request: text, number of prompt tokens (an estimate without a tokenizer) and of tokens to
    generate. `images` are data URLs, whose tokens are not counted.
    """

    prompt: str
    prompt_len: int
    output_len: int
    images: tuple[str, ...] = ()


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the dataset flags, with vLLM's names and meanings."""
    group = parser.add_argument_group("Dataset")
    group.add_argument(
        "--dataset-name", choices=sorted(DATASETS), default="random", help="kind of prompts (default: random)"
    )
    group.add_argument("--dataset-path", metavar="FILE", help="JSON file of conversations, for sharegpt")
    group.add_argument(
        "--num-prompts", type=positive_int, default=1000, metavar="N", help="number of requests (default: 1000)"
    )
    group.add_argument(
        "--random-input-len",
        "--input-len",
        type=positive_int,
        default=1024,
        metavar="N",
        help="prompt tokens (default: 1024)",
    )
    group.add_argument(
        "--random-output-len",
        "--output-len",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens to generate (default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="R",
        help="lengths are uniform in len * (1 - R) to len * (1 + R) (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="tokens of a common prefix before the prompt tokens (default: 0)",
    )
    group.add_argument(
        "--sharegpt-output-len",
        type=positive_int,
        metavar="N",
        help="tokens to generate (default: as long as the recorded answer)",
    )
    group.add_argument(
        "--prefix-repetition-num-prefixes",
        type=positive_int,
        default=10,
        metavar="N",
        help="number of different prefixes (default: 10)",
    )
    group.add_argument(
        "--prefix-repetition-prefix-len",
        type=positive_int,
        default=256,
        metavar="N",
        help="tokens per prefix (default: 256)",
    )
    group.add_argument(
        "--prefix-repetition-suffix-len",
        type=positive_int,
        default=256,
        metavar="N",
        help="tokens after the prefix (default: 256)",
    )
    group.add_argument(
        "--prefix-repetition-output-len",
        type=positive_int,
        default=128,
        metavar="N",
        help="tokens to generate (default: 128)",
    )
    add_image_flags(group, non_negative_int)


def positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def non_negative_int(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return int(text)


def ratio(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return float(text)


def make_samples(arguments: argparse.Namespace, encoder: Encoder | None, seed: int) -> list[Sample]:
    """Return `num_prompts` samples. Raises ValueError if the dataset needs a tokenizer or file that is missing."""
    # a string, because Random ignores the sign of a number
    return DATASETS[arguments.dataset_name](arguments, encoder, random.Random(str(seed)))


def random_text(rng: random.Random, num_tokens: int, encoder: Encoder | None) -> str:
    """Return common English words, each one token in most vocabularies; with an encoder exactly `num_tokens` tokens."""
    words = " ".join(rng.choice(WORDS) for _ in range(num_tokens))
    if encoder is None:
        return words
    return fit(words, num_tokens, encoder, lambda: " " + rng.choice(WORDS))


def fit(text: str, num_tokens: int, encoder: Encoder, more: Callable[[], str]) -> str:
    """Lengthen or cut `text` until it encodes to `num_tokens`. Cutting may change the tokenization of the end, so this
    is repeated a few times.
    """
    for _ in range(20):
        ids = encoder.encode(text, add_special_tokens=False)
        if len(ids) == num_tokens:
            break
        text = (
            encoder.decode(ids[:num_tokens])
            if len(ids) > num_tokens
            else text + "".join(more() for _ in range(num_tokens - len(ids)))
        )
    return text


def _varied(rng: random.Random, length: int, range_ratio: float) -> int:
    return max(1, rng.randint(int(length * (1 - range_ratio)), int(length * (1 + range_ratio))))


def _random(arguments: argparse.Namespace, encoder: Encoder | None, rng: random.Random) -> list[Sample]:
    prefix = random_text(rng, arguments.random_prefix_len, encoder) + " " if arguments.random_prefix_len else ""
    samples = []
    for _ in range(arguments.num_prompts):
        input_len = _varied(rng, arguments.random_input_len, arguments.random_range_ratio)
        output_len = _varied(rng, arguments.random_output_len, arguments.random_range_ratio)
        samples.append(
            Sample(prefix + random_text(rng, input_len, encoder), arguments.random_prefix_len + input_len, output_len)
        )
    return samples


def _random_mm(arguments: argparse.Namespace, encoder: Encoder | None, rng: random.Random) -> list[Sample]:
    """Return random texts with random images after them."""
    samples = _random(arguments, encoder, rng)
    return [dataclasses.replace(sample, images=random_images(arguments, rng)) for sample in samples]


def _prefix_repetition(arguments: argparse.Namespace, encoder: Encoder | None, rng: random.Random) -> list[Sample]:
    prefixes = [
        random_text(rng, arguments.prefix_repetition_prefix_len, encoder)
        for _ in range(arguments.prefix_repetition_num_prefixes)
    ]
    length = arguments.prefix_repetition_prefix_len + arguments.prefix_repetition_suffix_len
    samples = [
        Sample(
            f"{prefixes[i % len(prefixes)]} {random_text(rng, arguments.prefix_repetition_suffix_len, encoder)}",
            length,
            arguments.prefix_repetition_output_len,
        )
        for i in range(arguments.num_prompts)
    ]
    rng.shuffle(samples)
    return samples


def _sharegpt(arguments: argparse.Namespace, encoder: Encoder | None, rng: random.Random) -> list[Sample]:
    if not arguments.dataset_path:
        raise ValueError("--dataset-name sharegpt needs --dataset-path FILE.json")
    if encoder is None:
        raise ValueError("--dataset-name sharegpt counts tokens and needs --tokenizer FOLDER")
    conversations = [
        entry["conversations"] for entry in json.loads(Path(arguments.dataset_path).read_text(encoding="utf-8"))
    ]
    conversations = [turns for turns in conversations if len(turns) >= 2]
    rng.shuffle(conversations)
    samples: list[Sample] = []
    for question, answer, *_ in conversations:
        if len(samples) == arguments.num_prompts:
            break
        prompt_len = len(encoder.encode(question["value"], add_special_tokens=False))
        answer_len = len(encoder.encode(answer["value"], add_special_tokens=False))
        output_len = arguments.sharegpt_output_len or answer_len
        if (
            MIN_LEN <= prompt_len <= MAX_PROMPT_LEN
            and answer_len >= MIN_LEN
            and prompt_len + output_len <= MAX_TOTAL_LEN
        ):
            samples.append(Sample(question["value"], prompt_len, output_len))
    if not samples:
        raise ValueError(f"{arguments.dataset_path} has no conversation of usable length")
    return [samples[i % len(samples)] for i in range(arguments.num_prompts)]


DATASETS: dict[str, Callable[[argparse.Namespace, Encoder | None, random.Random], list[Sample]]] = {
    "random": _random,
    "random-mm": _random_mm,
    "sharegpt": _sharegpt,
    "prefix-repetition": _prefix_repetition,
}
