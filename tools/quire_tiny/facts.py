"""Everything the model is meant to know: tables and sentences, written by hand, in facts.json.

Code that turns them into conversations is in `skills.py` and `tool_skills.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

_DATA = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))

CAPITALS: dict[str, str] = _DATA["capitals"]
DAYS: list[str] = _DATA["days"]
MONTHS: list[str] = _DATA["months"]
MONTH_DAYS: list[int] = _DATA["month_days"]
SEASONS: list[str] = _DATA["seasons"]
ORDINALS: list[str] = _DATA["ordinals"]
NUMBERS: list[str] = _DATA["numbers"]
COLOURS: list[str] = _DATA["colours"]
NOUNS: list[str] = _DATA["nouns"]
ADJECTIVES: list[str] = _DATA["adjectives"]
VERBS: list[str] = _DATA["verbs"]
ADVERBS: list[str] = _DATA["adverbs"]
NAMES: list[str] = _DATA["names"]
CITIES: list[str] = _DATA["cities"]
FOREIGN: list[str] = _DATA["foreign"]
LANGUAGES: list[str] = _DATA["languages"]
CURRENCIES: list[str] = _DATA["currencies"]
UNITS: list[tuple[str, ...]] = [tuple(entry) for entry in _DATA["units"]]
LISTS: dict[str, list[str]] = _DATA["lists"]
PARAGRAPHS: dict[str, str] = _DATA["paragraphs"]
STORY_HEROES: list[str] = _DATA["story_heroes"]
STORY_PLACES: list[str] = _DATA["story_places"]
STORY_THINGS: list[str] = _DATA["story_things"]
STORY_ENDS: list[str] = _DATA["story_ends"]
IDENTITY: list[tuple[list[str], str]] = [tuple(entry) for entry in _DATA["identity"]]
GREETINGS: list[str] = _DATA["greetings"]
THANKS: list[str] = _DATA["thanks"]
BYES: list[str] = _DATA["byes"]
QUIRE: list[tuple[list[str], str]] = [tuple(entry) for entry in _DATA["quire"]]
GENERAL: list[tuple[list[str], str]] = [tuple(entry) for entry in _DATA["general"]]
REWORDED: dict[str, str] = _DATA["reworded"]
