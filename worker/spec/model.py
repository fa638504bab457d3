"""The parts of a model, as read from `config.json`: `ModelSpec` and one `LayerSpec` per layer. Torch-free.

`reader.py` turns a config.json into a spec; facts about a family are in its own file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints.config_schema import check_config, unwrapped
from quire.checkpoints.reading import KeptReads, read_json, read_object
from quire.checkpoints.safetensors import StoredTensor, read_header, stored_files
from quire.worker.spec.cache import (
    CacheSpec,
    Chunk,
    Compressed,
    CompressedSizes,
    Cross,
    Full,
    IndexSizes,
    Latent,
    LatentSizes,
    State,
    Window,
)
from quire.worker.spec.moe import MoESpec
from quire.worker.spec.ngrams import NgramSpec
from quire.worker.spec.rope import RopeSpec
from quire.worker.spec.state import StateSpec
from quire.worker.spec.vision import VisionSpec

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a model. Sizes are those of the whole model, not of a rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # for q and k
    v_head_dim: int
    intermediate_size: int
    mixer: str = "attention"  # a key of `blocks.MIXERS`, "bidirectional" in an encoder
    mlp: str = "gated"  # a key of `decoder.MLPS`
    # number of positions that a token attends to, None for all; in an encoder, to each side and with its own
    window: int | None = None
    chunk: int | None = None  # positions per chunk: a token attends to its chunk only; None without chunks
    # a token of the output attends to the prompt and to this number of last tokens of the output, 0: to all
    output_window: int = 0
    rope: str | None = "default"  # a key of `ModelSpec.ropes`, None for no rotary embedding
    scale: float | None = None  # scale of attention scores, None for head_dim**-0.5
    soft_cap: float | None = None  # for attention scores
    sinks: bool = False  # a learned score per head that takes part in the softmax and has no value
    bias_extent: int = 0  # distances at which the query adds a bias to a key's score (Inkling); 0: none
    qk_norm: str | None = None  # a key of `attention.QK_NORMS`, None without norms of q and k
    latent: LatentSizes | None = None  # for mixer "mla"
    latent_eps: float = 1e-6  # for the norms of latents, whatever the others have
    q_lora_rank: int | None = None  # for the latents of queries in mixer "mla", None without
    # parts of the one tensor with q, k and v in the files, each holding those of some heads; 0: not divided
    qkv_chunks: int = 0
    # for mixers "mla" and "block_attention": the index that chooses keys; None: all are attended to
    index: IndexSizes | None = None
    compressed: CompressedSizes | None = None  # for mixer "compressed"
    v_norm: bool = False  # whether heads of v are normalised, without a weight
    key_is_value: bool = False  # whether v is the output of k_proj, before its norm
    kv_from: int | None = None  # the layer whose keys and values this one reads; it has none of its own
    clip_qkv: float | None = None  # bound of the entries of q, k and v, after the norms of q and k; "whole" norms only
    moe: MoESpec | None = None  # the experts, which are the MLP ("moe") or stand next to it
    state: StateSpec | None = None  # for a mixer with a recurrent state, which replaces attention or stands next to it
    attends: bool = True  # whether the mixer has attention
    # for attention next to a state (`mixers/side_by_side.py`), or form "normed_residual"
    mixer_scales: tuple[float, ...] = ()
    # a gate multiplies the attended values: one per head, or one per entry
    head_gate: bool = False
    entry_gate: bool = False
    gate_act: str = "sigmoid"  # its activation, a key of `attention.GATE_ACTIVATIONS`
    v_scale: float = 1.0  # factor of the values, for mixer "attention" only
    cross_length: int = 0  # for mixer "cross": positions of the encoder's output, to which all tokens attend
    ngrams: NgramSpec | None = None  # embeddings of n-grams that are added before the layer (Qwen4-Exp)


@dataclass(frozen=True, slots=True)
class MTPSpec:
    """`count` heads, each with one layer, that draft tokens (`mtp.py`): the i-th one drafts the i-th token."""

    layer: LayerSpec
    names: tuple[tuple[str, str], ...] = ()  # parts of names of the head's tensors, and those in the files
    hidden_first: bool = False  # whether `fc` reads the hidden state before the embedding
    count: int = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder. Sizes are those of the whole model, not of a rank."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    max_model_len: int  # longest context in tokens, which scaled rotary embeddings may stretch
    norm_eps: float
    ropes: dict[str, RopeSpec]
    tie_word_embeddings: bool
    attention_bias: bool  # bias of q, k and v
    attention_out_bias: bool
    mlp_bias: bool
    hidden_act: str  # a key of `activation.ACTIVATIONS`
    layers: tuple[LayerSpec, ...]
    dtype: str  # dtype of the weights in the files: float32, bfloat16 or float16
    raw: dict[str, Any]  # config.json, of a wrapper its text part
    form: str = "pre"  # where a layer has norms: a key of `blocks.BLOCKS`
    norm: str = "rms"  # a key of `norm.NORMS`
    fused: tuple[str, ...] = ()  # for qkv_proj and gate_up_proj, those that the checkpoint holds as one tensor
    learned_positions: int | None = None  # offset of position 0 in the table of learned position embeddings
    num_token_types: int = 0  # for an encoder
    embed_norm: bool = False  # whether the embeddings are normalised
    embedding_size: int = 0  # output size of a projection of the last hidden states, 0 without one
    hidden_size_per_layer_input: int = 0  # for per-layer inputs (`per_layer.py`), 0 without
    vocab_size_per_layer_input: int = 0
    embed_scale: float = 1.0
    # for layers without rotary embedding, q at position p is multiplied by 1 + a * ln(1 + floor((p + 1) / b)): (a, b)
    still_query_scale: tuple[float, float] | None = None
    residual_scale: float = 1.0  # for the output of attention and of the MLP
    gate_scale: float = 1.0  # for the gate of mlp "scaled", before its activation
    down_scale: float = 1.0  # the same, of its output
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    why_shorter: str = ""  # reason for a `max_model_len` below what the positions allow
    implementation: str = "quire"  # or transformers, which reads the model from `folder`
    folder: str = ""
    vision: VisionSpec | None = None  # None: images are not served
    mtp: MTPSpec | None = None  # heads that draft tokens, if config.json has any
    has_head: bool = False  # whether they are part of the model
    captures: tuple[int, ...] = ()  # layers before which the streams are kept, for an EAGLE-3 head
    tower_prefixes: tuple[str, ...] = ()  # beginnings of the names of a wrapper's tensors outside the language model

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def pooled_size(self) -> int:
        """Return the number of entries of the vectors that are pooled."""
        return self.embedding_size or self.hidden_size

    @property
    def is_encoder(self) -> bool:
        """Return whether tokens attend to later ones, so that a prompt must be computed in one step."""
        return any(layer.mixer == "bidirectional" for layer in self.layers)

    @property
    def crosses(self) -> bool:
        """Return whether layers attend to the output of an encoder, so that every request needs audio."""
        return any(layer.cross_length for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Return whether some layers keep a recurrent state."""
        return any(layer.state for layer in self.layers)

    @property
    def has_lm_head(self) -> bool:
        """Return whether the model generates text: its architecture is not a bare model, an encoder or a classifier."""
        name = self.architecture.removesuffix("LMHeadModel")
        return not self.is_encoder and not name.endswith(("Model", "ForSequenceClassification", "ForMaskedLM"))

    @property
    def labels_tokens(self) -> bool:
        """Return whether a classifier labels each token of a prompt."""
        return self.architecture.endswith("ForTokenClassification")

    @property
    def labels(self) -> list[str]:
        """Return the names of a classifier's outputs; empty for other models."""
        if not self.architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
            return []
        named = self.raw.get("id2label") or {}
        num_labels = len(named) or self.raw.get("num_labels") or 2
        return [str(named.get(str(i), f"LABEL_{i}")) for i in range(num_labels)]


