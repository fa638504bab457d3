"""Lists the keys that the files of an architecture may leave out, with their defaults: the default of llama.cpp's
`load_hparams`, or a size that the file's tensors have. `Metadata.get` requires a key without an entry. Torch-free.
"""

from __future__ import annotations

import math

from quire.checkpoints.gguf.header import GgufFile
from quire.checkpoints.gguf.metadata import FULL, Default, Metadata

_LATENT = "attn_kv_a_mqa.weight"  # for layers with latent attention


def metadata_of(file: GgufFile) -> Metadata:
    """Return the metadata of a file, with the defaults of its architecture."""
    return Metadata(file, DEFAULTS)


def _width(m: Metadata) -> list[int] | None:
    """Return the widths of the layers' MLPs; without MLPs, those of their experts."""
    for tensor in ("ffn_down.weight", "ffn_down_exps.weight"):
        widths = [m.columns(f"blk.{i}.{tensor}") for i in range(m.num_layers())]
        if any(widths):
            return widths
    return None


def _expert_width(m: Metadata) -> list[int] | int | None:
    widths = [m.columns(f"blk.{i}.ffn_down_exps.weight") for i in range(m.num_layers())]
    return widths if any(widths) else m.find("feed_forward_length")


def _shared_width(m: Metadata) -> int:
    return max((m.columns(f"blk.{i}.ffn_down_shexp.weight") for i in range(m.num_layers())), default=0)


def _shared_count(m: Metadata) -> int:
    return math.ceil(_shared_width(m) / (m.one("expert_feed_forward_length") or 1))


def _sparse_layers(m: Metadata) -> list[int]:
    return m.layers_with("ffn_gate_inp.weight")


def _dense_layers(m: Metadata) -> int:
    """Return the number of layers in front of the first one with experts."""
    return next(iter(_sparse_layers(m)), 0)


def _sparse_step(m: Metadata) -> int:
    first, second = [*_sparse_layers(m), None, None][:2]
    if first is None:
        return 1
    return first + 1 if second is None else second - first


def _head_dim(m: Metadata) -> int:
    return m.get("embedding_length") // m.one("attention.head_count")


