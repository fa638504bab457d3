"""The loader: the errors it raises, by tensor name, and equal weights from every way of loading."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.native import KERNELS
from quire.worker.layers.linear import PLAIN, Linear, LinearMethod
from quire.worker.models.registry import build_model, read_model_spec
from quire.worker.parallel import Group, use_groups
from quire.worker.weights.loader import load_weights

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32, **options):
    spec = read_model_spec(str(folder))
    model = build_model(spec, dtype, CPU, ops=CpuPlatform().ops)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # makes unloaded weights visible
    load_weights(model, spec, str(folder), **options)
    return model


@pytest.fixture
def edited(checkpoint, tmp_path):
    """`edited(name, change)`: a copy of a checkpoint whose dict of tensors went through `change`."""

    def edit(name, change, **options):
        folder = tmp_path / name
        shutil.copytree(checkpoint(name, **options), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return edit


def equal(a, b) -> bool:
    mine, other = dict(a.named_parameters()), dict(b.named_parameters())
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def test_fused_weights_are_the_checkpoints_tensors(checkpoint):
    folder = checkpoint("qwen2")
    tensors, layer = load_file(f"{folder}/model.safetensors"), load(folder).model.layers["1"]
    prefix = "model.layers.1.self_attn."
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([tensors[f"{prefix}{p}_proj.weight"] for p in "qkv"]))
    assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat([tensors[f"{prefix}{p}_proj.bias"] for p in "qkv"]))
    assert torch.equal(
        layer.mlp.gate_up_proj.weight,
        torch.cat([tensors[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]),
    )
    assert torch.equal(layer.input_layernorm.weight, tensors["model.layers.1.input_layernorm.weight"])


@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_sharded_files_load_like_one_file(checkpoint, name):
    sharded = checkpoint(name, sharded=True)
    with open(f"{sharded}/model.safetensors.index.json") as file:
        assert len(set(json.load(file)["weight_map"].values())) > 1
    assert equal(load(sharded), load(checkpoint(name)))


def test_dtype_is_converted(checkpoint):
    folder = checkpoint("qwen3")
    exact, rounded = load(folder), load(folder, torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        assert torch.equal(parameter, dict(exact.named_parameters())[name].bfloat16())


def test_missing_tensors_are_named(edited):
    def change(tensors):
        del tensors["model.layers.2.self_attn.k_proj.weight"], tensors["model.norm.weight"]

    with pytest.raises(
        ValueError,
        match=r"Qwen3ForCausalLM; missing: model\.layers\.2\.self_attn\.k_proj\.weight, model\.norm\.weight$",
    ):
        load(edited("qwen3", change))


def test_untied_head_must_be_there(edited):
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight$"):
        load(edited("qwen3", lambda tensors: tensors.pop("lm_head.weight")))


def test_superfluous_tensors_are_named(edited):
    def change(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(160, 64)  # a layer beyond num_hidden_layers

    with pytest.raises(
        ValueError,
        match=r"superfluous: model\.layers\.0\.self_attn\.q_proj\.bias, model\.layers\.3\.mlp\.up_proj\.weight$",
    ):
        load(edited("qwen3", change))


def test_misshapen_tensors_are_named(edited):
    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 161)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(160, 64, dtype=torch.int8)

    with pytest.raises(ValueError) as error:
        load(edited("qwen3", change))
    assert "model.layers.1.mlp.down_proj.weight is [64, 161], expected [64, 160]" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight is of type I8, expected one of F32, BF16" in str(error.value)


def test_many_names_are_cut_short(edited):
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more$"):
        load(
            edited(
                "qwen3",
                lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name or "self_attn" in name],
            )
        )


def test_known_extras_are_ignored(edited, checkpoint):
    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert equal(load(edited("llama-tied", change)), load(checkpoint("llama-tied")))


def test_tied_head_is_the_embedding(checkpoint):
    model = load(checkpoint("llama-tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_no_weights(tmp_path, checkpoint):
    shutil.copy(f"{checkpoint('qwen3')}/config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match=r"no model\.safetensors or .* in .*found pytorch_model\.bin, which is not supported"
    ):
        load(tmp_path)


def test_truncated_file(edited):
    folder = edited("qwen3", lambda tensors: None)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cannot read the weights in .*model\.safetensors"):
        load(folder)


def test_missing_shard(checkpoint, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(checkpoint("qwen3", sharded=True), folder)
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"there is no file .*{gone.name}, but the index"):
        load(folder)


def test_unknown_format(checkpoint):
    with pytest.raises(ValueError, match="load_format is 'gguf', but must be one of auto, safetensors, dummy"):
        load(checkpoint("qwen3"), load_format="gguf")


def test_progress_counts_bytes_up_to_one(checkpoint):
    fractions = []
    load(checkpoint("qwen3"), progress=fractions.append)
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 5


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_slices(checkpoint, size):
    folder = checkpoint("llama-bias")
    whole = load(folder)

    def rank_model(rank):
        group = Group()
        group.rank, group.size = rank, size
        with use_groups(tp=group):
            return load(folder)

    ranks = [rank_model(rank) for rank in range(size)]
    attention = [model.model.layers["0"].self_attn for model in ranks]
    full = whole.model.layers["0"].self_attn
    q = 64 // size
    assert torch.equal(torch.cat([a.qkv_proj.weight[:q] for a in attention]), full.qkv_proj.weight[:64])
    assert torch.equal(torch.cat([a.qkv_proj.bias[:q] for a in attention]), full.qkv_proj.bias[:64])
    # two heads of 16: one per rank, or the same one for ranks 0 and 1
    kv_heads = [a.qkv_proj.weight[q : q + 16] for a in attention]
    for rank, head in enumerate(kv_heads):
        index = rank * 2 // size
        assert torch.equal(head, full.qkv_proj.weight[64 + 16 * index : 80 + 16 * index])
    assert torch.equal(torch.cat([a.o_proj.weight for a in attention], 1), full.o_proj.weight)
    # added once
    assert torch.equal(attention[0].o_proj.bias, full.o_proj.bias) and all(a.o_proj.bias is None for a in attention[1:])
    gate_up = torch.stack([model.model.layers["0"].mlp.gate_up_proj.weight for model in ranks]).unflatten(1, (2, -1))
    assert torch.equal(gate_up.transpose(0, 1).flatten(0, 2), whole.model.layers["0"].mlp.gate_up_proj.weight)
    assert torch.equal(torch.cat([model.lm_head.weight for model in ranks]), whole.lm_head.weight)


class Repacking(LinearMethod):
    """Removes each layer's weight, and records how many of the others were loaded by then."""

    rows = None  # that a tied embedding would look up

    def __init__(self, linears):
        self.linears, self.finalized, self.places = linears, {}, defaultdict(set)

    def finalize(self, layer):
        if layer in self.finalized:
            return
        assert not layer.weight.isnan().any()  # all weights are present
        self.places[layer.weight.shape].add(layer.weight.data_ptr())
        layer.weight = None
        self.finalized[layer] = sum(other.weight is None or not other.weight.isnan().any() for other in self.linears)


