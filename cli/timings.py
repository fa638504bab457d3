"""Measures tokens and times of an answer for `--verbose`."""

from __future__ import annotations

import sys
import time
from typing import Any


class Timings:
    """Measures the time from the request to the last chunk; token counts are the server's."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first: float | None = None  # when the first text came
        self.usage: dict[str, Any] = {}

    def observe(self, chunk: dict[str, Any]) -> None:
        """Record a chunk of the answer."""
        self.usage = chunk.get("usage") or self.usage
        if self.first is None and any(choice.get("delta") for choice in chunk.get("choices", ())):
            self.first = time.monotonic()

    def show(self) -> None:
        """Print Ollama's lines to stderr."""
        end = time.monotonic()
        first = end if self.first is None else self.first
        rows = [("total duration", f"{end - self.started:.3f} s")]
        for name, key, seconds in (
            ("prompt eval", "prompt_tokens", first - self.started),
            ("eval", "completion_tokens", end - first),
        ):
            count = self.usage.get(key)
            rows += [(f"{name} count", f"{count} tokens")] if count is not None else []
            rows += [(f"{name} duration", f"{seconds:.3f} s")]
            rows += [(f"{name} rate", f"{count / seconds:.2f} tokens/s")] if count and seconds > 0 else []
        lines = "\n".join(f"{name + ':':<22}{value}" for name, value in rows)
        print(f"\n{lines}", file=sys.stderr, flush=True)
