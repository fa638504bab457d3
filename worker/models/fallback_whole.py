"""Encoders, classifiers and token classifiers that quire has no file for, computed whole by transformers.

Each prompt is one pass of its own: there is no padding that could change a result, whatever the family computes. A
classifier's logits stand in the place of the hidden states of its prompt's tokens.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from quire.worker.attention.base import GroupedMetadata
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.platforms.base import is_out_of_memory
from quire.worker.platforms.ops import Ops
from quire.worker.spec.model import LayerSpec, ModelSpec
from quire.worker.transformer.pooling import Pooler

UNBOUNDED = 1 << 20  # positions of a model that has no limit
_LOG = logging.getLogger(__name__)
_CLASSIFIERS = {
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
}
_CLASS_TOKENS = {"xlnet": -1}  # the token to which a family's tokenizer gives a type of its own, 2
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")  # of the tokens of a prompt, in config.json
_TRIED = (1, 2, 3, 5, 17)  # lengths of prompts
_TYPES = 2  # of the tokens of two texts


def auto_class(config: Any, architecture: str) -> Any:
    """Return the class of transformers that makes the model of a whole prompt."""
    for suffix, cls in _CLASSIFIERS.items():
        if architecture.endswith(suffix):
            return cls
    if architecture.endswith("EncoderModel") and type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def reads_whole(config: Any, architecture: str) -> bool:
    """Return whether a model is an encoder or a classifier."""
    if auto_class(config, architecture) is not transformers.AutoModel:
        return True
    kind = type(config)
    if config.sub_configs:  # images or sound next to text
        return False
    if architecture in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or config.is_encoder_decoder:
        return False
    masked = kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return masked or (is_bare(architecture) and kind not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING)


def is_bare(architecture: str) -> bool:
    """Return whether a model has no head."""
    names = modeling_auto.MODEL_MAPPING_NAMES.values()
    return any(architecture == name or (isinstance(name, tuple) and architecture in name) for name in names)


def read_whole_spec(folder: str, raw: dict[str, Any], config: Any, architecture: str) -> ModelSpec:
    """Return the spec of a model for whole prompts. Raises ValueError if it needs more than tokens."""
    text = config.get_text_config(decoder=False)
    model = _on_meta(config, architecture)
    width = _width(model)
    layers = getattr(text, "num_hidden_layers", None) or getattr(text, "num_layers", 1)
    layer = LayerSpec(1, 1, width, width, width, mixer="bidirectional", rope=None)
    positions = _positions(model, text)
    return ModelSpec(
        architecture=architecture,
        model_type=config.model_type,
        vocab_size=getattr(text, "vocab_size", None) or model.get_input_embeddings().num_embeddings,
        hidden_size=width,
        max_position_embeddings=positions,
        max_model_len=positions,
        norm_eps=0.0,
        ropes={},
        tie_word_embeddings=False,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        hidden_act="",
        layers=(layer,) * layers,
        dtype=str(config.dtype or "").removeprefix("torch."),
        raw=raw,
        num_token_types=_TYPES if _has_types(model) else 0,
        implementation="transformers",
        folder=folder,
    )


def _on_meta(config: Any, architecture: str) -> transformers.PreTrainedModel:
    """Return the model without memory."""
    try:
        with torch.device("meta"):
            return auto_class(config, architecture).from_config(config).eval()
    except Exception as error:
        raise ValueError(f"transformers makes no such model of its config.json: {error}") from error


def _width(model: transformers.PreTrainedModel) -> int:
    """Return the numbers per token, after a pass without memory; of a classifier the number of labels."""
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError("it reads no tokens")
    ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            return _hidden_of(model, ids, _inputs(model, ids)).shape[1]
    except Exception as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return _width_by_config(model)  # the pass reads values, which are not there
        raise ValueError(f"a pass over tokens alone ends with {type(error).__name__}: {error}") from error


def _width_by_config(model: transformers.PreTrainedModel) -> int:
    if type(model).__name__.endswith(tuple(_CLASSIFIERS)):
        return model.config.num_labels
    return model.config.get_text_config(decoder=False).hidden_size


def _positions(model: nn.Module, text: Any) -> int:
    """Return the most tokens of a prompt: positions of some families begin after that of the padding token."""
    named = [getattr(text, name, None) or 0 for name in _LIMITS]
    found = min((limit for limit in named if limit > 0), default=UNBOUNDED)  # XLNet's is -1
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            found = min(found, module.num_embeddings - module.padding_idx - 1)
    return found


def _has_types(model: nn.Module) -> bool:
    """Return whether the tokens of a pair's second text have a type of their own."""
    known = "token_type_ids" in inspect.signature(model.forward).parameters
    config = model.config  # without types of its own, GPT-2 would add the embeddings of these numbers as tokens
    return known and (config.model_type in _CLASS_TOKENS or (getattr(config, "type_vocab_size", None) or 0) > 1)


def _inputs(model: nn.Module, ids: torch.Tensor, types: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return the arguments of a pass over one prompt `[1, n]` next to its tokens."""
    inputs = {"attention_mask": torch.ones_like(ids)}
    if _has_types(model):
        types = torch.zeros_like(ids) if types is None else types.clone()
        if (place := _CLASS_TOKENS.get(model.config.model_type)) is not None:
            types[0, place] = 2
        inputs["token_type_ids"] = types
    known = inspect.signature(model.forward).parameters
    return {name: tensor for name, tensor in inputs.items() if name in known}


def _hidden_of(model: nn.Module, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the hidden states or logits `[n, width]` of one prompt `[1, n]`."""
    out = model(input_ids=ids, **inputs, return_dict=True)
    if "logits" not in out:
        found = out.last_hidden_state[0]
        if len(found) != ids.shape[1]:
            raise ValueError(f"it makes {len(found)} hidden states of {ids.shape[1]} tokens")
        return found
    logits = out.logits[0]
    return logits if logits.dim() > 1 else logits.expand(ids.shape[1], -1)


def _is_of_device(error: Exception) -> bool:
    """Return whether an error is none of a prompt, but of memory or of the device."""
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and is_out_of_memory(error))


