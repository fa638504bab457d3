"""Drafts of an EAGLE-3 head are those of a float32 twin of it in plain torch, and change no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quire.worker.messages import SamplingParams
from quire.worker.sampling.speculation.draft_spec import captured_layers
from tests.helpers.worker.draft_twins import check_drafts
from tests.worker.sampling.test_speculation import check_equal, engine_of

SIZE, WIDE, HEADS, KV_HEADS, DIM, VOCAB, DRAFT_VOCAB, THETA = 64, 96, 4, 2, 16, 512, 300, 10000.0
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 2048,
    "rope_theta": THETA,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
}


def eagle_checkpoint(folder: Path, layer: str = "midlayer", embedding: bool = False, **changes) -> dict:
    """Write a head with random weights. Returns its tensors, with those of its layer at "midlayer"."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "fc.weight": (SIZE, 3 * SIZE),
        "norm.weight": (SIZE,),
        "lm_head.weight": (DRAFT_VOCAB, SIZE),
        **{f"midlayer.{name}.weight": (SIZE,) for name in NORMS},
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * SIZE),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * DIM, 2 * SIZE),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * DIM, 2 * SIZE),
        "midlayer.self_attn.o_proj.weight": (SIZE, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (WIDE, SIZE),
        "midlayer.mlp.up_proj.weight": (WIDE, SIZE),
        "midlayer.mlp.down_proj.weight": (SIZE, WIDE),
    } | ({"embed_tokens.weight": (VOCAB, SIZE)} if embedding else {})
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    known = torch.randperm(500, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = known - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({name.replace("midlayer", layer): one for name, one in tensors.items()}, folder / "model.safetensors")
    return tensors


class Twin:
    def __init__(self, target: str, tensors: dict, normed_residual: bool):
        self.model, self.tensors = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), tensors
        self.normed_residual = normed_residual

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x `[heads, T, D]`, by halves."""
        angles = torch.arange(x.shape[1])[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), normed], -1)
        q, k, v = (
            self.linear(x, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, DIM)).transpose(0, 1) for name in "qkv"
        )
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (self.rotated(k), v))
        attended = F.scaled_dot_product_attention(self.rotated(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
        residual = normed if self.normed_residual else hidden
        residual = residual + self.linear(attended, "midlayer.self_attn.o_proj")
        x = self.norm(residual, "midlayer.post_attention_layernorm")
        gated = F.silu(self.linear(x, "midlayer.mlp.gate_proj")) * self.linear(x, "midlayer.mlp.up_proj")
        return residual + self.linear(gated, "midlayer.mlp.down_proj")

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The drafts that follow `tokens`, whose last one the model has not computed."""
        streams = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[:3]
        hidden = self.linear(torch.cat([one[0] for one in streams], -1), "fc")
        embedding = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        found: list[int] = []
        for _ in range(count):
            out = self.layer(embedding[torch.tensor([*tokens[1:], *found])], hidden)
            best = int(self.linear(self.norm(out[-1], "norm"), "lm_head").argmax())
            found.append(best + int(self.tensors["d2t"][best]))
            hidden = torch.cat([hidden, out[-1:]])
        return found


def eagle_engine(target: str, head: Path, num: int | None = 3, **settings):
    config = {"method": "eagle3", "model": str(head)} | ({"num_speculative_tokens": num} if num else {})
    return engine_of(target, speculative_config=json.dumps(config), **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "embedding", "changes"),
    [("midlayer", False, {}), ("layers.0", True, {"norm_before_residual": True})],
)
def test_drafts_are_those_of_the_twin_and_change_no_token(checkpoint, tmp_path, layer, embedding, changes):
    tensors = eagle_checkpoint(tmp_path / "head", layer, embedding, **changes)
    twin = Twin(checkpoint("qwen3"), tensors, bool(changes))
    engine = eagle_engine(checkpoint("qwen3"), tmp_path / "head", max_num_batched_tokens=24, dtype="float32")
    check_drafts(engine, twin, VOCAB)


@pytest.mark.slow
def test_bits_are_those_without(checkpoint, tmp_path, native_kernels):
    """Also of a server without a head, whose layers run as one call."""
    eagle_checkpoint(tmp_path / "head")
    settings = {"deterministic": True, "dtype": "bfloat16"}
    engine = eagle_engine(checkpoint("qwen3"), tmp_path / "head", num_gpu_blocks_override=40, **settings)
    check_equal(engine)
    bare = engine_of(checkpoint("qwen3"), **settings)
    sampling = SamplingParams(temperature=0.7, seed=1, max_tokens=20, logprobs=2)
    one, other = (each.generate([[5, 77, 300, 12]], sampling)[0] for each in (engine, bare))
    assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_heads_of_other_models_are_refused(checkpoint, tmp_path):
    for number, (changes, message) in enumerate(
        (
            ({"vocab_size": 640}, "vocab_size of the EAGLE-3 head is 640, but that of the model is 512"),
            ({"target_hidden_size": 128}, "reads hidden states of 128, but hidden_size of the model is 64"),
            ({"num_hidden_layers": 2}, "EAGLE-3 has one layer"),
            ({"architectures": ["LlamaForCausalLM"]}, "names no EAGLE-3 head"),
            ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "must be different layers of a model of 3 layers"),
        )
    ):
        eagle_checkpoint(tmp_path / str(number), **changes)
        with pytest.raises(ValueError, match=message):
            eagle_engine(checkpoint("qwen3"), tmp_path / str(number))
    eagle_checkpoint(tmp_path / "alone")
    with pytest.raises(ValueError, match="it drafts for another model"):
        engine_of(str(tmp_path / "alone"))


def test_the_layers_whose_streams_a_head_reads():
    key = "eagle_aux_hidden_state_layer_ids"
    assert captured_layers({}, 32) == (2, 16, 29)
    assert captured_layers({key: [1, 5, 9]}, 32) == (1, 5, 9)
    assert captured_layers({"eagle_config": {key: [1, 5, 9]}}, 32) == (2, 6, 10)
