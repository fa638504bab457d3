"""Pooling of a prompt's hidden states into one vector: read from the files of sentence-transformers, computed in
float32.

`modules.json` lists the steps after the model: Pooling (`1_Pooling/config.json`), Dense layers and Normalize. Models
without these files pool as their architecture says: classifiers and bare decoders take the last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from quire.checkpoints.files import damaged_weights, unreadable
from quire.checkpoints.honoured import refuse
from quire.checkpoints.reading import read_json, read_object, reading
from quire.checkpoints.sentence_settings import TextLimit, is_shortened, read_text_limit, transformer_settings
from quire.worker.messages import PoolingInfo
from quire.worker.spec.model import ModelSpec

METHODS = ("lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean")
# switches of older files -> method
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# (path of a GGUF file, name of a tensor) -> its values in float32
ReadTensor = Callable[[str, str], torch.Tensor]
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "Sigmoid": nn.Sigmoid}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer after pooling, and its activation by the name of torch's class. `gguf` is the GGUF file with its
    weight, and the name there.
    """

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    gguf: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """`methods` are concatenated, in this order. The score of a reranker that is a language model is the logit of the
    first of `score_tokens`, minus that of the second.
    """

    methods: tuple[str, ...] = ("lasttoken",)
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = True
    score_tokens: tuple[int, ...] = ()
    prompt: str = ""  # the default one
    activation: str | None = None  # for a classifier; None: by config.json
    limit: TextLimit = TextLimit()
    matryoshka: bool = False  # whether vectors can be cut
    matryoshka_sizes: tuple[int, ...] = ()  # the sizes to cut to, if the files list them
    default_dimensions: int = 0  # for vectors, if the files cut them; 0: all
    reason: str = "default of the architecture"


def read_pooling(folder: str, spec: ModelSpec, asked: str = "auto", matryoshka: bool = False) -> PoolingSpec | None:
    """Return how the model in `folder` pools, or None if it only generates text. `asked` is --pooling: auto, none, or a
    method that replaces the files'; `matryoshka` permits cutting vectors, whatever the files hold.

    Raises ValueError for files that are unreadable or name a step that is not supported.
    """
    if asked == "none":
        return None
    if spec.labels and spec.implementation == "transformers":
        return _read_whole(folder, spec, asked)
    if asked == "yes-no":
        return PoolingSpec(score_tokens=_token_ids(Path(folder), "yes", "no"), reason="as requested")
    found = _pooling_of_modules(Path(folder), spec)
    if asked != "auto":
        found = replace(found or PoolingSpec(), methods=(asked,), score_tokens=(), reason="as requested")
    elif found is None and not spec.has_lm_head:
        found = PoolingSpec((_default_method(spec),))
    if found is None:
        return None
    shortened, sizes = is_shortened(Path(folder), spec.raw)
    return replace(found, matryoshka=matryoshka or shortened, matryoshka_sizes=() if matryoshka else tuple(sizes))


def _read_whole(folder: str, spec: ModelSpec, asked: str) -> PoolingSpec:
    """Return the steps of a classifier that transformers computes: its logits stand at every token."""
    if asked != "auto":
        raise ValueError(f"--pooling {asked} does not work with {spec.architecture}, which transformers computes")
    found = _pooling_of_modules(Path(folder), spec) or PoolingSpec()
    return replace(found, methods=("cls",), dense=())


def _pooling_of_modules(folder: Path, spec: ModelSpec) -> PoolingSpec | None:
    """Return the steps of modules.json, if there is one. Raises ValueError, which names the file."""
    if not (modules := folder / "modules.json").is_file():
        return None
    with reading(modules):
        return _read_modules(folder, spec)


def _default_method(spec: ModelSpec) -> str:
    """Return the first token if a classifier reads it; the mean for an encoder, as in sentence-transformers."""
    if not spec.is_encoder:
        return "lasttoken"
    return spec.raw.get("classifier_pooling") or "cls" if spec.labels else "mean"


