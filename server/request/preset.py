"""PARAMETER of Ollama's Modelfiles -> defaults of requests, and the fill-in of requests that leave them open."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.checkpoints.library.applied import entry_of
from quire.configs.generation import PARAMETERS
from quire.server.model_info import Preset
from quire.server.request.ollama_options import Options
from quire.server.request.request import GenerationOptions, options_of

logger = logging.getLogger("quire")

_FIELDS = {one.encode_name for one in msgspec.structs.fields(Options)}
_IN_FILES = frozenset(PARAMETERS.values())  # keys that generation_config.json may set


def check_parameters(parameters: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return parameters of Ollama's names as options of a request, and the names that have no effect.

    Raises ValueError for a name that is not known, or a value out of range.
    """
    ignored = sorted(name for name in parameters if name in Options.hints or name in Options.harmless)
    if unknown := sorted(parameters.keys() - _FIELDS - set(ignored)):
        raise ValueError(f"PARAMETER {unknown[0][:40]} is not known; there are {', '.join(sorted(_FIELDS))}, num_ctx")
    if (length := parameters.get("num_ctx")) is not None:
        ignored.remove("num_ctx")
        if not isinstance(length, int) or isinstance(length, bool) or not 0 < length < 1 << 31:
            raise ValueError(f"PARAMETER num_ctx must be a number of tokens, not {str(length)[:40]}")
    for name, value in parameters.items():
        if name in _FIELDS:
            _converted({name: value}, f"PARAMETER {name}")
    return _converted({name: value for name, value in parameters.items() if name in _FIELDS}, "PARAMETER"), ignored


def _converted(values: dict[str, Any], what: str) -> Options:
    try:
        return msgspec.convert(values, Options, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {str(error).partition(' - at')[0]}") from None


def read_preset(model: str) -> Preset:
    """Return what the name `model` adds to requests. Raises ValueError for parameters that cannot be used."""
    if (entry := entry_of(model)) is None:
        return Preset()
    try:
        options, ignored = check_parameters(entry.parameters)
    except ValueError as error:
        raise ValueError(f"model: {error} ({model})") from None
    if ignored:
        logger.warning("%s: PARAMETER %s: no effect here", model, ", ".join(ignored))
    found = options_of(options, max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None)
    given = {name: getattr(found, name) for name in GenerationOptions.__struct_fields__ if name != "n"}
    given = {name: value for name, value in given.items() if value is not None}
    return Preset(
        entry,
        {name: value for name, value in given.items() if name in _IN_FILES},
        {name: value for name, value in given.items() if name not in _IN_FILES},
    )


def filled(options: GenerationOptions, preset: Preset) -> GenerationOptions:
    """Return the options of a request with those of `preset` that it leaves open."""
    missing = {name: value for name, value in preset.options.items() if getattr(options, name) is None}
    return msgspec.structs.replace(options, **missing) if missing else options
