"""Conversations with tools: families of tools with many names and parameter names, requests for them, their results,
and requests that none of them fits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tools.quire_tiny.everyday_tools import (
    alarm,
    calculator,
    clock_time,
    convert_currency,
    convert_units,
    event,
    lookup_id,
    search,
    send_message,
    stock,
    translate,
    weather,
)
from tools.quire_tiny.other_tools import (
    device,
    distance,
    explicit,
    file_tool,
    flight,
    media,
    no_arguments,
    random_number,
    subject_lookup,
)
from tools.quire_tiny.skill import held_out, to_json
from tools.quire_tiny.skills import draw
from tools.quire_tiny.tool import Message, Use, city

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
