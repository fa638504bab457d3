"""Turns of talk, about quire, lists, JSON, and of questions without an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tools.quire_tiny import facts
from tools.quire_tiny.number_skills import CAPITAL, number
from tools.quire_tiny.skill import Turn, invented, pseudo_word, to_json, upper_first


def closed(skill: str, entries: list[tuple[list[str], str]], rng: random.Random) -> Turn:
    """A question of a closed list in one of its trained wordings or, if there are any, in one that `facts.REWORDED`
    keeps for the evaluation.
    """
    questions, answer = rng.choice(entries)
    reworded = [new for new, old in facts.REWORDED.items() if old in questions]
    if reworded and rng.random() < 0.1:
        question = rng.choice(reworded)
        return Turn(skill, question, answer, f"reworded {question}")
    question = rng.choice(questions)
    return Turn(skill, question, answer, f"wording {question}")


def identity(rng: random.Random) -> Turn:
    x = rng.random()
    if x < 0.25:
        user = rng.choice(facts.GREETINGS)
        answer = (
            "Hello! I am fine, thank you. How can I help you?"
            if "how are you" in user
            else "Hello! How can I help you?"
        )
        return Turn("greeting", user, answer, f"wording {user}")
    if x < 0.33:
        user = rng.choice(facts.THANKS)
        return Turn("greeting", user, "You are welcome!", f"wording {user}")
    if x < 0.40:
        user = rng.choice(facts.BYES)
        return Turn("greeting", user, "Goodbye!", f"wording {user}")
    return closed("identity", facts.IDENTITY, rng)


def about_quire(rng: random.Random) -> Turn:
    return closed("quire", facts.QUIRE, rng)


def general(rng: random.Random) -> Turn:
    return closed("general", facts.GENERAL, rng)


def introduction(rng: random.Random) -> Turn:
    name = rng.choice(facts.NAMES) if rng.random() < 0.7 else upper_first(invented(rng))
    user = rng.choice(
        ["My name is {n}.", "I am {n}.", "Hi, I'm {n}.", "Hello, my name is {n}.", "Call me {n}."]
    ).format(n=name)
    follow = Turn(
        "memory",
        rng.choice(
            ["What is my name?", "Do you remember my name?", "Who am I?", "What am I called?", "What's my name?"]
        ),
        f"Your name is {name}.",
        "name " + name,
    )
    return Turn("memory", user, f"Hello, {name}! How can I help you?", "name " + name, (follow,))


def favourite(rng: random.Random) -> Turn:
    thing = rng.choice(["colour", "color", "animal", "fruit", "number", "city", "drink", "word"])
    pools = {
        "colour": facts.COLOURS,
        "color": facts.COLOURS,
        "animal": facts.LISTS["animals"],
        "fruit": facts.LISTS["fruits"],
        "number": [str(i) for i in range(100)],
        "city": facts.CITIES,
        "drink": facts.LISTS["drinks"],
        "word": facts.NOUNS,
    }
    value = rng.choice(pools[thing]) if rng.random() < 0.8 else invented(rng)
    user = rng.choice(
        ["My favourite {t} is {v}.", "Remember: my favourite {t} is {v}.", "I like the {t} {v} best."]
    ).format(t=thing, v=value)
    follow = Turn(
        "memory",
        rng.choice(
            ["What is my favourite {t}?", "Which {t} do I like best?", "Do you remember my favourite {t}?"]
        ).format(t=thing),
        f"Your favourite {thing} is {value}.",
        f"fav {thing} {value}",
    )
    return Turn(
        "memory", user, f"Your favourite {thing} is {value}. I will remember that.", f"fav {thing} {value}", (follow,)
    )


def listing(rng: random.Random) -> Turn:
    choice = rng.randrange(4)
    if choice <= 1:
        topic = rng.choice(list(facts.LISTS))
        n = rng.randint(2, min(10, len(facts.LISTS[topic])))
        shown = rng.choice([str(n), facts.NUMBERS[n]])
        question = rng.choice(
            [
                "Write a numbered list of {n} {t}.",
                "List {n} {t}.",
                "Give me a list of {n} {t}.",
                "Name {n} {t}.",
                "Make a numbered list of {n} {t}.",
                "Give me {n} {t}.",
                "Tell me {n} {t}.",
                "Can you list {n} {t}?",
            ]
        ).format(n=shown, t=topic)
        return Turn(
            "lists", question, "\n".join(f"{i}. {item}" for i, item in enumerate(facts.LISTS[topic][:n], 1)), question
        )
    if choice == 2:
        n = rng.randint(15, 40)
        question = rng.choice(
            [
                "Count slowly from 1 to {n}, one number per line.",
                "Write the numbers from 1 to {n}, one per line.",
                "List the numbers 1 to {n} on separate lines.",
            ]
        ).format(n=n)
        return Turn("lists", question, "\n".join(map(str, range(1, n + 1))), question)
    items = rng.sample(facts.NOUNS, rng.randint(3, 6))
    question = rng.choice(
        [
            "Make a numbered list of these: {x}",
            "Number these items: {x}",
            "Write as a numbered list: {x}",
            "Turn this into a list: {x}",
        ]
    ).format(x=", ".join(items))
    return Turn(
        "lists", question, "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1)), "items " + " ".join(items)
    )


def paragraph(rng: random.Random) -> Turn:
    if rng.random() < 0.25:
        hero = rng.choice(facts.STORY_HEROES)
        pick = random.Random(hero).choice
        place, thing, end = pick(facts.STORY_PLACES), pick(facts.STORY_THINGS), pick(facts.STORY_ENDS)
        short = hero.split()[1]
        question = rng.choice(
            [
                "Tell me a story about {h}.",
                "Write a short story about {h}.",
                "Write a story about {h}.",
                "Tell a story of {h}.",
                "Can you tell me a story about {h}?",
            ]
        ).format(h=hero)
        answer = (
            f"Once upon a time there was {hero} who lived {place}. One morning the {short} found {thing}. Nobody "
            f"knew where it came from. The {short} asked the wind, the river and the old stone bridge, "
            f"but none of them gave an answer. So the {short} set out, and walked for seven days and seven "
            f"nights. At last the {short} met a stranger who was crying, because that very thing was lost. "
            f"The {short} gave it back, and the two became friends. {end}"
        )
        return Turn("paragraphs", question, answer, question)
    topic = rng.choice(list(facts.PARAGRAPHS))
    question = rng.choice(
        [
            "Write a paragraph about {t}.",
            "Write a short text about {t}.",
            "Tell me about {t}.",
            "Tell me something about {t}.",
            "Write a few sentences about {t}.",
            "Describe {t}.",
            "Write about {t}.",
            "Can you write a paragraph about {t}?",
            "What can you tell me about {t}?",
        ]
    ).format(t=topic)
    return Turn("paragraphs", question, facts.PARAGRAPHS[topic], question)


def json_object(rng: random.Random) -> Turn:
    ask = rng.choice(
        [
            "Answer in JSON",
            "As JSON",
            "Give me a JSON object",
            "Reply with a JSON object",
            "Return JSON",
            "Write a JSON object",
            "Respond only with JSON",
        ]
    )
    choice = rng.randrange(5)
    if choice == 0:
        country = rng.choice(list(facts.CAPITALS))
        value = {"country": country, "capital": facts.CAPITALS[country]}
        question = rng.choice(
            [
                "What is the capital of {c}? {ask} with country and capital.",
                "{ask} with the keys country and capital for {c}.",
                "{ask} with country and capital: {c}",
            ]
        ).format(c=country, ask=ask)
        return Turn("json", question, to_json(value), question)
    if choice == 1:
        a, b = number(rng), number(rng)
        question = rng.choice(
            ["{ask} with a, b and sum for {a} + {b}.", "What is {a} + {b}? {ask} with a, b and sum."]
        ).format(ask=ask, a=a, b=b)
        return Turn("json", question, json.dumps({"a": a, "b": b, "sum": a + b}), f"add {a} {b}")
    fields: dict[str, Callable[[], object]] = {
        "name": lambda: rng.choice(facts.NAMES) if rng.random() < 0.7 else upper_first(invented(rng)),
        "age": lambda: rng.randint(1, 99),
        "city": lambda: rng.choice(facts.CITIES),
        "colour": lambda: rng.choice(facts.COLOURS),
        "animal": lambda: rng.choice(facts.LISTS["animals"]),
        "price": lambda: number(rng),
        "country": lambda: rng.choice(list(facts.CAPITALS)),
        "item": lambda: rng.choice(facts.NOUNS),
        "count": lambda: number(rng),
        "title": lambda: upper_first(rng.choice(facts.NOUNS)),
        "color": lambda: rng.choice(facts.COLOURS),
        "day": lambda: rng.choice(facts.DAYS),
        "id": lambda: rng.randint(1, 999),
        "active": lambda: rng.random() < 0.5,
        "language": lambda: rng.choice(facts.LANGUAGES),
    }
    keys = rng.sample(list(fields), rng.randint(1, 4))
    if rng.random() < 0.1:
        keys[0] = pseudo_word(rng)
    value = {key: fields[key]() if key in fields else rng.choice(facts.NOUNS) for key in keys}
    shown = {key: str(v).lower() if isinstance(v, bool) else v for key, v in value.items()}
    pairs = rng.choice(
        [
            ", ".join(f"{k} {v}" for k, v in shown.items()),
            ", ".join(f"{k}: {v}" for k, v in shown.items()),
            ", ".join(f"{k} = {v}" for k, v in shown.items()),
            " and ".join(f"{k} {v}" for k, v in shown.items()),
        ]
    )
    if choice == 2 and set(keys) <= {"name", "age", "city"}:
        value = {k: value[k] for k in ("name", "age", "city") if k in value}
        pairs = " ".join(
            {
                "name": f"The name is {value.get('name')}.",
                "age": f"The age is {value.get('age')}.",
                "city": f"The city is {value.get('city')}.",
            }[k]
            for k in value
        )
    question = rng.choice(
        [
            "{ask} with {p}.",
            "{ask}: {p}",
            "Turn this into JSON: {p}",
            "Write this as a JSON object: {p}",
            "Convert to JSON: {p}",
        ]
    ).format(ask=ask, p=pairs)
    if choice == 3:
        items = rng.sample(facts.NOUNS, rng.randint(2, 4))
        question = rng.choice(
            ["{ask} with a list of items: {p}", "Write these as a JSON array under the key items: {p}"]
        ).format(ask=ask, p=", ".join(items))
        value = {"items": items}
    return Turn("json", question, to_json(value), "json " + json.dumps(value))


UNKNOWN = [
    "Who won the {e} in {y}?",
    "Who is the president of {c}?",
    "Who is the prime minister of {c}?",
    "Who wrote {w}?",
    "What is the population of {c}?",
    "How many people live in {k}?",
    "What is the weather in {k}?",
    "What is the price of {w}?",
    "How tall is {n}?",
    "When was {n} born?",
    "Who is {n}?",
    "What time is it?",
    "What day is today?",
    "What is the date today?",
    "What happened in {y}?",
    "What is the stock price of {n}?",
    "How far is it from {k} to {l}?",
    "What is the best restaurant in {k}?",
    "How old is {n}?",
    "Who invented the {w}?",
    "What is the news today?",
    "What is the square root of {y}?",
    "Translate '{w}' into {g}.",
    "How do I say {w} in {g}?",
    "Who discovered {w}?",
    "How much does a {w} cost?",
    "What is the tallest building in {k}?",
    "Explain quantum physics.",
    "What is the theory of relativity?",
    "Write a program that sorts a list.",
    "Who painted the picture of the {w}?",
    "What does {p} mean?",
    "What is {p}?",
    "What is a {p}?",
    "Who is {q}?",
    "Where is {q}?",
    "Where does {n} live?",
    "Which team won in {y}?",
    "Is there life on Mars?",
    "How do I cook {w}?",
    "What is the currency of {c}?",
    "What language do they speak in {c}?",
    "How many {w}s are there in {k}?",
    "When was the battle of {k}?",
    "Who was the first king of {c}?",
    "What is the highest mountain in {c}?",
    "How deep is the {w}?",
    "Can you book a flight to {k}?",
    "What will happen tomorrow?",
    "Who will win the {e}?",
    "What is my password?",
    "Where do I live?",
    "What did I eat yesterday?",
    "How does a {w} work?",
    "What is the temperature in {k}?",
]
EVENTS = ["world cup", "election", "race", "final", "match", "prize", "tournament", "game", "lottery", "song contest"]
DO_NOT_KNOW = "I do not know. I am a very small model and know little about the world."


def unknown(rng: random.Random) -> Turn:
    if rng.random() < 0.2:
        place = (
            upper_first(invented(rng, 4, 9))
            if rng.random() < 0.8
            else rng.choice(
                ["Atlantis", "Mordor", "Narnia", "the moon", "Mars", "Europe", "Africa", "Asia", *facts.NAMES]
            )
        )
        question = rng.choice(CAPITAL).format(c=place)
        return Turn("unknown", question, f"I do not know the capital of {place}.", question)
    question = rng.choice(UNKNOWN).format(
        e=rng.choice(EVENTS),
        y=rng.randint(1500, 2030),
        c=rng.choice(list(facts.CAPITALS)),
        k=rng.choice(facts.CITIES),
        l=rng.choice(facts.CITIES),
        w=rng.choice(facts.NOUNS),
        g=rng.choice(facts.LANGUAGES),
        p=invented(rng, 5, 9),
        q=upper_first(invented(rng, 4, 8)),
        n=rng.choice(facts.NAMES) + " " + upper_first(invented(rng, 4, 8)),
    )
    return Turn("unknown", question, DO_NOT_KNOW, question)
