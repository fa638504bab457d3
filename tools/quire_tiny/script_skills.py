"""Turns about words with accents and in other scripts."""

from __future__ import annotations

import random

from tools.quire_tiny import facts
from tools.quire_tiny.number_skills import number
from tools.quire_tiny.skill import Turn, accented, pseudo_word, upper_first
from tools.quire_tiny.word_skills import REPEAT, _quoted, sentence

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