class TransformersWhole(nn.Module):
    """An encoder or classifier of transformers, on one rank. The interface is that of `encoder.EncoderLM`.

    Raises:
        ValueError: the weights are to be quantized.
    """

    received_width: ClassVar = 0

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__()
        if weights is not PLAIN_WEIGHTS:
            raise ValueError(f"--quantization does not work with {spec.architecture}, which transformers computes")
        self.spec, self.max_model_len = spec, max_model_len
        self.dtype, self.device = torch.get_default_dtype(), torch.get_default_device()
        self.pooler: Pooler | None = None
        self.failures: dict[int, str] = {}  # of the prompts of the last step, by position
        config = transformers.AutoConfig.from_pretrained(spec.folder, local_files_only=True)
        self._adopt(_on_meta(config, spec.architecture))

    def _adopt(self, inner: transformers.PreTrainedModel) -> None:
        self.inner = inner.eval().requires_grad_(False)
        self._sparse = [part for part in self.inner.modules() if hasattr(part, "set_attention_type")][:1]
        self._longest_full = 0

    def load(self, folder: str, load_format: str, seed: int, progress: Callable[[float], None] | None) -> None:
        """Read the weights of `folder`, or make random ones if `load_format` is dummy."""
        _LOG.warning(
            "quire has no file for %s, and transformers computes it, one prompt after another: expect it to be slow",
            self.spec.architecture,
        )
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        auto = auto_class(config, self.spec.architecture)
        if load_format == "dummy":
            with torch.random.fork_rng(), torch.device(self.device):
                torch.manual_seed(seed)
                inner = auto.from_config(config, dtype=self.dtype)
        else:
            inner, found = auto.from_pretrained(
                folder, dtype=self.dtype, local_files_only=True, output_loading_info=True
            )
            missing = sorted(name for name in found["missing_keys"] if self.spec.labels or "pooler" not in name)
            if missing:
                raise ValueError(f"tensors are missing in {folder}: {', '.join(missing[:5])}")
        self._adopt(inner.to(self.device))
        self._try()
        if progress:
            progress(1.0)

    @torch.inference_mode()
    def _try(self) -> None:
        """Raise ValueError if transformers' code fails for a short text, as Funnel's below three tokens, or makes other
        numbers than config.json says, as Reformer's.
        """
        refused = f"architecture {self.spec.architecture} cannot run with transformers: its code"
        for length in _TRIED[: bisect_right(_TRIED, self.max_model_len)]:
            try:
                found = self._pass(torch.full((1, length), self.spec.vocab_size - 1, device=self.device), None)
            except Exception as error:
                raise ValueError(
                    f"{refused} fails for a text of {length} tokens: {type(error).__name__}: {error}"
                ) from error
            if found.shape != (length, self.spec.hidden_size):
                raise ValueError(
                    f"{refused} makes numbers of the shape {list(found.shape)} of a text of {length} tokens, not "
                    f"{[length, self.spec.hidden_size]}"
                )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        hidden: torch.Tensor | None = None,
        needed_rows: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map input_ids `[T]` to hidden states `[T, H]`, or to those of `needed_rows`."""
        starts, _ = attn[0].host_lengths()
        parts, self.failures = [], {}
        for i, (start, stop) in enumerate(pairwise(starts)):
            if start == stop:
                continue
            types = None if token_types is None else token_types[None, start:stop]
            try:
                parts.append(self._pass(input_ids[None, start:stop].long(), types))
            except Exception as error:
                if _is_of_device(error):
                    raise
                _LOG.exception("transformers' code fails for a prompt of %d tokens", stop - start)
                self.failures[i] = (
                    f"the code that transformers has for {self.spec.architecture} fails for this prompt of "
                    f"{stop - start} tokens: {type(error).__name__}: {error}"
                )
                parts.append(torch.zeros(stop - start, self.spec.hidden_size, dtype=self.dtype, device=self.device))
        found = torch.cat(parts)
        return found if needed_rows is None else found[needed_rows]

    def _pass(self, ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states of one prompt `[1, n]`."""
        count, config = ids.shape[1], self.inner.config
        reads_end = config.is_encoder_decoder and self.spec.architecture.endswith("ForSequenceClassification")
        if reads_end and not (ids == config.eos_token_id).any():
            # these classifiers read the last end-of-text token, for which the longest prompt must give a place
            ids = ids[:, : self.spec.max_model_len - 1]
            ids = torch.cat([ids, ids.new_full((1, 1), config.eos_token_id)], 1)
        with self._sparse_for(count):
            return _hidden_of(self.inner, ids, _inputs(self.inner, ids, types))[:count]

    @contextmanager
    def _sparse_for(self, count: int) -> Iterator[None]:
        """Undo BigBird's switch from sparse to full attention, which its code makes for good at a short prompt, before
        a prompt that may be long. To switch costs time.
        """
        for part in self._sparse:
            if count > self._longest_full:
                part.set_attention_type(part.config.attention_type)
        yield
        for part in self._sparse:
            if part.attention_type != part.config.attention_type:
                self._longest_full = max(self._longest_full, count)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return pooled logits `[P, num_labels]` as they are."""
        return pooled

    def use(self, ops: Ops) -> None:
        """Do nothing, as `finalize` and `round_for_products`: the layers are transformers' own."""

    def finalize(self) -> None:
        """See `use`."""

    def round_for_products(self) -> None:
        """See `use`."""
