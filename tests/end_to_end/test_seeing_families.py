"""Language models that transformers has only beside an encoder, as `test_families.py` and `test_family_ranks.py` have
the others.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.worker.attention.distance_bias import DistanceBias
from quire.worker.models.registry import read_model_spec
from tests.end_to_end import test_families
from tests.end_to_end.test_families import assert_same_text, load_family, prompts  # noqa: F401
from tests.helpers.models.families import FAMILIES, SEEING, VOCAB, build_family, redraw
from tests.worker.models.test_family_ranks import Pipeline, over_ranks
from tests.worker.test_tensor_parallel import build, logits_of


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path):  # noqa: F811
    test_families.test_tokens_and_logprobs_equal_transformers(name, prompts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SEEING, "zamba2"])
def test_two_ranks_agree_with_one(name, tmp_path):
    folder = build_family(name, tmp_path)
    expected, has_experts = logits_of(build(folder)), any(layer.moe for layer in read_model_spec(folder).layers)
    for logits in over_ranks(folder, has_experts):
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits_of(Pipeline(folder)), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_head_of_inkling_with_fewer_rows_than_the_embeddings(prompts, tmp_path):  # noqa: F811
    """As the published files have it. transformers' head is padded, and the padding's logits are dropped."""
    settings = SEEING["inkling"][1]["text_config"] | {"unpadded_vocab_size": VOCAB - 8}
    folder = build_family("inkling", tmp_path, text_config=settings)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.llm.unembed.weight"] = tensors["model.llm.unembed.weight"][: VOCAB - 8].clone()
    model = load_family(folder)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    chosen = [[token % (VOCAB - 8) for token in prompt] for prompt in prompts]
    assert_same_text(model, tmp_path, chosen)


def test_keys_have_a_bias_up_to_the_extent_of_the_profiles():
    """Against a dense sum: keys at distances beyond the profiles, and ahead of the query, have none."""
    generator = torch.Generator().manual_seed(0)
    bias = DistanceBias(torch.randn(3, 2, 4, generator=generator), torch.randn(4, 5, generator=generator))
    distances = torch.tensor([[-1, 0, 4, 5], [2, 1, 0, -1], [9, 8, 7, 3]])
    found = bias.at(distances)
    for token, head, key in itertools.product(range(3), range(2), range(4)):
        distance = int(distances[token, key])
        expected = bias.states[token, head] @ bias.profiles[:, distance] if 0 <= distance < 5 else torch.tensor(0.0)
        torch.testing.assert_close(found[token, head, key], expected)


@pytest.mark.slow
def test_experts_of_inkling_2_in_8_bits(prompts, tmp_path):  # noqa: F811
    """As the published files have them: values and exponents of 32, of all experts, which config.json does not say."""
    from transformers.models.inkling2 import Inkling2Config, Inkling2ForConditionalGeneration

    text = FAMILIES["inkling2"][1] | {"moe_intermediate_size": 64}
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "patch_size": 4}
    vision |= {"posemb_grid_size": 2, "projection_hidden_dim": 16, "text_hidden_size": text["hidden_size"]}
    config = Inkling2Config(text_config=text, vision_config=vision, image_token_id=10)
    torch.manual_seed(0)
    model = Inkling2ForConditionalGeneration(config).eval()
    redraw(model)
    stored = {}
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            groups = weight.data.unflatten(-1, (-1, 32))
            exponents = groups.abs().amax(-1).log2().ceil().sub(8)
            values = (groups / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
            weight.data = (values.float() * exponents.exp2()[..., None]).flatten(-2)
            stored[name] = values.flatten(-2), (exponents + 127).to(torch.uint8)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, both in stored.items():
        layer = name.split(".")[3]
        for part, end in zip(both, ("", "_scale")):
            if "gate_up" in name:  # their rows alternate
                part = torch.stack(part.chunk(2, 1), 2).flatten(1, 2)
            kind = "w13" if "gate_up" in name else "w2"
            tensors[f"model.llm.layers.{layer}.mlp.experts.{kind}_weight{end}"] = part.contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del raw["transformers_version"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert_same_text(model, tmp_path, prompts)
    expected = logits_of(build(str(tmp_path)))
    for expert_parallel in (False, True):
        for logits in over_ranks(str(tmp_path), expert_parallel):
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
