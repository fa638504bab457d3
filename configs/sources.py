"""Merges the sources of settings: command line over environment over YAML file over default."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.configs.config import Config
from quire.configs.kv_transfer import read_kv_transfer
from quire.configs.options import (
    Option,
    all_options,
    find_option,
    in_python,
    no_effect,
    removed_settings,
    suggestion,
)
from quire.configs.peers.engines import engine_settings
from quire.configs.peers.reading import Given, Translation, from_environment, translate
from quire.configs.peers.table import rows

PRESETS = Path(__file__).parent
EMBEDDED_MODEL = PRESETS / "quire-tiny"
# variables that are no settings: the YAML file, the cache of compiled kernels
_OTHER_VARIABLES = ("QUIRE_CONFIG", "QUIRE_CACHE")


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds the values that were set, a readable source of each, and the flags without effect."""

    values: dict[str, Any]
    sources: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    without_effect: list[Given] = field(default_factory=list)  # flags of other servers

    def config(self) -> Config:
        return Config.from_flat(**self.values)

    def source(self, name: str) -> str:
        return self.sources.get(name, "default")


def resolve(
    flags: Mapping[str, Any],
    config_file: str | None = None,
    environ: Mapping[str, str] = os.environ,
    others: Sequence[Given] = (),
) -> Settings:
    """Merge the sources: flags over QUIRE_ variables over the file over variables of other servers.

    `flags` has the options of the command line by name, as text, lists of text or bools, and `others` has its flags of
    other servers. Raises ValueError.
    """
    settings = Settings({}, {})
    _add_translated(settings, translate(from_environment(environ)), "environment ")
    config_file = config_file or environ.get("QUIRE_CONFIG")
    if config_file:
        _add_yaml(settings, find_config_file(config_file))
    _add_environment(settings, environ)
    for name, value in flags.items():
        option = all_options()[name]
        _set(settings, option, value, option.flag, "command line")
    _add_translated(settings, _without_repetition(translate(others), flags))
    _add_connectors(settings)
    for name, value in engine_settings(settings.without_effect, settings.values).items():
        settings.values[name], settings.sources[name] = value, "--data-parallel-external-lb"
    if settings.values.get("strict_flags"):
        _refuse_warnings(settings)
    return settings


def _refuse_warnings(settings: Settings) -> None:
    if found := [*settings.warnings, *removed_settings(settings.config())]:
        raise ValueError(f"--strict-flags: {'; '.join(found)}")


def _without_repetition(found: Translation, flags: Mapping[str, Any]) -> Translation:
    """Return `found` after checking that no flag of quire sets the same setting to another value."""
    for name, value in found.settings.items():
        option = all_options()[name]
        if name in flags and option.parse(flags[name], option.flag) != option.parse(value, found.spelled[name]):
            if name == "model":
                raise ValueError(f"the model is set twice, by MODEL and by {found.spelled[name]}")
            raise ValueError(f"{found.spelled[name]} and {option.flag} set the same: give one")
    return found


def _add_connectors(settings: Settings) -> None:
    """Add the tiers that the connectors of `kv_transfer_config` ask for, unless they are set."""
    if not (text := settings.values.get("kv_transfer_config")):
        return
    found = read_kv_transfer(text)
    settings.warnings.extend(f"--kv-transfer-config: {note}" for note in found.notes)
    for name, value in (("kv_offload_gib", found.offload_gib), ("kv_disk", found.folder)):
        if value is not None and name not in settings.values:
            settings.values[name], settings.sources[name] = value, settings.sources["kv_transfer_config"]


def _set(settings: Settings, option: Option, value: Any, spelling: str, source: str) -> None:
    if (warning := no_effect(option, value, spelling)) is not None:
        settings.warnings.append(warning)
        return
    settings.values[option.name] = option.parse(value, spelling)
    settings.sources[option.name] = source


