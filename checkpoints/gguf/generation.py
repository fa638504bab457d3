"""The generation_config.json of a GGUF file's model: the tokens that end an answer, and sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from quire.checkpoints.gguf.header import GgufFile

logger = logging.getLogger("quire.checkpoints")

# texts of tokens that end an answer wherever a vocabulary has them, as llama.cpp assumes
_ENDS = frozenset(
    (
        "</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>",
        "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
        "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>",
        "<|repo_name|>", "<fim-repo>", "<REPO>", "<|file_sep|>",
    )
)  # fmt: skip
_CONTROL = 3  # in tokenizer.ggml.token_type
# (text, others): the text ends no answer in a vocabulary with all of the others
_UNLESS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),  # harmony: it ends a message
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),  # Gemma 4
)
# key of general.sampling -> name in generation_config.json
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_UNKNOWN_SAMPLERS = ("xtc_probability", "mirostat")


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the file's content. Settings that have no effect here are logged."""
    metadata = file.metadata
    for key in _UNKNOWN_SAMPLERS:
        if metadata.get(f"general.sampling.{key}"):
            logger.warning("%s: general.sampling.%s is not supported and has no effect", file.path, key)
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    if found["top_k"] is not None:
        found["top_k"] = max(found["top_k"], 0)
    suppressed = metadata.get("tokenizer.ggml.suppress_tokens")
    return (
        {"eos_token_id": ends(metadata)}
        # stored as float32
        | {name: round(value, 6) for name, value in found.items() if value is not None}
        | ({"suppress_tokens": suppressed} if suppressed else {})
    )


def ends(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that the metadata names, then those with well-known texts."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens") or [], metadata.get("tokenizer.ggml.token_type") or []
    known = {text: i for i, text in enumerate(tokens) if text in _ENDS}
    if "</s>" in known and types and types[known["</s>"]] != _CONTROL:
        del known["</s>"]  # an HTML tag
    for text, others in _UNLESS:
        if others <= known.keys():
            known.pop(text, None)
    return list(dict.fromkeys(token_id for token_id in (*named, *known.values()) if token_id is not None))
