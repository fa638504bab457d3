"""Settings in sentence-transformers' files for texts and vectors, except pooling. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.reading import read_object

# for the module Transformer, under the names that versions of the library have given it
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# families whose embedding models are Matryoshka-trained, but whose files do not say so
_SHORTENED_FAMILIES = ("qwen3", "gemma3_text", "jina_embeddings_v5", "nomic_bert")


@dataclass(frozen=True, slots=True)
class TextLimit:
    """Texts are cut to `max_tokens` tokens (0: they are not), special ones included, at the end or the start."""

    max_tokens: int = 0
    side: str = "right"


def read_text_limit(folder: Path, transformer: Path, max_positions: int) -> TextLimit:
    """Return where sentence-transformers cuts texts for a folder with modules.json. `transformer` is the folder of its
    first module. The tokenizer's own limit counts if it is below `max_positions`.

    Raises ValueError naming the file and the key.
    """
    settings, path = transformer_settings(transformer)
    tokenizer = read_object(folder / "tokenizer_config.json")
    arguments: Mapping[str, Any] = settings.get("tokenizer_args") or settings.get("processor_kwargs") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{path}: tokenizer_args must be an object")
    side = arguments.get("truncation_side", tokenizer.get("truncation_side", "right"))
    if side not in ("left", "right"):
        raise ValueError(f"tokenizer_config.json: truncation_side must be left or right, not {side!r}")
    for key, value in (
        ("model_max_length", arguments.get("model_max_length")),
        ("max_seq_length", settings.get("max_seq_length")),
    ):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**63:
            raise ValueError(f"{path}: {key} must be a whole number of at least 1, not {value!r}")
        return TextLimit(value, side)
    length = tokenizer.get("model_max_length")
    declared = isinstance(length, int | float) and 1 <= length < max_positions  # no limit is 10 ** 30
    return TextLimit(int(length) if declared else 0, side)


def is_shortened(folder: Path, raw: Mapping[str, Any]) -> tuple[bool, list[int]]:
    """Return whether a prefix of a vector is a vector of the text, too (Matryoshka), and the valid lengths, if the
    files list them.
    """
    sizes = raw.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) and size > 0 for size in sizes):
        return True, sizes
    if raw.get("is_matryoshka") is not None:
        return bool(raw["is_matryoshka"]), []
    declared = read_object(folder / "config_sentence_transformers.json").get("truncate_dim") is not None
    return declared or raw.get("model_type") in _SHORTENED_FAMILIES, []


def transformer_settings(transformer: Path) -> tuple[dict[str, Any], Path]:
    """Return the settings of the module Transformer, and their file; none if there is no such file."""
    for name in TRANSFORMER_FILES:
        if (transformer / name).is_file():
            return read_object(transformer / name), transformer / name
    return {}, transformer / TRANSFORMER_FILES[0]
