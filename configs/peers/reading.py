"""Converts given flags and variables of other servers to settings and warnings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.configs.peers.groups import Kind
from quire.configs.peers.table import OPTIONAL, SEVERAL, SWITCH, Row, rows
from quire.configs.peers.values import NoEffect, number
from quire.configs.speculation import from_parts

_ON_OFF = ("on", "off", "auto", "true", "false", "1", "0", "enabled", "disabled")
_VARIABLES = ("LLAMA_ARG_", "LLAMA_API_KEY", "OLLAMA_", "VLLM_")
_ALL_READ = ("LLAMA_ARG_", "VLLM_")  # an unknown variable with this prefix is a warning
_OF_CHARTS = ("VLLM_ADDITIONAL_ARGS", "VLLM_API_SERVER_COUNT")  # KServe's scripts make flags of them
# set by Kubernetes in every pod for a service whose name begins with "vllm"
_SERVICE_LINK = re.compile(r"VLLM_(.*_)?(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP)(_.*)?)")


@dataclass(frozen=True, slots=True)
class Given:
    """One flag or variable as it was given; `texts` are its values."""

    name: str
    texts: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.name.startswith("-"):
            return "=".join((self.name, *self.texts))
        return " ".join((self.name, *self.texts))


@dataclass(slots=True)
class Translation:
    """Holds settings by name, the flags that set each, and a warning for each flag without effect."""

    settings: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    without_effect: list[Given] = field(default_factory=list)


def take(arguments: list[str], start: int) -> tuple[Given, int] | None:
    """Return the other server's flag at `start` of the command line, and the position after its values; None if there
    is none.

    Raises ValueError if its value is missing.
    """
    name, equals, text = arguments[start].partition("=")
    row = rows().get(name)
    if row is None or row.is_variable or row.kind == Kind.SAME:
        return None
    if equals:
        return Given(name, (text,)), start + 1
    end = start + 1
    if row.takes == SEVERAL:
        while end < len(arguments) and not is_flag(arguments[end]):
            end += 1
    elif row.takes == OPTIONAL:
        end += end < len(arguments) and (
            arguments[end] in _ON_OFF or (row.kind == Kind.REFUSED and not is_flag(arguments[end]))
        )
    elif row.takes != SWITCH:
        end += 1
        if row.kind != Kind.REFUSED and (end > len(arguments) or is_flag(arguments[end - 1])):
            raise ValueError(f"{name}: expected one argument")
    return Given(name, tuple(arguments[start + 1 : end])), end


def is_flag(argument: str) -> bool:
    """Return whether argparse reads a word as a flag: negative numbers and texts with spaces are values."""
    if len(argument) < 2 or not argument.startswith("-") or " " in argument:
        return False
    return not argument[1:].replace(".", "", 1).isdecimal()


def from_python(name: str, value: Any) -> Given | None:
    """Return the flag of a setting of a YAML file or of `LLM`; None if no server has it."""
    row = rows().get("--" + name.replace("_", "-"))
    if row is None or row.kind == Kind.SAME:
        return None
    if row.takes == SWITCH and isinstance(value, bool):
        off = rows().get("--no-" + name.replace("_", "-"))
        return Given(row.name) if value else Given(off.name) if off else Given(row.name, ("false",))
    if isinstance(value, list | tuple):
        return Given(row.name, tuple(map(str, value)))
    return Given(row.name, (json.dumps(value) if isinstance(value, Mapping | bool) else str(value),))


def from_environment(environ: Mapping[str, str]) -> list[Given]:
    """Return the variables of llama.cpp, Ollama and vLLM in `environ`, without empty ones."""
    known = rows()
    return [
        Given(name, (environ[name],))
        for name in sorted(environ)
        if name.startswith(_VARIABLES) and environ[name] and (name in known or name.startswith(_ALL_READ))
        if not _is_the_charts(name, environ[name])
    ]


def _is_the_charts(name: str, value: str) -> bool:
    return name in _OF_CHARTS or bool(_SERVICE_LINK.fullmatch(name)) or value.startswith(("tcp://", "udp://"))


def translate(given: Iterable[Given]) -> Translation:
    """Return settings of other servers' flags.

    Raises ValueError for a flag that is refused, with the reason.
    """
    result = Translation()
    parts: dict[str, dict[str, tuple[Given, Any]]] = {}
    for one in given:
        row = rows().get(one.name)
        if row is None:
            result.warnings.append(f"{one.name}: no effect: quire does not know it")
            continue
        value = _value(row, one)
        if isinstance(value, NoEffect):
            result.warnings.append(f"{one}: no effect: {value}")
            result.without_effect.append(one)
        elif value is not None:
            _add(parts.setdefault(row.group.option, {}), row, one, value)
    for option, found in parts.items():
        spelled = ", ".join(dict.fromkeys(one.name for one, _ in found.values()))
        try:
            result.settings[option] = _combine(option, {key: value for key, (_, value) in found.items()})
        except ValueError as error:
            raise ValueError(f"{spelled}: {error}") from None
        result.spelled[option] = spelled
    return result


def _value(row: Row, given: Given) -> Any:
    """Return the value of the setting, None to leave it alone, or the reason why the flag has no effect."""
    group, text = row.group, " ".join(given.texts)
    if row.takes == SWITCH and given.texts == ("false",):
        return None  # a switch of a YAML file that is off
    if row.kind == Kind.NO_EFFECT or (row.kind == Kind.REFUSED and given.texts and text.lower() in group.harmless):
        return NoEffect(group.note)
    if row.kind == Kind.REFUSED:
        raise ValueError(f"{given}: refused: {group.note}")
    if row.takes == SWITCH:
        return group.value
    try:
        if row.takes == SEVERAL:
            return [group.convert(one) if group.convert else one for one in given.texts]
        return group.convert(text) if group.convert else text
    except ValueError as error:
        raise ValueError(f"{given.name}: {error}") from None


def _add(found: dict[str, tuple[Given, Any]], row: Row, given: Given, value: Any) -> None:
    """Add a flag: it replaces an earlier one of the same name; lists grow. Raises ValueError if names disagree."""
    key = row.group.key
    before, known = found.get(key, (given, value))
    if isinstance(value, list) and known is not value:
        value = [*known, *value]
    elif before.name != given.name and known != value:
        raise ValueError(f"{before} and {given} set the same: give one")
    found[key] = given, value


def _combine(option: str, parts: dict[str, Any]) -> Any:
    """Return the value of a setting whose parts several flags set. Raises ValueError if they do not fit together."""
    if option == "speculative_config":
        return parts[""] if set(parts) == {""} else from_parts(parts)
    if option == "override_generation_config":
        return json.dumps(parts.pop("", {}) | parts)
    if option == "max_num_batched_tokens":
        return min(parts.values(), key=number)
    if option == "scheduling_policy":
        return parts.get("priority") or parts[""]
    if option == "model" and "file" in parts:
        if "repository" not in parts:
            raise ValueError("a file of a repository needs -hf ORG/NAME")
        return f"{parts['repository'].partition(':')[0]}/{parts['file']}"
    if option == "kv_cache_dtype" and "" not in parts and len({parts.get("k"), parts.get("v")}) > 1:
        raise ValueError("keys and values have one type: give -ctk and -ctv the same")
    values = list(parts.values())
    if any(value != values[0] for value in values):
        raise ValueError("give one of them")
    return values[0]
