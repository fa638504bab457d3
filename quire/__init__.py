"""quire's public names: `from quire import LLM, SamplingParams`.

The packages `quire.server`, `quire.engine`, `quire.worker`, `quire.configs` and `quire.cli` are the folders of these
names beside this one in a checkout, and lie inside it when installed from a wheel.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]

_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "engine", "core.py")) and os.path.isfile(
    os.path.join(_checkout, "pyproject.toml")
):
    __path__.append(_checkout)

if TYPE_CHECKING:
    from quire.server.offline.llm import LLM, SamplingParams, StructuredOutputsParams


def __getattr__(name: str):
    if name in __all__:  # imported on first use: the command line must not pay for it
        from quire.server.offline import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
