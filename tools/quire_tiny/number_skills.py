"""Turns about numbers, capitals, days, order and counting."""

from __future__ import annotations

import random

from tools.quire_tiny import facts
from tools.quire_tiny.skill import Turn, upper_first

ADD = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Compute {a} + {b}.",
    "What's {a}+{b}?",
    "Can you add {a} and {b}?",
    "{a} plus {b}",
    "I have {a} apples and buy {b} more. How many do I have?",
    "What do you get when you add {b} to {a}?",
    "How much is {a} + {b}?",
]
SUB = [
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "{a}-{b}=",
    "Calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "How much is {a} minus {b}?",
    "Compute {a} - {b}.",
    "What's {a}-{b}?",
    "{a} minus {b}",
    "I have {a} apples and eat {b}. How many are left?",
    "What is left when I take {b} from {a}?",
    "How much is {a} - {b}?",
    "What is the difference between {a} and {b}?",
]
MUL = [
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a} x {b}",
    "Multiply {a} by {b}.",
    "{a} times {b}",
    "Calculate {a} * {b}.",
]


def number(rng: random.Random) -> int:
    return rng.randint(0, 9) if rng.random() < 0.3 else rng.randint(10, 99)


def addition(rng: random.Random) -> Turn:
    a, b = number(rng), number(rng)
    answer = f"{a} + {b} = {a + b}"
    c = rng.randint(1, 9)
    follow = Turn(
        "addition",
        rng.choice(["Add {c} to that.", "And plus {c}?", "Now add {c}.", "Plus {c}?"]).format(c=c),
        f"{a + b} + {c} = {a + b + c}",
        f"add {a + b} {c}",
    )
    return Turn("addition", rng.choice(ADD).format(a=a, b=b), answer, f"add {a} {b}", (follow,))


def subtraction(rng: random.Random) -> Turn:
    a, b = number(rng), number(rng)
    if a < b and rng.random() < 0.8:
        a, b = b, a
    question = rng.choice(SUB[:12] if a < b else SUB)
    c = rng.randint(1, 9)
    follow = Turn(
        "subtraction",
        rng.choice(["Subtract {c} from that.", "And minus {c}?", "Now take away {c}.", "Minus {c}?"]).format(c=c),
        f"{a - b} - {c} = {a - b - c}",
        f"sub {a - b} {c}",
    )
    return Turn(
        "subtraction", question.format(a=a, b=b), f"{a} - {b} = {a - b}", f"sub {a} {b}", (follow,) if a - b > c else ()
    )


def multiplication(rng: random.Random) -> Turn:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    question = rng.choice(MUL).format(a=a, b=b)
    return Turn("multiplication", question, f"{a} * {b} = {a * b}", question)


def comparison(rng: random.Random) -> Turn:
    a, b = rng.sample(range(0, 100), 2)
    if rng.random() < 0.5:
        question = rng.choice(
            ["Which is larger, {a} or {b}?", "Which is bigger: {a} or {b}?", "Which number is greater, {a} or {b}?"]
        )
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    else:
        question = rng.choice(["Which is smaller, {a} or {b}?", "Which number is less, {a} or {b}?"])
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    return Turn("comparison", question.format(a=a, b=b), answer, f"cmp {a} {b}")


# ------------------------------------------------------------------ capitals

CAPITAL = [
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "Name the capital of {c}.",
    "Which city is the capital of {c}?",
    "Tell me the capital of {c}.",
    "Capital of {c}?",
    "capital of {c}",
    "What is the name of the capital of {c}?",
    "Do you know the capital of {c}?",
    "The capital of {c} is",
    "What is the capital city of {c}?",
    "Which is the capital of {c}?",
    "I would like to know the capital of {c}.",
    "Give me the capital of {c}.",
]
COUNTRY = [
    "Which country has the capital {k}?",
    "{k} is the capital of which country?",
    "Of which country is {k} the capital?",
    "What country is {k} the capital of?",
]


