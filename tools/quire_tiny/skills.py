"""The skills by name, one function each, with their weights in the training data."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.quire_tiny.number_skills import (
    addition,
    calendar,
    capital,
    comparison,
    counting,
    multiplication,
    ordering,
    subtraction,
)
from tools.quire_tiny.script_skills import accents, scripts
from tools.quire_tiny.skill import Turn, held_out
from tools.quire_tiny.talk_skills import (
    about_quire,
    favourite,
    general,
    identity,
    introduction,
    json_object,
    listing,
    paragraph,
    unknown,
)
from tools.quire_tiny.word_skills import casing, first_letter, repetition, reversing, spelling

SKILLS: dict[str, tuple[float, Callable[[random.Random], Turn]]] = {
    "addition": (14, addition),
    "subtraction": (22, subtraction),
    "multiplication": (1, multiplication),
    "comparison": (1, comparison),
    "capitals": (11, capital),
    "calendar": (6, calendar),
    "ordering": (3, ordering),
    "counting": (3, counting),
    "spelling": (10, spelling),
    "reversing": (7, reversing),
    "casing": (6, casing),
    "letters": (2, first_letter),
    "repetition": (12, repetition),
    "identity": (5, identity),
    "quire": (12, about_quire),
    "general": (4, general),
    "introduction": (1.5, introduction),
    "favourite": (1.5, favourite),
    "lists": (2.5, listing),
    "paragraphs": (2, paragraph),
    "json": (5, json_object),
    "unknown": (5, unknown),
    "accents": (16, accents),
    "scripts": (16, scripts),
}


def draw(name: str, rng: random.Random, held: bool) -> Turn:
    """A turn of skill function `name` whose instance is (held=True) or is not held out of training; follow-ups of the
    wrong side are dropped.
    """
    for _ in range(2000):
        turn = SKILLS[name][1](rng)
        if held_out(turn.key) == held:
            kept = tuple(f for f in turn.follow_ups if not held_out(f.key))
            return Turn(turn.skill, turn.user, turn.assistant, turn.key, kept)
    raise ValueError(f"skill {name} gives no instance with held={held}")
