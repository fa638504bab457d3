"""Every key of a GGUF file is honoured, or refused by name; a file with any header is read or refused in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoints.gguf.folder import write_folder
from quire.checkpoints.gguf.generation import ends, generation_config
from quire.checkpoints.gguf.header import GgufFile, read_gguf
from quire.checkpoints.gguf.keys import ARCHITECTURE, FIXED, GENERAL
from quire.checkpoints.gguf.model_config import model_config
from quire.checkpoints.reading import KeptReads
from quire.worker.models.registry import parse_model_spec
from tests.checkpoints.test_hostile_model_files import LIMITS, bounded
from tests.helpers.models.checkpoints import build_checkpoint
from tests.helpers.models.gguf_files import write_gguf

gguf = pytest.importorskip("gguf")

SIZES = {
    "block_count": 12, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": 1e-5, "attention.sliding_window": 32,
}  # fmt: skip


def config_of(arch: str, **changes: Any) -> dict[str, Any]:
    changes = {"logit_scale": 0.5} | changes if arch == "cohere2" else changes
    keys = SIZES | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in keys.items()}
    return model_config(GgufFile(Path("model.gguf"), KeptReads(metadata), {}), {})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"yarn_attn_factor": 1.0}, None),  # the type computes it
        ({"yarn_attn_factor": 1.2079441541679836}, 1.2079441541679836),  # of OLMo 3's config.json
        ({"attn_factor": 2.0}, 2.0 * 1.2079441541679836),
    ],
)
def test_factor_of_the_attention_in_yarn(keys, expected):
    keys = {"type": "yarn", "factor": 8.0} | keys
    scaling = config_of("qwen2", **{f"rope__scaling__{key}": value for key, value in keys.items()})["rope_scaling"]
    assert scaling.get("attention_factor") == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("llama", {"attention__scale": 0.5}, r"llama\.attention\.scale 0\.5 is not supported"),
        ("qwen2", {"attention__max_alibi_bias": 8.0}, r"qwen2\.attention\.max_alibi_bias 8\.0 is not supported"),
        ("llama", {"attention__causal": False}, r"llama\.attention\.causal False is not supported"),
        ("llama", {"attn_logit_softcapping": 30.0}, r"llama\.attn_logit_softcapping 30\.0 is not supported"),
        ("qwen3", {"attention__value_length": 32}, r"qwen3\.attention\.value_length 32 is not supported"),
        ("qwen2", {"rope__scaling__alpha": 2.0}, r"qwen2\.rope\.scaling\.alpha 2\.0 is not supported"),
        ("qwen2", {"rope__scaling__yarn_ext_factor": 0.5}, r"yarn_ext_factor 0\.5 is not supported"),
        ("llama", {"rope__scaling__attn_factor": 2.0}, r"rope\.scaling\.attn_factor 2\.0 is not supported"),
        ("granite", {"rope__scaling__finetuned": False}, r"granite\.rope\.scaling\.finetuned false"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, r"expert_gating_func 2 is"),
        ("qwen2moe", {"expert_count": 8, "expert_used_count": 2, "expert_weights_norm": True,
                      "expert_shared_feed_forward_length": 8}, r"expert_weights_norm True is"),
        ("llama", {"block_count": 10**6}, r"model\.gguf: llama\.block_count must be a whole number from 1 to 1024"),
        ("llama", {"rope__freq_base": "x"}, r"llama\.rope\.freq_base must be a number from .*, not 'x'"),
        ("gemma3", {"attention__sliding_window_pattern": [2]}, r"a period from 0 to 1024, or a list of flags"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_by_name(arch, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(arch, **changes)


def test_values_that_change_nothing_are_no_reason():
    config_of("llama", attention__causal=True, attention__value_length=16, rope__scaling__finetuned=False,
              attention__max_alibi_bias=0.0, expert_count=0, rope__scaling__attn_factor=1.0, vocab_size=7,
              attention__scale=0.25)  # fmt: skip


def test_unknown_keys_are_reported(caplog):
    with caplog.at_level(logging.WARNING):
        config_of("llama", something_new=3)
    assert "llama.something_new has no effect" in caplog.text


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "gemma3n", "cohere2", "exaone4", "olmo2", "gpt-oss"])
def test_a_period_of_windows_is_the_list_of_its_layers(arch):
    more: dict[str, Any] = {}
    if arch == "gemma3n":
        more = {"attention__shared_kv_layers": 2, "embedding_length_per_layer_input": 8, "altup__num_inputs": 2,
                "altup__active_idx": 0, "activation_sparsity_scale": [0.0] * 12}  # fmt: skip
    if arch == "gpt-oss":
        more = {"expert_count": 4, "expert_used_count": 2}
    listed = [i % 3 < 2 for i in range(12)]
    expected = config_of(arch, attention__sliding_window_pattern=listed, **more)
    assert config_of(arch, attention__sliding_window_pattern=3, **more) == expected
    assert expected["layer_types"] == [("full_attention", "sliding_attention")[slides] for slides in listed]


def test_the_scale_of_attention_is_that_of_the_file():
    for arch in ("gemma2", "gemma3"):
        raw = config_of(arch, attention__scale=0.125)
        assert {layer.scale for layer in parse_model_spec(raw | {"vocab_size": 8}).layers} == {0.125}


def test_rope_scaling():
    """Without a type it is linear, as llama.cpp assumes; the factor has an older name."""
    assert config_of("llama", rope__scaling__factor=4.0)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert config_of("llama", rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config_of("llama", rope__scaling__type="none", rope__scaling__factor=4.0)["rope_scaling"] == {
        "rope_type": "default"
    }
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert "attention_factor" not in config_of("qwen2", **yarn)["rope_scaling"]
    scaled = config_of("qwen2", **yarn, rope__scaling__attn_factor=0.5)["rope_scaling"]
    assert scaled["attention_factor"] == pytest.approx(0.5 * 1.138629)


def vocabulary(*tokens: str, **ids: int) -> dict[str, Any]:
    return {"tokenizer.ggml.tokens": list(tokens)} | {f"tokenizer.ggml.{k}_token_id": v for k, v in ids.items()}


@pytest.mark.parametrize(
    ("tokens", "ids", "expected"),
    [
        (["a", "<|endoftext|>", "<|im_end|>"], {"eos": 1}, [1, 2]),
        (["a", "<eos>", "<end_of_turn>"], {"eos": 1}, [1, 2]),
        (["<|return|>", "<|call|>", "<|end|>"], {"eos": 0}, [0, 1]),
        (["<|end|>", "<|endoftext|>"], {"eos": 1}, [1, 0]),
        (["</s>", "<|tool_response>"], {"eot": 1}, [1]),
        (["a", "b"], {"eos": 0, "eot": 1, "eom": 1}, [0, 1]),
    ],
)
def test_well_known_ends(tokens, ids, expected):
    assert ends(vocabulary(*tokens, **ids)) == expected


def test_a_tag_of_html_is_no_end():
    assert ends(vocabulary("</s>", "<eos>") | {"tokenizer.ggml.token_type": [4, 3]}) == [1]


def test_sampling_of_the_file(caplog):
    sampling = {"temp": 0.6000000238418579, "top_k": -1, "top_p": 0.9, "min_p": 0.0, "penalty_repeat": 1.05}
    sampling["mirostat"] = 2
    metadata = {f"general.sampling.{key}": value for key, value in sampling.items()} | vocabulary("a", eos=0)
    with caplog.at_level(logging.WARNING):
        found = generation_config(GgufFile(Path("m.gguf"), KeptReads(metadata), {}))
    assert found == {"eos_token_id": [0], "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0,
                     "repetition_penalty": 1.05}  # fmt: skip
    assert "general.sampling.mirostat is not supported" in caplog.text


def test_every_key_of_the_gguf_package_has_an_entry():
    """That package is llama.cpp's own list of keys."""
    named = {value for group in vars(gguf.Keys).values() if isinstance(group, type)
             for value in vars(group).values() if isinstance(value, str) and "." in value}  # fmt: skip
    per_arch = {name.removeprefix("{arch}.") for name in named if name.startswith("{arch}.")}
    # of models with a state, encoders of images and speech, T5 and adapters, which are not served
    foreign = (
        "ssm.",
        "wkv.",
        "kda.",
        "posnet.",
        "convnext.",
        "shortconv.",
        "xielu.",
        "token_shift_count",
        "swin_norm",
        "decoder_",
        "rescale_every",
        "time_",
        "features_length",
        "{dense}",
        "full_attention_interval",
        "attention.gate_lora",
        "attention.decay_lora",
        "attention.iclr",
        "attention.value_residual",
        "attention.recurrent",
        "residual",
    )
    missing = {key for key in per_arch - ARCHITECTURE.keys() if not key.startswith(foreign)}
    assert not missing
    ours = {name for name in named if name.startswith(("tokenizer.", "general.sampling.", "split."))}
    assert not {name for name in ours - GENERAL.keys() if "chat_template" not in name}


