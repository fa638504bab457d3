"""DeepSeek V4 as it is published: names of tensors, FP8 weights and experts in FP4."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.families import build_family
from tests.worker.test_tensor_parallel import build, logits_of

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _published(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
    return re.sub(r"attn\.norm\.", "attn.kv_norm.", name)


def test_published_files_are_read(tmp_path):
    """Weights of a plain file, rounded to FP8 and FP4, give the logits of the plain file with the rounded weights."""
    torch.manual_seed(0)
    folder = Path(build_family("deepseek_v4", tmp_path / "plain", moe_intermediate_size=32))
    stored = tmp_path / "stored"
    stored.mkdir()
    plain, files = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours, plain[name] = _published(name), tensor
        files[ours] = tensor
        in_8_bits = re.search(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.|shared_experts", name)
        if re.search(r"\.experts\.", name):
            codes = torch.randint(0, 16, tensor.shape, dtype=torch.uint8)
            exponents = torch.randint(124, 127, (len(tensor), tensor.shape[1] // 32), dtype=torch.uint8)
            values = _E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
            plain[name] = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
            files[ours] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
            files[ours.replace("weight", "scale")] = exponents.view(torch.float8_e8m0fnu)
        elif in_8_bits:
            files[ours] = (tensor * 64).to(torch.float8_e4m3fn)
            plain[name] = files[ours].float() / 64
            blocks = torch.full([-(-size // 128) for size in tensor.shape], 121, dtype=torch.uint8)  # 2**-6
            files[ours.replace("weight", "scale")] = blocks.view(torch.float8_e8m0fnu)
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, stored / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config |= {"quantization_config": quantization, "expert_dtype": "fp4"}
    (stored / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(build(str(stored))), logits_of(build(str(folder))), atol=2e-3, rtol=0)