def capital(rng: random.Random) -> Turn:
    country = rng.choice(list(facts.CAPITALS))
    city = facts.CAPITALS[country]
    if rng.random() < 0.25 and list(facts.CAPITALS.values()).count(city) == 1:
        question = rng.choice(COUNTRY).format(k=city)
        return Turn("capitals", question, f"{city} is the capital of {country}.", question)
    question = rng.choice(CAPITAL).format(c=country)
    other = rng.choice(list(facts.CAPITALS))
    follow_question = rng.choice(
        ["And of {c}?", "And {c}?", "What about {c}?", "And the capital of {c}?", "How about {c}?"]
    ).format(c=other)
    follow = Turn(
        "capitals", follow_question, f"The capital of {other} is {facts.CAPITALS[other]}.", "follow " + follow_question
    )
    return Turn("capitals", question, f"The capital of {country} is {city}.", question, (follow,))


# ------------------------------------------------------------------ days, months, order, counting


def calendar(rng: random.Random) -> Turn:
    names, kind = (facts.DAYS, "day") if rng.random() < 0.5 else (facts.MONTHS, "month")
    i = rng.randrange(len(names))
    n, name = len(names), names[i]
    after, before = names[(i + 1) % n], names[(i - 1) % n]
    choice = rng.randrange(8)
    if choice <= 1:
        question = rng.choice(
            [
                "What {k} comes after {x}?",
                "Which {k} follows {x}?",
                "What is the {k} after {x}?",
                "Which {k} comes after {x}?",
                "What comes after {x}?",
                "What is the next {k} after {x}?",
            ]
        )
        answer = f"{after} comes after {name}."
    elif choice <= 3:
        question = rng.choice(
            [
                "What {k} comes before {x}?",
                "Which {k} is before {x}?",
                "What is the {k} before {x}?",
                "Which {k} comes before {x}?",
                "What comes before {x}?",
            ]
        )
        answer = f"{before} comes before {name}."
    elif choice == 4 and kind == "day":
        question, answer = rng.choice(
            [
                ("If today is {x}, what day is tomorrow?", f"If today is {name}, tomorrow is {after}."),
                ("Today is {x}. What day was yesterday?", f"If today is {name}, yesterday was {before}."),
                ("If today is {x}, what day was yesterday?", f"If today is {name}, yesterday was {before}."),
                ("Today is {x}. What day is tomorrow?", f"If today is {name}, tomorrow is {after}."),
            ]
        )
    elif choice == 4:
        days = facts.MONTH_DAYS[i]
        question = rng.choice(["How many days does {x} have?", "How many days are in {x}?", "How long is {x}?"])
        answer = f"{name} has {days} days." if i != 1 else "February has 28 days, and 29 in a leap year."
    elif choice == 5:
        whole = "week" if kind == "day" else "year"
        question, answer = rng.choice(
            [
                ("What is the {o} {k} of the {w}?", f"The {facts.ORDINALS[i]} {kind} of the {whole} is {name}."),
                ("Which {k} is {x} of the {w}?", f"{name} is the {facts.ORDINALS[i]} {kind} of the {whole}."),
                ("Name the {o} {k} of the {w}.", f"The {facts.ORDINALS[i]} {kind} of the {whole} is {name}."),
            ]
        )
        question = question.replace("{o}", facts.ORDINALS[i]).replace("{w}", whole)
    elif choice == 6:
        whole = "week" if kind == "day" else "year"
        question = rng.choice(
            [
                "List the {k}s of the {w}.",
                "What are the {k}s of the {w}?",
                "Name all {k}s.",
                "Name the {k}s of the {w} in order.",
                "Which {k}s does a {w} have?",
                "List all the {k}s.",
            ]
        ).replace("{w}", whole)
        answer = "The " + kind + "s of the " + whole + " are " + ", ".join(names[:-1]) + " and " + names[-1] + "."
    else:
        question, answer = rng.choice(
            [
                ("How many days does a week have?", "A week has 7 days."),
                ("How many months does a year have?", "A year has 12 months."),
                ("How many days are in a year?", "A year has 365 days, and 366 in a leap year."),
                ("What are the seasons?", "The seasons are spring, summer, autumn and winter."),
                ("Name the four seasons.", "The seasons are spring, summer, autumn and winter."),
                ("How many hours does a day have?", "A day has 24 hours."),
                ("How many minutes are in an hour?", "An hour has 60 minutes."),
                ("How many seconds are in a minute?", "A minute has 60 seconds."),
                ("How many days are in a week?", "A week has 7 days."),
                ("How many months are in a year?", "A year has 12 months."),
                *(
                    (f"Which season comes after {s}?", f"{upper_first(facts.SEASONS[(j + 1) % 4])} comes after {s}.")
                    for j, s in enumerate(facts.SEASONS)
                ),
            ]
        )
        return Turn("calendar", question, answer, question)
    question = question.format(k=kind, x=name)
    return Turn("calendar", question, answer, question)