def _read_modules(folder: Path, spec: ModelSpec) -> PoolingSpec:
    modules = read_json(folder / "modules.json")
    pooled: dict[str, Any] = {}
    methods, dense, normalize, score_tokens, limit = None, [], False, (), TextLimit()
    for module in sorted(modules, key=lambda module: module["idx"]):
        kind, path = module["type"].rpartition(".")[2], folder / module["path"]
        match kind:
            case "Transformer":
                refuse("sentence_bert_config.json", *transformer_settings(path))
                limit = read_text_limit(folder, path, spec.max_model_len)
            case "Pooling":
                pooled = read_object(path / "config.json")
                methods = _methods(pooled)
            case "Dense":
                dense.append(_dense(path))
            case "Normalize":
                normalize = True
            case "LogitScore":
                config = read_json(path / "config.json")
                ids = config["true_token_id"], config.get("false_token_id")
                score_tokens = tuple(token_id for token_id in ids if token_id is not None)
            case _:
                raise ValueError(
                    f"modules.json: the step {kind!r} is not supported; supported: Transformer, Pooling, Dense, "
                    "Normalize, LogitScore"
                )
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.is_file() else {}
    prompt = (config.get("prompts") or {}).get(config.get("default_prompt_name"), "")
    if pooled.get("include_prompt") is False and prompt:
        refuse("1_Pooling/config.json", {"include_prompt": "false"}, folder / "1_Pooling/config.json")
    return PoolingSpec(
        methods or (_default_method(spec) if spec.labels else "lasttoken",),
        tuple(dense),
        normalize,
        score_tokens,
        prompt,
        config.get("activation_fn"),
        limit,
        default_dimensions=config.get("truncate_dim") or 0,
        reason="modules.json",
    )


def _token_ids(folder: Path, *tokens: str) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--pooling yes-no needs {path}")
    ids = tuple(map(Tokenizer.from_file(str(path)).token_to_id, tokens))
    if None in ids:
        raise ValueError(f"--pooling yes-no: the tokenizer lacks the token {tokens[ids.index(None)]!r}")
    return ids


def _methods(config: dict[str, Any]) -> tuple[str, ...]:
    mode = config.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode or [_SWITCHES[key] for key in _SWITCHES if config.get(key)]
    if not names or (unknown := set(names) - set(METHODS)):
        what = ", ".join(sorted(unknown)) if names else "none"
        raise ValueError(
            f"1_Pooling/config.json: pooling_mode {what} is not supported; supported: {', '.join(METHODS)}"
        )
    return tuple(names)


def _dense(folder: Path) -> DenseSpec:
    config = read_json(folder / "config.json")
    refuse("2_Dense/config.json", config, folder / "config.json", (None, False, "sentence_embedding"))
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{folder.name}: activation_function {activation} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    sizes = config["in_features"], config["out_features"]
    stored = (config["gguf_file"], config["gguf_tensor"]) if "gguf_file" in config else None
    return DenseSpec(folder, *sizes, config.get("bias", True), activation, stored)


