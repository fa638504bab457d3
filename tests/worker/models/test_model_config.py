"""config.json -> ModelSpec, against transformers' own reading of the same files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.checkpoints.config_schema import check_config
from quire.worker.models.registry import (
    DECODERS,
    WRAPPED,
    model_class,
    num_parameters,
    parse_model_spec,
    read_model_spec,
)
from quire.worker.spec.model import kv_bytes_per_token
from tests.helpers.models.checkpoints import CHECKPOINTS
from tests.helpers.models.families import causal_lm_class

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings")
NORM_EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
FULL = "full_attention"


def rope_of(raw):
    return parse_model_spec(raw).ropes["default"]


def windows(spec) -> set[int | None]:
    return {layer.window for layer in spec.layers}


def kinds(config) -> list[str]:
    """The attention kind of each layer."""
    default = FULL if getattr(config, "sliding_window", None) is None else "sliding_attention"
    default = FULL if getattr(config, "use_sliding_window", None) is False else default
    return getattr(config, "layer_types", None) or [default] * config.num_hidden_layers


def ropes(config) -> dict[str, dict]:
    """The rotary embedding of each attention kind."""
    found = getattr(config, "rope_parameters", None) or {}
    return found if found.keys() & set(kinds(config)) else dict.fromkeys(kinds(config), found)


def of_layers(config) -> list:
    """The configuration of each layer, some of whose sizes may be its own."""
    num_layers, own = config.num_hidden_layers, config.to_dict().get("per_layer_config")
    return [config.per_layer_config[i] for i in range(num_layers)] if own else [config] * num_layers


def compare(spec, config) -> None:
    for key in SIZES:
        if key == "max_position_embeddings" and not any(layer.attends for layer in spec.layers):
            continue  # a model of states alone has no positions
        assert getattr(spec, key) == getattr(config, key), key
    given = [value for key in NORM_EPS if (value := getattr(config, key, None)) is not None]
    assert spec.norm_eps == next(iter(given), 1e-5)
    turning = getattr(config, "no_rope_layers", None) or [1] * len(spec.layers)  # 1: with rotary embedding
    for layer, kind, mine, turns in zip(spec.layers, kinds(config), of_layers(config), turning, strict=True):
        if not layer.attends:
            continue
        heads = mine.num_attention_heads
        assert layer.num_heads == heads
        assert layer.num_kv_heads == (getattr(mine, "num_key_value_heads", None) or heads)
        head_dim = getattr(mine, "head_dim", None) or mine.hidden_size // heads
        if layer.latent is not None:
            head_dim = mine.qk_rope_head_dim if turns else 0
            still = 0 if turns else mine.qk_rope_head_dim
            assert (layer.latent.rope_dim, layer.latent.nope_dim) == (head_dim, mine.qk_nope_head_dim + still)
            assert (layer.latent.v_dim, layer.latent.rank) == (layer.v_head_dim, mine.kv_lora_rank)
            assert layer.q_lora_rank == getattr(mine, "q_lora_rank", None)
            assert layer.head_dim == mine.qk_nope_head_dim + mine.qk_rope_head_dim
        else:
            assert layer.head_dim == head_dim
        size = getattr(mine, "intermediate_size", None)
        size = size[0] if isinstance(size, list) else size
        size = size or getattr(mine, "ffn_dim", None) or 4 * mine.hidden_size
        if (layer.moe is None or hasattr(mine, "intermediate_size")) and spec.model_type != "lfm2":  # its own formula
            assert layer.intermediate_size == size
        assert layer.window == (config.sliding_window if kind == "sliding_attention" else None)
        if layer.rope:
            rope, theirs = spec.ropes[layer.rope], ropes(config)[kind]
            assert rope.theta == theirs["rope_theta"]
            assert (rope.scaling or {"rope_type": "default"})["rope_type"] == theirs["rope_type"]
            whole = (
                theirs["rope_type"] == "proportional" or spec.model_type == "mistral4"
            )  # the factor is not of this head
            whole |= layer.latent is not None  # rope_dim is the rotated part
            assert rope.rotary_dim == int(head_dim * (1.0 if whole else theirs.get("partial_rotary_factor") or 1.0))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_reads_what_transformers_wrote(checkpoint, name):
    folder = checkpoint(name)
    config = transformers.AutoConfig.from_pretrained(folder)
    spec = read_model_spec(folder)
    compare(spec, config)
    assert spec.dtype == "float32"


def default_config(architecture: str, **settings):
    return CONFIG_MAPPING[model_class(architecture).config_defaults["model_type"]](**settings)


# The default sizes of GLM-4.5 do not divide. LFM2-MoE and Nemotron-H have no default for the kinds of layers. Layers of
# Granite 4 are recurrent by default; those of Mamba have no positions. MiniMax M3 has a size of its own for dense
# layers. The index of Qwen4-Exp has no default sizes. transformers does not have DeepSeek with plain attention, whose
# published code test_deepseek_ocr.py reads, nor Ling 2.5, PLaMo 2 and 3 (tests/helpers/twins.py), nor MiMo.
WITHOUT_DEFAULTS = {
    f"{name}ForCausalLM"
    for name in (
        *("Glm4Moe", "GraniteMoeHybrid", "Deepseek", "Lfm2Moe", "NemotronH"),
        *("Mamba", "Mamba2", "FalconMamba"),
        *("BailingMoeV2_5", "MiMo", "MiniMaxM3VL", "Plamo2", "Plamo3", "Qwen4Exp"),
    )
}
WITH_DEFAULTS = sorted(DECODERS.keys() - WITHOUT_DEFAULTS)


# GLM-4V has no such config; each of Whisper's layers is two (test_whisper.py compares it)
# MiMo's and Inkling's layers differ in their KV heads, those of DeepSeek V4 have two kinds of keys (test_families.py);
# the vocabulary of Inkling 2 is read without its padding; the index of Qwen4-Exp has no default sizes
_ELSEWHERE = {
    "DeepseekV4ForCausalLM",
    "Glm4vMoeForCausalLM",
    "Inkling2ForCausalLM",
    "InklingForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "Qwen4ExpVLForCausalLM",
    "WhisperForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [one for one in (*WITH_DEFAULTS, *sorted(WRAPPED)) if one not in _ELSEWHERE])
def test_defaults_are_those_of_transformers(architecture):
    config = default_config(architecture)
    if architecture in WRAPPED and not hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False  # a key of the wrapper
    compare(parse_model_spec({"architectures": [architecture]}), config)


def test_sizes_by_layer_under_keys_of_two_digits():
    """transformers pads the keys of per_layer_config with zeros in models of more than ten layers."""
    sizes = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_kv_lora_rank": 96, "swa_v_head_dim": 48}
    config = default_config("Dots3NoteForCausalLM", num_hidden_layers=14, swa_qk_nope_head_dim=40, **sizes)
    raw = json.loads(config.to_json_string())
    assert "02" in raw["per_layer_config"]
    compare(parse_model_spec(raw | {"architectures": ["Dots3NoteForCausalLM"]}), config)


# transformers has these only beside an encoder (test_seeing_families.py); the last one lists its layers
SEEING = (
    "Glm5NextForCausalLM",
    "MistralLarge4ForCausalLM",
    "MuseGlimmerForCausalLM",
    "Step3p5ForCausalLM",
    "Zamba2ForCausalLM",
)


# transformers builds none of the first's default config, which has no number of experts, and the second's table of
# experts is no parameter there
NO_MODEL = ("Dots1ForCausalLM", "DeepseekV4ForCausalLM")

# refused by name, or read from another key
WITHOUT_BIAS = {
    ("use_bias", "Ernie4_5_MoeForCausalLM"),
    ("attention_bias", "BailingHybridForCausalLM"),
    ("attention_bias", "BailingMoeV3ForCausalLM"),
    ("attention_bias", "KimiLinearForCausalLM"),
    ("attention_bias", "ZayaForCausalLM"),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in WITH_DEFAULTS if name not in (*SEEING, *NO_MODEL)])
def test_parameters_of_the_default_models(architecture):
    import torch

    config = default_config(architecture, num_hidden_layers=2, vocab_size=100, pad_token_id=0)
    if config.to_dict().get("head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.num_attention_heads
    for key in ("attention_bias", "mlp_bias", "use_bias", "use_qk_norm"):
        if hasattr(config, key) and (key, architecture) not in WITHOUT_BIAS:
            setattr(config, key, True)
    if hasattr(config, "num_kv_shared_layers"):
        config.num_kv_shared_layers = 0
    with torch.device("meta"):
        model = causal_lm_class(config.model_type)._from_config(config)
    # buffers that checkpoints hold are parameters here
    unused = "|".join(model_class(architecture).ignored) or "$^"
    stored = [name for name in model.state_dict() if not re.search(unused, name)]
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in stored)
    spec = parse_model_spec(config.to_dict() | {"architectures": [architecture]})
    assert num_parameters(spec) == model.num_parameters() + buffers


LING = {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "layer_group_size": 3}
KIMI = {
    "linear_attn_config": {
        "head_dim": 64, "num_heads": 8, "short_conv_kernel_size": 3, "full_attn_layers": [2, 4], "kda_layers": [1, 3]
    },
    "num_experts": 16, "num_experts_per_token": 3, "num_shared_experts": 2, "model_max_length": 5000,
    "moe_renormalize": False, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 2,
    "num_hidden_layers": 4,
}  # fmt: skip
MINIMAX = {
    "attn_type_list": [0, 1, 0], "layernorm_full_attention_alpha": 3.5, "layernorm_full_attention_beta": 1.5,
    "layernorm_linear_attention_alpha": 2.5, "layernorm_mlp_alpha": 0.5, "head_dim": 128, "rotary_dim": 64,
    "num_hidden_layers": 3, "postnorm": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "published", "other"),
    [
        ("KimiLinearForCausalLM", KIMI, {}),
        ("BailingHybridForCausalLM", LING, {}),
        (
            "MiniMaxText01ForCausalLM",
            MINIMAX,
            {
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "full_attn_alpha_factor": 3.5,
                "full_attn_beta_factor": 1.5,
                "linear_attn_alpha_factor": 2.5,
                "mlp_alpha_factor": 0.5,
                "head_dim": 128,
                "num_hidden_layers": 3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        ),
    ],
    ids=["kimi", "ling", "minimax"],
)
def test_published_keys_and_those_of_transformers(architecture, published, other):
    """`other` are transformers' names of the published keys or, of {}, those that transformers writes for them."""
    spec = parse_model_spec({"architectures": [architecture], **published})
    other = other or default_config(architecture, **published).to_dict()
    again = parse_model_spec(other | {"architectures": [architecture]})
    assert spec.layers == again.layers and spec.ropes == again.ropes
    assert spec.max_model_len == again.max_model_len