def _add_translated(settings: Settings, found: Translation, source: str | None = None) -> None:
    """Add settings translated from other servers' names. `source` is the prefix of their source; None: command line."""
    settings.warnings.extend(found.warnings)
    settings.without_effect.extend(found.without_effect)
    for name, value in found.settings.items():
        spelling = found.spelled[name]
        where = "command line" if source is None else source if source.startswith("file") else source + spelling
        _set(settings, all_options()[name], value, spelling, where)


def _add_environment(settings: Settings, environ: Mapping[str, str]) -> None:
    variables = {variable: option for option in all_options().values() for variable in option.variables}
    for variable in sorted(environ):
        if not variable.startswith("QUIRE_") or variable in _OTHER_VARIABLES:
            continue
        if variable not in variables:
            raise ValueError(f"unknown environment variable {variable}{_hint(variable, variables)}")
        option, text = variables[variable], environ[variable]
        is_list = option.repeat and not text.lstrip().startswith("[")  # which JSON writes
        value = [part.strip() for part in text.split(",") if part.strip()] if is_list else text
        _set(settings, option, value, variable, f"environment {variable}")


def _hint(variable: str, variables: Mapping[str, Option]) -> str:
    """Return the setting that an unknown QUIRE_ variable means by another server's name, or the nearest name."""
    row = rows().get("--" + variable.removeprefix("QUIRE_").lower().replace("_", "-"))
    if row is None:
        return suggestion(variable, variables)
    return f": {row.group.note}" if row.group.note else f": set {all_options()[row.group.option].variable}"


def _add_yaml(settings: Settings, path: Path) -> None:
    content, where = read_yaml(path), f" in {path}"
    try:
        own, others = in_python(content, where)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{path}: {error}") from None
    seen: dict[str, str] = {}
    for key, value in own.items():
        option = find_option(key)
        if option.name in seen:
            raise ValueError(f"{path}: {key} and {seen[option.name]} are the same setting")
        seen[option.name] = key
        _set(settings, option, value, f"{key} in {path}", f"file {path}")
    flags = {find_option(key).name: value for key, value in own.items()}
    _add_translated(settings, _without_repetition(others, flags), f"file {path}")


def find_config_file(name: str) -> Path:
    """Return a path, or the name of a preset in `configs/` ("cpu" or "cpu.yaml"). Raises ValueError naming the
    presets.
    """
    presets = {path.name: path for path in sorted(PRESETS.glob("*.yaml"))}
    for candidate in (Path(name), presets.get(name), presets.get(f"{name}.yaml")):
        if candidate is not None and candidate.is_file():
            return candidate
    raise ValueError(f"--config: no file {name}; the presets are {', '.join(path.stem for path in presets.values())}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in `path`. Raises ValueError for anything else, and for a key that is given twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            repeated = [key for i, key in enumerate(keys) if key in keys[:i]]
            if repeated:
                raise ValueError(f"{path}: {repeated[0]} is given twice")
            return super().construct_mapping(node, deep=deep)

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ValueError(
            f"{path}{f', line {mark.line + 1}' if mark else ''}: not valid YAML: {problem or error}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `setting: value` lines")
    return content


def embedded_model() -> str | None:
    """Return the folder of the embedded model, or None if this copy of quire does not include it."""
    return str(EMBEDDED_MODEL) if (EMBEDDED_MODEL / "model.safetensors").is_file() else None


def describe(settings: Settings) -> str:
    """Return every setting with its value and source, as YAML that `--config` accepts. Secrets are commented out."""
    lines, section = [], None
    for option in all_options().values():
        if option.section != section:
            section = option.section
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
        lines.append(_describe(option, settings.values.get(option.name, option.default), settings.source(option.name)))
    return "\n".join(lines)


def _describe(option: Option, value: Any, source: str) -> str:
    if option.secret and value:
        return f"# {option.name}: {len(value)} not shown  # {source}"
    return f"{f'{option.name}: {to_yaml(value)}':<44}  # {source}"


def to_yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # JSON scalars and lists of strings are also YAML
