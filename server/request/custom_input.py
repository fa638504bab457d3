"""The text of a custom tool's call. Models know functions only, so they write it as the string `input` of an object."""

from __future__ import annotations

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# a stretch of a JSON string that can be decoded now: characters, whole escapes, whole surrogate pairs
_STRETCH = re.compile(r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
                      r'|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\["\\/bfnrt])*')  # fmt: skip
_SPACES = re.compile(r"\s+")


class CustomInput:
    """Takes `{"input": "..."}` in pieces and gives the text. Other texts are passed through."""

    def __init__(self) -> None:
        self._state = "opening"  # then "text", then "after" or "raw"
        self._rest = ""

    def push(self, text: str) -> str:
        self._rest += text
        if self._state == "opening":
            found = _OPENING.match(self._rest)
            if found:
                self._state, self._rest = "text", self._rest[found.end() :]
            elif not _may_open(self._rest):
                self._state = "raw"
            else:
                self._rest = _SPACES.sub(" ", self._rest)
        if self._state == "text":
            return self._decoded()
        if self._state == "raw":
            out, self._rest = self._rest, ""
            return out
        if self._state == "after":
            self._rest = ""
        return ""

    def _decoded(self) -> str:
        end = _STRETCH.match(self._rest).end()
        out, self._rest = self._rest[:end], self._rest[end:]
        if self._rest.startswith('"'):
            self._state, self._rest = "after", ""
        elif len(self._rest) > 12:  # longer than any escape that may still be completed: not JSON
            self._state, out, self._rest = "raw", out + self._rest, ""
            return out
        return json.loads(f'"{out}"', strict=False)


def _may_open(text: str) -> bool:
    """Return whether more text may make this the beginning of the object."""
    return '{"input":"'.startswith("".join(text.split()))