def test_rotary_embeddings_by_layer_of_step_3_5():
    """Its published files list a base and a part of the head for each layer, and scale those without a window."""
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    raw = {
        "architectures": ["Step3p5ForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_hidden_layers": 4,
        "rope_theta": [5e6, 1e4] * 2,
        "partial_rotary_factors": [0.5, 1.0] * 2,
        "rope_scaling": scaling | {"original_max_position_embeddings": 131072},
        "yarn_only_types": ["full_attention"],
        "sliding_window": 512,
    }
    check_config(raw, Path("config.json"))
    ropes = parse_model_spec(raw).ropes
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    assert (full.theta, full.rotary_dim, full.scaling["factor"]) == (5e6, 64, 2.0)
    assert (local.theta, local.rotary_dim, local.scaling) == (1e4, 128, None)
    with pytest.raises(ValueError, match=r"rope_theta must be a number from .* or a list of them"):
        check_config(raw | {"rope_theta": [1e4, "x"]}, Path("config.json"))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope False is not supported"),
        ("MiniMaxText01ForCausalLM", {"postnorm": False}, "postnorm false is not supported"),
        ("MiniMaxText01ForCausalLM", {"shared_intermediate_size": 8}, "shared_intermediate_size is not supported"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["moe"], "moe_latent_size": 16, "mlp_bias": True},
            "mlp_bias true is not supported with moe_latent_size",
        ),
    ],
)
def test_settings_of_state_models_that_are_refused(architecture, changes, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec({"architectures": [architecture], **changes})


@pytest.mark.parametrize("value", [0, -1, "x", [1], 1.5])
@pytest.mark.parametrize(
    "key",
    ["linear_num_key_heads", "linear_conv_kernel_dim", "conv_L_cache", "n_groups", "state_size", "mamba_n_groups",
     "mamba_dt_rank", "mamba_d_head", "time_step_rank", "short_conv_kernel_size"],
)  # fmt: skip
def test_wrong_sizes_of_states_are_refused_by_name(key, value, tmp_path):
    path = tmp_path / "config.json"
    for part in ("", "text_config.", "linear_attn_config."):
        raw = {part[:-1]: {key: value}} if part else {key: value}
        with pytest.raises(ValueError, match=f"{re.escape(f'{path}: {part}{key}')} must be a whole number from 1 to"):
            check_config(raw, path)
    check_config({key: 4, "mamba_d_head": "auto", "time_step_rank": "auto", "mamba_expand": 1.5}, path)
    if value != 1.5:
        with pytest.raises(ValueError, match=r"mamba_expand must be a number from 0\.001 to 1024"):
            check_config({"mamba_expand": value}, path)


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("inkling_text", "InklingForCausalLM", "only files with its encoders"),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "a block of tokens in several passes"),
    ],
)
def test_architectures_that_are_known_but_refused_with_the_reason(model_type, architecture, reason, tmp_path):
    config = CONFIG_MAPPING[model_type]()
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{architecture} is not supported: .*{reason}"):
        read_model_spec(str(tmp_path))


