"""Specs of models that transformers computes (`fallback.py`). Imported only for such a model.

What their layers need is read off one pass over the model without memory, on torch's meta device: every layer must
reach transformers' attention interface once, with arguments that our attention knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.worker.models.fallback_states import Held, held_states, keeps_states, make_cache, pass_tokens, state_spec
from quire.worker.models.fallback_whole import UNBOUNDED, is_bare, read_whole_spec, reads_whole
from quire.worker.spec.model import LayerSpec, ModelSpec

NAME = "quire"  # of our attention in transformers' interface

# attends with (module, q, k, v, scaling, other arguments): [1, heads, T, D] each; returns [1, T, heads, D of v]
Attend = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float | None, dict[str, Any]], torch.Tensor
]
_ATTEND: ContextVar[Attend] = ContextVar("attend")

# Models whose layers depend on more than the tokens' positions and their own keys and values, by `model_type`.
UNSUPPORTED = {
    "llama4_text": "it masks attention in chunks, which transformers does not tell the attention interface",
    "llama4": "it masks attention in chunks, which transformers does not tell the attention interface",
    "deepseek_v32": "its sparse attention chooses keys from the attention mask",
    "glm_moe_dsa": "its sparse attention chooses keys from the attention mask",
}
# Arguments of the attention interface that do not change the result.
_HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position", "return_dict"}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_GROWING_ROPES = ("dynamic", "longrope")


def read_spec(folder: str, raw: dict[str, Any]) -> ModelSpec:
    """Return the spec of the model in `folder`, whose config.json is `raw`.

    Raises ValueError, naming the reason, if our attention cannot serve it.
    """
    architecture = ", ".join(raw.get("architectures") or []) or "none named in config.json"
    try:
        if method := (raw.get("quantization_config") or {}).get("quant_method"):
            raise ValueError(f"its weights are quantized ({method})")
        if (kind := raw.get("model_type")) not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"neither quire (docs/models.md lists its families) nor transformers {transformers.__version__} knows "
                f"the model type {kind!r}"
            )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = raw.get("architectures") or [""]
        if whole := next((name for name in names if reads_whole(config, name)), None):
            return read_whole_spec(folder, raw, config, whole)
        text = config.get_text_config(decoder=True)
        try:
            _check(config, text)
            layers = _layers(config, text)
        except ValueError:
            if config.is_encoder_decoder or config.sub_configs or not is_bare(names[0]):
                raise
            return read_whole_spec(folder, raw, config, names[0])  # for embeddings no cache is needed
    except Exception as error:
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"architecture {architecture} cannot run with transformers: {reason}") from error
    positions = getattr(text, "max_position_embeddings", None) or UNBOUNDED
    return ModelSpec(
        architecture=architecture,
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=positions,
        max_model_len=positions,
        norm_eps=0.0,
        ropes={},
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        hidden_act="",
        layers=layers,
        dtype=str(config.dtype or "").removeprefix("torch."),
        raw=raw,
        implementation="transformers",
        folder=folder,
    )


def make_model(folder: str, config: Any = None) -> transformers.PreTrainedModel:
    """Return the model of `folder` with uninitialised weights of torch's default dtype, on its default device."""
    config = config or transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = torch.get_default_dtype()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME).eval()