@pytest.mark.parametrize("name", ["qwen3", "llama-bias", "llama-tied"])
def test_layers_are_finalized_as_soon_as_they_are_loaded(checkpoint, name):
    folder = checkpoint(name)
    spec = read_model_spec(folder)
    model = build_model(spec, torch.float32, CPU, ops=CpuPlatform().ops)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 4 * spec.num_hidden_layers + 1
    method = Repacking(linears)
    for layer in linears:
        assert layer.method is PLAIN
        layer.method = method
        layer.weight.data.fill_(torch.nan)
    load_weights(model, spec, folder)
    assert set(method.finalized) == set(linears)
    assert list(method.finalized.values()) == sorted(method.finalized.values()) and min(method.finalized.values()) < 4
    # all gate-and-up weights were put together in the same memory
    assert len(method.places[torch.Size([2 * spec.layers[0].intermediate_size, spec.hidden_size])]) == 1


@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_weight_stays_in_the_file(edited, name, dtype, monkeypatch):
    monkeypatch.setattr(KERNELS, "lib", None)  # with it layers repack bfloat16
    folder = edited(name, lambda tensors: tensors.update({key: tensor.to(dtype) for key, tensor in tensors.items()}))
    model = load(folder, dtype)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert str(folder) not in Path("/proc/self/maps").read_text()
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(model.model.layers["0"].mlp.down_proj.weight, tensors["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(
        model.lm_head.weight, tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"]
    )


def test_dummy_weights_are_random_seeded_and_never_zero(checkpoint, tmp_path):
    shutil.copy(f"{checkpoint('llama-bias')}/config.json", tmp_path)  # no weight files at all
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert equal(first, again) and not equal(first, other)
    seen = set()
    for name, parameter in first.named_parameters():
        assert parameter.isfinite().all() and (parameter == 0).float().mean() < 0.01, name
        assert abs(parameter.mean() - int(name.endswith("norm.weight"))) < 0.02, name
        seen.add(tuple(parameter.flatten()[:4].tolist()))
    assert len(seen) == len(list(first.parameters()))  # no two tensors alike
    embedding = first.model.embed_tokens.weight
    assert len({tuple(row[:4].tolist()) for row in embedding}) == len(embedding)  # no two rows alike


@pytest.mark.slow
def test_dummy_weights_are_fast(checkpoint):
    # a hundred million weights
    spec = read_model_spec(checkpoint("qwen3"))
    layers = tuple(replace(layer, intermediate_size=4096) for layer in spec.layers)
    spec = replace(spec, hidden_size=1024, layers=layers, vocab_size=32768)
    model = build_model(spec, torch.bfloat16, CPU, ops=CpuPlatform().ops)
    start = time.process_time()
    load_weights(model, spec, "", "dummy")
    assert time.process_time() - start < 2.0