def llama(**changes):
    return {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, **changes}


def qwen(**changes):
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        **changes,
    }


def test_old_and_new_rope_keys():
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = parse_model_spec(
        llama(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **scaling}, max_position_embeddings=131072)
    )
    older = parse_model_spec(
        llama(rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling}, max_position_embeddings=131072)
    )
    new = parse_model_spec(
        llama(
            rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling}, max_position_embeddings=131072
        )
    )
    assert old.ropes == older.ropes == new.ropes
    assert new.ropes["default"].theta == 500000.0
    assert new.ropes["default"].scaling == {"rope_type": "llama3", **scaling}
    assert new.max_model_len == 131072  # llama3 scaling is already counted in


def test_plain_rope():
    assert rope_of(llama(rope_scaling=None, rope_theta=1e6)).theta == 1e6
    assert rope_of(llama(rope_parameters={"rope_type": "default", "rope_theta": 1e6})).scaling is None
    assert rope_of(llama()).theta == 10000.0


def test_stretched_positions():
    yarn = parse_model_spec(
        llama(
            max_position_embeddings=32768,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        )
    )
    assert yarn.max_model_len == 131072
    counted = parse_model_spec(
        llama(
            max_position_embeddings=131072,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        )
    )
    assert counted.max_model_len == 131072
    linear = parse_model_spec(llama(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0}))
    assert linear.max_model_len == 16384
    implicit = parse_model_spec(llama(max_position_embeddings=4096, rope_scaling={"type": "yarn", "factor": 2.0}))
    assert implicit.ropes["default"].scaling["original_max_position_embeddings"] == 4096


