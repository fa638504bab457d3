"""Builds small random encoders in the formats of transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.models.checkpoints import VOCAB_SIZE, build_tokenizer
from tests.helpers.models.embedders import write_modules

_SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id", "sep_token_id"), 0)
# name -> (class prefix in transformers, type of the second text's tokens, settings)
ENCODERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert": ("Bert", 1, {"pad_token_id": 0}),
    "roberta": ("Roberta", 0, {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", 0, {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", 0, _SPECIAL | {"num_hidden_layers": 5, "local_attention": 12}),
    "nomic": ("NomicBert", 1, {"pad_token_id": 0}),
}
_GEMMA: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA2: dict[str, Any] = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "per_layer_config": {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3)},
    "hidden_size_per_layer_input": 8,
    "embedding_dim": 96,
}
# name -> (class prefix in transformers, settings, sizes of the Dense layers after the mean)
EMBEDDERS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "embedding-gemma": ("Gemma3Text", _GEMMA, ((64, 96), (96, 64))),
    "embedding-gemma-2": ("EmbeddingGemma2Text", _GEMMA2, ()),
}
MAX_POSITIONS = 514


def build_encoder(name: str, folder: Path, kind: str = "Model", mode: str | None = None, **settings: Any) -> str:
    """Write encoder `name`; `kind` is the suffix of the class, and with `mode` the folder has modules.json."""
    prefix, second_type, own = ENCODERS[name]
    _save_model(prefix, folder, kind, own | settings)
    path = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}  # as BERT's tokenizer has
    if "type_vocab_size" in json.loads((folder / "config.json").read_text()):
        path.write_text(json.dumps(json.loads(path.read_text()) | names))
    _frame(folder / "tokenizer.json", second_type)
    if mode is not None:
        write_modules(folder, 64, mode)
    return str(folder)


def build_embedding_gemma(folder: Path, name: str = "embedding-gemma") -> str:
    """Write the language model of Gemma 3 with bidirectional attention, or that of EmbeddingGemma 2."""
    prefix, settings, dense = EMBEDDERS[name]
    _save_model(prefix, folder, "Model", settings)
    _frame(folder / "tokenizer.json", 0)
    write_modules(folder, settings.get("embedding_dim", 64), "mean", dense=dense)
    return str(folder)


def _save_model(prefix: str, folder: Path, kind: str, own: dict[str, Any]) -> None:
    import torch
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    }
    config = getattr(transformers, f"{prefix}Config")(**common | own)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}{kind}")(config).eval()
    for parameter in model.parameters():  # also biases and norms, which are 0 and 1 in a new model
        parameter.data += torch.randn_like(parameter) / 10
    model.save_pretrained(folder)
    build_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()  # sentence-transformers would apply it


def _frame(path: Path, second_type: int) -> None:
    """Make the tokenizer join texts as BERT's does: [CLS] first [SEP] second [SEP]."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path))
    cls, sep = "<|begin_of_text|>", "<|im_end|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:{second_type} {sep}:{second_type}",
        special_tokens=[(cls, 3), (sep, 2)],
    )
    tokenizer.save(str(path))
