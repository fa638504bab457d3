"""Families of tools for devices, travel, files and media, and of no arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.quire_tiny import facts
from tools.quire_tiny.number_skills import number
from tools.quire_tiny.skill import pseudo_word, to_json, upper_first
from tools.quire_tiny.tool import Use, city, clock, function, person, thing, verb_name
from tools.quire_tiny.word_skills import sentence


def device(rng: random.Random) -> Use:
    thing_name, room, state = (
        rng.choice(["light", "lamp", "heating", "radio", "fan", "television"]),
        rng.choice(["kitchen", "garden", "bedroom", "cellar", "office", "hall", "bathroom"]),
        rng.choice(["on", "off"]),
    )
    if rng.random() < 0.5:
        tool = function(
            verb_name(rng, "turn_on switch_on" if state == "on" else "turn_off switch_off", thing_name),
            f"Turn {state} the {thing_name} in a room.",
            {"room": "string"},
        )
        arguments: dict[str, Any] = {"room": room}
    else:
        tool = function(
            verb_name(rng, "set switch control", thing_name),
            f"Switch the {thing_name} in a room.",
            {"room": "string", "state": ["on", "off"]},
        )
        arguments = {"room": room, "state": state}
    user = rng.choice(
        [
            "Turn {s} the {t} in the {r}.",
            "Switch {s} the {t} in the {r}.",
            "Please turn the {t} in the {r} {s}.",
            "{t} {s} in the {r}, please",
        ]
    ).format(s=state, t=thing_name, r=room)
    return Use(
        tool,
        upper_first(user),
        arguments,
        rng.choice(["ok", to_json({"ok": True})]),
        f"The {thing_name} in the {room} is now {state}.",
    )


def distance(rng: random.Random) -> Use:
    a, b, d = city(rng), city(rng), rng.randint(10, 9000)
    names = rng.choice([("origin", "destination"), ("from", "to"), ("start", "end"), ("city1", "city2")])
    tool = function(
        verb_name(rng, "get compute find", "distance route travel_time"),
        rng.choice(["Distance between two cities.", "Get the distance from one place to another"]),
        {names[0]: "string", names[1]: "string"},
    )
    user = rng.choice(
        [
            "How far is it from {a} to {b}?",
            "What is the distance from {a} to {b}?",
            "Distance from {a} to {b}?",
            "How far is {a} from {b}?",
        ]
    ).format(a=a, b=b)
    return Use(
        tool,
        user,
        {names[0]: a, names[1]: b},
        rng.choice([f"{d} km", to_json({"distance_km": d})]),
        f"It is {d} km from {a} to {b}.",
    )


def flight(rng: random.Random) -> Use:
    a, b, day = city(rng), city(rng), rng.choice(facts.DAYS)
    names = rng.choice([("origin", "destination", "date"), ("from", "to", "day"), ("departure", "arrival", "date")])
    kind = rng.choice(["flight", "train", "ticket"])
    tool = function(
        verb_name(rng, "book find search", kind),
        f"Book a {kind}.",
        {names[0]: "string", names[1]: "string", names[2]: "string"},
    )
    user = rng.choice(
        [
            "Book a {k} from {a} to {b} on {d}.",
            "I need a {k} from {a} to {b} on {d}.",
            "Find a {k} from {a} to {b} on {d}",
        ]
    ).format(k=kind, a=a, b=b, d=day)
    t = clock(rng)
    return Use(
        tool,
        user,
        dict(zip(names, (a, b, day))),
        rng.choice([t, to_json({"time": t})]),
        f"There is a {kind} from {a} to {b} on {day} at {t}.",
    )


def no_arguments(rng: random.Random) -> Use:
    kind = rng.randrange(5)
    if kind == 0:
        day = rng.choice(facts.DAYS)
        return Use(
            function(verb_name(rng, "get fetch", "date current_date today"), "Get today's date.", {}),
            rng.choice(["What day is it?", "What day is today?", "What is today's date?", "Which day is it today?"]),
            {},
            day,
            f"Today is {day}.",
        )
    if kind == 1:
        n = rng.randint(1, 6)
        return Use(
            function(verb_name(rng, "roll throw", "dice die"), "Roll a die.", {}),
            rng.choice(["Roll a die.", "Roll the dice.", "Throw the dice for me."]),
            {},
            str(n),
            f"The die shows {n}.",
        )
    if kind == 2:
        t = clock(rng)
        return Use(
            function(verb_name(rng, "get read", "time current_time clock"), "Get the current time.", {}),
            rng.choice(["What time is it?", "Tell me the time.", "What is the time?", "What's the time now?"]),
            {},
            rng.choice([t, to_json({"time": t})]),
            f"It is {t}.",
        )
    if kind == 3:
        side = rng.choice(["heads", "tails"])
        return Use(
            function(verb_name(rng, "flip toss", "coin"), "Flip a coin.", {}),
            rng.choice(["Flip a coin.", "Toss a coin.", "Heads or tails?"]),
            {},
            side,
            f"The coin shows {side}.",
        )
    joke = sentence(rng)
    return Use(
        function(verb_name(rng, "get tell fetch", "joke random_joke"), "Get a joke.", {}),
        rng.choice(["Tell me a joke.", "Do you know a joke?", "I want to hear a joke."]),
        {},
        joke,
        joke,
    )


def file_tool(rng: random.Random) -> Use:
    path = (
        rng.choice(["", "/home/", "/tmp/", "docs/", "data/"])
        + thing(rng)
        + rng.choice([".txt", ".md", ".csv", ".json", ".py", ".log"])
    )
    p, content = rng.choice(["path", "file", "filename", "file_path"]), sentence(rng)
    if rng.random() < 0.6:
        tool = function(
            verb_name(rng, "read open show cat", "file text_file"),
            rng.choice(["Read a file.", "Returns the content of a file"]),
            {p: "string"},
        )
        user = rng.choice(
            ["Read the file {f}.", "Show me {f}.", "What is in {f}?", "Open {f}", "Print the content of {f}."]
        ).format(f=path)
        return Use(tool, user, {p: path}, content, f"The file {path} says: {content}")
    tool = function(verb_name(rng, "delete remove", "file"), "Delete a file.", {p: "string"})
    return Use(
        tool,
        rng.choice(["Delete the file {f}.", "Remove {f}.", "Delete {f}"]).format(f=path),
        {p: path},
        rng.choice(["ok", to_json({"ok": True})]),
        f"I have deleted {path}.",
    )


def media(rng: random.Random) -> Use:
    kind = rng.choice(["song", "music", "playlist", "video", "artist", "album"])
    p, what = (
        rng.choice(["name", "title", kind]),
        rng.choice([upper_first(thing(rng)), f"{upper_first(rng.choice(facts.ADJECTIVES))} {upper_first(thing(rng))}"]),
    )
    tool = function(verb_name(rng, "play start", kind), f"Play a {kind}.", {p: "string"})
    return Use(
        tool,
        rng.choice(["Play {w}.", "Play the {k} {w}.", "I want to hear {w}.", "Start {w}", "Put on {w}."]).format(
            w=what, k=kind
        ),
        {p: what},
        rng.choice(["ok", to_json({"status": "playing"})]),
        f"Now playing {what}.",
    )


def random_number(rng: random.Random) -> Use:
    low, high = rng.randint(0, 20), rng.randint(21, 1000)
    names, n = rng.choice([("min", "max"), ("low", "high"), ("start", "end")]), rng.randint(low, high)
    tool = function(
        verb_name(rng, "get make generate", "random_number number random"),
        "Random number between two numbers.",
        {names[0]: "integer", names[1]: "integer"},
    )
    user = rng.choice(
        [
            "Give me a random number between {a} and {b}.",
            "Pick a number from {a} to {b}.",
            "Random number from {a} to {b}",
        ]
    ).format(a=low, b=high)
    return Use(
        tool, user, {names[0]: low, names[1]: high}, rng.choice([str(n), to_json({"number": n})]), f"The number is {n}."
    )


def subject_lookup(rng: random.Random) -> Use:
    """Tools of the form get_<property>(<thing>), with properties and things of every kind, invented ones too."""
    prop = rng.choice(
        [
            "population",
            "price",
            "capital",
            "color",
            "size",
            "age",
            "owner",
            "address",
            "phone",
            "definition",
            "author",
            "length",
            "weight",
            "height",
            "rating",
            "stock",
            "salary",
            "score",
            "balance",
            "recipe",
            "news",
            "synonym",
            pseudo_word(rng, 4, 8),
        ]
    )
    p = rng.choice(
        ["name", "item", "key", "topic", "word", "subject", "country", "product", "title", pseudo_word(rng, 3, 6)]
    )
    subject = rng.choice([thing, city, person])(rng)
    tool = function(
        verb_name(rng, "get find fetch lookup check read query", prop),
        rng.choice(
            [
                f"Get the {prop} of something.",
                f"Look up the {prop}",
                f"{upper_first(prop)} of a {p}",
                f"Returns the {prop}.",
            ]
        ),
        {p: "string"},
    )
    user = rng.choice(
        [
            "What is the {p} of {s}?",
            "Look up the {p} of {s}.",
            "Tell me the {p} of {s}.",
            "Find the {p} of {s}.",
            "Get the {p} of {s}.",
            "{p} of {s}?",
        ]
    ).format(p=prop, s=subject)
    value = rng.choice([thing(rng), str(rng.randint(1, 99999)), person(rng)])
    return Use(
        tool,
        upper_first(user),
        {p: subject},
        rng.choice([value, to_json({prop: value})]),
        f"The {prop} of {subject} is {value}.",
    )


def explicit(rng: random.Random) -> Use:
    """Invented tools that the user names: the call has to be built from the definition alone."""
    name = "_".join(rng.choice([rng.choice(facts.NOUNS), pseudo_word(rng)]) for _ in range(rng.randint(1, 3)))
    kinds: dict[str, Callable[[], Any]] = {
        "string": lambda: thing(rng),
        "integer": lambda: rng.randint(0, 999),
        "number": lambda: number(rng),
        "boolean": lambda: rng.random() < 0.5,
    }
    chosen = {
        rng.choice([pseudo_word(rng, 3, 6), rng.choice(facts.NOUNS), "name", "value", "count", "level"]): rng.choice(
            ["string", "string", "integer", "number", "boolean"]
        )
        for _ in range(rng.randint(1, 3))
    }
    arguments = {p: kinds[t]() for p, t in chosen.items()}
    tool = function(
        name,
        rng.choice([f"The {name} tool.", f"Runs {name.replace('_', ' ')}.", "A tool.", sentence(rng)]),
        dict(chosen),
    )
    shown = rng.choice([" and ", ", "]).join(
        f"{p} {str(v).lower() if isinstance(v, bool) else v}" for p, v in arguments.items()
    )
    user = rng.choice(
        ["Use {n} with {x}.", "Call {n} with {x}.", "Run {n} with {x}", "Please call {n} with {x}."]
    ).format(n=name, x=shown)
    out = rng.choice(["ok", "done", sentence(rng), str(rng.randint(0, 999))])
    return Use(tool, user, arguments, out, f"The tool {name} returned: {out}")
