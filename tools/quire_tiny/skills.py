"""Single question-and-answer turns, one function per skill.

Each draws from a `random.Random` and returns a `Turn`; nothing else is random.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.quire_tiny import facts

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
    """The word with one to three of its letters replaced by accented ones; unchanged where it has none that could be."""
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


# ------------------------------------------------------------------ arithmetic

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


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


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


# ------------------------------------------------------------------ letters

QUOTES = ["{w}", "{w}", "'{w}'", '"{w}"', "the word {w}", "the word '{w}'", 'the word "{w}"']
TYPOGRAPHIC = ["“{w}”", "‘{w}’", "„{w}“", "«{w}»", "the word “{w}”"]


class Words:
    """Where the words of the letter skills come from: the tokenizer's own words (which must all be learnt), common
    nouns and invented words.
    """

    vocabulary: list[str] = []

    @classmethod
    def draw(cls, rng: random.Random) -> tuple[str, str]:
        """(word, instance key).

        Words that are one token each have a spelling of their own to learn, so none of them is held out.
        """
        x = rng.random()
        if x < 0.45 and cls.vocabulary:
            word = rng.choice(cls.vocabulary)
            return word, f"vocabulary {word}"
        if x < 0.65:
            word = rng.choice(facts.NOUNS)
        elif x < 0.70:
            word = rng.choice(facts.NAMES)
        elif x < 0.94:
            word = invented(rng)
        else:
            word = random_letters(rng)
        if rng.random() < 0.1:
            word = upper_first(word)
        if word in cls.vocabulary:
            return word, f"vocabulary {word}"
        return word, f"word {word.lower()}"

    @classmethod
    def draw_several(cls, rng: random.Random) -> list[str]:
        """Two to five words of the training side, for the questions that take a list: the quickest way to learn the
        spelling of many.
        """
        words: list[str] = []
        count = rng.randint(2, 5)
        while len(words) < count:
            word, key = cls.draw(rng)
            if not held_out(key) and word not in words:
                words.append(word)
        return words


def _quoted(rng: random.Random, word: str) -> str:
    return rng.choice(TYPOGRAPHIC if rng.random() < 0.1 else QUOTES).format(w=word)


def spelling(rng: random.Random) -> Turn:
    word, key = Words.draw(rng)
    if rng.random() < 0.12:
        question = rng.choice(
            [
                "How many letters does {w} have?",
                "How many letters are in {w}?",
                "Count the letters in {w}.",
                "How long is {w}?",
            ]
        )
        return Turn("letters", question.format(w=_quoted(rng, word)), f"{'-'.join(word)}: {len(word)} letters.", key)
    if rng.random() < 0.25:
        words = Words.draw_several(rng)
        question = rng.choice(
            ["Spell these words: {x}", "Spell the words {x}.", "Spell each of these words: {x}", "Spell {x}."]
        )
        return Turn(
            "spelling",
            question.format(x=", ".join(words)),
            ", ".join("-".join(w) for w in words),
            f"wording {' '.join(words)}",
        )
    question = rng.choice(
        [
            "Spell {w}.",
            "Spell {w}",
            "How do you spell {w}?",
            "How is {w} spelled?",
            "Spell {w}, please.",
            "Can you spell {w}?",
            "Spell out {w}.",
            "Spell {w} letter by letter.",
            "Please spell {w}.",
        ]
    )
    return Turn("spelling", question.format(w=_quoted(rng, word)), "-".join(word), key)


def reversing(rng: random.Random) -> Turn:
    word, key = Words.draw(rng)
    question = rng.choice(
        [
            "Reverse {w}.",
            "Reverse {w}",
            "Write {w} backwards.",
            "Spell {w} backwards.",
            "What is {w} backwards?",
            "Turn {w} around.",
            "What is the reverse of {w}?",
            "Can you reverse {w}?",
            "Say {w} backwards.",
        ]
    )
    return Turn("reversing", question.format(w=_quoted(rng, word)), word[::-1], key)


def casing(rng: random.Random) -> Turn:
    word, key = Words.draw(rng)
    if rng.random() < 0.15:
        words = Words.draw_several(rng)
        question = rng.choice(
            [
                "Write these words in capital letters: {x}",
                "Write the words {x} in capitals.",
                "Convert to uppercase: {x}",
                "Upper-case these words: {x}",
            ]
        )
        return Turn(
            "casing",
            question.format(x=", ".join(words)),
            ", ".join(w.upper() for w in words),
            f"wording {' '.join(words)}",
        )
    if rng.random() < 0.25:
        question = rng.choice(
            [
                "Write {w} in lower case.",
                "Lower-case {w}.",
                "Put {w} in small letters.",
                "Convert {w} to lowercase.",
                "Make {w} lowercase.",
            ]
        )
        return Turn("casing", question.format(w=_quoted(rng, word.upper())), word.lower(), key)
    question = rng.choice(
        [
            "Write {w} in capital letters.",
            "Write {w} in upper case.",
            "Upper-case {w}.",
            "Put {w} in capitals.",
            "Convert {w} to uppercase.",
            "Make {w} uppercase.",
            "Write {w} in uppercase.",
            "What is {w} in capital letters?",
            "Write {w} in capitals.",
            "{w} in upper case, please",
        ]
    )
    return Turn("casing", question.format(w=_quoted(rng, word)), word.upper(), key)


def first_letter(rng: random.Random) -> Turn:
    word, key = Words.draw(rng)
    first = rng.random() < 0.5
    letter = word[0] if first else word[-1]
    where = "first" if first else "last"
    question = rng.choice(
        ["What is the {p} letter of {w}?", "Which letter is the {p} in {w}?", "Give me the {p} letter of {w}."]
    )
    return Turn("letters", question.format(p=where, w=_quoted(rng, word)), f"The {where} letter is {letter}.", key)


# ------------------------------------------------------------------ repetition


def sentence(rng: random.Random) -> str:
    """A sentence of 3 to 14 words over a small grammar, now and then with an invented word, a number, a capital or an
    unusual mark.
    """

    def noun() -> str:
        return invented(rng) if rng.random() < 0.15 else rng.choice(facts.NOUNS)

    def phrase() -> str:
        return (
            rng.choice(["the ", "a ", "my ", "every ", "this ", "our "])
            + (rng.choice(facts.ADJECTIVES) + " " if rng.random() < 0.5 else "")
            + noun()
        )

    kind = rng.randrange(9)
    if kind <= 2:
        text = f"{phrase()} {rng.choice(facts.VERBS)} {phrase()}" + (
            f" {rng.choice(facts.ADVERBS)}" if rng.random() < 0.5 else ""
        )
    elif kind == 3:
        text = f"{rng.choice(facts.NAMES)} {rng.choice(facts.VERBS)} {phrase()} in {rng.choice(facts.CITIES)}"
    elif kind == 4:
        text = f"{phrase()} is {rng.choice(facts.ADJECTIVES)} and {rng.choice(facts.ADJECTIVES)}"
    elif kind == 5:
        text = f"there are {number(rng)} {noun()}s in {phrase()}"
    elif kind == 6:
        text = " ".join(noun() if rng.random() < 0.7 else invented(rng) for _ in range(rng.randint(2, 7)))
    elif kind == 7 and Words.vocabulary:
        text = " ".join(
            rng.choice(Words.vocabulary) if rng.random() < 0.85 else str(number(rng)) for _ in range(rng.randint(3, 10))
        )
    else:
        text = (
            f"{rng.choice(['I', 'we', 'you', 'they', rng.choice(facts.NAMES)])} "
            f"{rng.choice(['like', 'want', 'need', 'have', 'see', 'love', 'found', 'made'])} {phrase()} and "
            f"{phrase()}"
        )
    if rng.random() < 0.75:
        text = upper_first(text)
    if rng.random() < 0.75:
        text += rng.choice([".", ".", ".", "!", "?", "..."])
    if rng.random() < 0.08:
        words = text.split(" ")
        words[rng.randrange(len(words))] += rng.choice([",", ";", ":"])
        text = " ".join(words)
    return text


REPEAT = [
    "Repeat: {s}",
    "Repeat after me: {s}",
    "Repeat this sentence: {s}",
    "Say: {s}",
    "Repeat exactly: {s}",
    "Repeat the following sentence: {s}",
    "Say exactly this: {s}",
    "Please repeat: {s}",
    "Echo: {s}",
    'Repeat "{s}"',
    "Repeat '{s}'",
    'Say "{s}"',
    'Repeat this exactly: "{s}"',
    "Copy this text: {s}",
    "Write this again: {s}",
    "Repeat the sentence '{s}'",
    'Please repeat after me: "{s}"',
    "Echo this back to me: {s}",
    "Repeat the following text word for word: {s}",
]


def repetition(rng: random.Random) -> Turn:
    text = sentence(rng)
    if rng.random() < 0.12:
        text = f"{text if text[-1] in '.!?' else text + '.'} {upper_first(sentence(rng))}"
    follow = Turn(
        "repetition",
        rng.choice(["Say that again.", "Again, please.", "Once more.", "Repeat that.", "Say it again."]),
        text,
        "again " + text,
    )
    return Turn("repetition", rng.choice(REPEAT).format(s=text), text, "repeat " + text, (follow,))


# ------------------------------------------------------------------ beyond ASCII

QUOTED = [
    "Repeat “{s}”",
    "Repeat ‘{s}’",
    "Say “{s}”",
    "Say „{s}“",
    "Repeat «{s}»",
    "Repeat this exactly: “{s}”",
    "Please repeat after me: “{s}”",
]
REPEAT_WORD = [
    "Repeat the word {s}.",
    "Repeat {s}",
    "Say {s}.",
    "Say {s}",
    "Repeat: {s}",
    "Say the word “{s}”.",
    "Repeat '{s}'.",
    "Write {s} again.",
    "Copy: {s}",
    "Echo: {s}",
]


def typographic(rng: random.Random, words: list[str]) -> str:
    """The words with marks that people's keyboards and word processors make."""
    i, mark = rng.randrange(len(words)), rng.randrange(8)
    if mark <= 2:
        words[i] = ("“{w}”", "‘{w}’", "„{w}“", "«{w}»", "»{w}«")[rng.randrange(5)].format(w=words[i])
    elif mark == 3 and i:
        words.insert(i, rng.choice("–—"))
    elif mark == 4:
        words[i] += rng.choice(["’s", "—so", "’ll"])
    elif mark == 5:
        words[-1] = words[-1].rstrip(".!?") + "…"
    elif mark == 6:
        words[0], words[-1] = rng.choice("¿¡") + words[0], words[-1].rstrip(".!?") + rng.choice("?!")
    else:
        words[i] = rng.choice(
            ["{n} €", "£{n}", "{n} °C", "§ {n}", "{n} × {n}", "• {n}", "±{n}", "½", "№ {n}", "™", "©", "µ", "²", "→"]
        ).format(n=number(rng))
    return " ".join(words)


