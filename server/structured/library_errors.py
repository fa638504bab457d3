"""The library's error messages -> messages for clients, without excerpts of the generated grammar."""

from __future__ import annotations

import re

NOTHING = "no value is valid"  # also a message of the other modules
MAX_CHARS = 500
# appended to a message by the library: its state, numbered lines of the grammar
_APPENDED = re.compile(r"\n?<(?:state|grammar|backtrace|non-verbose)|\n\s*\d+ \| |%llguidance|\"x-guidance\"")
_PLACE = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
# the library's message -> ours
_WHOLE = {
    "Failed to generate regex for": "minimum, maximum: this range of numbers cannot be enforced",
    "Value for 'multipleOf'": "multipleOf: it has too many digits",
    "NoExtensionBias": "it refers to itself without an end",
    "fuel exhausted": "it is too complex: what may follow cannot be found within the limits",
}
_PARTS = (
    (re.compile(r"failed to compile JSON schema: "), ""),
    (re.compile(r"invalid regex \"(?:[^\"\\]|\\.)*\" \(in regex\): "), ""),
    (re.compile(r"regex parse error: .*\^ error: "), "invalid regex: "),  # without its drawing
    (re.compile("Unsatisfiable schema"), NOTHING),
)
OURS = frozenset(_WHOLE.values())


def readable(error: str, lines_before: int | None = None) -> str:
    """Return the message. `lines_before`: the number of lines that the server wrote before a client's own grammar; line
    numbers are then given.
    """
    reason = _APPENDED.split(error)[0]
    place = _PLACE.match(reason)
    reason = " ".join(_PLACE.sub("", reason).split())
    for pattern, ours in _PARTS:
        reason = pattern.sub(ours, reason)
    reason = next((ours for theirs, ours in _WHOLE.items() if theirs in reason), reason)[:MAX_CHARS]
    if place is None or lines_before is None:
        return reason
    return f"at line {int(place[1]) - lines_before}: {reason}"
