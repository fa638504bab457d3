"""Writes a model of real shapes with random bfloat16 weights and a tokenizer, for servers that need a folder (quire
has `--load-format dummy`).

    python benchmarks/make_model.py {qwen3-0.6b,llama-1b,qwen3-4b,gemma3-1b,phi4-mini,qwen3-30b-a3b,gpt-oss-20b,
    qwen3.5-0.8b,lfm2.5-350m,bert-base,modernbert-base,tiny} OUT_DIR [--layers N]

The text that such a model writes means nothing; its speed is that of the real one. `tiny` has one layer of next to no
work: what is measured with it is everything but the model. Experts of gpt-oss are in MXFP4, as in its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

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

_COMMON = {"bos_token_id": 0, "eos_token_id": 0, "head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True}
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3-0.6b": Qwen3Config(
        **_COMMON,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
    ),
    "llama-1b": LlamaConfig(
        **_COMMON | {"head_dim": 64},
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    "qwen3-4b": Qwen3Config(
        **_COMMON,
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
    ),
    "gemma3-1b": Gemma3TextConfig(
        **_COMMON | {"head_dim": 256, "num_key_value_heads": 1},
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        sliding_window=512,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    ),
    "phi4-mini": Phi3Config(
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        pad_token_id=0,
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        **_COMMON | {"num_key_value_heads": 4, "tie_word_embeddings": False},
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
    ),
    "gpt-oss-20b": GptOssConfig(
        **_COMMON | {"head_dim": 64, "tie_word_embeddings": False},
        pad_token_id=0,
        num_hidden_layers=24,
        num_local_experts=32,
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        sliding_window=128,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        **_COMMON | {"head_dim": 256, "num_key_value_heads": 2},
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
    ),
    "lfm2.5-350m": Lfm2Config(
        **{key: value for key, value in _COMMON.items() if key != "head_dim"},
        pad_token_id=0,
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=32768,
        layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    ),
    "bert-base": BertConfig(),
    "modernbert-base": ModernBertConfig(),
    "tiny": Qwen3Config(
        **_COMMON | {"head_dim": 64, "num_key_value_heads": 1},
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
    ),
}
ENCODERS = ("bert-base", "modernbert-base")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_weights(config: PreTrainedConfig, folder: Path, *, generates: bool = True) -> None:
    """Norms are 1 and matrices are Gaussian of the config's initializer range, drawn in place: no second copy of the
    model is ever in memory.
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
    """Byte-level BPE trained on Python's standard library, padded so that every id of the model has a text."""
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