def read_config(folder: str) -> dict[str, Any]:
    """Parse `folder/config.json`. Raises ValueError if it is missing or unreadable."""
    path = Path(folder, "config.json")
    if not path.is_file():
        raise ValueError(f"no model configuration: cannot read {path}: No such file or directory")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must contain a JSON object")
    raw = unwrapped(raw)
    check_config(raw, path)
    return KeptReads(raw)


_SETTINGS_BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}


def with_quantization(raw: dict[str, Any], folder: str) -> dict[str, Any]:
    """Add the settings of a file next to config.json, where older exports of modelopt, GPTQ and AWQ store them."""
    if raw.get("quantization_config") or raw.get("compression_config"):
        return raw
    for name, method in _SETTINGS_BESIDE.items():
        path = Path(folder, name)
        if not path.is_file() or (method != "modelopt" and not _has_packed_weights(folder)):
            continue
        try:
            settings = read_object(path)
            settings = settings["quantization"] if method == "modelopt" else settings
            return {**raw, "quantization_config": {"quant_method": method, **settings}}
        except (KeyError, TypeError) as error:
            raise ValueError(f"cannot read {path}: it has no settings under quantization; download it again") from error
    return raw


def _has_packed_weights(folder: str) -> bool:
    """Return whether tensors have the names of GPTQ and AWQ: settings of these tools may accompany a plain model."""
    return any(name.endswith(".qweight") for name, _ in _stored_tensors(folder))


