"""Conversations with tools: families of tools with many names and parameter names, requests for them, their results,
and requests that none of them fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.quire_tiny import facts
from tools.quire_tiny.skills import draw, held_out, invented, number, pseudo_word, sentence, to_json, upper_first

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


def weather(rng: random.Random) -> Use:
    p, c = rng.choice(["city", "location", "city", "place", "town"]), city(rng)
    parameters: dict[str, Any] = {p: "string"}
    arguments: dict[str, Any] = {p: c}
    ask = rng.choice(
        [
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "What's the weather like in {c}?",
            "Weather in {c}?",
            "Tell me the weather in {c}.",
            "What is the temperature in {c}?",
            "Is it raining in {c}?",
            "How warm is it in {c}?",
            "What is the weather in {c} today?",
            "Do I need a coat in {c}?",
        ]
    )
    if rng.random() < 0.3:
        unit = rng.choice(["celsius", "fahrenheit"])
        name = rng.choice(["unit", "units"])
        parameters[name] = ["celsius", "fahrenheit"]
        if rng.random() < 0.5:
            arguments[name] = unit
            ask = ask[:-1] + f" in {unit}" + ask[-1]
    tool = function(
        verb_name(rng, "get fetch check lookup read query", "weather current_weather forecast temperature"),
        rng.choice(
            [
                "Get the current weather in a city.",
                "Get weather",
                "Current weather for a location",
                "Weather of a place",
                "Returns the weather",
            ]
        ),
        parameters,
        ("unit", "units"),
    )
    t, sky = rng.randint(-9, 38), rng.choice(["sunny", "cloudy", "rainy", "windy", "clear", "foggy", "snowing"])
    result, answer = rng.choice(
        [
            (to_json({"temperature": t, "condition": sky}), f"It is {t} degrees and {sky} in {c}."),
            (to_json({p: c, "temperature": t, "sky": sky}), f"It is {t} degrees and {sky} in {c}."),
            (f"{t} degrees, {sky}", f"It is {t} degrees and {sky} in {c}."),
            (to_json({"temperature": t}), f"It is {t} degrees in {c}."),
            (f"{t} degrees", f"It is {t} degrees in {c}."),
            (f"{sky}", f"It is {sky} in {c}."),
        ]
    )
    return Use(tool, ask.format(c=c), arguments, result, answer)


def clock_time(rng: random.Random) -> Use:
    p, c, t = rng.choice(["city", "location", "timezone", "place"]), city(rng), clock(rng)
    tool = function(
        verb_name(rng, "get fetch check lookup", "time current_time local_time"),
        rng.choice(["Get the current time in a city.", "Current local time", "Time in a place"]),
        {p: "string"},
    )
    user = rng.choice(
        [
            "What time is it in {c}?",
            "What is the time in {c}?",
            "Tell me the time in {c}.",
            "Current time in {c}?",
            "How late is it in {c}?",
            "What's the local time in {c}?",
        ]
    ).format(c=c)
    return Use(tool, user, {p: c}, rng.choice([t, to_json({"time": t})]), f"It is {t} in {c}.")


def calculator(rng: random.Random) -> Use:
    a, b = rng.randint(2, 9999), rng.randint(2, 999)
    op, word, value = rng.choice([("+", "plus", a + b), ("-", "minus", a - b), ("*", "times", a * b)])
    asks = [
        "What is {a} {op} {b}?",
        "What is {a} {w} {b}?",
        "Calculate {a} {op} {b}.",
        "Compute {a} {op} {b}",
        "How much is {a} {w} {b}?",
        "{a} {op} {b}",
        "Use the calculator: {a} {op} {b}",
    ]
    user = rng.choice(asks).format(a=a, b=b, op=op, w=word)
    if rng.random() < 0.6:
        p = rng.choice(["expression", "expr", "formula", "input"])
        tool = function(
            rng.choice(["calculator", "calculate", "evaluate", "compute", "calc", "math"]),
            rng.choice(["Evaluate an arithmetic expression.", "Calculator", "Calculates the value of an expression"]),
            {p: "string"},
        )
        arguments: dict[str, Any] = {p: f"{a} {op} {b}"}
    else:
        verb = {"+": "add", "-": "subtract", "*": "multiply"}[op]
        p, q = rng.choice([("a", "b"), ("x", "y"), ("first", "second")])
        tool = function(
            rng.choice([verb, f"{verb}_numbers"]), f"{upper_first(verb)} two numbers.", {p: "integer", q: "integer"}
        )
        arguments = {p: a, q: b}
    return Use(tool, user, arguments, rng.choice([str(value), to_json({"result": value})]), f"{a} {op} {b} = {value}")


def search(rng: random.Random) -> Use:
    p, q = rng.choice(["query", "q", "text", "search", "keywords"]), query(rng)
    tool = function(
        rng.choice(
            ["search", "web_search", "search_web", "search_documents", "find", "google", "search_docs", "lookup"]
        ),
        rng.choice(["Search the web.", "Search documents", "Find pages about something.", "Full text search"]),
        {p: "string"},
    )
    user = rng.choice(
        [
            "Search for {q}.",
            "Search the web for {q}.",
            "Find something about {q}.",
            "Look up {q}.",
            "Please search for {q}",
            "Search: {q}",
            'Search for "{q}".',
            "Can you search for {q}?",
            "Find {q}",
        ]
    ).format(q=q)
    found = sentence(rng)
    return Use(tool, user, {p: q}, rng.choice([found, to_json({"result": found})]), f"I found this: {found}")


def convert_units(rng: random.Random) -> Use:
    (source, target), value, out = rng.choice(facts.UNITS), rng.randint(1, 500), rng.randint(1, 999)
    names = rng.choice([("value", "from_unit", "to_unit"), ("amount", "from", "to"), ("value", "source", "target")])
    tool = function(
        verb_name(rng, "convert", "units unit measure"),
        rng.choice(["Convert between units.", "Unit converter"]),
        {names[0]: "number", names[1]: "string", names[2]: "string"},
    )
    user = rng.choice(
        ["Convert {v} {s} to {t}.", "How many {t} are {v} {s}?", "What is {v} {s} in {t}?", "{v} {s} in {t}"]
    ).format(v=value, s=source, t=target)
    return Use(
        tool,
        user,
        dict(zip(names, (value, source, target))),
        rng.choice([str(out), to_json({"result": out})]),
        f"{value} {source} are {out} {target}.",
    )


def convert_currency(rng: random.Random) -> Use:
    (source, target), value, out = rng.sample(facts.CURRENCIES, 2), rng.randint(1, 900), rng.randint(1, 999)
    names = rng.choice(
        [("amount", "from_currency", "to_currency"), ("amount", "from", "to"), ("value", "source", "target")]
    )
    tool = function(
        verb_name(rng, "convert exchange", "currency money"),
        rng.choice(["Convert an amount of money.", "Currency converter"]),
        {names[0]: "number", names[1]: "string", names[2]: "string"},
    )
    user = rng.choice(
        [
            "Convert {v} {s} to {t}.",
            "How much is {v} {s} in {t}?",
            "What are {v} {s} in {t}?",
            "Exchange {v} {s} for {t}.",
        ]
    ).format(v=value, s=source, t=target)
    return Use(
        tool,
        user,
        dict(zip(names, (value, source, target))),
        rng.choice([str(out), to_json({"result": out})]),
        f"{value} {source} are {out} {target}.",
    )


def send_message(rng: random.Random) -> Use:
    kind = rng.choice(["message", "email", "note", "sms"])
    to, text = rng.choice(["to", "recipient", "name"]), rng.choice(["text", "message", "body", "content"])
    who, what = person(rng), sentence(rng)
    tool = function(
        verb_name(rng, "send write", kind),
        f"Send {'an' if kind == 'email' else 'a'} {kind}.",
        {to: "string", text: "string"},
    )
    user = rng.choice(
        [
            "Send a {k} to {n}: {s}",
            "Send {n} a {k} saying: {s}",
            'Write a {k} to {n}: "{s}"',
            'Send {n} this {k}: "{s}"',
        ]
    ).format(k=kind, n=who, s=what)
    return Use(
        tool,
        user,
        {to: who, text: what},
        rng.choice(["ok", "sent", to_json({"status": "sent"}), to_json({"ok": True})]),
        f"I have sent the {kind} to {who}.",
    )


def translate(rng: random.Random) -> Use:
    text_name, language_name = rng.choice(
        [("text", "language"), ("text", "target_language"), ("text", "to"), ("sentence", "language")]
    )
    text, language = (thing(rng) if rng.random() < 0.4 else sentence(rng)), rng.choice(facts.LANGUAGES)
    tool = function(
        rng.choice(["translate", "translate_text", "translator"]),
        rng.choice(["Translate a text.", "Translate text into a language"]),
        {text_name: "string", language_name: "string"},
    )
    user = rng.choice(
        [
            "Translate '{s}' into {g}.",
            'Translate "{s}" to {g}.',
            "Translate into {g}: {s}",
            "How do I say '{s}' in {g}?",
        ]
    ).format(s=text, g=language)
    out = " ".join(pseudo_word(rng) for _ in range(rng.randint(1, 4)))
    return Use(
        tool,
        user,
        {text_name: text, language_name: language},
        rng.choice([out, to_json({"translation": out})]),
        f"In {language}: {out}",
    )


def alarm(rng: random.Random) -> Use:
    if rng.random() < 0.5:
        p, t = rng.choice(["time", "at", "when"]), clock(rng)
        tool = function(
            verb_name(rng, "set create add", "alarm"), rng.choice(["Set an alarm.", "Alarm clock"]), {p: "string"}
        )
        user = rng.choice(
            ["Set an alarm for {t}.", "Wake me up at {t}.", "Wake me at {t}", "I need an alarm at {t}."]
        ).format(t=t)
        return Use(tool, user, {p: t}, rng.choice(["ok", to_json({"status": "ok"})]), f"The alarm is set for {t}.")
    p, n = rng.choice([("minutes", "minutes"), ("seconds", "seconds"), ("duration", "minutes")]), rng.randint(2, 90)
    tool = function(
        verb_name(rng, "set start create", "timer"), rng.choice(["Start a timer.", "Timer"]), {p[0]: "integer"}
    )
    user = rng.choice(
        ["Set a timer for {n} {u}.", "Start a timer of {n} {u}.", "Timer for {n} {u}", "Remind me in {n} {u}."]
    ).format(n=n, u=p[1])
    return Use(
        tool, user, {p[0]: n}, rng.choice(["ok", to_json({"status": "ok"})]), f"The timer is set for {n} {p[1]}."
    )


def stock(rng: random.Random) -> Use:
    p = rng.choice(["symbol", "ticker", "company"])
    symbol = (
        "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
        if p != "company"
        else upper_first(pseudo_word(rng, 4, 8))
    )
    price = f"{rng.randint(1, 900)}.{rng.randint(10, 99)}"
    tool = function(
        verb_name(rng, "get fetch check", "stock_price stock price quote"),
        rng.choice(["Get the price of a stock.", "Current stock price"]),
        {p: "string"},
    )
    user = rng.choice(
        [
            "What is the stock price of {s}?",
            "How much is {s} worth?",
            "What is the price of {s}?",
            "Price of {s}?",
            "Check the stock of {s}.",
            "How is the {s} stock?",
        ]
    ).format(s=symbol)
    return Use(
        tool,
        user,
        {p: symbol},
        rng.choice([price, to_json({"price": float(price)})]),
        f"The price of {symbol} is {float(price)}.",
    )


def event(rng: random.Random) -> Use:
    names = rng.choice([("title", "date"), ("title", "day"), ("name", "day"), ("event", "date")])
    what, when = (
        f"{rng.choice(['meeting', 'lunch', 'dinner', 'call', 'party', 'lesson'])} with {person(rng)}",
        rng.choice([*facts.DAYS, f"{rng.choice(facts.MONTHS)} {rng.randint(1, 28)}"]),
    )
    tool = function(
        verb_name(rng, "create add schedule make", "event appointment calendar_event"),
        rng.choice(["Add an event to the calendar.", "Create a calendar entry"]),
        {names[0]: "string", names[1]: "string"},
    )
    user = rng.choice(
        [
            "Add {w} on {d} to my calendar.",
            "Schedule {w} on {d}.",
            "Create an event: {w} on {d}",
            "Plan {w} for {d}.",
            "Put {w} on {d} into the calendar.",
        ]
    ).format(w=what, d=when)
    return Use(
        tool,
        user,
        dict(zip(names, (what, when))),
        rng.choice(["ok", to_json({"status": "created"})]),
        f"I have added {what} on {when}.",
    )


def lookup_id(rng: random.Random) -> Use:
    kind = rng.choice(
        ["order", "user", "customer", "ticket", "invoice", "product", "account", "package", pseudo_word(rng)]
    )
    p = rng.choice(["id", f"{kind}_id", "number", f"{kind}_number"])
    n, text_id = rng.randint(1, 99999), rng.random() < 0.3
    value: Any = f"{rng.choice('ABCDEFGHXYZ')}{n}" if text_id else n
    state = rng.choice(["open", "closed", "active", "shipped", "paid", "pending", "delivered", "new"])
    tool = function(
        verb_name(rng, "get find fetch lookup check", f"{kind} {kind}_status {kind}_info"),
        rng.choice([f"Get the status of a {kind}.", f"Find a {kind} by its id", f"Look up a {kind}"]),
        {p: "string" if text_id else "integer"},
    )
    user = rng.choice(
        [
            "What is the status of {k} {n}?",
            "Look up {k} {n}.",
            "Find {k} {n}.",
            "Check {k} number {n}.",
            "Show me {k} {n}.",
            "Where is {k} {n}?",
        ]
    ).format(k=kind, n=value)
    return Use(
        tool,
        user,
        {p: value},
        rng.choice([state, to_json({"status": state}), to_json({"id": value, "status": state})]),
        f"The status of {kind} {value} is {state}.",
    )


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


FAMILIES: list[tuple[float, Callable[[random.Random], Use]]] = [
    (5, weather),
    (3, clock_time),
    (4, calculator),
    (3, search),
    (2, convert_units),
    (2, convert_currency),
    (2, send_message),
    (2, translate),
    (2, alarm),
    (2, stock),
    (2, event),
    (2, lookup_id),
    (1.5, device),
    (1.5, distance),
    (1, flight),
    (2, no_arguments),
    (1.5, file_tool),
    (1, media),
    (1, random_number),
    (4, subject_lookup),
    (2.5, explicit),
]
PLAIN = [
    "addition",
    "capitals",
    "capitals",
    "calendar",
    "identity",
    "identity",
    "quire",
    "repetition",
    "spelling",
    "reversing",
    "counting",
    "unknown",
]


def use(rng: random.Random) -> Use:
    family = rng.choices([f for _, f in FAMILIES], weights=[w for w, _ in FAMILIES])[0]
    return family(rng)


def call(u: Use, call_id: str) -> Message:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": u.tool["function"]["name"], "arguments": to_json(u.arguments)},
    }


def key_of(u: Use) -> str:
    """The instance of a tool call: which tool, with which arguments."""
    return f"tool {u.tool['function']['name']} {json.dumps(u.arguments)}"


def draw_use(rng: random.Random, held: bool) -> Use:
    while True:
        u = use(rng)
        if held_out(key_of(u)) == held:
            return u


def distractors(rng: random.Random, names: set[str], count: int) -> list[Use]:
    """Uses of other tools, with names different from `names` and each other in their words, so that exactly one tool
    fits a request.
    """
    found: list[Use] = []
    words = set().union(*(_words(n) for n in names)) if names else set()
    while len(found) < count:
        other = use(rng)
        own = _words(other.tool["function"]["name"])
        if not own & words:
            words |= own
            found.append(other)
    return found


_VERBS = {
    "get",
    "fetch",
    "check",
    "lookup",
    "read",
    "query",
    "find",
    "search",
    "set",
    "create",
    "add",
    "make",
    "start",
    "send",
    "write",
    "book",
    "open",
    "show",
    "current",
    "info",
    "status",
    "price",
    "stock",
    "time",
    "clock",
    "calculate",
    "calculator",
}
_SAME = {
    "forecast": "weather",
    "temperature": "weather",
    "google": "search",
    "web": "search",
    "docs": "search",
    "documents": "search",
    "find": "search",
    "lookup": "search",
    "evaluate": "calc",
    "compute": "calc",
    "calculate": "calc",
    "calculator": "calc",
    "math": "calc",
    "subtract": "calc",
    "multiply": "calc",
    "numbers": "calc",
    "quote": "price",
    "stock": "price",
    "clock": "time",
    "today": "date",
    "money": "currency",
    "route": "distance",
    "travel": "distance",
}


def _words(name: str) -> set[str]:
    """The words of a tool name without its verb, synonyms made equal."""
    spaced = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    parts = [_SAME.get(p, p) for p in spaced.split("_") if p]
    return {
        p
        for p in parts
        if p
        not in {
            "get",
            "fetch",
            "check",
            "read",
            "query",
            "set",
            "create",
            "make",
            "start",
            "send",
            "write",
            "book",
            "open",
            "show",
            "current",
            "info",
            "status",
        }
    } or set(parts)


def tool_conversation(rng: random.Random, held: bool) -> tuple[str, list[Message], list[dict[str, Any]]]:
    """(skill, messages, tools): a call, two calls at once, calls with their results and answers one after another, or a
    question that no tool fits.
    """
    x = rng.random()
    if x < 0.2:
        turn = draw(rng.choice(PLAIN), rng, held)
        taken = {"calculator", "capital", "get_capital", "search", "price"} | (
            {
                "weather",
                "time",
                "date",
                "stock",
                "price",
                "population",
                "translate",
                "distance",
                "currency",
                "book_flight",
            }
            if turn.skill == "unknown"
            else set()
        )
        tools = [other.tool for other in distractors(rng, taken, rng.randint(1, 3))]
        return (
            "tool-none",
            [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}],
            tools,
        )
    u = draw_use(rng, held)
    others = distractors(rng, {u.tool["function"]["name"]}, rng.choice([0, 0, 1, 1, 2, 3]))
    tools = [u.tool, *(other.tool for other in others)]
    rng.shuffle(tools)
    messages: list[Message] = [{"role": "user", "content": u.user}]
    if x < 0.28:
        family_pair = _pair(rng, held)
        if family_pair is not None:
            first, second, user = family_pair
            tools = [
                first.tool,
                *(other.tool for other in distractors(rng, {first.tool["function"]["name"]}, rng.choice([0, 1, 2]))),
            ]
            messages = [
                {"role": "user", "content": user},
                {"role": "assistant", "content": None, "tool_calls": [call(first, "call_0"), call(second, "call_1")]},
            ]
            if rng.random() < 0.5:
                messages += [
                    {"role": "tool", "tool_call_id": "call_0", "content": first.result},
                    {"role": "tool", "tool_call_id": "call_1", "content": second.result},
                    {"role": "assistant", "content": f"{first.answer} {second.answer}"},
                ]
            return "tool-parallel", messages, tools
    messages.append({"role": "assistant", "content": None, "tool_calls": [call(u, "call_0")]})
    if rng.random() < 0.55:
        messages += _outcome(u, "call_0")
        for n, other in enumerate(others, 1):  # the same tools again, for another request
            if rng.random() < 0.7 and held_out(key_of(other)) == held:
                messages += [
                    {"role": "user", "content": other.user},
                    {"role": "assistant", "content": None, "tool_calls": [call(other, f"call_{n}")]},
                    *_outcome(other, f"call_{n}"),
                ]
        if rng.random() < 0.2:
            turn = draw(rng.choice(["identity", "capitals", "calendar"]), rng, held)
            if not any("capital" in tool["function"]["name"].lower() for tool in tools):
                messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return "tool-call", messages, tools


def _outcome(u: Use, call_id: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call_id, "content": u.result}, {"role": "assistant", "content": u.answer}]


def _pair(rng: random.Random, held: bool) -> tuple[Use, Use, str] | None:
    """Two uses of one tool asked for together, for the families where that reads naturally."""
    family = rng.choice([weather, clock_time])
    first = family(rng)
    arguments = first.arguments
    if len(arguments) != 1 or held_out(key_of(first)) != held:
        return None
    name, c = next(iter(arguments.items()))
    other = city(rng)
    if other == c or other in first.answer:
        return None
    second = Use(first.tool, "", {name: other}, first.result, first.answer.replace(c, other))
    joined = first.user.replace(f"{c}", f"{c} and {other}", 1)
    return first, second, joined
