"""Names of Ollama's library for models whose files are on the Hub: `llama3.2:1b`. The table is ollama_names.json."""

from __future__ import annotations

import json
import re
from importlib.resources import files

# `llama3.2:1b-instruct-q8_0`: a size of the table in another quantization
_TAG = re.compile(r"(?P<size>[\w.]+)-(instruct|it|chat)-(?P<quantization>[\w.]+)")


def table() -> dict[str, dict[str, str]]:
    """Return name -> tag -> name of the Hub; `latest` is the tag that a name without one stands for."""
    text = files("quire.checkpoints.library").joinpath("ollama_names.json").read_text(encoding="utf-8")
    return json.loads(text)


def on_hub(name: str) -> str | None:
    """Return the Hub's name for `llama3.2`, `llama3.2:1b` or `llama3.2:1b-instruct-q8_0`; None if the table lacks it.

    Raises ValueError with the known tags if the table has the name with other tags.
    """
    base, _, tag = name.removeprefix("library/").partition(":")
    if "/" in base or (tags := table().get(base)) is None:
        return None
    tag = tag or "latest"
    if tag == "latest":
        return tags[tags["latest"]]
    if tag in tags:
        return tags[tag]
    if (match := _TAG.fullmatch(tag)) and ":" in tags.get(match["size"], ""):
        return f"{tags[match['size']].partition(':')[0]}:{match['quantization'].upper()}"
    known = ", ".join(known for known in tags if known != "latest")
    raise ValueError(
        f"model: of {base}, the tag {tag} is not known here; known: {known}. Name the files on the Hub: "
        "ORG/NAME:QUANTIZATION"
    )
