"""Writes a model folder without weights and transformers, sufficient for the server and the fake executor."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers.models.checkpoints import CHAT_TEMPLATE, SPECIAL_TOKENS, TEXT

VOCAB_SIZE = 512


def write_light_model(folder: str | Path, **config) -> str:
    """Write config.json of a small Qwen3, a byte-level BPE tokenizer and a chat template; returns the folder as a
    string.
    """
    folder = Path(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": SPECIAL_TOKENS[2], "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 2048,
                "eos_token_id": 2,
                "dtype": "float32",
                **config,
            }
        )
    )
    return str(folder)
