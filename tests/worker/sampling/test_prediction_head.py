"""Drafts of prediction heads (MTP) are those of a torch twin of the head, and change no token."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.checkpoints.gguf.folder import gguf_folder
from quire.worker.layers.linear import PLAIN
from quire.worker.messages import SamplingParams
from quire.worker.models.registry import build_model, parse_model_spec
from tests.checkpoints.test_gguf_families import CASES, SAME_SCALE, SPLIT_LATENTS
from tests.engine.executor.test_parallel import ParallelEngine
from tests.helpers.models.checkpoints import MOE_CHECKPOINTS, build_checkpoint
from tests.helpers.models.families import FAMILIES, VOCAB, build_family, redraw
from tests.helpers.models.gguf_converter import Converter, common
from tests.helpers.worker import draft_twins
from tests.helpers.worker.draft_twins import check_drafts
from tests.worker.sampling.test_speculation import engine_of

pytestmark = pytest.mark.slow

_LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}
NUM_LAYERS = 4  # of the model; those after them become the heads'
# family -> settings of five layers; key of config.json; names of the parts of head {i}
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
_AFTER = tuple(f"model.layers.{{n}}{end}" for end in ("", ".eh_proj", ".enorm", ".hnorm", ".shared_head.norm"))
_WITH_AFTER = ("glm4-moe", "deepseek-v3", "deepseek-v32", "glm-5")
# heads attend to all keys, and the twin's to those that an index chooses: as many as the prompts have
_ALL_KEYS = {"deepseek-v32": {"index_topk": 800}, "glm-5": {"index_topk": 800}}
HEADS |= {name: (_ALL_KEYS.get(name, {}), "num_nextn_predict_layers", _AFTER) for name in _WITH_AFTER}
_MIMO = ("", *(f".{end}" for end in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")))
HEADS |= {"qwen2": ({}, "num_nextn_predict_layers", tuple(f"model.mtp_layers.{{i}}{end}" for end in _MIMO))}
# of families that transformers does not have: what config.json says of those that have the same layers
OTHERS = {"qwen2": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}}
K = '{"method": "mtp", "num_speculative_tokens": 3}'


class Twin:
    """transformers' model with the heads beside it."""

    def __init__(self, folder: Path, name: str, num_heads: int = 1):
        _, key, names = HEADS[name]
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model.config.num_hidden_layers = NUM_LAYERS
        self.heads, size = [], self.model.config.hidden_size
        tensors = load_file(folder / "model.safetensors")
        for i in range(num_heads):
            n = NUM_LAYERS + i
            layer, fc, *norms = (one.format(i=i, n=n) for one in names)
            tensors = {one.replace(f"model.layers.{n}.", f"{layer}."): tensor for one, tensor in tensors.items()}
            joined = torch.nn.Linear(2 * size, size, bias=False)
            parts = [joined, *(copy.deepcopy(self.model.model.norm) for _ in norms)]
            self.heads.append((self.model.model.layers[n], *parts))
            for seed, (part, module) in enumerate(zip((fc, *norms), parts)):
                redraw(module, seed + 4 * i)
                tensors[f"{part}.weight"] = module.weight.data
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config |= {key: num_heads, "num_hidden_layers": NUM_LAYERS}
        config |= OTHERS.get(name, {})
        self.hidden_first = name in OTHERS
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:NUM_LAYERS]
        (folder / "config.json").write_text(json.dumps(config))

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The drafts that follow `tokens`, whose last one the model has not computed."""
        hidden = out = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        found: list[int] = []
        for place in range(count):
            layer, fc, before, after, end = self.heads[min(place, len(self.heads) - 1)]
            # a head reads the states of the one before, for the same tokens; the last one goes on with its own
            hidden = out if place < len(self.heads) else torch.cat([hidden, out[:, -1:]], 1)
            following = torch.tensor([[*tokens, *found][-hidden.shape[1] :]])
            both = before(self.model.model.embed_tokens(following)), after(hidden)
            x = fc(torch.cat(both[::-1] if self.hidden_first else both, -1))
            positions = torch.arange(x.shape[1])[None]
            rotation = self.model.model.rotary_emb(x, positions)
            mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
            out = layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
            out = end(out[0] if isinstance(out, tuple) else out)
            found.append(int(self.model.lm_head(out[0, -1]).argmax()))
        return found


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_twin_and_change_no_token(name, tmp_path):
    build = build_family if name in FAMILIES else build_checkpoint
    folder = Path(build(name, tmp_path, num_hidden_layers=5, **HEADS[name][0]))
    twin = Twin(folder, name)
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24)
    check_drafts(engine, twin, VOCAB)


@pytest.mark.parametrize(("name", "num_heads"), [("qwen2", 3), ("glm4-moe", 2), ("deepseek-v3", 2)])
def test_the_i_th_head_drafts_the_i_th_token(name, num_heads, tmp_path):
    """With more drafts than heads, the last one goes on."""
    folder = Path(build_checkpoint(name, tmp_path, num_hidden_layers=NUM_LAYERS + num_heads))
    twin = Twin(folder, name, num_heads)
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24)
    assert len(engine.executor._worker.runner.model.mtp) == num_heads
    check_drafts(engine, twin, VOCAB)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_exact_heads_are_accepted_up_to_the_first_wrong_one(wrong, tmp_path):
    """Weights that make of each token the next one of a permutation: a head that is right reads the last token."""
    folder = Path(build_checkpoint("qwen2", tmp_path, num_hidden_layers=NUM_LAYERS + 3, tie_word_embeddings=False))
    Twin(folder, "qwen2", 3)
    tensors = load_file(folder / "model.safetensors")
    embedding = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0))
    size, order = embedding.shape[1], torch.randperm(len(embedding), generator=torch.Generator().manual_seed(1))
    head = torch.empty_like(embedding)
    head[order] = embedding
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # layers change nothing
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1)
        elif name.endswith("input_proj.weight"):
            sign = -1 if name == f"model.mtp_layers.{wrong}.input_proj.weight" else 1
            tensors[name] = torch.cat([torch.zeros(size, size), sign * torch.eye(size)], 1)
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4)
    (result,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True))
    known = [7, *result.token_ids]
    assert known[1:] == order[known[:-1]].tolist()
    stats = engine.scheduler.flush_stats()
    right = 3 if wrong is None else wrong  # of the three drafts of a step; the last step has room for fewer
    assert len(stats.accepted_per_position) == right and sum(stats.accepted_per_position) >= right * (
        stats.num_drafts - 1
    )
    assert stats.num_draft_tokens >= 3 * (stats.num_drafts - 2) > 0


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(("name", "num_heads"), [*((name, 1) for name in HEADS if name in CASES), ("glm4-moe", 2)])
def test_heads_of_gguf_files(name, num_heads, kind, tmp_path):
    """In the file the heads are layers after the others. Rounded to Q8_0, the drafts are no longer the twin's, but no
    token is another.
    """
    arch, sizes, keys = CASES[name]
    build = build_family if name in FAMILIES else build_checkpoint
    if name in SAME_SCALE:
        sizes = sizes | {"rope_parameters": MOE_CHECKPOINTS[name][1]["rope_parameters"] | SAME_SCALE[name]}
    folder = Path(
        build(name, tmp_path / "source", **(sizes | HEADS[name][0] | {"num_hidden_layers": NUM_LAYERS + num_heads}))
    )
    twin = Twin(folder, name, num_heads)
    options = {"split_latents": name in SPLIT_LATENTS}
    converter = Converter(str(folder), tmp_path / "model.gguf", arch, {"default": kind}, **options)
    converter.run(common(converter.config) | keys(converter.config))
    found = gguf_folder(str(tmp_path / "model.gguf"))
    engine = engine_of(found, speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24, dtype="float32")
    check_drafts(engine, twin if kind == "F32" else None, VOCAB)


def test_the_last_of_two_stages_drafts(tmp_path):
    folder = Path(build_checkpoint("qwen2", tmp_path, num_hidden_layers=5))
    seen = check_ranks(str(folder), Twin(folder, "qwen2"), pipeline_parallel_size=2)
    assert {len(draft) for _, draft in seen} == {1, 2, 3}  # a block has 16 slots


def check_ranks(folder: str, twin: draft_twins.Twin, **sizes: int) -> draft_twins.Seen:
    """Over several ranks, drafts are the twin's, and no token is another than without drafts. Returns the drafts."""
    engine = ParallelEngine(folder, speculative_config=K, **sizes)
    try:
        prompts = [[3, 9, 7, 4] * 9, [(7 * i) % 120 + 4 for i in range(23)], [5, 6]]
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
        engine.scheduler.contents.reset_prefix_cache()
        engine.executor.call("record_drafts")
        assert [one.token_ids for one in engine.generate(prompts, sampling)] == [one.token_ids for one in plain]
        seen = engine.executor.call("recorded")
    finally:
        engine.close()
    assert len(seen) > 30
    for tokens, draft in seen[::4]:
        assert draft == twin.drafts(tokens, len(draft))
    return seen