def accented_sentence(rng: random.Random) -> str:
    """A sentence some of whose words have accents or come from other languages, or are set with typographic marks."""
    if rng.random() < 0.25:
        words = [
            rng.choice(facts.FOREIGN) if rng.random() < 0.5 else accented(rng, pseudo_word(rng))
            for _ in range(rng.randint(2, 7))
        ]
        words[-1] += rng.choice(["", ".", "!"])
    else:
        words = sentence(rng).split(" ")
        for _ in range(rng.randint(1, 3)):
            i = rng.randrange(len(words))
            if rng.random() < 0.5:
                words[i] = accented(rng, words[i])
            else:
                words.insert(i, rng.choice(facts.FOREIGN))
    return typographic(rng, words) if rng.random() < 0.35 else " ".join(words)


def repeated(rng: random.Random, skill: str, text: str, is_word: bool) -> Turn:
    wordings = REPEAT_WORD if is_word else QUOTED if rng.random() < 0.25 else REPEAT
    return Turn(
        skill, rng.choice(wordings).format(s=text), text, f"word {text.lower()}" if is_word else "repeat " + text
    )


def accents(rng: random.Random) -> Turn:
    """What the letter skills and repetition ask, of Latin words with accents and of typographic marks."""
    x = rng.random()
    if x < 0.4:
        return repeated(rng, "accents", accented_sentence(rng), False)
    word = (
        accented(rng, rng.choice(facts.NOUNS) if rng.random() < 0.3 else pseudo_word(rng))
        if rng.random() < 0.8
        else rng.choice(facts.FOREIGN)
    )
    word, key = (upper_first(word) if rng.random() < 0.15 else word), f"word {word.lower()}"
    if x < 0.6:
        return repeated(rng, "accents", word, True)
    quoted = _quoted(rng, word)
    if x < 0.8:
        return Turn(
            "accents",
            rng.choice(
                ["Spell {w}.", "How do you spell {w}?", "Spell {w}", "Please spell {w}.", "Can you spell {w}?"]
            ).format(w=quoted),
            "-".join(word),
            key,
        )
    if x < 0.9:
        return Turn(
            "accents",
            rng.choice(["Reverse {w}.", "Write {w} backwards.", "Spell {w} backwards.", "Reverse {w}"]).format(
                w=quoted
            ),
            word[::-1],
            key,
        )
    if x < 0.95 or "ß" in word:
        return Turn(
            "accents",
            rng.choice(["What is the first letter of {w}?", "Which letter is the first in {w}?"]).format(w=quoted),
            f"The first letter is {word[0]}.",
            key,
        )
    return Turn(
        "accents",
        rng.choice(["Write {w} in capital letters.", "Upper-case {w}.", "Convert {w} to uppercase."]).format(w=quoted),
        word.upper(),
        key,
    )


