"""Reading of model files: JSON objects, and one line naming the file and the key for each error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.checkpoints.files import unreadable

_LONGEST = 3000  # characters of an error; values from files may be longer


class KeptReads(dict):
    """A JSON object that records which keys were read, and which one last."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.asked: dict[str, None] = {}

    @property
    def last(self) -> str | None:
        return next(reversed(self.asked), None)

    def _ask(self, key: Any) -> None:
        self.asked.pop(key, None)
        self.asked[key] = None

    def __getitem__(self, key: Any) -> Any:
        self._ask(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._ask(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._ask(key)
        return super().get(key, default)


@contextmanager
def reading(path: str | Path, content: KeptReads | None = None) -> Iterator[None]:
    """Turn unexpected errors while the file or folder `path` is read into a ValueError of one line that names `path`
    and the key of `content` that was read last.
    """
    try:
        yield
    except ValueError as error:
        if "\n" in (text := str(error)) or len(text) > _LONGEST or type(error) is not ValueError:
            raise ValueError(f"cannot read {path}: {_one_line(error)}") from error
        raise
    except Exception as error:
        key = f" at {content.last}" if content is not None and content.last is not None else ""
        raise ValueError(f"cannot read {path}{key}: {type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:400]} ... {text[-90:]}"


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is none. Raises ValueError."""
    return _object(read_json(path, {}), path)


def read_json(path: Path, missing: Any = None) -> Any:
    """Return the content of a JSON file; `missing` if there is none. Raises ValueError, also for a missing file
    without `missing`.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise ValueError(unreadable(path, error)) from error
    except OSError as error:
        raise ValueError(unreadable(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {_one_line(error)}; download it again") from error


def _object(found: Any, path: Path) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(found).__name__}")
    return found
