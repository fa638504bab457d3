"""quire's public names: `from quire import LLM, SamplingParams`.

The other packages, `quire.server` and so on, are inside this folder when quire is installed from a wheel. In a checkout
they are the folders next to this one. The links in this folder lead setuptools, editors and type checkers to them; the
interpreter imports them from their own place, so that a traceback shows the path that is edited.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams"]

_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "engine", "core.py")) and os.path.isfile(
    os.path.join(_checkout, "pyproject.toml")
):
    __path__.insert(0, _checkout)

if TYPE_CHECKING:
    from quire.server.offline.llm import LLM
    from quire.server.offline.lora import LoRARequest
    from quire.server.offline.params import SamplingParams, StructuredOutputsParams


def __getattr__(name: str):
    if name in __all__:  # imported on first use: the command line must not pay for it
        from quire.server.offline import llm, lora, params

        return getattr({"LLM": llm, "LoRARequest": lora}.get(name, params), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
