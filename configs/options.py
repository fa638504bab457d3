"""Turns each field of `Config`'s sections into an option with three spellings: flag `--max-model-len`, YAML key
`max_model_len`, variable `QUIRE_MAX_MODEL_LEN`.

`Option.parse` is the only check of a value's type, choices and range, for all sources of values. Its errors name the
spelling that the user used.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

from quire.configs.config import Config
from quire.configs.peers.own_values import other_meaning
from quire.configs.peers.reading import Translation, from_python, translate
from quire.configs.peers.table import rows

logger = logging.getLogger("quire")
TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
NEAR = 0.8  # minimum similarity, at most 1, of a name to count as a typing error
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    `type` is the type of the value, or of one item if `repeat`. An `optional` setting may be None: quire then chooses.
    """

    name: str
    section: str
    type: type
    optional: bool
    default: Any
    help: str
    everyday: bool
    choices: tuple[str, ...] | None
    hidden_choices: tuple[str, ...]
    other_choices: str | None
    aliases: Mapping[str, str]
    repeat: bool
    metavar: str | None
    unit: str | None
    minimum: float | None
    above: float | None
    maximum: float | None
    secret: bool
    other_name: str | None
    removed: bool
    check: Callable[[Any], object] | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> list[str]:
        """Return the flag, and the flag of the setting's other name."""
        return ["--" + name.replace("_", "-") for name in (self.name, self.other_name) if name]

    @property
    def variable(self) -> str:
        return "QUIRE_" + self.name.upper()

    @property
    def variables(self) -> list[str]:
        return ["QUIRE_" + name.upper() for name in (self.name, self.other_name) if name]

    def parse(self, value: Any, spelling: str) -> Any:
        """Convert `value`, text or already of the right type, to the field's type.

        Raises ValueError with a message that starts with `spelling`.
        """
        if self.repeat:
            items = value if isinstance(value, list | tuple) else [value]
            return [self._parse_one(item, spelling) for listed in items for item in _json_list(listed)]
        return self._parse_one(value, spelling)

    def _parse_one(self, value: Any, spelling: str) -> Any:
        if self.optional and (value is None or (self.type is bool and value == "auto")):
            return None
        if isinstance(value, str) and not is_utf8(value):
            raise ValueError(f"{spelling}: {value!a} is not UTF-8; rename the file")
        try:
            result = self._convert(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{spelling}: expected {self._expected()}, got {value!r}") from None
        result = self.aliases.get(result, result) if self.aliases else result
        if self.choices and not self._is_choice(result):
            raise ValueError(
                f"{spelling}: {result!r} is not one of {', '.join(self.choices)}{suggestion(str(result), self.choices)}"
            )
        self._check_range(result, spelling)
        if self.check is not None:
            try:
                self.check(result)
            except ValueError as error:
                raise ValueError(f"{spelling}: {error}") from None
        return result

    def _is_choice(self, value: Any) -> bool:
        others = self.other_choices is not None and re.fullmatch(self.other_choices, str(value))
        return value in (*self.choices, *self.hidden_choices) or bool(others)

    def _convert(self, value: Any) -> Any:
        text = value.strip() if isinstance(value, str) else value
        if self.unit == "mapping":
            return parse_mapping(text)
        if self.type is bool:
            return parse_bool(text)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        if self.unit == "length":
            return "auto" if text in ("auto", -1, "-1") else str(positive(parse_count(text)))
        if self.unit == "bytes":
            return parse_count(text)
        if self.type is str:
            if self.repeat and not text:
                raise ValueError
            return str(value)
        if self.type is int and isinstance(value, float):
            raise TypeError
        return self.type(text)

    def _check_range(self, value: Any, spelling: str) -> None:
        if self.minimum is not None and not value >= self.minimum:
            raise ValueError(f"{spelling}: must be at least {self.minimum}, got {value}")
        if self.above is not None and not value > self.above:
            raise ValueError(f"{spelling}: must be above {self.above}, got {value}")
        if self.maximum is not None and not value <= self.maximum:
            raise ValueError(f"{spelling}: must be at most {self.maximum}, got {value}")

    def _expected(self) -> str:
        if self.unit == "length":
            return "auto or a number of tokens (4096, 32k, 32K)"
        if self.unit == "bytes":
            return "a number of bytes (500M, 4G, 1.5g; capital letters are powers of 1024)"
        if self.unit == "mapping":
            return 'name=value, or a JSON object ({"name": value})'
        return {
            bool: "true, false or auto" if self.optional else "true or false",
            int: "a whole number",
            float: "a number",
            str: "text that is not empty" if self.repeat else "text",
        }[self.type]


def _json_list(value: Any) -> list[Any]:
    """Return the items of a list written as JSON, as in vLLM, or the one value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except ValueError:
            return [value]
        return found if isinstance(found, list) else [value]
    return [value]


def is_utf8(text: str) -> bool:
    """Return whether a name of a file, for example, can be sent to clients and engines."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    raise ValueError(value)


def parse_count(value: Any) -> int:
    """Parse 4096, "4096", "32k" = 32,000, "32K" = 32,768, "4GiB" = "4G", "1.5g" = 1,500,000,000: small letters are
    decimal, capital ones binary, as in vLLM.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?B)?", str(value))
    if not match or (match[3] and match[2] in ("", *"kmgt")) or match[3] == "B":
        raise ValueError(value)
    number = float(match[1]) * _SUFFIXES[match[2]]
    if number != int(number):
        raise ValueError(value)
    return int(match[1]) if match[1].isdigit() and not match[2] else int(number)


def parse_mapping(value: Any) -> str:
    """Convert `image=4,video=0`, a JSON object as text, or a mapping to JSON."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("{") else dict(_pair(pair) for pair in value.split(","))
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return json.dumps(value)


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise ValueError(text)
    return name.strip(), json.loads(value)


def positive(number: int) -> int:
    if number < 1:
        raise ValueError(number)
    return number


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the nearest of `known`, or "" if none is near."""
    plain = {name.lstrip("-").replace("-", "_").lower(): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").replace("-", "_").lower(), plain, n=1, cutoff=NEAR)
    return f"; did you mean {plain[near[0]]}?" if near else ""


def setting_suggestion(word: str, known: Iterable[str]) -> str:
    """Return the nearest of `known`, or of other servers' flags, in their spelling."""
    others = {name: name for name in rows() if name.startswith("--")}
    return suggestion(word, known) or suggestion(word, others)


@cache
def all_options() -> dict[str, Option]:
    """Return every option by name, in the order of `Config`."""
    return {
        option.name: option
        for section in fields(Config)
        for option in _section_options(section.name, section.default_factory)
    }


def _section_options(section: str, cls: type) -> Iterable[Option]:
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        value_type, optional, repeat = _value_type(hints[field.name])
        assert repeat == field.metadata["repeat"], f"{field.name}: repeat and its type disagree"
        default = field.default_factory() if field.default is MISSING else field.default
        yield Option(
            name=field.name, section=section, type=value_type, optional=optional, default=default, **field.metadata
        )


def _value_type(hint: Any) -> tuple[type, bool, bool]:
    """Return (type of one value, may be None, is a list) of an annotation: `int | None` -> (int, True, False),
    `list[str]` -> (str, False, True).
    """
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], False, True
    if isinstance(hint, types.UnionType):
        (value_type,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        return value_type, True, False
    return hint, False, False


def find_option(name: str) -> Option | None:
    """Return the option that `name` means (dashes or underscores)."""
    options = all_options()
    plain = name.replace("-", "_")
    return options.get(plain) or next((one for one in options.values() if one.other_name == plain), None)


def unknown_setting(name: str, spelling: str | None = None) -> ValueError:
    """Return the error for `name`, with the nearest name."""
    return ValueError(f"unknown setting {spelling or name}{setting_suggestion(name.replace('-', '_'), all_options())}")


def in_python(settings: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], Translation]:
    """Split values by name, from a file or `LLM`, into (quire's settings, the translation of other servers' settings).

    Raises ValueError for a name that no server has; the message starts with `where`.
    """
    own, others = {}, []
    for key, value in settings.items():
        name = str(key)
        if find_option(name) is not None:
            own[name] = value
        elif (given := from_python(name, value)) is not None:
            others.append(given)
        else:
            raise unknown_setting(name, f"{name}{where}")
    return own, translate(others)


def removed_settings(config: Config) -> list[str]:
    """Return a warning for each setting of `config` that was changed but has no effect any more."""
    return [
        f"{option.flag} {value}: {option.help}"
        for option in all_options().values()
        if option.removed and (value := getattr(getattr(config, option.section), option.name)) != option.default
    ]


def no_effect(option: Option, value: Any, spelling: str) -> str | None:
    """Return the warning for another server's value that has no effect here. Raises ValueError if it is refused."""
    try:
        reason = other_meaning(option.name, value)
    except ValueError as error:
        raise ValueError(f"{spelling}: {error}") from None
    return None if reason is None else f"{spelling} {value}: no effect: {reason}"


def config_from(settings: Mapping[str, Any]) -> Config:
    """Return a checked `Config` from Python values by field name, for the offline API. Settings of other servers
    without effect are reported in the log.

    Raises ValueError naming the setting.
    """
    own, translation = in_python(settings)
    warnings, values = list(translation.warnings), {}
    given = {name: (value, name) for name, value in own.items()}
    given |= {name: (value, translation.spelled[name]) for name, value in translation.settings.items()}
    for name, (value, spelling) in given.items():
        option = find_option(name)
        if (warning := no_effect(option, value, spelling)) is not None:
            warnings.append(warning)
        else:
            values[option.name] = option.parse(value, spelling)
    if warnings and values.get("strict_flags"):
        raise ValueError("; ".join(warnings))
    for warning in warnings:
        logger.warning("%s", warning)
    return Config.from_flat(**values)
