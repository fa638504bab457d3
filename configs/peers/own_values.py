"""Lists values of other servers for settings of the same name: without effect here, or refused."""

from __future__ import annotations

from typing import Any

from quire.configs.peers.values import NoEffect

_READ = NoEffect("the quantization of a checkpoint is read from its files")
_AT_LOAD = "16-bit weights are rounded to int8 or int4; other quantizations are read from checkpoints"
_WEIGHTS = "the type of weights and activations has 16 or 32 bits: set --quantization int8 or int4"
_FORMAT = NoEffect("the format of the files is recognized, and safetensors are mapped into memory")
_NO_FORMAT = "weights are read from safetensors and GGUF files"
_KERNEL = NoEffect("the attention backend is chosen by model and device")
_GPU = "devices are cpu and cuda; CUDA_VISIBLE_DEVICES chooses the GPUs"
_EIGHT = "keys and values have the type of the activations, or 8 bits: fp8 or int8"


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


VALUES: dict[str, dict[str, str]] = {
    "quantization": {
        **_each(
            _READ,
            "awq awq_marlin gptq gptq_marlin marlin compressed-tensors gguf modelopt modelopt_fp8 modelopt_fp4 "
            "modelopt_mixed mxfp4 gpt_oss_mxfp4 auto-round auto_round inc quark none unquant null",
        ),
        **_each(
            _AT_LOAD,
            "fp8 fp8_per_tensor fp8_per_block mxfp8 bitsandbytes experts_int8 torchao rtn w8a8_int8 w8a8_fp8 "
            "moe_wna16 petit_nvfp4 nvfp4 hqq eetq deepspeedfp tpu_int8 fbgemm_fp8 ptpc_fp8 8bit 4bit q8_0 q4_0 "
            "q4_k_m",
        ),
    },
    "dtype": _each(_WEIGHTS, "int8 int4 fp8 8bit 4bit q8_0 q4_0 q4_k_m float8"),
    "kv_cache_dtype": _each(_EIGHT, "fp8_e5m2 fp8_inc fp4 fp4_e2m1 nvfp4 int4 q4_0 q4_1 q5_0 q5_1 iq4_nl fp8_ds_mla"),
    "device": _each(
        _GPU,
        "mps metal xpu npu tpu hpu vulkan musa neuron openvino sycl cuda:1 cuda:2 cuda:3 cuda:4 cuda:5 cuda:6 cuda:7 "
        "cuda1 cuda2 cuda3 cuda4 cuda5 cuda6 cuda7",
    ),
    "load_format": {
        **_each(_FORMAT, "hf gguf fastsafetensors runai_streamer instanttensor mmap layered"),
        **_each(
            _NO_FORMAT,
            "pt npcache bitsandbytes mistral tensorizer sharded_state presharded runai_streamer_sharded remote "
            "remote_instance flash_rl",
        ),
    },
    "attention_backend": _each(
        _KERNEL,
        "auto flash_attn flash_attn_vllm_v1 flashinfer triton triton_attn torch_sdpa torch_native flex_attention "
        "flashmla cutlass_mla flashinfer_mla flash_attn_mla triton_mla xformers fa2 cpu_attn rocm_attn rocm_aiter_fa "
        "tree_attn fa3 fa4 trtllm_mla trtllm_mha intel_amx intel_xpu aiter wave ascend dsa nsa dual_chunk_flash_attn",
    ),
}


def other_meaning(option: str, value: Any) -> NoEffect | None:
    """Return why another server's value has no effect here; None for a value of quire's.

    Raises ValueError with the reason if it is refused.
    """
    found = VALUES.get(option, {}).get(value.lower()) if isinstance(value, str) else None
    if found is None or isinstance(found, NoEffect):
        return found
    raise ValueError(f"{value}: {found}")
