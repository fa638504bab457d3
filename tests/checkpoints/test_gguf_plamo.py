"""GGUF files of PLaMo 2 and 3, written by llama.cpp's rules and compared with `helpers/twins.py` and the tokenizer
of the folder that they were made of.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoints.gguf.folder import gguf_folder
from quire.server.text.tokenizer import Tokenizer
from tests.helpers import twins
from tests.server.text.test_plamo_tokenizer import entries, write_folder
from tests.worker.layers.test_stored_weights import load, logits_of

gguf = pytest.importorskip("gguf")

IDS = [int(i) for i in torch.randint(3, 120, (60,), generator=torch.Generator().manual_seed(3))]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "mixer.qkv_proj": "attn_qkv",
    "mixer.o_proj": "attn_output",
    "mixer.q_weight": "attn_q_norm.weight",
    "mixer.k_weight": "attn_k_norm.weight",
    "mixer.q_norm": "attn_q_norm",
    "mixer.k_norm": "attn_k_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.bcdt_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_norm_weight": "ssm_dt_norm",
    "mixer.B_norm_weight": "ssm_b_norm",
    "mixer.C_norm_weight": "ssm_c_norm",
    "mixer.out_proj": "ssm_out",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_mixer_norm": "attn_norm",
    "pre_mlp_norm": "ffn_norm",
    "post_mixer_norm.weight": "post_attention_norm",
    "post_mlp_norm.weight": "post_ffw_norm",
}
OFFSETS = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 1 / 5**1.5}
LONG = {"attention_window_size": 2048, "full_attention_idx": []}  # files do not have windows of PLaMo 2


def _name(name: str) -> str:
    base, kind = name, ""
    if name.endswith(".weight") and name.rpartition("layers.")[2].partition(".")[2] not in NAMES:
        base, kind = name.removesuffix(".weight"), ".weight"
    match = re.fullmatch(r"model\.layers\.layers\.(\d+)\.(.+)", base)
    return f"blk.{match[1]}.{NAMES[match[2]]}{kind}" if match else NAMES[base] + kind


def _value(name: str, value: torch.Tensor) -> torch.Tensor:
    if name.endswith(".A_log"):
        return -value.exp()
    if name.endswith("norm.weight"):
        return value + next((offset for end, offset in OFFSETS.items() if f".{end}." in name), 1.0)
    return value.squeeze(1) if name.endswith(".conv1d.weight") else value


def _keys(c: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.freq_base": float(c.get("rope_theta", 10000)),
    }
    if c["model_type"] == "plamo3":
        own = {"attention.head_count": c["num_attention_heads"], "attention.head_count_kv": c["num_key_value_heads"]}
        own |= {"attention.sliding_window": c["window_size"], "rope.freq_base_swa": float(c["rope_local_theta"])}
        return keys | own | {"attention.sliding_window_pattern": c["sliding_window_pattern"]}
    step, layers = c["mamba_step"], range(c["num_hidden_layers"])
    attends = [i % step == step // 2 for i in layers]
    return keys | {
        "attention.head_count": [c["num_attention_heads"] * one for one in attends],
        "attention.head_count_kv": [c["num_key_value_heads"] * one for one in attends],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.time_step_rank": c["mamba_num_heads"],
        "ssm.inner_size": c["mamba_num_heads"] * 16,
        "ssm.group_count": 0,
    }


def random_weights(name: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = getattr(twins, f"{name}_shapes")(config)
    return {key: torch.randn(shape, generator=random) * 0.15 for key, shape in shapes.items()}


def write_gguf(path: Path, c: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, c["model_type"])
    for key, value in _keys(c).items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{c['model_type']}.{key}", value)
    kinds = {"UNKNOWN": 2, "CONTROL": 3, "BYTE": 6, "NORMAL": 1}
    texts, scores, types = zip(*entries(c["vocab_size"]))
    writer.add_tokenizer_model("plamo2")
    writer.add_token_list(list(texts))
    writer.add_token_scores(list(scores))
    writer.add_token_types([kinds[kind] for kind in types])
    for i, add in enumerate((writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id)):
        add(i)
    for name, value in weights.items():
        writer.add_tensor(_name(name), _value(name, value.float()).numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


@pytest.mark.parametrize("name", ["plamo2", "plamo3"])
def test_logits_and_tokens_are_those_of_the_folder(tmp_path, monkeypatch, name):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")
    config = getattr(twins, f"{name}_config")() | (LONG if name == "plamo2" else {})
    config["vocab_size"] = max(config["vocab_size"], 300)
    monkeypatch.setattr(twins, "VOCAB", config["vocab_size"])
    weights = random_weights(name, config)
    source = write_folder(tmp_path / "source", config["vocab_size"])
    write_gguf(tmp_path / "model.gguf", config, weights)
    folder = gguf_folder(str(tmp_path / "model.gguf"))
    want = getattr(twins, name)(weights, config, torch.tensor(IDS))
    torch.testing.assert_close(logits_of(load(folder), IDS), want, atol=2e-3, rtol=2e-3)
    mine, theirs = Tokenizer.load(folder), Tokenizer.load(source)
    text = "abcab 漢字<|plamo:eos|>\n🦊"
    assert mine.encode(text) == theirs.encode(text) and mine.decode(mine.encode(text), False) == text
    assert mine.eos_token_ids == [2] and mine.special_tokens == theirs.special_tokens


def test_layers_without_a_period_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("quire.checkpoints.gguf.folder.cache_folder", lambda: tmp_path / "cache")
    config = twins.plamo2_config() | LONG | {"vocab_size": 300}
    keys = _keys(config)
    keys["attention.head_count_kv"] = [2, 2, 0, 0, 0, 2]
    monkeypatch.setitem(globals(), "_keys", lambda c: keys)
    write_gguf(tmp_path / "model.gguf", config, {})
    with pytest.raises(ValueError, match=r"plamo2.attention.head_count_kv does not follow one period"):
        gguf_folder(str(tmp_path / "model.gguf"))