def ordering(rng: random.Random) -> Turn:
    choice = rng.randrange(3)
    if choice == 0:
        numbers = rng.sample(range(0, 100), rng.randint(3, 5))
        down = rng.random() < 0.3
        listed = ", ".join(map(str, numbers))
        question = rng.choice(
            [
                "Sort these numbers from largest to smallest: {x}",
                "Sort in descending order: {x}",
                "Put these numbers in descending order: {x}",
            ]
            if down
            else [
                "Sort these numbers: {x}",
                "Sort {x}.",
                "Put these numbers in order: {x}",
                "Order these numbers from smallest to largest: {x}",
                "Sort in ascending order: {x}",
                "Sort the numbers {x}.",
            ]
        )
        return Turn(
            "ordering", question.format(x=listed), ", ".join(map(str, sorted(numbers, reverse=down))), f"sort {listed}"
        )
    if choice == 1:
        start = rng.randint(0, 60)
        question, answer = rng.choice(
            [
                ("What number comes after {x}?", f"{start + 1} comes after {start}."),
                ("What number comes before {x}?", f"{start} comes before {start + 1}."),
                ("Which number follows {x}?", f"{start + 1} comes after {start}."),
            ]
        )
        x = start + 1 if "before" in question else start
        return Turn("ordering", question.format(x=x), answer, f"{question}{x}")
    words = rng.sample(facts.NOUNS, rng.randint(2, 3))
    question = rng.choice(
        [
            "Sort these words alphabetically: {x}",
            "Put these words in alphabetical order: {x}",
            "Which order do these words have in a dictionary: {x}?",
        ]
    )
    return Turn("ordering", question.format(x=", ".join(words)), ", ".join(sorted(words)), "words " + " ".join(words))


def counting(rng: random.Random) -> Turn:
    choice = rng.randrange(4)
    if choice <= 1:
        start = 1 if rng.random() < 0.7 else rng.randint(0, 30)
        stop = start + rng.randint(2, 14)
        question = rng.choice(
            [
                "Count from {a} to {b}.",
                "Count from {a} to {b}",
                "List the numbers from {a} to {b}.",
                "Please count from {a} to {b}.",
                "Can you count from {a} to {b}?",
            ]
            + (["Count to {b}.", "Can you count to {b}?", "Count up to {b}."] if start == 1 else [])
        )
        return Turn(
            "counting",
            question.format(a=start, b=stop),
            ", ".join(map(str, range(start, stop + 1))),
            f"count {start} {stop}",
        )
    if choice == 2:
        stop = rng.randint(0, 8)
        start = stop + rng.randint(2, 10)
        question = rng.choice(
            ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}."]
        )
        return Turn(
            "counting",
            question.format(a=start, b=stop),
            ", ".join(map(str, range(start, stop - 1, -1))),
            f"count {start} {stop}",
        )
    step, start = rng.choice([2, 5, 10]), 0
    first = start + step
    numbers = [first + i * step for i in range(rng.randint(4, 9))]
    question = rng.choice(
        [
            "Count by {s}s from {a} to {b}.",
            "Count in steps of {s} from {a} to {b}.",
            "List every {s}th number from {a} to {b}.",
        ]
    )
    return Turn(
        "counting",
        question.format(s=step, a=numbers[0], b=numbers[-1]),
        ", ".join(map(str, numbers)),
        f"count {numbers}",
    )
