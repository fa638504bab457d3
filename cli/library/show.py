"""Implements `quire show`, which describes a model from its files, or from headers for a Hub model elsewhere."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from quire.checkpoints import hub, packaged
from quire.checkpoints.files import check_model_folder
from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.checkpoints.library import modelfile, names, stores
from quire.checkpoints.library.applied import entry_of
from quire.checkpoints.reading import read_object
from quire.checkpoints.safetensors import read_header, stored_files
from quire.checkpoints.sizes import format_bytes
from quire.checkpoints.templates import model_templates
from quire.checkpoints.weight_summary import describe_format
from quire.cli.main import Parser

_THOUGHTS = ("<think>", "enable_thinking", "reasoning_content", "thinking")


def main(argv: list[str]) -> int:
    """Run `quire show ARGV...`; returns 1 if the model cannot be found or read."""
    parser = Parser(
        prog="quire show",
        description="Show what a model is, from its files: no server is needed, and no weights are downloaded.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model by any name, or its path")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s", stream=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="quire-show-") as target:
        try:
            facts = describe(arguments.model, target)
        except ValueError as error:
            print(f"quire show: error: {error}".replace(target, arguments.model), file=sys.stderr)
            return 1
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    width = max(map(len, facts)) + 1
    for name, value in facts.items():
        lines = value if isinstance(value, list) and name == "files" else [_words(value)]
        print(*(f"{name + ':' if i == 0 else '':<{width}} {line}" for i, line in enumerate(lines)), sep="\n")
    return 0


def describe(model: str, target: str) -> dict[str, Any]:
    """Return the facts about a model by name. Raises ValueError."""
    folder, _ = hub.resolve_headers(model, revision=None, download_dir=None, target=target)
    check_model_folder(folder, needs_weights=False)
    config = read_object(Path(folder, "config.json"))
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    gguf = read_gguf(settings["file"]) if settings.get("quant_method") == "gguf" else None
    text = config.get("text_config") or config
    templates = model_templates(Path(folder), read_object(Path(folder, "tokenizer_config.json")))
    tensors, files = _gguf_tensors(gguf) if gguf else _stored_tensors(Path(folder))
    return {
        "model": model,
        "source": _source(model),
        **_added(model),
        "architecture": ", ".join(config.get("architectures") or ()) or config.get("model_type"),
        "parameters": _parameters(tensors, settings),
        "context": text.get("max_position_embeddings"),
        "quantization": _quantization(settings, tensors),
        "chat template": bool(templates),
        "capabilities": _capabilities(Path(folder), config, templates),
        "licence": _licence(Path(folder), model, gguf),
        "files": [file.name if file.is_relative_to(target) else str(file) for file in files],
    }


def _added(model: str) -> dict[str, Any]:
    """Return the prompt, parameters and adapters that the name adds to the files."""
    if (entry := entry_of(model)) is None:
        return {}
    found = {"system": entry.system, "parameters by name": modelfile.parameter_lines(entry.parameters)}
    found |= {"adapters": list(entry.adapters), "first messages": [one["content"] for one in entry.messages]}
    return {name: value for name, value in found.items() if value}


def _words(value: Any) -> str:
    match value:
        case None:
            return "not in the files"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(value)
    return str(value)


def _source(model: str) -> str:
    found = names.located(model)
    path = os.path.expanduser(found)
    if os.path.exists(path):
        return f"{stores.owner(path) or 'path'} ({os.path.abspath(path)})"
    return f"package {found}" if found in packaged.MODELS else f"Hub: {found}"


def _gguf_tensors(file: GgufFile) -> tuple[list[tuple[str, int, int]], list[Path]]:
    """Return (type, number of values, bytes) of each tensor, and the files."""
    tensors = [(tensor.type, math.prod(tensor.shape), tensor.size) for tensor in file.tensors.values()]
    return tensors, sorted({file.path, *(tensor.path for tensor in file.tensors.values())})


def _stored_tensors(folder: Path) -> tuple[list[tuple[str, int, int]], list[Path]]:
    paths = stored_files(folder)
    found = [tensor for path in paths for tensor in read_header(path).values()]
    return [(tensor.dtype, math.prod(tensor.shape), tensor.end - tensor.start) for tensor in found], paths


def _parameters(tensors: list[tuple[str, int, int]], settings: dict[str, Any]) -> int | None:
    """Return the number of weights; None if they are packed, several to a stored value."""
    packed = settings and settings.get("quant_method") != "gguf" and any(kind[0] in "IU" for kind, *_ in tensors)
    return None if packed or not tensors else sum(count for _, count, _ in tensors)


def _quantization(settings: dict[str, Any], tensors: list[tuple[str, int, int]]) -> str:
    sizes: Counter[str] = Counter()
    for kind, _, size in tensors:
        sizes[kind] += size
    total = sum(sizes.values())
    shares = ", ".join(f"{kind} {100 * size / total:.0f} %" for kind, size in sizes.most_common(3) if total)
    name = describe_format(settings, sizes) or "none"
    return f"{name}, {format_bytes(total)} ({shares})" if total else name


def _capabilities(folder: Path, config: dict[str, Any], templates: dict[str, str]) -> list[str]:
    """Return Ollama's words for the abilities that the files of the model show."""
    text = "\n".join(templates.values())
    makes_text = "For" in "".join(config.get("architectures") or ()) and not (folder / "modules.json").is_file()
    found = ["completion"] if makes_text or templates else ["embedding"]
    found += ["tools"] if "tools" in text else []
    found += ["thinking"] if any(word in text for word in _THOUGHTS) else []
    return found + (["vision"] if "vision_config" in config else [])


def _licence(folder: Path, model: str, gguf: GgufFile | None) -> str | None:
    if (found := names.located(model)) in packaged.MODELS:
        return packaged.MODELS[found].license
    if gguf is not None:
        stated = gguf.metadata.get("general.license")
        return stated if isinstance(stated, str) else None
    for path in sorted(folder.glob("LICENSE*")):
        with path.open(encoding="utf-8", errors="replace") as file:
            return next((line.strip() for line in file if line.strip()), None)
    return None
