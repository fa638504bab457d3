"""Files of models: quire's own YAML, llama-swap's YAML and llama.cpp's presets (INI)."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quire.configs.options import find_option, suggestion
from quire.configs.peers.table import SWITCH, rows
from quire.configs.several import read_duration
from quire.server.models.flags import read_flags, split_words

_KEYS = ("name", "source", "aliases", "pinned", "keep_alive", "flags")
_SWAP_KEYS = frozenset({"cmd", "aliases", "ttl", "name", "description", "macros", "metadata"})
_SWAP_TOP = frozenset({"models", "macros"})
_MODEL_FLAGS = ("-m", "--model", "-hf", "-hfr", "--hf-repo")
_SERVERS = {"llama-server": 0, "server": 0, "vllm": 1, "quire": 1}  # the words of each before its flags
_BY_SERVER = ("port", "host")  # flags of a command that only say where it listens
_MERGE = "tag:yaml.org,2002:merge"
_ALIASES = ("alias", "a", "LLAMA_ARG_ALIAS")
_NOT_FLAGS = frozenset({"load-on-startup", "stop-timeout", *_ALIASES})
_ON, _OFF = frozenset({"1", "true", "on", "enabled", "yes"}), frozenset({"0", "false", "off", "disabled", "no"})


@dataclass(slots=True)
class Described:
    """A model as a file describes it; `values` are its settings by name."""

    name: str | None
    source: str
    where: str
    aliases: list[str] = field(default_factory=list)
    pinned: bool = False
    keep_alive: float | None = None
    values: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_models_file(path: str) -> list[Described]:
    """Return the models of a file. Raises ValueError naming the line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--models-file {path}: {getattr(error, 'strerror', None) or error}") from None
    first = next((line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] not in "#;"), "")
    if first.startswith("[") or re.match(r"version\s*=", first):
        return _presets(text, path)
    try:
        return _read_yaml(text, path)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{at}: not valid YAML: {problem or error}") from None


def _read_yaml(text: str, path: str) -> list[Described]:
    root = yaml.compose(text, yaml.SafeLoader)
    if root is None:
        raise ValueError(f"{path}: it is empty")
    content = _entries(root, path)
    if "models" not in content:
        raise ValueError(f"{path}: there is no list `models`")
    models, line = content["models"]
    if isinstance(models, yaml.MappingNode):
        return _swap(content, path)
    if not isinstance(models, yaml.SequenceNode):
        raise ValueError(f"{path}, line {line}: models must be a list")
    for name, (_, at) in content.items():
        if name != "models":
            raise ValueError(f"{path}, line {at}: unknown key {name}{suggestion(name, ['models'])}")
    return [_own(node, path) for node in models.value]


# ---- quire's own


def _own(node: yaml.Node, path: str) -> Described:
    if isinstance(node, yaml.ScalarNode) and _value(node) not in (None, ""):
        return Described(None, node.value, _at(node, path))
    keys = _entries(node, path)
    where = _at(node, path)
    for name, (_, line) in keys.items():
        if name not in _KEYS:
            raise ValueError(f"{path}, line {line}: unknown key {name}{suggestion(name, _KEYS)}")
    content = {name: _value(value) for name, (value, _) in keys.items()}
    if not isinstance(content.get("source"), str) or not content["source"]:
        raise ValueError(f"{where}: the model has no source: a folder, GGUF file or Hub id")
    found = Described(_text(content.get("name"), "name", where), content["source"], where)
    found.aliases = _names(content.get("aliases", []), where)
    found.pinned = _is(content.get("pinned", False), "pinned", where)
    if "keep_alive" in content:
        found.keep_alive = _duration(content["keep_alive"], f"{path}, line {keys['keep_alive'][1]}: keep_alive")
    if "flags" in content:
        at = f"{path}, line {keys['flags'][1]}"
        found.values, found.warnings = read_flags(content["flags"], at)
    return found


