"""Requirements on a draft model and on an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.checkpoints.reading import reading
from quire.checkpoints.vocabulary import check_same_vocabulary
from quire.configs.config import Config
from quire.worker.models.registry import DRAFTING, model_class, read_model_spec
from quire.worker.spec.index import without_indexes
from quire.worker.spec.model import LayerSpec, ModelSpec, dtype_of_weights, has_tensor, read_config

_NAME = "--speculative-config: model"


def read_draft_spec(config: Config, target: ModelSpec, folder: str) -> ModelSpec:
    """Return the spec of the draft model in `folder` for the model `target`. Raises ValueError if it does not fit
    `target`.
    """
    options = config.model
    try:
        draft = without_indexes(read_model_spec(folder, "quire", images=False))
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


def read_eagle_spec(config: Config, target: ModelSpec, folder: str) -> ModelSpec:
    """Return the spec of the EAGLE-3 head in `folder` for the model `target`. Its `raw` also has the layers of the
    model before which residual streams are `captured`, their `captured_size`, and whether the head `has_embedding`.
    Raises ValueError if the head does not fit `target`.
    """
    path = Path(folder, "config.json")
    try:
        raw = read_config(folder)
        with reading(path, raw):
            name = next((one for one in raw.get("architectures") or [] if one in DRAFTING), None)
            if name is None:
                raise ValueError(f"{path}: architectures names no EAGLE-3 head, such as {', '.join(DRAFTING)}")
            head = model_class(name).read_config(name, raw)
            captured = captured_layers(raw, target.num_hidden_layers)
    except ValueError as error:
        raise ValueError(f"{_NAME}: {error}") from None
    if head.vocab_size != target.vocab_size:
        raise ValueError(
            f"{_NAME}: vocab_size of the EAGLE-3 head is {head.vocab_size}, but that of the model is "
            f"{target.vocab_size}: the head drafts for another model"
        )
    size, own = raw.get("target_hidden_size") or head.hidden_size, has_tensor(folder, "embed_tokens.weight")
    if size != target.hidden_size or not (own or head.hidden_size == target.hidden_size):
        raise ValueError(
            f"{_NAME}: the EAGLE-3 head reads hidden states of {size}, but hidden_size of the model is "
            f"{target.hidden_size}: the head drafts for another model"
        )
    more = {"captured": captured, "captured_size": size, "has_embedding": own}
    return replace(head, raw={**head.raw, **more}, dtype=head.dtype or dtype_of_weights(folder), has_head=False)


def captured_layers(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers before which a head reads the residual stream of a model of `num_layers` layers: three of them.
    vLLM's key lists these layers; SGLang's lists the layers whose output is read.
    """
    key, nested = "eagle_aux_hidden_state_layer_ids", raw.get("eagle_config") or {}
    ids = raw.get(key) or [i + 1 for i in nested.get(key) or ()] or (2, num_layers // 2, num_layers - 3)
    captured = tuple(sorted(set(ids)))
    if len(captured) != len(ids) or captured[0] < 0 or captured[-1] >= num_layers:
        raise ValueError(f"{key} must be different layers of a model of {num_layers} layers, not {list(ids)}")
    return captured


def _is_plain(layer: LayerSpec) -> bool:
    return layer.attends and not layer.state and layer.chunk is None and not layer.output_window


def draft_quantization(config: Config, draft: ModelSpec) -> str | None:
    """Return `--quantization` for the draft model: the same, unless its checkpoint is quantized."""
    return None if draft.raw.get("quantization_config") else config.model.quantization
