"""Requirements on a draft model."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoints.vocabulary import check_same_vocabulary
from quire.configs.config import Config
from quire.worker.models.registry import read_model_spec
from quire.worker.transformer.config import LayerSpec, ModelSpec

_NAME = "--speculative-config: model"


def read_draft_spec(config: Config, target: ModelSpec, folder: str) -> ModelSpec:
    """The spec of the draft model in `folder` for the model `target`. Raises ValueError if it cannot draft for it."""
    options = config.model
    try:
        draft = read_model_spec(folder, "quire", images=False)
    except ValueError as error:
        raise ValueError(f"{_NAME}: {error}") from None
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{_NAME}: the draft model's vocab_size is {draft.vocab_size}, but that of the model is "
            f"{target.vocab_size}: both must have the same vocabulary"
        )
    check_same_vocabulary(options.model, folder, _NAME)
    if draft.is_encoder or not draft.has_lm_head:
        raise ValueError(f"{_NAME}: {draft.architecture} generates no text")
    if not all(map(_is_plain, draft.layers)):
        raise ValueError(
            f"{_NAME}: {draft.architecture} cannot draft: only attention to all tokens or to a window of them is "
            "supported in a draft model, no recurrent states and no chunks"
        )
    if draft.learned_positions is not None and draft.max_position_embeddings < target.max_model_len:
        raise ValueError(
            f"{_NAME}: {draft.architecture} has embeddings of {draft.max_position_embeddings} positions, but the model "
            f"has a context of {target.max_model_len}: set --max-model-len"
        )
    return replace(draft, vision=None)


def _is_plain(layer: LayerSpec) -> bool:
    return layer.attends and not layer.state and layer.chunk is None and not layer.output_window


def draft_quantization(config: Config, draft: ModelSpec) -> str | None:
    """`--quantization` for the draft model: the same, unless its checkpoint is quantized."""
    return None if draft.raw.get("quantization_config") else config.model.quantization