def base_of(model: transformers.PreTrainedModel) -> torch.nn.Module:
    """Return the part of a causal language model that computes hidden states."""
    return getattr(model, model.base_model_prefix)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let transformers' models attend with `attend`."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the function of transformers' attention interface."""
    if attention_mask is not None:
        others["attention_mask"] = attention_mask
    return _ATTEND.get()(module, query, key, value, scaling, others), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
# experts without memory: their product needs the numbers of tokens per expert
ALL_EXPERTS_FUNCTIONS.register(f"{NAME}_meta", lambda module, x, *args, **options: torch.empty_like(x))


def _check(config: Any, text: Any) -> None:
    """Raise ValueError if the configuration shows that our attention cannot serve the model."""
    for part in (config, text):
        if reason := UNSUPPORTED.get(part.model_type):
            raise ValueError(reason)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("it has an encoder")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal language model of the model type {config.model_type!r}; models with an "
            "encoder of images are served if docs/models.md lists them"
        )
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in _GROWING_ROPES:
            raise ValueError(
                f"its rope_type {rope['rope_type']!r} depends on the longest sequence of a batch, so that requests "
                "would change each other's results"
            )


def _layers(config: Any, text: Any) -> tuple[LayerSpec, ...]:
    default, checks = torch.get_default_dtype(), torch.distributions.Distribution._validate_args
    torch.set_default_dtype(torch.float32)
    torch.distributions.Distribution.set_default_validate_args(False)  # Gemma 3n's: they read values
    try:
        with torch.device("meta"), torch.no_grad():
            model = make_model("", config)
            model.config.pad_token_id = None  # GPT-2 would look for it among the ids
            states = keeps_states(config)
            attends = set(getattr(text, "layer_types", None) or ("unknown",)) <= _ATTENTION
            if not states and not attends and type(model)._is_stateful:
                raise ValueError("it keeps its recurrent state elsewhere than in transformers' cache classes")
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation(f"{NAME}_meta")
            if states:
                return stateful_layers(model, text)
            found: list[LayerSpec] = []
            ids = torch.zeros(1, 3, dtype=torch.long)
            with attending(lambda *call: _record(found, text, *call)):
                base_of(model)(input_ids=ids, position_ids=ids, use_cache=False)
    except ValueError:
        raise
    except Exception as error:
        if error.args == (NAME,):
            raise ValueError("its attention does not go through transformers' attention interface") from error
        raise ValueError(
            "it needs more than tokens, positions and the attention interface: a pass without transformers' own cache "
            f"and without memory ends with {type(error).__name__}: {error}"
        ) from error
    finally:
        torch.set_default_dtype(default)
        torch.distributions.Distribution.set_default_validate_args(checks)
    if len(found) != text.num_hidden_layers:
        others = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
        raise ValueError(
            f"{len(found)} of its {text.num_hidden_layers} layers attend through transformers' attention interface"
            + (f"; layers of the types {', '.join(others)} are not implemented" if others else "")
        )
    return tuple(found)


def stateful_layers(model: transformers.PreTrainedModel, text: Any) -> tuple[LayerSpec, ...]:
    """Return the layers of a model on the meta device whose layers keep states (`fallback_states.py`)."""
    found: list[LayerSpec] = []
    updated: list[int] = []
    layers, states = [], first_states(model, lambda *call: _record(found, text, *call), updated)
    if len(found) != len(updated) or sorted(set(updated)) != updated:
        raise ValueError("a layer does not attend once, through transformers' attention interface and cache")
    attended = dict(zip(updated, found))
    for i, held in enumerate(states):
        if i not in attended and not held and not _is_without_mixer(model, i):
            raise ValueError(f"layer {i} neither attends through transformers' attention interface nor keeps a state")
        layer = attended.get(i) or LayerSpec(1, 1, 1, 1, text.hidden_size, rope=None, attends=False)
        layers.append(replace(layer, state=state_spec(held)))
    return tuple(layers)


def _is_without_mixer(model: transformers.PreTrainedModel, layer: int) -> bool:
    """Return whether a layer is an MLP alone."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] in ("mlp", "moe")


def first_states(
    model: transformers.PreTrainedModel, attend: Attend, updated: list[int] | None = None
) -> list[tuple[Held, ...]]:
    """Return what the layers of a model hold after a first pass; those that attend add their index to `updated`."""
    cache, ids = make_cache(model.config, updated=updated), torch.zeros(3, dtype=torch.long)
    with attending(attend):
        pass_tokens(base_of(model), cache, ids, ids)
    return held_states(cache, model.config.get_text_config(decoder=True).num_hidden_layers)


def _record(
    found: list[LayerSpec],
    text: Any,
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    others: dict[str, Any],
) -> torch.Tensor:
    """Add the layer of a call to `found`."""
    options = {name: value for name, value in others.items() if value is not None and name not in _HARMLESS}
    window, soft_cap, sinks = (options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    if not options.pop("is_causal", getattr(module, "is_causal", True)):
        raise ValueError("its attention is not causal")
    if options:
        raise ValueError(f"its attention takes {', '.join(sorted(options))}, which ours does not know")
    found.append(
        LayerSpec(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=k.shape[3],
            v_head_dim=v.shape[3],
            intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            window=window or None,
            scale=scaling,
            soft_cap=soft_cap,
            sinks=sinks is not None,
        )
    )
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])
