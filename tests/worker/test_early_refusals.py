"""What config.json and the settings alone refuse is refused before any process starts, or else before ranks wait for
each other and before weights are loaded; a context that is far below the model's has a warning.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from quire.checkpoints.early import refuse_early
from quire.configs.config import Config
from quire.server.startup.engine_group import EngineGroup
from quire.worker import limits
from quire.worker.models.registry import parse_model_spec
from quire.worker.startup.preview import preview
from quire.worker.worker import Worker
from tests.helpers.models.encoders import build_encoder
from tests.helpers.server.light_model import write_light_model
from tests.helpers.server.running import running_server

CONFIGS = json.loads((Path(__file__).parent / "models" / "hub_configs.json").read_text(encoding="utf-8"))
_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "conv_L_cache": 3,
}


def refusal(check, *arguments) -> str | None:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CONFIGS)
def test_early_refusals_are_those_of_the_worker(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    spec = parse_model_spec(CONFIGS[name])
    for tp in range(1, 33):
        for pp in (1, 2, 1000):
            early = refusal(refuse_early, str(tmp_path), tp, pp, "auto")
            late = refusal(limits._check_divisible, spec, tp, pp)
            assert early is None or late is not None, (tp, pp, early)
    for asked in (1, spec.max_model_len, spec.max_model_len + 1, 1 << 40):
        early = refusal(refuse_early, str(tmp_path), 1, 1, str(asked))
        late = refusal(limits._requested_model_len, str(asked), spec)
        assert early is None or early == late


def test_most_published_models_are_refused_early(tmp_path):
    found = lengths = 0
    for raw in CONFIGS.values():
        (tmp_path / "config.json").write_text(json.dumps(raw))
        found += refusal(refuse_early, str(tmp_path), 7, 1, "auto") is not None
        lengths += refusal(refuse_early, str(tmp_path), 1, 1, str(1 << 40)) is not None
    assert found > 0.8 * len(CONFIGS) and lengths > 0.5 * len(CONFIGS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 7}, "num_attention_heads 4 cannot be split over tensor_parallel_size 7; sizes that"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size 99 is more than the model's num_hidden_layers"),
        ({"tensor_parallel_size": 3, "distributed_executor_backend": "ray"}, "num_attention_heads 4 cannot be split"),
        ({"tensor_parallel_size": 3, "data_parallel_size": 2}, "num_attention_heads 4 cannot be split over"),
        ({"max_model_len": "2049"}, "--max-model-len 2049 is more than this model's 2048 tokens: set"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "--max-cpu-loras 2 must be at least --max-loras 4"),
    ],
)
def test_no_process_starts(tmp_path, settings, words):
    folder = write_light_model(tmp_path, num_attention_heads=4, num_key_value_heads=4)
    group = EngineGroup(Config.from_flat(model=folder, load_format="dummy", **settings))
    with pytest.raises(ValueError, match=words):
        group.start(folder)
    assert not group.processes


def test_a_text_part_and_keys_of_other_kinds(tmp_path):
    for raw, refused in (
        ({"text_config": {"num_attention_heads": 4}, "num_attention_heads": 7}, True),
        ({"num_attention_heads": [4, 4], "num_key_value_heads": None, "num_hidden_layers": True}, False),
        ({"num_attention_heads": 14, "num_key_value_heads": 2}, True),
        ({"vocab_size": 5}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert (refusal(refuse_early, str(tmp_path), 7, 9, "auto") is not None) == refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": "999999"}, "--max-model-len 999999 is more than this model's"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel: .* has no experts"),
        ({"quantization": "int8", "dtype": "float32"}, "--quantization int8 supports bfloat16 activations only"),
    ],
)
def test_a_rank_refuses_before_it_waits_for_others(tmp_path, settings, words, monkeypatch):
    folder = write_light_model(tmp_path)
    monkeypatch.setattr("quire.worker.startup.resolve.get_platform", None)  # nor does it use the device
    worker = Worker(Config.from_flat(model=folder, device="cpu", load_format="dummy", **settings), 1, 2, "file:///none")
    with pytest.raises(ValueError, match=words):
        worker.initialize(lambda phase, fraction: None)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({}, {"max_model_len": "64", "kv_cache_memory_bytes": 60_000}, "--max-model-len 64 needs"),
        ({}, {"kv_cache_memory_bytes": 10}, "--kv-cache-memory-bytes 10 is too small"),
        ({}, {"max_model_len": "64", "num_gpu_blocks_override": 3}, "set --max-model-len to at most 32"),
        (_LFM2, {"max_num_seqs": 64, "kv_cache_memory_bytes": 60_000}, "--max-num-seqs 64: the recurrent states"),
    ],
)  # fmt: skip
def test_weights_are_not_loaded_first(tmp_path, monkeypatch, config, settings, words):
    """And `quire check` refuses the same."""
    folder = write_light_model(tmp_path, **config)
    loaded = []
    monkeypatch.setattr("quire.worker.startup.load.load_weights", lambda *arguments: loaded.append(arguments))
    given = Config.from_flat(model=folder, device="cpu", load_format="dummy", **settings)
    with pytest.raises(ValueError, match=words):
        Worker(given).initialize(lambda phase, fraction: None)
    assert not loaded
    with pytest.raises(ValueError, match=words):
        preview(given)


def test_adapters_of_an_encoder_are_refused_before_its_weights(tmp_path, monkeypatch):
    folder = build_encoder("bert", tmp_path / "model", mode="mean")
    monkeypatch.setattr("quire.worker.startup.load.load_weights", None)
    with pytest.raises(ValueError, match="this model is an encoder"):
        Worker(Config.from_flat(model=folder, device="cpu", enable_lora=True)).initialize(lambda phase, fraction: None)


@pytest.mark.parametrize("config", [{}, _LFM2], ids=["attention", "states"])
def test_a_context_far_below_the_models_has_a_warning_that_helps(tmp_path, config):
    folder = write_light_model(tmp_path, **config)
    whole = preview(Config.from_flat(model=folder, device="cpu", load_format="dummy"))
    assert not whole.warnings
    short = {"model": folder, "device": "cpu", "load_format": "dummy", "max_num_seqs": 1, "block_size": 16}
    size = 4 * whole.plan.bytes_per_block + 8 * whole.plan.states // max(whole.num_states, 1)
    ready = preview(Config.from_flat(**short, kv_cache_memory_bytes=size))
    assert 4 * ready.max_model_len <= whole.max_model_len
    (warning,) = ready.warnings
    assert f"requests may have {ready.max_model_len} tokens only, of the model's {whole.max_model_len}" in warning
    enough = int(re.search(r"--kv-cache-memory-bytes (\d+)", warning)[1])
    advised = preview(Config.from_flat(**short, kv_cache_memory_bytes=enough))
    assert advised.max_model_len == whole.max_model_len and not advised.warnings
    asked = Config.from_flat(**short, kv_cache_memory_bytes=size, max_model_len=str(ready.max_model_len))
    assert not preview(asked).warnings


@pytest.mark.slow
def test_the_warning_is_in_the_log_of_a_server(tmp_path, caplog):
    folder = write_light_model(tmp_path)
    small = {"kv_cache_memory_bytes": 60_000, "load_format": "dummy", "max_model_len": "auto"}
    with (
        caplog.at_level(logging.WARNING, "quire"),
        running_server(folder, distributed_executor_backend="uniproc", device="cpu", **small) as server,
    ):
        server.wait_ready(120)
    assert "tokens only, of the model's" in caplog.text and "--kv-cache-memory-bytes" in caplog.text


def test_a_config_that_is_no_json_is_still_named(tmp_path):
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config\.json"):
        refuse_early(str(tmp_path), 2, 1, "auto")