def cache_specs(spec: ModelSpec, itemsize: int, tp: int = 1, scale_bytes: int = 0) -> list[CacheSpec | None]:
    """Return the cache spec of each layer on each of `tp` ranks, with elements of `itemsize` bytes and scales of
    `scale_bytes` per head; None for a layer that has no cache of its own. If any layer has a second cache, of
    compressed keys or of the keys of an index, the specs of each layer's second cache follow.
    """
    first = [cache_spec(layer, itemsize, tp, scale_bytes) for layer in spec.layers]
    second = [_second_spec(layer, itemsize, scale_bytes) for layer in spec.layers]
    return first + second if any(second) else first


def num_caches(spec: ModelSpec) -> int:
    """Return the number of entries of `cache_specs`; the layers of prediction heads follow them."""
    return len(spec.layers) * (1 + has_second_caches(spec))


def has_second_caches(spec: ModelSpec) -> bool:
    """Return whether some layers have two caches."""
    return any(_second_spec(layer, 1) for layer in spec.layers)


def cache_indices(spec: ModelSpec, layers: Sequence[int]) -> list[int]:
    """Return the places in `cache_specs` of the caches of `layers`."""
    second = [len(spec.layers) + layer for layer in layers] if has_second_caches(spec) else []
    return [*layers, *second]


def _second_spec(layer: LayerSpec, itemsize: int, scale_bytes: int = 0) -> Compressed | None:
    """Return the cache of a layer's compressed keys, or of the keys of its index."""
    if layer.index is not None and layer.index.source is None:
        return Compressed(layer.index.width, 1, itemsize, scale_bytes)
    sizes = layer.compressed
    return Compressed(layer.head_dim + sizes.index_dim, sizes.rate, itemsize) if sizes and sizes.rate else None


def cache_spec(layer: LayerSpec, itemsize: int, tp: int = 1, scale_bytes: int = 0) -> CacheSpec | None:
    """Return the cache of one layer, see `cache_specs`. KV heads are replicated if there are fewer KV heads
    than ranks.
    """
    if not layer.attends or layer.kv_from is not None:
        return None
    if layer.mixer == "bidirectional":
        return Full(1, 1, 1, itemsize)  # nothing is kept: blocks only bound the tokens of requests in flight
    if layer.compressed is not None:
        return Latent(layer.head_dim, layer.compressed.rope_dim, itemsize, window=layer.window)
    if layer.latent is not None:
        return Latent(layer.latent.width, layer.latent.rope_dim, itemsize, scale_bytes, layer.window or 0)
    sizes = max(1, layer.num_kv_heads // tp), layer.head_dim, layer.v_head_dim, itemsize
    if layer.cross_length:
        return Cross(*sizes, layer.cross_length, scale_bytes=scale_bytes)
    if layer.chunk is not None:
        return Chunk(*sizes, layer.chunk, scale_bytes=scale_bytes)
    if layer.window is None:
        return Full(*sizes, scale_bytes=scale_bytes, output_window=layer.output_window)
    return Window(*sizes, layer.window, scale_bytes=scale_bytes)


def state_specs(spec: ModelSpec, tp: int = 1) -> list[State | None]:
    """Return the recurrent state of each layer on each of `tp` ranks, None for a layer that has none."""
    return [State(layer.state.shapes(tp)) if layer.state else None for layer in spec.layers]


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int, tp: int = 1) -> int:
    """Return bytes of keys and values per token on each of `tp` ranks, over all layers."""
    return sum(cache.page_bytes(1) for cache in cache_specs(spec, dtype_bytes, tp) if cache)


def dtype_of_weights(folder: str) -> str:
    """Return the dtype of the first weight in the files, as transformers does if config.json names none; float32 if
    there are no weights either.
    """
    dtypes = (tensor.dtype for _, tensor in _stored_tensors(folder))
    return next((_SAFETENSORS_DTYPES[dtype] for dtype in dtypes if dtype in _SAFETENSORS_DTYPES), "float32")


def has_tensor(folder: str, end: str) -> bool:
    """Return whether the name of a tensor in the files is `end`, or ends with "." and it."""
    return any(f".{name}".endswith(f".{end}") for name, _ in _stored_tensors(folder))


def _stored_tensors(folder: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each tensor in the files, and its name. Raises ValueError if a file is damaged."""
    for path in stored_files(Path(folder)):
        yield from read_header(path).items()
