"""Real models, which `make install-dev` downloads (checkpoints/packaged.py); without one its tests are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from quire.checkpoints import packaged
from quire.checkpoints.gguf.header import read_gguf

gguf = pytest.importorskip("gguf")

# written for these tests
PROSE = (
    "The lighthouse keeper counted the ships every evening, and every evening he wrote the number in a small green "
    "book. In winter there were few of them, and he spent the long hours repairing nets and listening to the wind. "
    "One night in February the lamp went out. He climbed the stairs with a candle in his hand, found that the oil was "
    "frozen, and understood that he had to carry it up warm, one can at a time, until the morning. Three ships passed "
    "while he worked. The captain of the last one sent a letter in the spring. It said that the light had been weak, "
    "but that nobody on board had ever been so glad to see it, and that the crew would like to know the name of the "
    "man who kept it burning."
)


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The file or folder of a model by name."""

    def get(name: str) -> Path:
        if (path := packaged.cached(name)) is None:
            pytest.skip(f"{name} is not in {packaged.folder()}; tools/fetch_models.py downloads it")
        return path

    return get


def reference(path: Path, config: PretrainedConfig) -> PreTrainedModel:
    """transformers' model with the weights of a GGUF file, which the package `gguf` dequantizes to float32.

    Not `from_pretrained(gguf_file=...)`: it converts the tokenizer twice, which takes half a minute, and needs one more
    package.
    """
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3_text": gguf.MODEL_ARCH.GEMMA3}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = read_gguf(path).tensors
    config._attn_implementation = "eager"
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    weights = {}
    for name in empty.state_dict():
        if name != "lm_head.weight":  # tied to the embedding
            stored = tensors.pop(names.get_name(name, try_suffixes=(".weight",)))
            data = np.memmap(path, np.uint8, "r", stored.start, (stored.size,))
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[stored.type])
            weights[name] = _as_in_the_model(torch.from_numpy(values.reshape(stored.shape).copy()), name, config)
    assert set(tensors) <= {"rope_freqs.weight"}
    return type(empty).from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


def _as_in_the_model(values: torch.Tensor, name: str, config: PretrainedConfig) -> torch.Tensor:
    """Undo what llama.cpp's converter changes: Llama's pairs of rotated channels, the 1 that Gemma's norms add."""
    if config.model_type == "gemma3_text":
        return values - 1 if name.endswith("norm.weight") else values
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return values


def reference_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
