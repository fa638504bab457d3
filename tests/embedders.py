"""Small random embedding models in the formats of sentence-transformers, and that library as the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.checkpoints import build_checkpoint

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "engine",
    "Once upon a time there was a small engine that read a long book, word by word. " * 4,
    "Die Bäume wachsen über die Häuser, größer und schöner.",
    "What is the capital of France? The capital of France is Paris.",
]


def build_embedder(
    name: str, folder: Path, *, mode: str | None = "lasttoken", normalize: bool = True, **overrides: Any
) -> str:
    """The decoder `name` of `tests/checkpoints.py` as embedding models are published: without its output head, its
    tensors without the prefix "model.", and with modules.json, unless `mode` is None.
    """
    import transformers

    source = folder.with_name(folder.name + "-lm")
    build_checkpoint(name, source, **overrides)
    model = transformers.AutoModel.from_pretrained(source)
    model.save_pretrained(folder)
    for path in source.glob("*token*"):
        shutil.copy(path, folder)
    end_with_eos(folder)
    if mode is not None:
        write_modules(folder, model.config.hidden_size, mode, normalize)
    return str(folder)


def end_with_eos(folder: Path) -> None:
    """Let the tokenizer put one token after every text, as those of embedding models do."""
    from tokenizers import Tokenizer, processors

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", pair="$A $B <|im_end|>", special_tokens=[("<|im_end|>", 2)]
    )
    tokenizer.save(str(path))


def write_modules(folder: Path, hidden_size: int, mode: str, normalize: bool = True) -> None:
    """modules.json and the configuration of pooling, with the switches of sentence-transformers before version 6."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for i, (path, kind) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": hidden_size, f"pooling_mode_{switch(mode)}": True})
    )


def switch(mode: str) -> str:
    return {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}.get(
        mode, mode
    )


def reference_embeddings(folder: str, texts: list[str], dtype: str = "float32"):
    """What sentence-transformers computes, `[n, D]` float32."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
    return model.encode(texts, convert_to_tensor=True).float()
