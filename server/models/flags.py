"""The flags of one model in a file of models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from quire.configs.options import Option, find_option, in_python, no_effect, unknown_setting
from quire.configs.peers.reading import Given, is_flag, take, translate

# settings of the HTTP server that belong to a model
_OF_MODEL = frozenset({
    "chat_template", "trust_request_chat_template", "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice",
    "generic_tool_prompt", "exclude_tools_when_tool_choice_none", "reasoning_field", "generation_config",
    "override_generation_config", "max_logprobs",
})  # fmt: skip
_OF_SERVER = ("server", "models")


def read_flags(given: object, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return (settings by name, warnings for flags without effect). `given` is a mapping of settings, or flags as a
    text or a list of words. Raises ValueError naming `where` the flags stand.
    """
    try:
        return _read(given, where)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from None


def split_words(text: str, where: str) -> list[str]:
    """Return the words of a command line, as a shell splits them. Raises ValueError naming `where` it stands."""
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ValueError(f"{where}: {error} in: {text.strip()[:200]}") from None


def _read(given: object, where: str) -> tuple[dict[str, Any], list[str]]:
    if isinstance(given, Mapping):
        own, others = in_python(given, f" ({where})")
    elif isinstance(given, str | list):
        words = split_words(given, where) if isinstance(given, str) else [str(word) for word in given]
        own, found = _split(words, where)
        others = translate(found)
    else:
        raise ValueError(f"{where}: flags must be a mapping, a text or a list")
    values: dict[str, Any] = {}
    warnings = [f"{where}: {warning}" for warning in others.warnings]
    spelled = {**{name: name for name in own}, **{name: others.spelled[name] for name in others.settings}}
    for name, value in (own | others.settings).items():
        option = find_option(name)
        _refuse_other(option, spelled[name], where)
        if (warning := no_effect(option, value, spelled[name])) is not None:
            warnings.append(f"{where}: {warning}")
        else:
            values[option.name] = option.parse(value, f"{where}: {spelled[name]}")
    return values, warnings


def _refuse_other(option: Option, spelling: str, where: str) -> None:
    """Raise ValueError for a setting of the whole server."""
    if option.name == "model" or (option.section in _OF_SERVER and option.name not in _OF_MODEL):
        raise ValueError(f"{where}: {spelling} is no setting of one model: set it for the server")


def _split(words: list[str], where: str) -> tuple[dict[str, Any], list[Given]]:
    """Return quire's own settings and other servers' flags of a command line without the model."""
    own: dict[str, Any] = {}
    others: list[Given] = []
    position = 0
    while position < len(words):
        word = words[position]
        name, equals, text = word.partition("=")
        option = find_option(name.removeprefix("--")) if name.startswith("--") else None
        negated = find_option(name.removeprefix("--no-")) if name.startswith("--no-") else None
        if option is None and negated is not None and negated.type is bool:
            own[negated.name], position = False, position + 1
        elif option is None:
            if (found := take(words, position)) is None:
                raise unknown_setting(name.removeprefix("--"), f"{name} ({where})")
            others.append(found[0])
            position = found[1]
        elif option.type is bool:
            own[option.name], position = text or True, position + 1
        elif equals:
            own[option.name], position = [text] if option.repeat else text, position + 1
        else:
            end = position + 2
            while option.repeat and end < len(words) and not is_flag(words[end]):
                end += 1
            if position + 1 >= len(words):
                raise ValueError(f"{where}: {name}: expected one argument")
            own[option.name] = words[position + 1 : end] if option.repeat else words[position + 1]
            position = end
    return own, others
