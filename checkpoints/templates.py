"""The chat templates in a model folder, in the order in which transformers looks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoints.reading import read_object

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def model_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name; a single one is "default". A model with a processor (of images, say) takes
    them from processor_config.json, then chat_template.json, then template files. Any other takes them from template
    files, then tokenizer_config.json. The remaining source comes last: a text model may have a chat_template.json.

    Raises ValueError naming the file if its content is no template.
    """
    in_files = _in_files(folder)
    legacy = _json_templates(folder / "chat_template.json")
    of_tokenizer = _named(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return in_files or of_tokenizer or legacy
    if legacy and any(name != "default" for name in in_files):
        raise ValueError(
            f"{folder} has both chat_template.json and additional_chat_templates, of which transformers takes neither: "
            "remove one, or set --chat-template"
        )
    return _json_templates(folder / "processor_config.json") or legacy or in_files or of_tokenizer


def _in_files(folder: Path) -> dict[str, str]:
    found = {path.stem: _text(path) for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = _text(folder / "chat_template.jinja")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _json_templates(path: Path) -> dict[str, str]:
    """Return the templates under `chat_template` of a JSON file, none if there is no such file or key."""
    content = read_object(path)
    return _named(content.get("chat_template"), path)


def _named(declared: Any, path: Path) -> dict[str, str]:
    """Return templates by name from a text, a list of {name, template}, or an object of templates by name."""
    match declared:
        case None:
            return {}
        case str():
            return {"default": declared}
        case list() if all(isinstance(entry, dict) for entry in declared):
            named = {entry.get("name"): entry.get("template") for entry in declared}
        case dict():
            named = declared
        case _:
            named = {None: None}
    if not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise ValueError(f"{path}: chat_template must be a text, or a list of objects with name and template")
    return named
