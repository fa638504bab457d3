"""Families of tools of assistants: weather, time, sums, messages, dates."""

from __future__ import annotations

import random
from typing import Any

from tools.quire_tiny import facts
from tools.quire_tiny.skill import pseudo_word, to_json, upper_first
from tools.quire_tiny.tool import Use, city, clock, function, person, query, thing, verb_name
from tools.quire_tiny.word_skills import sentence


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
