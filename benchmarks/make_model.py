"""Writes a model of real shapes with random bfloat16 weights and a tokenizer, for servers that need a folder (quire
has `--load-format dummy`).

    python benchmarks/make_model.py {qwen3-0.6b,llama-1b,qwen3-4b,gemma3-1b,phi4-mini,qwen3-30b-a3b,gpt-oss-20b,
    qwen3.5-0.8b,lfm2.5-350m,bert-base,modernbert-base,tiny} OUT_DIR [--layers N]

The text that such a model writes means nothing; its speed is that of the real one. `tiny` has one layer of next to no
work: it serves to measure everything but the model. Experts of gpt-oss are in MXFP4, as in its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    ModernBertConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_NO_HEAD_DIM = {"bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 8, "tie_word_embeddings": True}
_COMMON = _NO_HEAD_DIM | {"head_dim": 128, "rms_norm_eps": 1e-6}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip


def _shape(
    config: type[PreTrainedConfig], sizes: tuple[int, ...], more: dict[str, Any], base: dict[str, Any] = _COMMON
):
    return config(**base | dict(zip(_SIZES, sizes, strict=True)) | more)


_ROPE_75 = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_LFM2_LAYERS = ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3-0.6b": _shape(Qwen3Config, (151936, 1024, 3072, 28, 16, 40960), {}),
    "llama-1b": _shape(LlamaConfig, (128256, 2048, 8192, 16, 32, 131072), {"head_dim": 64, "rms_norm_eps": 1e-5}),
    "qwen3-4b": _shape(Qwen3Config, (151936, 2560, 9728, 36, 32, 40960), {}),
    "gemma3-1b": _shape(
        Gemma3TextConfig,
        (262144, 1152, 6912, 26, 4, 32768),
        {"head_dim": 256, "num_key_value_heads": 1, "sliding_window": 512},
    ),
    "phi4-mini": _shape(
        Phi3Config,
        (200064, 3072, 8192, 32, 24, 4096),
        {"pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_parameters": _ROPE_75},
        _NO_HEAD_DIM,
    ),
    "qwen3-30b-a3b": _shape(
        Qwen3MoeConfig,
        (151936, 2048, 6144, 48, 32, 40960),
        {"num_key_value_heads": 4, "tie_word_embeddings": False, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gpt-oss-20b": _shape(
        GptOssConfig,
        (201088, 2880, 2880, 24, 64, 131072),
        {"head_dim": 64, "tie_word_embeddings": False, "pad_token_id": 0, "num_local_experts": 32}
        | {"sliding_window": 128, "rms_norm_eps": 1e-5},
    ),
    "qwen3.5-0.8b": _shape(
        Qwen3_5TextConfig,
        (248320, 1024, 3584, 24, 8, 32768),
        {"head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    ),
    "lfm2.5-350m": _shape(
        Lfm2Config, (65536, 1024, 6656, 16, 16, 32768), {"pad_token_id": 0, "layer_types": _LFM2_LAYERS}, _NO_HEAD_DIM
    ),
    "bert-base": BertConfig(),
    "modernbert-base": ModernBertConfig(),
    "tiny": _shape(Qwen3Config, (4096, 64, 64, 1, 1, 4096), {"head_dim": 64, "num_key_value_heads": 1}),
}
ENCODERS = ("bert-base", "modernbert-base")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_weights(config: PreTrainedConfig, folder: Path, *, generates: bool = True) -> None:
    """Write weights: norms of 1, Gaussian matrices of the config's initializer range. They are drawn in place, so that
    memory never holds a second copy of the model.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        cls = AutoModelForCausalLM if generates else AutoModel
        model = cls.from_config(config, dtype=torch.bfloat16)
    if config.model_type == "gpt_oss":
        return write_mxfp4(model, folder)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        draw(name, parameter, config.initializer_range)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="4GB")


def draw(name: str, parameter: torch.Tensor, std: float) -> None:
    if name.lower().endswith("norm.weight"):
        torch.nn.init.ones_(parameter)
    else:
        torch.nn.init.normal_(parameter, std=std)


def write_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Write a gpt-oss model, which is on the meta device, as its checkpoints are: with blocks and exponents in place of
    its experts' weights, random ones.
    """
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        file = files.setdefault("-".join(name.split(".")[:3]), {})
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            file[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            draw(name, file[name], model.config.initializer_range)
            continue
        num, inputs, outputs = tensor.shape
        file[f"{name}_blocks"] = torch.randint(0, 256, (num, outputs, inputs // 32, 16), dtype=torch.uint8)
        file[f"{name}_scales"] = torch.randint(119, 122, (num, outputs, inputs // 32), dtype=torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in files.items():
        save_file(tensors, folder / f"model-{file}.safetensors", metadata={"format": "pt"})
    index = {name: f"model-{file}.safetensors" for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def write_tokenizer(vocab_size: int, folder: Path, *, generates: bool = True) -> None:
    """Write a byte-level BPE trained on Python's standard library, padded so that every id of the model has a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(32000, vocab_size),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    vocab |= {f"~{i}": i for i in range(len(vocab), vocab_size)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        eos_token=SPECIAL[0],
        bos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
    )
    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if "
        "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.chat_template = chat_template if generates else None
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, help="keep only the first layers, for a model that is too large")
    arguments = parser.parse_args()
    config = SHAPES[arguments.shape]
    if arguments.layers:
        config.num_hidden_layers = arguments.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: arguments.layers]
    generates = arguments.shape not in ENCODERS
    write_weights(config, arguments.output, generates=generates)
    write_tokenizer(config.vocab_size, arguments.output, generates=generates)


if __name__ == "__main__":
    main()
