"""ModernBERT: rotary positions, norms before attention and the MLP, windows between layers of full attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.worker.layers.activation import ACTIVATIONS
from quire.worker.layers.linear import PLAIN_WEIGHTS, WeightFormat
from quire.worker.spec.model import ModelSpec
from quire.worker.spec.rope import RopeSpec, read_ropes_by_kind
from quire.worker.transformer.encoder import ClassifierHead, Encoder, EncoderLM
from quire.worker.transformer.reader import COMMON_DEFAULTS, FULL, PLAIN_ACTIVATIONS, SLIDING


class ModernBertEncoder(Encoder):
    """Lacks the first norm of the first layer, whose input is the norm of the embeddings."""

    def __init__(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat = PLAIN_WEIGHTS):
        super().__init__(spec, max_model_len, weights)
        self.layers["0"].input_layernorm = nn.Identity()


class ModernBert(EncoderLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "modernbert",
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "norm_bias": False,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "classifier_pooling": "cls",
        "classifier_activation": "gelu",
        "classifier_bias": False,
    }
    facts = {
        "num_key_value_heads": None,
        "head_dim": None,
        "mixer": "bidirectional",
        "embed_norm": True,
        "fused": ("qkv_proj", "gate_up_proj"),
        "tie_word_embeddings": False,
    }
    gated_activations = ("gelu", "gelu_pytorch_tanh", "silu")
    renames = {
        "model.embed_tokens": "model.embeddings.tok_embeddings",
        "model.embed_norm": "model.embeddings.norm",
        "input_layernorm": "attn_norm",
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.Wo",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_up_proj": "mlp.Wi",
        "mlp.down_proj": "mlp.Wo",
        "model.norm": "model.final_norm",
        "score.dense": "head.dense",
        "score.norm": "head.norm",
        "score.out_proj": "classifier",
    }
    ignored = (r"^(head|decoder)\.",)  # of a masked language model

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        values["norm"] = "layer_bias" if values["norm_bias"] else "layer"
        values["attention_out_bias"] = values["attention_bias"]
        values["sliding_window"] = values["local_attention"] // 2 + 1
        values["rope_theta"] = values["global_rope_theta"]
        if values["classifier_pooling"] not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling {values['classifier_pooling']!r} is not supported; it is cls or mean")
        if values["classifier_activation"] not in PLAIN_ACTIVATIONS:
            raise ValueError(
                f"classifier_activation {values['classifier_activation']!r} is not supported; supported: "
                f"{', '.join(PLAIN_ACTIVATIONS)}"
            )

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return read_ropes_by_kind(values, raw, values["local_rope_theta"])

    @classmethod
    def layer_types(cls, values: dict[str, Any]) -> list[str]:
        period = values["global_attn_every_n_layers"]
        return [SLIDING if i % period else FULL for i in range(values["num_hidden_layers"])]

    def make_decoder(self, spec: ModelSpec, max_model_len: int, weights: WeightFormat) -> Encoder:
        return ModernBertEncoder(spec, max_model_len, weights)

    def make_classifier(self, spec: ModelSpec) -> nn.Module:
        activation = ACTIVATIONS[spec.raw.get("classifier_activation", "gelu")]
        return ClassifierHead(spec, activation, bias=bool(spec.raw.get("classifier_bias")), norm=True)
