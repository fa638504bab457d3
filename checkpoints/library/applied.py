"""Finds the additions of a name to the files of its model, from the user's names and from Ollama's store."""

from __future__ import annotations

import os
from dataclasses import replace

from quire.checkpoints.library import aliases, names, ollama_store
from quire.checkpoints.library.entries import Entry


def entry_of(model: str) -> Entry | None:
    """Return the additions of the name `model` to its files; None for a path, or a name that adds nothing.

    Raises ValueError for a damaged file of names or of Ollama's store.
    """
    if os.path.exists(os.path.expanduser(model)):
        return None
    own = aliases.find(model)
    below = _ollama_additions(model if own is None else own.base)
    if own is None:
        return below
    found = own if below is None else replace(own.over(below), base=own.base)
    return None if found.is_plain else found


def _ollama_additions(model: str) -> Entry | None:
    """Return the additions by the layers of a model in Ollama's store, if the name stands for that model."""
    if os.path.exists(os.path.expanduser(model)):
        return None
    found = ollama_store.find(names.on_hub(model))
    if found is None or names.located(model) != str(found.weights):
        return None
    entry = ollama_store.entry(found)
    return None if entry.is_plain else entry