def test_windows():
    assert windows(parse_model_spec({"architectures": ["MistralForCausalLM"], "sliding_window": None})) == {None}
    mistral = parse_model_spec({"architectures": ["MistralForCausalLM"], "sliding_window": 100, "num_hidden_layers": 2})
    assert [layer.window for layer in mistral.layers] == [100, 100]
    assert windows(parse_model_spec(qwen(sliding_window=100))) == {None}  # use_sliding_window is false
    upper = parse_model_spec(qwen(sliding_window=100, use_sliding_window=True, max_window_layers=1))
    assert [layer.window for layer in upper.layers] == [None, 100, 100]
    listed = parse_model_spec(
        qwen(
            sliding_window=100,
            use_sliding_window=True,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        )
    )
    assert [layer.window for layer in listed.layers] == [100, None, None]
    mixed = parse_model_spec(
        {
            "architectures": ["MistralForCausalLM"],
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        }
    )
    assert [layer.window for layer in mixed.layers] == [None, 4096]
    assert windows(parse_model_spec(qwen(sliding_window=100, use_sliding_window=True, max_window_layers=3))) == {None}
    assert windows(parse_model_spec(llama(sliding_window=100))) == {None}


def test_biases():
    spec = parse_model_spec(qwen())
    assert spec.attention_bias and not spec.attention_out_bias and not spec.mlp_bias
    spec = parse_model_spec(llama(attention_bias=True, mlp_bias=True))
    assert spec.attention_bias and spec.attention_out_bias and spec.mlp_bias
    spec = parse_model_spec({"architectures": ["MistralForCausalLM"], "attention_bias": True})
    assert not spec.attention_bias


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"architectures": ["ElephantForCausalLM"]},
            "not supported: ElephantForCausalLM. Supported: AfmoeForCausalLM, ArceeForCausalLM, AXK1ForCausalLM, Bamba",
        ),
        ({}, "none named in config.json. Supported: Afmoe"),
        (llama(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (
            llama(rope_scaling={"type": "axial", "factor": 2.0}),
            "rope_type 'axial' is not supported; supported: default, linear, llama3, yarn, longrope",
        ),
        (llama(rope_scaling={"rope_type": "longrope"}), "'longrope' needs a list of numbers 'short_factor', not None"),
        (llama(rope_scaling={"rope_type": "linear"}), "'linear' needs a positive number 'factor', not None"),
        (
            llama(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
            "'llama3' needs a positive number 'high_freq_factor'",
        ),
        (llama(partial_rotary_factor=1.5), "partial_rotary_factor must be a number above 0 and up to 1, not 1.5"),
        (llama(num_attention_heads=5), "hidden_size 64 is not a multiple of num_attention_heads 5"),
        (llama(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        (llama(hidden_size="64"), "hidden_size must be a positive integer, not '64'"),
        (llama(num_hidden_layers=0), "num_hidden_layers must be a positive integer, not 0"),
        (llama(head_dim=15), "head_dim 15 must be even for rotary embeddings"),
        (
            llama(torch_dtype="float8_e4m3fn"),
            "dtype 'float8_e4m3fn' is not supported; supported: float32, bfloat16, float16",
        ),
        (qwen(layer_types=["full_attention"]), "layer_types must name .* for each of 3 layers, found 1"),
        (qwen(layer_types=["chunked_attention"] * 3), "chunked_attention"),
        (qwen(layer_types=["sliding_attention"] * 3), "no sliding_window"),
        (qwen(use_sliding_window=True, sliding_window=0), "sliding_window must be a positive integer or null, not 0"),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "mamba_ssm_dtype": "bfloat16"},
            "mamba_ssm_dtype 'bfloat16' is not supported: recurrent states are kept in float32",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        parse_model_spec(raw)


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match=r"no model configuration: cannot read .*config\.json: No such file"):
        read_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        read_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must contain a JSON object"):
        read_model_spec(str(tmp_path))


def test_dtype_falls_back_to_that_of_the_weights(checkpoint, tmp_path):
    shutil.copytree(checkpoint("qwen3", dtype="bfloat16"), tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": None, "torch_dtype": "float16"}))
    assert read_model_spec(str(tmp_path)).dtype == "float16"
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key != "dtype"}))
    assert read_model_spec(str(tmp_path)).dtype == "bfloat16"
    (tmp_path / "model.safetensors").unlink()
    assert read_model_spec(str(tmp_path)).dtype == "float32"


def test_kv_bytes_per_token():
    spec = parse_model_spec(qwen(head_dim=32))
    assert kv_bytes_per_token(spec, 2) == 3 * 2 * 2 * 32 * 2
    assert kv_bytes_per_token(spec, 2, tp=2) == kv_bytes_per_token(spec, 2) // 2
    assert kv_bytes_per_token(spec, 2, tp=4) == kv_bytes_per_token(spec, 2) // 2  # two heads, each held twice


def test_torch_free():
    module = "quire.worker.spec.model"
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_broken_weight_header(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"cannot read the weights in .*model\.safetensors: .*download it again"):
        read_model_spec(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layers": [0, 0, 1, 3]}, "kv_source_layers: layer 2 must read its own keys or .* not .* layer 1"),
        ({"kv_source_layers": [0, 3, 2, 3]}, "kv_source_layers: layer 1 must read .* not those of layer 3"),
        ({"kv_source_layers": [0, 1, 2, 0]}, "layer 3 must read .* also a rotary embedding, or none, .* layer 0"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers must have an entry for each of 4 layers, not 2"),
    ],
)
def test_layers_that_read_others_latents(changes, message):
    config = {"architectures": ["MistralLarge4ForCausalLM"], "num_hidden_layers": 4}
    shared = parse_model_spec(config | {"kv_source_layers": [0, 0, 2, 3]})
    assert [layer.kv_from for layer in shared.layers] == [None, 0, None, None]
    assert [layer.rope for layer in shared.layers] == ["default"] * 3 + [None]
    assert (shared.max_model_len, shared.why_shorter) == (1048576, "")
    with pytest.raises(ValueError, match=message):
        parse_model_spec(config | changes)
