"""Turns about letters, and texts to repeat."""

from __future__ import annotations

import random

from tools.quire_tiny import facts
from tools.quire_tiny.number_skills import number
from tools.quire_tiny.skill import Turn, held_out, invented, random_letters, upper_first

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
