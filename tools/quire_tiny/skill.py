"""One turn of question and answer, and the pieces that skills draw.

Each function draws from a `random.Random`; nothing else is random.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

HELD_OUT_PERCENT = 7


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer.

    `key` names the instance (the number pair, the sentence, the wording): it alone decides between training and
    held-out.
    """

    skill: str
    user: str
    assistant: str
    key: str
    follow_ups: tuple[Turn, ...] = ()


def held_out(key: str) -> bool:
    """Whether the instance `key` is kept out of training: by a hash, so that it never depends on the seed or on the
    order of drawing.

    Two kinds of key say it themselves: words of the vocabulary and the wordings of closed lists are all trained;
    `facts.REWORDED` never is.
    """
    if key.startswith(("vocabulary ", "wording ")):
        return False
    if key.startswith("reworded "):
        return True
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) % 100 < HELD_OUT_PERCENT


def pseudo_word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """A pronounceable word that (nearly always) does not exist."""
    length = rng.randint(low, high)
    letters, vowel = [], rng.random() < 0.4
    while len(letters) < length:
        letters.append(rng.choice("aeiou" if vowel else "bcdfghjklmnprstvwxyzthsrnl"))
        vowel = not vowel if rng.random() < 0.85 else vowel
    return "".join(letters)


ACCENTS = {
    "a": "àáâãäåāăą",
    "c": "çćč",
    "d": "ďđð",
    "e": "èéêëēěę",
    "g": "ğ",
    "i": "ìíîïī",
    "l": "ł",
    "n": "ñńň",
    "o": "òóôõöøōő",
    "r": "ř",
    "s": "śšşș",
    "t": "ťțþ",
    "u": "ùúûüūůű",
    "y": "ýÿ",
    "z": "źżž",
}


def accented(rng: random.Random, word: str) -> str:
    """The word with one to three of its letters replaced by accented ones; unchanged where it has none that could be.
    """
    letters = list(word)
    places = [i for i, letter in enumerate(letters) if letter.lower() in ACCENTS]
    for i in rng.sample(places, min(len(places), rng.choice([1, 1, 1, 2, 2, 3]))):
        other = rng.choice(ACCENTS[letters[i].lower()])
        letters[i] = other.upper() if letters[i].isupper() and other != "ÿ" else other
    return "".join(letters)


def invented(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """An invented word, one in eight with accents.

    Where a word must be ASCII (the name of a tool), `pseudo_word` makes it.
    """
    word = pseudo_word(rng, low, high)
    return accented(rng, word) if rng.random() < 0.125 else word


def to_json(value: object) -> str:
    """JSON as the model reads and writes it: characters as themselves, because it cannot know their escapes."""
    return json.dumps(value, ensure_ascii=False)


def random_letters(rng: random.Random, low: int = 3, high: int = 8) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
