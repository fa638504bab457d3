"""Ollama's store of models on this machine: manifests that name the layers of a model by their SHA-256. Only read."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.library.entries import Entry

_LIBRARY = "registry.ollama.ai"
_HUB_HOSTS = ("hf.co", "huggingface.co")
_LAYER = "application/vnd.ollama.image."
NAME = re.compile(r"(?:(?P<org>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_BYTES = 1 << 20  # per manifest, and per layer with text


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """`layers` has the files of each kind: model, adapter, system, params ..."""

    name: str
    weights: Path
    layers: Mapping[str, list[Path]]


def folders() -> list[Path]:
    """Return $OLLAMA_MODELS, or the user's folder and the one of the Linux service."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given).expanduser()]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def find(name: str) -> OllamaModel | None:
    """Return the model `NAME[:TAG]` or `ORG/NAME[:TAG]`. Raises ValueError if the store has it but not its weights."""
    if not (match := NAME.fullmatch(name)):
        return None
    organization, tag = match["org"], match["tag"] or "latest"
    hosts = (_LIBRARY,) if organization is None else (_LIBRARY, *_HUB_HOSTS)
    for folder in folders():
        for host in hosts:
            manifest = folder / "manifests" / host / (organization or "library") / match["name"] / tag
            with contextlib.suppress(PermissionError):  # the service's folder may be closed to us
                if manifest.is_file() and (model := read(folder, manifest)) is not None:
                    return model
    return None


def read(folder: Path, manifest: Path) -> OllamaModel | None:
    """Return the model of a manifest, None if it describes no model. Raises ValueError if the weights are missing."""
    layers: dict[str, list[Path]] = {}
    try:
        with manifest.open("rb") as file:
            for layer in json.loads(file.read(_MAX_BYTES))["layers"]:
                if _DIGEST.fullmatch(digest := layer["digest"]):
                    kind = layer["mediaType"].removeprefix(_LAYER)
                    layers.setdefault(kind, []).append(folder / "blobs" / digest.replace(":", "-"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if "model" not in layers:
        return None
    name, weights = _name(manifest.relative_to(folder / "manifests").parts), layers["model"][0]
    if not weights.is_file():
        raise ValueError(f"model: Ollama's store lacks {weights}, the weights of {name}: run `ollama pull {name}`")
    return OllamaModel(name, weights, layers)


def entry(model: OllamaModel) -> Entry:
    """Return the content of the layers other than the weights. Raises ValueError if one is missing or damaged."""
    parameters, messages = _json(model, "params", {}), _json(model, "messages", [])
    if not isinstance(parameters, dict) or not isinstance(messages, list):
        raise ValueError(f"model: the parameters or messages of {model.name} in Ollama's store are damaged")
    for path in model.layers.get("adapter", ()):
        if not path.is_file():
            raise ValueError(f"model: Ollama's store lacks {path}, an adapter of {model.name}")
    return Entry(
        str(model.weights),
        _text(model, "system"),
        _text(model, "template"),
        parameters,
        tuple(map(str, model.layers.get("adapter", ()))),
        tuple({"role": str(one["role"]), "content": str(one["content"])} for one in messages if _is_message(one)),
        tuple(_content(model, path) for path in model.layers.get("license", ())),
    )


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and {"role", "content"} <= found.keys()


def _json(model: OllamaModel, kind: str, default: Any) -> Any:
    try:
        return json.loads(_text(model, kind) or "null") or default
    except ValueError:
        raise ValueError(f"model: the layer {kind} of {model.name} in Ollama's store is not JSON") from None


def _text(model: OllamaModel, kind: str) -> str:
    """Return the text of a layer, "" if there is none."""
    paths = model.layers.get(kind)
    return _content(model, paths[-1]) if paths else ""


def _content(model: OllamaModel, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"model: {path}, a layer of {model.name}, cannot be read: {error.strerror}") from None


def _name(parts: tuple[str, ...]) -> str:
    """Return the name of the manifest HOST/ORG/NAME/TAG as `ollama list` shows it."""
    *place, name, tag = parts
    if place[:1] == [_LIBRARY]:
        place = place[1:]
    return "/".join([*(part for part in place if part != "library"), f"{name}:{tag}"])