class Pooler(nn.Module):
    """Pools in float32. A prompt may arrive in several chunks: `update` returns a state that `finish` turns into the
    vector. `read_gguf` reads the weights of Dense layers that lie in a GGUF file.
    """

    def __init__(self, pooling: PoolingSpec, hidden_size: int, device: torch.device, read_gguf: ReadTensor) -> None:
        super().__init__()
        self.methods, self.score_tokens = pooling.methods, pooling.score_tokens
        self.num_dimensions = pooling.dense[-1].out_features if pooling.dense else hidden_size * len(pooling.methods)
        layers = [layer for dense in pooling.dense for layer in _load_dense(dense, device, read_gguf)]
        self.dense = nn.Sequential(*layers)

    def update(self, state: list[torch.Tensor] | None, hidden: torch.Tensor, start: int) -> list[torch.Tensor]:
        """Add the hidden states `[n, H]` of tokens start .. start + n - 1 to `state`, one tensor `[H]` per method; None
        before the first chunk.
        """
        return [
            _updated(method, state[m] if state else None, hidden.float(), start)
            for m, method in enumerate(self.methods)
        ]

    def finish(self, states: list[list[torch.Tensor]], lengths: list[int]) -> torch.Tensor:
        """Map the states of P prompts with `lengths` tokens to vectors `[P, D]` float32, before Dense layers."""
        counts = torch.tensor(lengths, dtype=torch.float32, device=states[0][0].device)[:, None]
        columns = []
        for m, method in enumerate(self.methods):
            pooled = torch.stack([state[m] for state in states])
            match method:
                case "mean":
                    pooled = pooled / counts
                case "mean_sqrt_len_tokens":
                    pooled = pooled / counts.sqrt()
                case "weightedmean":
                    pooled = pooled / (counts * (counts + 1) / 2)
            columns.append(pooled)
        return torch.cat(columns, 1)


def _updated(method: str, state: torch.Tensor | None, hidden: torch.Tensor, start: int) -> torch.Tensor:
    match method:
        case "cls":
            return hidden[0] if state is None else state
        case "lasttoken":
            return hidden[-1]
        case "max":
            most = hidden.amax(0)
            return most if state is None else torch.maximum(state, most)
        case "weightedmean":
            weights = torch.arange(start + 1, start + 1 + len(hidden), dtype=torch.float32, device=hidden.device)
            total = weights @ hidden
        case _:
            total = hidden.sum(0)
    return total if state is None else state + total


def _load_dense(dense: DenseSpec, device: torch.device, read_gguf: ReadTensor) -> list[nn.Module]:
    path = dense.folder / "model.safetensors"
    layer = nn.Linear(dense.in_features, dense.out_features, dense.bias, device=device, dtype=torch.float32)
    try:
        tensors = load_file(path) if dense.gguf is None else {"weight": read_gguf(*dense.gguf)}
    except OSError as error:
        raise ValueError(unreadable(path, error)) from error
    except SafetensorError as error:
        raise ValueError(damaged_weights(path, error)) from error
    try:
        layer.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit: {error}") from error
    return [layer.requires_grad_(False), _ACTIVATIONS[dense.activation]()]


def pooling_info(pooling: PoolingSpec, pooler: Pooler, spec: ModelSpec) -> PoolingInfo:
    """Return the facts that the server needs."""
    labels = ["LABEL_0"] if pooling.score_tokens else spec.labels
    by_token = ["token_classify"] if spec.labels_tokens else ["classify"]
    return PoolingInfo(
        by_token if labels else ["embed"],
        "+".join(pooling.methods),
        pooler.num_dimensions,
        pooling.normalize,
        labels,
        _activation(spec.raw, len(labels), pooling.activation),
        spec.has_lm_head,
        bool(pooling.score_tokens),
        pooling.prompt,
        spec.is_encoder,
        pooling.limit.max_tokens,
        pooling.limit.side,
        pooling.matryoshka,
        list(pooling.matryoshka_sizes),
        pooling.default_dimensions,
    )


def _activation(raw: dict[str, Any], num_labels: int, chosen: str | None) -> str:
    """Return the activation that sentence-transformers and transformers apply to the logits of a classifier by
    default.
    """
    chosen = (
        chosen
        or (raw.get("sentence_transformers") or {}).get("activation_fn")
        or raw.get("sbert_ce_default_activation_function")
    )
    by_problem = {"regression": "identity", "multi_label_classification": "sigmoid"}
    default = by_problem.get(raw.get("problem_type") or "", "sigmoid" if num_labels == 1 else "softmax")
    return (chosen.rpartition(".")[2].lower() if chosen else None) or default
