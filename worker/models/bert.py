"""BERT, RoBERTa and XLM-RoBERTa: learned positions and token types, norms after every sum."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from quire.worker.spec.rope import RopeSpec
from quire.worker.transformer.encoder import EncoderLM
from quire.worker.transformer.names import TensorNames
from quire.worker.transformer.reader import COMMON_DEFAULTS


class Bert(EncoderLM):
    config_defaults = COMMON_DEFAULTS | {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    facts = {
        "norm": "layer_bias",
        "num_key_value_heads": None,
        "head_dim": None,
        "form": "sum",
        "embed_norm": True,
        "mixer": "bidirectional",
        "mlp": "plain",
        "learned_positions": 0,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    }
    prefix = "bert"
    head_names = {"score.dense": "bert.pooler.dense", "score.out_proj": "classifier"}
    ignored = (r"position_ids$", r"^(\w+\.)?pooler\.", r"^(cls|lm_head)\.")

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        for key, needed in (
            ("position_embedding_type", "absolute"),
            ("is_decoder", False),
            ("add_cross_attention", False),
        ):
            if values[key] not in (needed, None):
                raise ValueError(f"{key} {values[key]!r} is not supported: it must be {needed!r}")
        values["num_token_types"] = values["type_vocab_size"]

    @classmethod
    def ropes(cls, values: dict[str, Any], raw: dict[str, Any]) -> dict[str, RopeSpec]:
        return {}

    def tensor_names(self, names: Collection[str]) -> TensorNames:
        # checkpoints converted from TensorFlow call the parameters of a norm gamma and beta
        old = any(name.endswith("LayerNorm.gamma") for name in names)
        parameters = {"weight": "gamma", "bias": "beta"} if old else {"weight": "weight", "bias": "bias"}
        norms = {
            f"{ours}.{parameter}": f"{theirs}.LayerNorm.{name}"
            for ours, theirs in (
                ("model.embed_norm", f"{self.prefix}.embeddings"),
                ("post_attention_layernorm", "attention.output"),
                ("post_feedforward_layernorm", "output"),
            )
            for parameter, name in parameters.items()
        }
        renames = {
            "model.embed_tokens": f"{self.prefix}.embeddings.word_embeddings",
            "model.embed_positions": f"{self.prefix}.embeddings.position_embeddings",
            "model.embed_types": f"{self.prefix}.embeddings.token_type_embeddings",
            "model.layers": f"{self.prefix}.encoder.layer",
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.o_proj": "attention.output.dense",
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
        }
        return TensorNames(renames | norms | self.head_names, self.ignored).placed(names, "model.embed_tokens.weight")


class Roberta(Bert):
    """Positions begin after that of the padding token."""

    config_defaults = Bert.config_defaults | {
        "model_type": "roberta",
        "vocab_size": 50265,
        "pad_token_id": 1,
    }
    prefix = "roberta"
    head_names = {"score.dense": "classifier.dense", "score.out_proj": "classifier.out_proj"}

    @classmethod
    def complete(cls, values: dict[str, Any], raw: dict[str, Any]) -> None:
        super().complete(values, raw)
        values["learned_positions"] = values["pad_token_id"] + 1
        values["max_position_embeddings"] -= values["learned_positions"]


class XLMRoberta(Roberta):
    config_defaults = Roberta.config_defaults | {"model_type": "xlm-roberta", "vocab_size": 30522}
