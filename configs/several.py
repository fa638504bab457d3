"""Defines the section of a server with several models."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.configs.fields import opt

FOREVER = -1.0
_LONGEST = 2**63 / 1e9  # seconds, of Go's durations: 292 years
LOAD_NICENESS = 8
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def read_duration(value: str | float) -> float:
    """Return the seconds of a duration as Go and Ollama write it (5m, 1h30m), or of a number of them; FOREVER if it is
    negative or longer than Go's longest one. Raises ValueError.
    """
    if not isinstance(value, str):
        return FOREVER if value < 0 or value > _LONGEST else float(value)
    text = value.strip()
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", digits):
        seconds = float(digits)
    else:
        parts = _PART.findall(digits)
        if not parts or "".join(map("".join, parts)) != digits:
            raise ValueError(f"{text!r} is no duration such as 5m or 1h30m, and no number of seconds")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return FOREVER if sign < 0 or seconds > _LONGEST else seconds


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """Settings of a server's models and of how long they stay loaded."""

    models: list[str] = opt(
        [], "further models, which load when a request names them: `quire serve A B` is the same", repeat=True
    )
    alias: list[str] = opt(
        [],
        "NAME=MODEL: another name of one of the models; NAME: the name of the only one (--served-model-name)",
        repeat=True,
        metavar="NAME[=MODEL]",
    )
    models_file: str | None = opt(
        None,
        "YAML file of models with names, aliases and flags; llama-swap's files and llama.cpp's presets are read, too",
        everyday=True,
        metavar="FILE",
    )
    models_dir: str | None = opt(None, "serve every GGUF file and checkpoint folder in this folder", metavar="DIR")
    hub_cache: bool = opt(False, "serve every model that was downloaded from the Hub")
    models_memory_bytes: int | None = opt(
        None,
        "memory that loaded models may take together; the least recently used one makes room (default: 0.8 of what is "
        "free at start; suffixes K, M, G)",
        metavar="BYTES",
        unit="bytes",
        minimum=1 << 20,
    )
    models_max: int = opt(0, "number of models that may be loaded at once (0: as many as the memory holds)", minimum=0)
    keep_alive: str = opt(
        "-1",
        "how long a model stays loaded after its last request, such as 5m (0: not at all, -1: until another needs its "
        "memory)",
        metavar="DURATION",
        check=read_duration,
    )
    load_niceness: int | None = opt(
        None,
        "niceness of the threads that load a model while others are loaded, so that those go on: 0 to 19 (Linux, CPU; "
        f"default: {LOAD_NICENESS})",
        minimum=0,
        maximum=19,
    )
    enable_sleep_mode: bool = opt(False, "let /sleep unload the model; /wake_up or the next request loads it again")

    @property
    def are_several(self) -> bool:
        """Return whether models are loaded on demand, and not one at start."""
        return bool(self.models or self.models_file or self.models_dir or self.hub_cache or self.enable_sleep_mode)