def characters(*ranges: tuple[int, int]) -> str:
    """All characters from the first to the last code point of each range."""
    return "".join(chr(c) for first, last in ranges for c in range(first, last + 1))


# script -> (share, its letters, the lengths of its words, the words of a text, what stands between words, marks at the
# end of a text)
SCRIPTS: dict[str, tuple[float, str, tuple[int, int], tuple[int, int], str, list[str]]] = {
    "Greek": (3, "αβγδεζηθικλμνξοπρσςτυφχψωάέήίόύώ", (2, 8), (1, 5), " ", ["", ".", "!", ";"]),
    "Cyrillic": (4, "абвгдежзийклмнопрстуфхцчшщъыьэюяёіїє", (2, 8), (1, 5), " ", ["", ".", "!", "?"]),
    "Han": (
        4,
        characters((0x4E00, 0x9FFF)) + "的一是不了人我在有他这中大来上国你好世界日本語学生水火山" * 150,
        (1, 4),
        (1, 4),
        "",
        ["", "。", "！", "？", "，谢谢。"],
    ),
    "kana": (3, characters((0x3041, 0x3093), (0x30A1, 0x30F3)) + "ーっ", (2, 6), (1, 3), "", ["", "。", "！", "、"]),
    "Hangul": (
        2,
        characters((0xAC00, 0xD7A3)) + "안녕하세요감사합니다한국사람" * 300,
        (1, 4),
        (1, 3),
        " ",
        ["", ".", "!"],
    ),
    "Hebrew": (1, characters((0x05D0, 0x05EA)), (2, 6), (1, 3), " ", ["", "."]),
    "Arabic": (1, characters((0x0621, 0x063A), (0x0641, 0x064A)), (2, 6), (1, 3), " ", ["", "."]),
    "Devanagari": (1, characters((0x0905, 0x0939)) + "ािीुूेैोौं्" * 4, (2, 6), (1, 3), " ", ["", "।"]),
    "emoji": (
        4,
        characters((0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F90C, 0x1F9FF)) + characters((0x2600, 0x2767)),
        (1, 3),
        (1, 2),
        " ",
        [""],
    ),
}