def test_fixed_choices_name_keys():
    assert FIXED.keys() <= ARCHITECTURE.keys()


# ---- any header


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    source = build_checkpoint("qwen3", folder / "source", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    write_gguf(source, folder / "model.gguf", {"default": "Q8_0"}, "qwen3")
    return (folder / "model.gguf").read_bytes()


def read(path: Path, folder: Path) -> None:
    with bounded():
        write_folder(read_gguf(path), folder)


@pytest.mark.slow
@settings(max_examples=60, **LIMITS)
@given(data=st.data())
def test_any_bytes_in_the_header(whole, tmp_path_factory, data):
    folder, changed = tmp_path_factory.mktemp("bytes"), bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 1200))
        changed[at : at + 1] = data.draw(st.sampled_from([b"\xff", b"\0", b"\x09", b"\x08", b"\x7f" * 8, b""]))
    (folder / "model.gguf").write_bytes(bytes(changed))
    read(folder / "model.gguf", folder / "made")


KEYS = [f"qwen3.{key}" for key in ARCHITECTURE] + [key for key in GENERAL if key != "general.architecture"]
values = st.sampled_from(
    [None, True, 0, -1, 2**31, 2**63, 0.5, float("nan"), float("inf"), "", "x", [], [0], [2**40] * 3, ["x"], [0.5] * 9]
)


@pytest.mark.slow
@settings(max_examples=150, **LIMITS)
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=3))
def test_any_value_of_a_key(whole, tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("values")
    (folder / "model.gguf").write_bytes(whole)
    file = read_gguf(folder / "model.gguf")
    for key, value in changes.items():
        file.metadata[key] = value
        if value is None:
            del file.metadata[key]
    with bounded():
        write_folder(file, folder / "made")
        json.loads((folder / "made" / "config.json").read_text())


def test_arrays_of_arrays_are_refused(tmp_path):
    entry = b"\x01\0\0\0\0\0\0\0a" + b"\x09\0\0\0" + b"\x09\0\0\0\x01\0\0\0\0\0\0\0" * 5000
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x01" + b"\0" * 7 + entry)
    with pytest.raises(ValueError, match=r"m\.gguf is incomplete or damaged"):
        read_gguf(tmp_path / "m.gguf")