def test_later_heads_may_be_missing(tmp_path):
    """config.json names three, of which the files have the first and the third: the first one drafts."""
    folder = Path(build_checkpoint("qwen2", tmp_path, num_hidden_layers=NUM_LAYERS + 3))
    Twin(folder, "qwen2", 3)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp_layers.1." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24)
    assert len(engine.executor._worker.runner.model.mtp) == 1
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert engine.scheduler.flush_stats().num_draft_tokens > 0


@pytest.mark.parametrize("skipped", [[], ["mtp.fc"], ["mtp.layers.0.mlp"]])
def test_parts_that_a_quantized_checkpoint_keeps_plain(skipped):
    """Its list has the names of the files, not those of the head's modules."""
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    stored["modules_to_not_convert"] = ["lm_head", *skipped]
    config = {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1, "num_hidden_layers": 4}
    spec = parse_model_spec(config | {"quantization_config": stored})
    (head,) = build_model(replace(spec, has_head=True), torch.bfloat16, torch.device("meta")).mtp
    plain = {name for name in ("fc", "layer.mlp.down_proj") if head.get_submodule(name).method is PLAIN}
    assert plain == {{"mtp.fc": "fc", "mtp.layers.0.mlp": "layer.mlp.down_proj"}[name] for name in skipped}


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