def _text(value: object, name: str, where: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ValueError(f"{where}: {name} must be a text")


def _names(value: object, where: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"{where}: aliases must be a list of names")
    return value


def _is(value: object, name: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {name} must be true or false")
    return value


def _duration(value: object, where: str) -> float:
    try:
        return read_duration(str(value))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


# ---- llama-swap


def _swap(content: Mapping[str, tuple[yaml.Node, int]], path: str) -> list[Described]:
    macros = _macros(content, path)
    found = []
    for name, (node, line) in _entries(content["models"][0], path).items():
        given, where = _entries(node, path), f"{path}, line {line}"
        keys = {key: _value(value) for key, (value, _) in given.items()}
        if not isinstance(keys.get("cmd"), str):
            raise ValueError(f"{where}: the model {name} has no cmd")
        one = _command(_expanded(keys["cmd"], macros | _macros(given, path)), name, where)
        one.aliases = _names(keys.get("aliases", []), where)
        if keys.get("ttl") not in (None, 0, -1):  # 0: it stays, -1: as the server says
            one.keep_alive = _duration(keys["ttl"], f"{where}: ttl")
        one.warnings += [f"{where}: {key} has no effect" for key in keys if key not in _SWAP_KEYS]
        found.append(one)
    if found:
        found[0].warnings += [
            f"{path}, line {line}: {key} has no effect" for key, (_, line) in content.items() if key not in _SWAP_TOP
        ]
    return found


def _macros(content: Mapping[str, tuple[yaml.Node, int]], path: str) -> dict[str, Any]:
    if "macros" not in content:
        return {}
    return {name: _value(value) for name, (value, _) in _entries(content["macros"][0], path).items()}


def _expanded(text: str, macros: Mapping[str, object]) -> str:
    """Return the command with its macros expanded; a macro may refer to earlier ones."""
    for _ in range(len(macros) + 1):
        replaced = re.sub(r"\$\{([\w-]+)\}", lambda found: str(macros.get(found[1], found[0])), text)
        if replaced == text:
            break
        text = replaced
    return text


def _command(text: str, name: str, where: str) -> Described:
    """Return the model of a command that starts llama-server, vLLM or quire."""
    words = split_words(text, where)
    program = Path(words[0]).name if words else ""
    if program not in _SERVERS:
        raise ValueError(f"{where}: cmd must start llama-server, vllm or quire, not {program or 'nothing'}")
    words = words[1 + _SERVERS[program] :]
    source, rest = _without_source(words)
    if not source:
        raise ValueError(f"{where}: cmd names no model")
    one = Described(name, source, where)
    one.values, one.warnings = read_flags(_without_address(rest), where)
    return one


def _without_source(words: list[str]) -> tuple[str | None, list[str]]:
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name in _MODEL_FLAGS:
            end = i + (1 if equals else 2)
            return text if equals else " ".join(words[i + 1 : end]), words[:i] + words[end:]
    return None, words


def _without_address(words: list[str]) -> list[str]:
    kept, position = [], 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if name.removeprefix("--") in _BY_SERVER:
            position += 1 if equals else 2
        else:
            kept.append(words[position])
            position += 1
    return kept


# ---- llama.cpp's presets


def _presets(text: str, path: str) -> list[Described]:
    """Return a section per model with llama-server's flags as keys; `[*]` has those of all."""
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    try:
        parser.read_string("\n".join(["" for _ in lines[:first]] + lines[first:]))
    except configparser.Error as error:
        raise ValueError(f"{path}: {error.message}".replace("\n", " ")) from None
    shared = dict(parser["*"]) if parser.has_section("*") else {}
    found = []
    for name in parser.sections():
        if name != "*":
            line = next(i for i, one in enumerate(lines, 1) if one.strip().startswith(f"[{name}]"))
            found.append(_preset(name, dict(parser[name]), shared, f"{path}, line {line}"))
    return found


def _preset(name: str, keys: dict[str, str], shared: dict[str, str], where: str) -> Described:
    both = {**shared, **keys}
    source, _ = _without_source(_words(both))
    one = Described(name.strip(), source or name.strip(), where)
    one.pinned = both.get("load-on-startup", "false").lower() in _ON
    one.aliases = [alias.strip() for key in _ALIASES for alias in keys.get(key, "").split(",") if alias.strip()]
    for part in (shared, keys):  # read separately: a section may spell a shared flag differently
        _, rest = _without_source(_words(part))
        values, warnings = read_flags(_without_address(rest), where)
        one.values |= values
        one.warnings += warnings
    return one


def _words(keys: dict[str, str]) -> list[str]:
    words: list[str] = []
    for key, value in keys.items():
        if key not in _NOT_FLAGS:
            flag = _flag(key)
            words += _switch(flag, value.lower()) if _is_switch(flag) else [flag, value]
    return words


def _is_switch(flag: str) -> bool:
    if flag in rows():
        return rows()[flag].takes == SWITCH
    option = find_option(flag.removeprefix("--no-")) or find_option(flag.removeprefix("--"))
    return option is not None and option.type is bool


def _switch(flag: str, value: str) -> list[str]:
    """Return the words of a flag without a value that a preset turns on or off."""
    if value in _ON:
        return [flag]
    if value not in _OFF:
        return [f"{flag}={value}"]  # refused with its name
    name = flag.removeprefix("--no-").removeprefix("--")
    opposite = f"--{name}" if flag.startswith("--no-") else f"--no-{name}"
    return [opposite] if opposite in rows() or find_option(name) is not None else []


def _flag(key: str) -> str:
    """Return the flag of a key, which may be its variable: ctx-size, c, LLAMA_ARG_CTX_SIZE."""
    if key.startswith("LLAMA_ARG_") and (row := rows().get(key)) is not None:
        same = (name for name, one in rows().items() if name.startswith("--") and one.group is row.group)
        key = next(same, key).removeprefix("--")
    return f"--{key}" if f"--{key}" in rows() or len(key) > 4 else f"-{key}"


# ---- YAML with lines


def _entries(node: yaml.Node, path: str) -> dict[str, tuple[yaml.Node, int]]:
    """Return the values of a mapping, each with the line of its key; those that it merges (`<<`) last."""
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{_at(node, path)}: expected `key: value` lines")
    found: dict[str, tuple[yaml.Node, int]] = {}
    merged: list[yaml.Node] = []
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == _MERGE:
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{path}, line {line}: a key must be a text")
        if key.value in found:
            raise ValueError(f"{path}, line {line}: {key.value} is given twice")
        found[key.value] = (value, line)
    for other in merged:
        found = _entries(other, path) | found
    return found


def _value(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _at(node: yaml.Node, path: str) -> str:
    return f"{path}, line {node.start_mark.line + 1}"
