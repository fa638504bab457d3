"""Builds small random checkpoints in the real Hugging Face formats: config.json, safetensors (single or sharded),
tokenizer, chat template, generation config.

The weights are random but scaled so that greedy outputs wander over the vocabulary and the best token wins by a clear
margin; ids above the tokenizer's (`VOCAB_SIZE` is padded, as real models' are) have zero rows and are never the best
token. transformers is imported by the functions, not by the module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER_SIZE = 500
VOCAB_SIZE = 512
MAX_POSITIONS = 2048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>"]  # ids 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + "
    "'<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message['role'] != 'system' %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEXT = """The quick brown fox jumps over the lazy dog. Once upon a time there was a small engine that read a long book, word by word.
It kept what it had read in blocks of sixteen, and whenever somebody asked, it could tell what would come next: a number, a name, an answer.
"Why do you write so slowly?" asked the scheduler. "Because I think about every token," said the worker, "and then I write it down once."
def attend(query, keys, values):\n    scores = query @ keys.T\n    return softmax(scores) @ values\n\n{"role": "user", "content": "Hello, world!", "n": 1234567890}
Die Bäume wachsen über die Häuser, größer und schöner. L'été dernier, où étiez-vous ? ¿Qué pasó mañana? Привет, мир! Как дела? 你好,世界。今天天气很好。 こんにちは 🙂🚀🎉
What is the capital of France? The capital of France is Paris. What is the sum of two and three? The sum of two and three is five.
There is no prefill and there is no decode; there are only tokens that are computed and tokens that are not yet computed.
"""

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 3,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_LATENT_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_INDEX = {"index_topk": 20, "index_head_dim": 32, "index_n_heads": 24, "num_hidden_layers": 2}
_MLA_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

# name -> (class prefix in transformers, differences from _COMMON)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "minicpm3": ("MiniCPM3", _LATENT | {"dim_model_base": 32, "rope_parameters": _MLA_YARN}),
    "minicpm3-plain-q": ("MiniCPM3", _LATENT | {"q_lora_rank": None, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_hidden_layers": 2}
# mixtures of experts, likewise
MOE_CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "DeepseekV2",
        _LATENT
        | _LATENT_EXPERTS
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        _LATENT | _LATENT_EXPERTS | {"n_group": 4, "topk_group": 2, "rope_parameters": _MLA_YARN},
    ),
    "deepseek-v32": ("DeepseekV32", _LATENT | _LATENT_EXPERTS | _INDEX | {"n_group": 4, "topk_group": 2}),
    "glm-5": ("GlmMoeDsa", _LATENT | _LATENT_EXPERTS | _INDEX),
    "glm4-moe-lite": ("Glm4MoeLite", _LATENT | _LATENT_EXPERTS),
    "mixtral": ("Mixtral", {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 96}),
    "qwen2-moe": (
        "Qwen2Moe",
        _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 32, "num_experts": 8, "norm_topk_prob": True}),
    "olmoe": (
        "Olmoe",
        {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "clip_qkv": 0.8},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "head_dim": 32,
            "num_hidden_layers": 2,
            "sliding_window": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "intermediate_size": 48,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        _EXPERTS
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 32,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 1,
            "num_hidden_layers": 2,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": [1, 2], "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 32},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
}


def config_of(name: str, **overrides: Any) -> Any:
    """Return transformers' configuration of checkpoint `name`, changed by `overrides`, as in its config.json."""
    import transformers

    prefix, differences = (CHECKPOINTS | MOE_CHECKPOINTS)[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **differences, **overrides})
    config.architectures = [f"{prefix}ForCausalLM"]
    return config


def build_checkpoint(
    name: str, folder: str | Path, *, sharded: bool = False, dtype: str = "float32", seed: int = 0, **overrides: Any
) -> str:
    """Write checkpoint `name` (a key of CHECKPOINTS or MOE_CHECKPOINTS, its configuration changed by `overrides`) into
    `folder` and return the folder as a string.
    """
    import torch
    import transformers

    prefix, differences = (CHECKPOINTS | MOE_CHECKPOINTS)[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **differences, **overrides})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    randomize(model, seed)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=3, eos_token_id=[2, 0], pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.8, top_k=20
    )
    options = {"max_shard_size": "300KB"} if sharded else {}
    model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    build_tokenizer(folder, add_bos=prefix in ("Llama", "Mistral"), byte_fallback=name == "llama2")
    return str(folder)


def randomize(model, seed: int) -> None:
    """Set Gaussian weights with gains that keep the residual stream of order one and make the layers' outputs outweigh
    the input embedding.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    gains = {"o_proj": 2.0, "down_proj": 2.0, "gate_proj": 1.5, "q_proj": 1.5, "k_proj": 1.5}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        module = name.split(".")[-2] if "." in name else name
        if module in ("embed_tokens", "lm_head"):
            value = noise * 0.5
            value[TOKENIZER_SIZE:] = 0
        elif module.endswith("norm"):
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif parameter.dim() == 3:  # experts: [E, out, in], but [E, in, out] in gpt-oss
            inputs = parameter.shape[1 if "GptOss" in type(model).__name__ else 2]
            value = noise * (2.0 if "down" in name else 1.5) / inputs**0.5
        elif parameter.dim() == 1:  # attention sinks
            value = noise
        else:
            value = noise * gains.get(module, 1.0) / parameter.shape[1] ** 0.5
        parameter.data.copy_(value)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def build_tokenizer(folder: str | Path, *, add_bos: bool = False, byte_fallback: bool = False) -> None:
    """Train a tokenizer on TEXT and save it with its chat template: byte-level BPE (GPT-2, Llama 3, Qwen) or, with
    `byte_fallback`, the SentencePiece kind of Llama 2 (a space is U+2581, unknown characters are <0xNN> tokens).
    `add_bos` puts BOS before every text.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = _sentencepiece() if byte_fallback else _byte_level()
    if add_bos:
        bos = SPECIAL_TOKENS[3]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 3)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[3] if add_bos else None,
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=SPECIAL_TOKENS[1:2],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _byte_level():
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=TOKENIZER_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def _sentencepiece():
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    space = "\u2581"
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    # other characters go through the byte tokens
    ascii_text = "".join(c for c in TEXT if c.isascii() and c != "\n").replace(" ", space)
    words = [space + word for word in ascii_text.split(space)]
    tokenizer.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=TOKENIZER_SIZE, special_tokens=SPECIAL_TOKENS + byte_tokens, show_progress=False
        ),
    )
    spec = json.loads(tokenizer.to_str())
    # byte tokens are ordinary entries, as in Llama 2
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in SPECIAL_TOKENS]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def load_reference(folder: str, dtype: str = "float32"):
    """Return the checkpoint in transformers, with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()


def greedy(model, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float], list[float]]:
    """Return `num_tokens` greedy tokens of a transformers `model` (EOS ignored), each with its log-probability and its
    margin over the second best logit.
    """
    import torch

    ids, tokens, logprobs, margins, cache = torch.tensor([prompt]), [], [], [], None
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1].float()
            best = logits.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
            ids = torch.tensor([tokens[-1:]])
    return tokens, logprobs, margins