def script_text(rng: random.Random, name: str, word: bool) -> str:
    _, letters, lengths, counts, space, ends = SCRIPTS[name]
    words = [
        "".join(rng.choice(letters) for _ in range(rng.randint(*lengths)))
        for _ in range(1 if word else rng.randint(*counts))
    ]
    if name in ("Greek", "Cyrillic") and rng.random() < 0.4:
        words[0] = upper_first(words[0])
    return space.join(words) + ("" if word else rng.choice(ends))


def scripts(rng: random.Random) -> Turn:
    """Verbatim copies of words and short texts in other scripts, and of sentences with one of them in it; letters of
    Greek and Cyrillic words.
    """
    name = rng.choices(list(SCRIPTS), weights=[share for share, *_ in SCRIPTS.values()])[0]
    x = rng.random()
    word = script_text(rng, name, True)
    if name in ("Greek", "Cyrillic") and x < 0.15:
        return Turn(
            "scripts",
            rng.choice(["Spell {w}.", "How do you spell {w}?"]).format(w=_quoted(rng, word)),
            "-".join(word),
            f"word {word.lower()}",
        )
    if x < 0.4:
        return repeated(rng, "scripts", word, True)
    if x < 0.65:
        words = sentence(rng).split(" ")
        words.insert(rng.randint(1, len(words)), word)
        return repeated(rng, "scripts", " ".join(words), False)
    return repeated(rng, "scripts", script_text(rng, name, False), False)


# ------------------------------------------------------------------ talk, quire, lists, JSON, what it does not know


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
