"""The type of values that come as JSON, or go into it."""

from __future__ import annotations

from typing import Any

Json = Any  # None, bool, int, float, str, list[Json] or dict[str, Json]: which one, the code that reads it checks