def _kv_heads(m: Metadata) -> list[int] | int:
    """Return the number of KV heads of each layer, 0 where it does not attend. A fused tensor has them after q's."""
    full, heads, latent = m.get("attention.key_length"), m.each("attention.head_count"), m.layers_with(_LATENT)
    if latent:
        return [heads[i] if i in latent else 0 for i in range(m.num_layers())]
    local = m.find("attention.key_length_swa") or full
    dims = [full] * m.num_layers()
    if local != full:
        dims = [full if kind == FULL else local for kind in m.layer_types()]
    found = [m.rows(f"blk.{i}.attn_k.weight") // dim for i, dim in enumerate(dims)]
    if not any(found):
        fused = [m.rows(f"blk.{i}.attn_qkv.weight") // dim for i, dim in enumerate(dims)]
        found = [(rows - of_q) // 2 if rows else 0 for rows, of_q in zip(fused, heads)]
    return found if any(found) else heads


def _latent_index(m: Metadata) -> int | None:
    """Return the first layer with latent attention, without a window if files say which layers have one."""
    pattern = m.find("attention.sliding_window_pattern")
    windows = {i for i, slides in enumerate(pattern) if slides} if isinstance(pattern, list) else set()
    return next((i for i in m.layers_with(_LATENT) if i not in windows), None)


def _latent_layer(m: Metadata) -> str | None:
    """Return that layer's name prefix."""
    return None if (layer := _latent_index(m)) is None else f"blk.{layer}"


def _latent_heads(m: Metadata) -> int:
    return m.each("attention.head_count")[_latent_index(m) or 0]


def _rotary(m: Metadata) -> int:
    if layer := _latent_layer(m):
        return m.rows(f"{layer}.{_LATENT}") - m.get("attention.kv_lora_rank")
    return m.get("attention.key_length")


def _query_rank(m: Metadata) -> int:
    return m.rows(f"{_latent_layer(m)}.attn_q_a.weight")


def _latent_rank(m: Metadata) -> int | None:
    return m.rows(f"{_latent_layer(m)}.attn_kv_a_norm.weight") or None


def _latent_key(m: Metadata) -> int:
    layer, heads = _latent_layer(m), _latent_heads(m)
    rows = m.rows(f"{layer}.attn_q_b.weight") or m.rows(f"{layer}.attn_q.weight")
    return rows // heads or m.get("attention.key_length")


def _latent_value(m: Metadata) -> int | None:
    columns = m.columns(f"{_latent_layer(m)}.attn_output.weight")
    return columns // _latent_heads(m) or m.find("attention.value_length")


def _per_layer_width(m: Metadata) -> int:
    return m.columns("per_layer_token_embd.weight") // m.num_layers()


def _streams(m: Metadata) -> int:
    """Return the number of streams of Gemma 3n, of which all but one have a projection."""
    return m.rows("altup_proj.weight") + 1 if m.rows("altup_proj.weight") else 4


def _sparsity(m: Metadata) -> list[float]:
    """Return the quantiles of Gemma 3n's published models: 0.95 in the first ten layers."""
    return [1.6448533535003662 if i < 10 else -math.inf for i in range(m.num_layers())]


def _latent_experts(m: Metadata) -> int:
    return max((m.rows(f"blk.{i}.ffn_latent_down.weight") for i in range(m.num_layers())), default=0)


def _exaone4_window(m: Metadata) -> int:
    """Return the window of the 32B, which llama.cpp knows by its number of layers."""
    return 4096 if m.num_layers() == 64 else 0


def _exaone4_period(m: Metadata) -> int:
    return 4 if m.num_layers() == 64 else 1


_T = "from the tensors"
_GRANITE = ("granite", "granite_swa", "granitehybrid", "granitemoe")
_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_ALSO_WITHOUT_WINDOWS = ("gemma3", "laguna", "mellum", "modern-bert", "olmo2", "phi3", "plamo3", "starcoder2")
_OWN_LOCAL_THETA = ("gemma-embedding", "gemma3", "gemma3n", "gemma4", "modern-bert", "plamo3")

DEFAULTS: dict[str, tuple[Default, ...]] = {
    # sizes
    "nextn_predict_layers": (Default(0),),
    "feed_forward_length": (Default(_width, note=_T),),
    "expert_feed_forward_length": (Default(_expert_width, note=_T),),
    "expert_shared_feed_forward_length": (Default(_shared_width, note=_T),),
    "expert_shared_count": (Default(_shared_count, note=_T),),
    "leading_dense_block_count": (Default(_dense_layers, note=_T),),
    "interleave_moe_layer_step": (Default(_sparse_step, note=_T),),
    "moe_latent_size": (Default(_latent_experts, note=_T),),
    "embedding_length_per_layer_input": (Default(_per_layer_width, note=_T),),
    "altup.num_inputs": (Default(_streams, note=_T),),
    "attention.head_count_kv": (Default(_kv_heads, note=_T),),
    "attention.key_length": (Default(_head_dim, note="embedding_length / attention.head_count"),),
    "attention.q_lora_rank": (Default(_query_rank, note=_T),),
    "attention.kv_lora_rank": (Default(_latent_rank, note=_T),),
    "attention.key_length_mla": (Default(_latent_key, note=_T),),
    "attention.value_length_mla": (Default(_latent_value, note=_T),),
    "rope.dimension_count": (Default(_rotary, note=f"attention.key_length; in latent attention {_T}"),),
    # experts
    "expert_group_count": (Default(0),),
    "expert_group_used_count": (Default(0),),
    "expert_weights_scale": (Default(0.0),),
    "expert_weights_norm": (Default(True, ("kimi-linear", "lfm2moe")), Default(False)),
    # attention
    "attention.sliding_window": (
        Default(4096, ("gemma2",)),
        Default(_exaone4_window, ("exaone4",), "4096 with 64 layers"),
        Default(0, _ALSO_WITHOUT_WINDOWS),
    ),
    "attention.sliding_window_pattern": (
        Default(2, ("gemma2", "gpt-oss")),
        Default(3, ("modern-bert",)),
        Default(4, ("afmoe", "cohere2", "exaone-moe", "laguna", "mellum", "olmo2")),
        Default(_exaone4_period, ("exaone4",), "4 with 64 layers"),
        Default(5, ("gemma3n",)),
        Default(6, ("gemma3", "gemma-embedding")),
        Default(8, ("plamo3",)),
    ),
    "attention.shared_kv_layers": (
        Default(lambda m: max(0, m.get("block_count") - 20), ("gemma3n",), "all layers but 20"),
        Default(0, ("gemma4",)),
    ),
    "attention.rope_pattern": (Default(lambda m: [True] * m.num_layers(), ("granite_swa",), "all layers rotate"),),
    "full_attention_interval": (Default(4, _DELTA),),
    "rope.freq_base": (Default(10000.0),),
    "rope.freq_base_swa": (Default(10000.0, _OWN_LOCAL_THETA),),
    "rope.scaling.type": (Default("linear"),),
    "rope.scaling.attn_factor": (Default(1.0),),
    "rope.scaling.yarn_beta_fast": (Default(32.0),),
    "rope.scaling.yarn_beta_slow": (Default(1.0),),
    "rope.scaling.original_context_length": (Default(lambda m: m.get("context_length"), note="context_length"),),
    "rope.scaling.finetuned": (Default(True, _GRANITE),),
    # factors and bounds: 0 is none
    "attn_logit_softcapping": (Default(50.0, ("gemma2",)),),
    "final_logit_softcapping": (Default(30.0, ("gemma2", "gemma3n", "gemma4")), Default(0.0)),
    "logit_scale": (Default(0.0, ("command-r", *_GRANITE)),),
    "residual_scale": (Default(0.0, _GRANITE),),
    "embedding_scale": (Default(0.0, _GRANITE),),
    "attention.scale": (Default(0.0, _GRANITE),),
    "attention.temperature_scale": (Default(0.0),),
    "swiglu_clamp_exp": (Default(0.0, ("glm5-next", "hy_v4")),),
    "swiglu_clamp_shexp": (Default(lambda m: m.get("swiglu_clamp_exp"), ("glm5-next",), "swiglu_clamp_exp"),),
    # others
    "altup.active_idx": (Default(0),),
    "activation_sparsity_scale": (Default(_sparsity, note="0.95 in the first ten layers"),),
    "ssm.dt_b_c_rms": (Default(False),),
    "kda.safe_gate": (Default(True, ("bailingmoe3",)),),
    "hidden_activation": (Default("gelu", ("modern-bert",)),),
    "pooling_type": (Default(0),),
    "classifier.pooling_type": (Default(1, ("modern-bert",)),),
}
