"""Drafts of prediction heads (MTP) are those of a torch twin of the head, and change no token."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.checkpoints.gguf.folder import gguf_folder
from quire.worker.messages import SamplingParams
from tests.checkpoints.test_gguf_families import CASES, SAME_SCALE, SPLIT_LATENTS
from tests.engine.executor.test_parallel import ParallelEngine
from tests.helpers.models.checkpoints import MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, VOCAB, build_family, redraw
from tests.helpers.models.gguf_converter import Converter, common
from tests.helpers.worker.draft_twins import check_drafts
from tests.worker.sampling.test_speculation import engine_of

_LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}
# family -> settings of five layers, the last of which becomes that of the head; key of config.json; names of the parts
HEADS = {
    "qwen3_5": (
        _LAYERS,
        "mtp_num_hidden_layers",
        ("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    ),
    "qwen3_5_moe": (
        _LAYERS,
        "mtp_num_hidden_layers",
        ("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    ),
}
HEADS["qwen3_next"] = HEADS["qwen3_5_moe"]
_AFTER = tuple(f"model.layers.4{end}" for end in ("", ".eh_proj", ".enorm", ".hnorm", ".shared_head.norm"))
_WITH_AFTER = ("glm4-moe", "deepseek-v3", "deepseek-v32", "glm-5")
HEADS |= {name: ({}, "num_nextn_predict_layers", _AFTER) for name in _WITH_AFTER}
_MIMO = ("", *(f".{end}" for end in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")))
HEADS |= {"qwen2": ({}, "num_nextn_predict_layers", tuple(f"model.mtp_layers.0{end}" for end in _MIMO))}
# of families that transformers does not have: what config.json says of those that have the same layers
OTHERS = {"qwen2": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}}
K = '{"method": "mtp", "num_speculative_tokens": 3}'


class Twin:
    """transformers' model with the head beside it."""

    def __init__(self, folder: Path, name: str):
        _, key, (layer, fc, *norms) = HEADS[name]
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model.config.num_hidden_layers = 4
        self.layer, size = self.model.model.layers[4], self.model.config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.norms = [copy.deepcopy(self.model.model.norm) for _ in norms]
        tensors = load_file(folder / "model.safetensors")
        tensors = {one.replace("model.layers.4", layer): tensor for one, tensor in tensors.items()}
        for seed, (part, module) in enumerate(zip((fc, *norms), (self.fc, *self.norms))):
            redraw(module, seed)
            tensors[f"{part}.weight"] = module.weight.data
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text()) | {key: 1, "num_hidden_layers": 4}
        config |= OTHERS.get(name, {})
        self.hidden_first = name in OTHERS
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:4]
        (folder / "config.json").write_text(json.dumps(config))

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The drafts that follow `tokens`, whose last one the model has not computed."""
        before, after, end = self.norms
        hidden = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        found: list[int] = []
        for _ in range(count):
            following = torch.tensor([[*tokens[1:], *found]])
            both = before(self.model.model.embed_tokens(following)), after(hidden)
            x = self.fc(torch.cat(both[::-1] if self.hidden_first else both, -1))
            positions = torch.arange(x.shape[1])[None]
            rotation = self.model.model.rotary_emb(x, positions)
            mask = torch.zeros(1, 1, x.shape[1], x.shape[1])  # only the last token's output is read
            out = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
            out = end(out[0] if isinstance(out, tuple) else out)
            found.append(int(self.model.lm_head(out[0, -1]).argmax()))
            hidden = torch.cat([hidden, out[:, -1:]], 1)
        return found


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_twin_and_change_no_token(name, tmp_path):
    build = build_family if name in FAMILIES else build_checkpoint
    folder = Path(build(name, tmp_path, num_hidden_layers=5, **HEADS[name][0]))
    twin = Twin(folder, name)
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24)
    check_drafts(engine, twin, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", [name for name in HEADS if name in CASES])
def test_heads_of_gguf_files(name, kind, tmp_path):
    """In the file the head is a layer after the others. Rounded to Q8_0, the drafts are no longer the twin's, but no
    token is another.
    """
    arch, sizes, keys = CASES[name]
    build = build_family if name in FAMILIES else build_checkpoint
    if name in SAME_SCALE:
        sizes = sizes | {"rope_parameters": MOE_CHECKPOINTS[name][1]["rope_parameters"] | SAME_SCALE[name]}
    folder = Path(build(name, tmp_path / "source", **(sizes | HEADS[name][0] | {"num_hidden_layers": 5})))
    twin = Twin(folder, name)
    options = {"split_latents": name in SPLIT_LATENTS}
    converter = Converter(str(folder), tmp_path / "model.gguf", arch, {"default": kind}, **options)
    converter.run(common(converter.config) | keys(converter.config))
    found = gguf_folder(str(tmp_path / "model.gguf"))
    engine = engine_of(found, speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24, dtype="float32")
    check_drafts(engine, twin if kind == "F32" else None, VOCAB)


@pytest.mark.slow
def test_the_last_of_two_stages_drafts(tmp_path):
    folder = Path(build_checkpoint("qwen2", tmp_path, num_hidden_layers=5))
    twin = Twin(folder, "qwen2")
    engine = ParallelEngine(str(folder), pipeline_parallel_size=2, speculative_config=K)
    try:
        prompts = [[3, 9, 7, 4] * 9, [(7 * i) % 120 + 4 for i in range(23)], [5, 6]]
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
        engine.executor.call("record_drafts")
        assert [one.token_ids for one in engine.generate(prompts, sampling)] == [one.token_ids for one in plain]
        seen = engine.executor.call("recorded")
    finally:
        engine.close()
    assert len(seen) > 30 and {len(draft) for _, draft in seen} == {1, 2, 3}  # a block has 16 slots
    for tokens, draft in seen[::4]:
        assert draft == twin.drafts(tokens, len(draft))


def test_a_model_without_a_head_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"method mtp: the model has no prediction head.*names none"):
        engine_of(checkpoint("qwen3"), speculative_config=K)
    folder = Path(build_checkpoint("glm4-moe", tmp_path, num_hidden_layers=4))
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"its files have no tensor layers\.4\.eh_proj\.weight"):
        engine_of(str(folder), speculative_config=K)


def test_auto_uses_a_head_as_long_as_it_pays(tmp_path):
    folder = Path(build_checkpoint("qwen2", tmp_path, num_hidden_layers=5))
    Twin(folder, "qwen2")
    engine = engine_of(str(folder), speculative_config='{"method": "auto"}', max_num_seqs=4)
    speculator = engine.executor._worker.runner.speculator
    assert 0 < speculator.model.cost < 1
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True)
    prompts = [[(7 * i * i) % 120 + 4 for i in range(23)], [5, 6]]
    plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
    engine.scheduler.flush_stats()
    assert [one.token_ids for one in engine.generate(prompts, sampling)] == [one.token_ids for one in plain]
    assert speculator.rows[0].odds[speculator.model].tried > 0
    assert engine.scheduler.flush_stats().num_drafts < 40  # its random weights are hardly ever right
