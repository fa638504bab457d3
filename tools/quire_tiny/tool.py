"""A use of a tool: its definition, a request for it, its call and its result."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tools.quire_tiny import facts
from tools.quire_tiny.skill import invented, pseudo_word, upper_first

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """One request for one tool: the definition, what the user says, the arguments of the call, the tool's result and
    the answer made of it.
    """

    tool: dict[str, Any]
    user: str
    arguments: dict[str, Any]
    result: str
    answer: str


def function(
    name: str, description: str, parameters: dict[str, str | list[str]], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A tool definition as the OpenAI SDK sends it.

    A parameter is its JSON type, or a list of the strings it may be.
    """
    properties = {
        p: {"type": "string", "enum": t} if isinstance(t, list) else {"type": t} for p, t in parameters.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [p for p in parameters if p not in optional],
            },
        },
    }


def verb_name(rng: random.Random, verbs: str, nouns: str) -> str:
    """get_weather, getWeather, weather, fetch_weather ..."""
    verb, noun = rng.choice(verbs.split()), rng.choice(nouns.split())
    style = rng.random()
    if style < 0.72:
        return f"{verb}_{noun}"
    if style < 0.86:
        return verb + "".join(upper_first(part) for part in noun.split("_"))
    return noun


def city(rng: random.Random) -> str:
    return rng.choice(facts.CITIES) if rng.random() < 0.75 else upper_first(invented(rng, 4, 9))


def person(rng: random.Random) -> str:
    return rng.choice(facts.NAMES) if rng.random() < 0.8 else upper_first(invented(rng))


def clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50]):02d}"


def thing(rng: random.Random) -> str:
    return rng.choice(facts.NOUNS) if rng.random() < 0.75 else invented(rng)


def query(rng: random.Random) -> str:
    return rng.choice(
        [
            f"{rng.choice(facts.ADJECTIVES)} {thing(rng)}",
            f"{thing(rng)} {thing(rng)}",
            f"best {thing(rng)} in {city(rng)}",
            f"how to build a {thing(rng)}",
            f"{thing(rng)} price",
            f"{person(rng)} {upper_first(pseudo_word(rng))}",
            thing(rng),
            f"history of {city(rng)}",
        ]
    )
