"""The head of an EAGLE-3 checkpoint (arXiv:2503.01840), as vLLM and SpecForge write them: one layer of Llama that reads
the embedding of a token next to the hidden state before it, three of the model's residual streams at first and its own
afterwards, and an output head for a part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch

from quire.worker.attention.base import GroupedMetadata
from quire.worker.host.huge_pages import Workspace
from quire.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from quire.worker.layers.linear import (
    PLAIN_WEIGHTS,
    ColumnParallelLinear,
    Part,
    Shard,
    WeightFormat,
    empty_parameter,
)
from quire.worker.models.llama import Llama
from quire.worker.spec.model import ModelSpec
from quire.worker.transformer.attention import SelfAttention, qkv_projection
from quire.worker.transformer.blocks import DecoderLayer, Streams
from quire.worker.transformer.calls import LayerCall
from quire.worker.transformer.decoder import Decoder
from quire.worker.transformer.names import TensorNames

_LAYER = "model.layers.0"


class EagleAttention(SelfAttention):
    """Reads two vectors per token, side by side."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.qkv_proj = qkv_projection(spec, spec.layers[layer], prefix, weights, 2 * spec.hidden_size)


class EagleLayer(DecoderLayer):
    norm_names: ClassVar = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    mixers: ClassVar = {"attention": EagleAttention}

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, layer, prefix, weights)
        self.normed_residual = bool(spec.raw.get("norm_before_residual"))

    def draft(self, embedded: torch.Tensor, hidden: torch.Tensor, call: LayerCall) -> Streams:
        """Map the embeddings `[T, H]` of the next tokens and hidden states `[T, H]` to x and residual."""
        normed = self.hidden_norm(hidden)
        x = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), call)
        x, residual = self.post_attention_layernorm.add(x, normed if self.normed_residual else hidden)
        return self.mlp(x), residual


class EagleDecoder(Decoder):
    @staticmethod
    def layer_cls(spec: ModelSpec) -> type[DecoderLayer]:
        return EagleLayer


class LlamaEagle3(Llama):
    """`combined`, `predict` and `draft_logits` are what `HeadDrafter` calls. The embedding is that of the model unless
    the checkpoint has one; `share` is called before the weights are loaded.
    """

    config_defaults = Llama.config_defaults | {"num_hidden_layers": 1}
    ignored = (r"^t2d$",)

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        if values["num_hidden_layers"] != 1:
            raise ValueError(f"num_hidden_layers {values['num_hidden_layers']} is not supported: EAGLE-3 has one layer")
        draft = raw.get("draft_vocab_size") or values["vocab_size"]
        if not isinstance(draft, int) or not 1 <= draft <= values["vocab_size"]:
            raise ValueError(f"draft_vocab_size must be from 1 to vocab_size {values['vocab_size']}, not {draft!r}")

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        raw, size = spec.raw, spec.hidden_size
        width = len(raw["captured"]) * raw["captured_size"]
        self.model.fc = ColumnParallelLinear(
            width, [Shard("model.fc", size, 0, size)], False, weights.linear("model.fc")
        )
        number = raw.get("draft_vocab_size") or spec.vocab_size
        self.lm_head = ParallelLMHead(number, size, "lm_head.weight", None, weights.head("lm_head.weight"))
        offsets = Part("d2t", (number,), types=("I64", "I32"))
        self.d2t = empty_parameter(number, parts=[offsets], dtype=torch.int64)  # target id - draft id
        self.d2t.if_absent, self.d2t.dummy_mean = 0, 0.0
        if not raw["has_embedding"]:
            del self.model.embed_tokens
        self._shared: list[VocabParallelEmbedding] = []  # in a list, so that it is not a submodule

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> EagleDecoder:
        return EagleDecoder(spec, max_model_len, weights)

    def share(self, model: Decoder) -> None:
        """Use the embedding of the model that this head drafts for."""
        self._shared = [model.embed_tokens]

    def tensor_names(self, names: Collection[str]) -> TensorNames:
        layer = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
        parts = {f"model.{part}": part for part in ("norm", "fc", "embed_tokens")}
        return TensorNames({_LAYER: layer} | parts, self.ignored)

    def combined(self, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the hidden states `[T, H]` that the model's residual streams `[T, _]` stand for."""
        return self.model.fc(torch.cat(list(captured), -1))

    def predict(
        self,
        next_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attn: GroupedMetadata,
        depth: int = 0,
    ) -> torch.Tensor:
        embed = self.model.embed_tokens if hasattr(self.model, "embed_tokens") else self._shared[0]
        layer = self.model.layers["0"]
        call = LayerCall(self.model.rotary_emb(positions).get(layer.rope), attn)
        x, residual = layer.draft(embed(next_ids), hidden, call)
        return x + residual

    def draft_logits(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor, workspace: Workspace | None = None) -> torch.Tensor:
        """Return logits of the whole vocabulary: -inf for tokens that the head does not know."""
        known = self.lm_head(self.model.norm(hidden), workspace)
        logits = known.new_full((len(known), self.spec.vocab_size), float("-inf"))
        logits[:, self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)] = known
        return logits
