"""The three parts of vLLM's /server_info: settings, variables and the system."""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from importlib import metadata
from typing import Any

from quire.server.errors import BadRequest
from quire.server.startup.model_names import without_folders

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
FORMATS = ("text", "json")
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyzmq")


def check_format(value: str | None) -> str:
    """Return ?config_format. Raises BadRequest."""
    if value not in (None, *FORMATS):
        raise BadRequest(f"config_format must be text or json, not '{value[:50]}'.", param="config_format")
    return value or "text"


def vllm_parts(settings: dict[str, dict[str, Any]], form: str) -> dict[str, Any]:
    """Return `vllm_config`, as a text or an object, `vllm_env` and `system_env`."""
    flat = {name: value for section in settings.values() for name, value in section.items()}
    text = ", ".join(f"{name}={value!r}" for name, value in flat.items())
    return {"vllm_config": text if form == "text" else settings, "vllm_env": _variables(), "system_env": _system()}


def _variables() -> dict[str, str]:
    """Return the environment variables with effect, without keys; of paths, only the last part."""
    return {
        name: without_folders(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(("QUIRE_", "VLLM_")) and not _SECRET.search(name)
    }


@cache
def _system() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python_version": platform.python_version(),
        "python_platform": platform.platform(),
        "os": platform.system(),
        "cpu": platform.processor() or platform.machine(),
    }
    for name in _PACKAGES:
        try:
            found[f"{name}_version"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[f"{name}_version"] = None
    return found
