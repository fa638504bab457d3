"""Keys that newer converters write into GGUF files, beside those of `test_gguf_families.py`."""

from __future__ import annotations

import pytest
import torch

from quire.checkpoints.gguf.names import AFTER, PRE, tensor_name
from tests.checkpoints.test_gguf_families import CASES, IDS, pair, reference
from tests.worker.layers.test_stored_weights import load, logits_of

_SSM = {f"ssm.{key}": 8 for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")}
# name -> (sizes, keys that newer files have in addition)
NEWER_KEYS = {
    "olmo3": ({}, {"rope.freq_base_swa": 500000.0}),
    "granite": ({}, _SSM | {"expert_used_count": 2, "rope.scaling.finetuned": True}),  # Granite 4 without Mamba layers
    "granite4-mamba": ({"mamba_proj_bias": True}, {"expert_used_count": 2, "expert_count": 0}),
    "qwen3_5": (
        {"layer_types": ["full_attention"] + ["linear_attention"] * 2 + ["full_attention"]},
        {"attention.recurrent_layers": [False, True, True, False]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEWER_KEYS)
def test_keys_that_newer_files_have(tmp_path, name):
    arch, usual, keys = CASES[name]
    sizes, more = NEWER_KEYS[name]
    folder, source = pair(name, tmp_path, case=(arch, usual | sizes, lambda c: keys(c) | more))
    assert torch.allclose(logits_of(load(folder), IDS), reference(source), atol=2e-3, rtol=2e-3)


def test_the_last_norm_of_a_layer_that_drafts():
    """MiMo V2's files have it under the name that encoders have for a layer's."""
    assert tensor_name("blk.4.layer_output_norm.weight", PRE, 4) == "mtp.0.norm.weight"
    assert tensor_name("blk.3.layer_output_norm.weight", AFTER, 4) == "model.layers.3.post_feedforward_layernorm.weight"
