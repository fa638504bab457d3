"""Files of MiMo-V2.5: one tensor with q, k and v, divided into the parts of ranks, whose FP8 blocks begin anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.families import build_family
from tests.worker.models.test_family_ranks import over_ranks
from tests.worker.test_tensor_parallel import build, logits_of

_BLOCK = 32
_E4M3 = torch.float8_e4m3fn


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, the scales of its blocks, and what they stand for."""
    scales = 2.0 ** torch.randint(-8, -4, [-(-size // _BLOCK) for size in weight.shape])
    wide = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[: len(weight), : weight.shape[1]]
    codes = (weight / wide).to(_E4M3)
    return codes, scales, codes.float() * wide


def test_fused_projections_in_fp8_over_ranks(tmp_path):
    torch.manual_seed(0)
    folder = Path(build_family("mimo_v2", tmp_path / "plain", num_key_value_heads=2))
    stored = tmp_path / "stored"
    shutil.copytree(folder, stored)
    plain = load_file(folder / "model.safetensors")
    files = dict(plain)
    for name in [name for name in plain if name.endswith("q_proj.weight")]:
        names = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        chunks = zip(*(plain[one].chunk(2) for one in names))
        codes, scales, rounded = zip(*(_rounded(torch.cat(parts)) for parts in chunks))
        sizes = [len(plain[one]) // 2 for one in names]
        assert sum(sizes) % _BLOCK, "a part must not be a whole number of blocks"
        for one, parts in zip(names, zip(*(chunk.split(sizes) for chunk in rounded))):
            plain[one] = torch.cat(parts)
            del files[one]
        fused = name.replace("q_proj.weight", "qkv_proj.weight")
        files |= {fused: torch.cat(codes), f"{fused}_scale_inv": torch.cat(scales)}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    save_file(files, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    others = ["o_proj", "mlp", "lm_head"]
    quantization = {"quant_method": "fp8", "weight_block_size": [_BLOCK] * 2, "modules_to_not_convert": others}
    config |= {"attention_projection_layout": "fused_qkv", "quantization_config": quantization}
    (stored / "config.json").write_text(json.dumps(config))
    expected = logits_of(build(str(folder)))
    for logits in (logits_of(build(str(stored))), *over_ranks(str(stored), False)):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
