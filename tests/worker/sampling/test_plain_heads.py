"""Drafts of prediction heads that are no layer like the model's others: without streams or experts, or with a window;
those of DeepSeek V4 read all streams.

The reference is transformers' model of one layer for each head, between the joined inputs and the last norm.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quire.worker.messages import SamplingParams
from tests.helpers.models.families import FAMILIES, SEEING, VOCAB, build_family, causal_lm_class, redraw
from tests.helpers.models.published import PUBLISHED
from tests.helpers.worker.draft_twins import check_drafts, record
from tests.worker.sampling.test_prediction_head import K, check_ranks
from tests.worker.sampling.test_speculation import engine_of

_NORMS = ("enorm", "hnorm", "final_layernorm")
_ALL_KEYS = {"index_topk": 1024}  # heads have no index
# family -> (number of heads, settings of a model of one layer, place of head {i}, layer n, in the files, its norms)
HEADS: dict[str, tuple[int, dict[str, Any], str, tuple[str, str, str]]] = {
    "mimo_v2": (
        3,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        "model.mtp.layers.{i}",
        _NORMS,
    ),
    "hy_v4": (2, {"mlp_layer_types": ["sparse"], "hc_mult": 1} | _ALL_KEYS, "model.mtp_layers.{i}", _NORMS),
    "glm5_next": (
        1,
        {"layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"], "hc_mult": 1} | _ALL_KEYS,
        "model.language_model.layers.{n}",
        ("enorm", "hnorm", "shared_head.norm"),
    ),
    "deepseek_v4": (
        1,
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]},
        "mtp.{i}",
        ("enorm", "hnorm", "norm"),
    ),
}
_RENAMED = {"mimo_v2": ("post_attention_layernorm", "pre_mlp_layernorm")}


class NoStreams(torch.nn.Module):
    """In the place of a hyper-connection: reads the only stream, and adds to it."""

    def __init__(self, num_results: int):
        super().__init__()
        self.num_results = num_results

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
        ones, read = torch.ones_like(streams[..., 0]), streams[:, :, 0]
        return {1: read, 2: (ones, read), 3: (ones, ones[..., None], read)}[self.num_results]


class Twin:
    """transformers' model, and its model of one layer for each head."""

    def __init__(self, folder: Path, name: str):
        self.name = name
        self.count, own, place, norms = HEADS[name]
        config = json.loads((folder / "config.json").read_text())
        self.layers = config.get("text_config", config)["num_hidden_layers"]
        seeing = name in SEEING
        self.model = (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_pretrained(folder).eval()
        self.heads = [self._head(i, folder, own, place, norms) for i in range(self.count)]
        key = {"num_nextn_predict_layers": self.count} if name != "mimo_v2" else {}
        config |= {"text_config": config["text_config"] | key} if seeing else key
        (folder / "config.json").write_text(json.dumps(config))

    def _head(self, i: int, folder: Path, own: dict[str, Any], place: str, norms: tuple[str, str, str]) -> tuple:
        model_type, settings = (FAMILIES | SEEING)[self.name]
        if self.name in SEEING:
            settings = settings | {"text_config": settings["text_config"] | own | {"num_hidden_layers": 1}}
        else:
            settings = settings | own | {"num_hidden_layers": 1}
        model = causal_lm_class(model_type)._from_config(CONFIG_MAPPING[model_type](**settings)).eval()
        redraw(model, 7 + i)
        model.save_pretrained(folder / "head")
        if self.name in PUBLISHED:
            PUBLISHED[self.name](folder / "head" / "model.safetensors")
        inner, size = decoder_of(model), decoder_of(model).embed_tokens.embedding_dim
        parts = [torch.nn.Linear(size, size, bias=False) for _ in range(2)]
        before, after = (type(inner.norm)(size, inner.norm.variance_epsilon) for _ in range(2))
        for seed, part in enumerate((*parts, before, after)):
            redraw(part, seed + 4 * i)
        head = place.format(i=i, n=self.layers + i)
        split = self.name == "deepseek_v4"
        tensors = {f"{head}.{norm}.weight": one.weight for norm, one in zip(norms, (before, after, inner.norm))}
        joined = {"e_proj": parts[0].weight, "h_proj": parts[1].weight}
        tensors |= {
            f"{head}.{part}.weight": weight
            for part, weight in (joined if split else {"eh_proj": torch.cat([*joined.values()], 1)}).items()
        }
        for stored, tensor in load_file(folder / "head" / "model.safetensors").items():
            if split and "hc_head" in stored:
                tensors[f"{head}.{stored.removeprefix('model.').replace('hc_head.hc_', 'hc_head_')}"] = tensor
            elif ".layers.0." in stored and (split or not re.search("_hc|hc_", stored)):
                part = stored.split(".layers.0.")[1].replace(*_RENAMED.get(self.name, ("", "")))
                tensors[f"{head}.{part}"] = tensor
        path = folder / "model.safetensors"
        save_file(load_file(path) | {key: value.detach().clone() for key, value in tensors.items()}, path)
        if not split and hasattr(inner, "hc_head"):
            num = 2 if self.name == "hy_v4" else 3
            inner.layers[0].attn_hc, inner.layers[0].ffn_hc, inner.hc_head = (
                NoStreams(num),
                NoStreams(num),
                NoStreams(1),
            )
        return inner, parts, before, after

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The drafts that follow `tokens`, whose last one the model has not computed."""
        inner, split = decoder_of(self.model), self.name == "deepseek_v4"
        hidden, streams = run(inner, {"input_ids": torch.tensor([tokens[:-1]])})
        hidden = out = streams if split else hidden
        found: list[int] = []
        for place in range(count):
            head, (by_token, by_hidden), before, after = self.heads[min(place, self.count - 1)]
            hidden = out if place < self.count else torch.cat([hidden, out[:, -1:]], 1)
            following = inner.embed_tokens(torch.tensor([[*tokens, *found][-hidden.shape[1] :]]))
            embedded = by_token(before(following))
            x = (embedded[:, :, None] if split else embedded) + by_hidden(after(hidden))
            normed, streams = run(head, {"inputs_embeds": embedded if split else x}, x if split else None)
            out = streams if split else normed
            found.append(int(self.model.lm_head(normed[0, -1]).argmax()))
        return found


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model.model, "language_model", model.model)


def run(
    decoder: torch.nn.Module, inputs: dict[str, torch.Tensor], streams: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result of the last norm, result of the last layer); with `streams` the first layer reads these."""
    kept: list[torch.Tensor] = []
    hooks = [decoder.layers[-1].register_forward_hook(lambda layer, args, out: kept.append(out))]
    if streams is not None:
        hooks.append(decoder.layers[0].register_forward_pre_hook(lambda layer, args: (streams, *args[1:])))
    try:
        positions = torch.arange(next(iter(inputs.values())).shape[1])[None]
        hidden = decoder(**inputs, position_ids=positions, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_twin_and_change_no_token(name, tmp_path):
    folder = Path(build_family(name, tmp_path))
    twin = Twin(folder, name)
    engine = engine_of(str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24)
    assert len(engine.executor._worker.runner.model.mtp) == HEADS[name][0]
    check_drafts(engine, twin, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo_v2", "deepseek_v4"])
def test_windows_of_heads_end_where_the_model_has_released_blocks(name, tmp_path):
    """Small blocks, and texts several times as long as the window."""
    folder = Path(build_family(name, tmp_path))
    twin = Twin(folder, name)
    engine = engine_of(
        str(folder), speculative_config=K, max_num_seqs=4, max_num_batched_tokens=24, block_size=4, max_model_len="160"
    )
    seen = record(engine.executor._worker.runner.speculator.model)
    prompts = [[(7 * i * i + length) % 120 + 4 for i in range(length)] for length in (90, 37)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = engine.generate(prompts, msgspec.structs.replace(sampling, speculation=False))
    engine.scheduler.contents.reset_prefix_cache()
    assert [one.token_ids for one in engine.generate(prompts, sampling)] == [one.token_ids for one in plain]
    for tokens, draft in seen[::3]:
        assert draft == twin.drafts(tokens, len(draft))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, {"tensor_parallel_size": 2}) for name in HEADS),
        # drafts of models with states need a single stage
        *((name, {"pipeline_parallel_size": 2}) for name in ("mimo_v2", "hy_v4")),
    ],
)
def test_ranks_draft_as_one_does(name, sizes, tmp_path):
    folder = Path(build_family(name, tmp_path))
    check_ranks(str(folder), Twin(folder, name), **sizes)
