"""Every architecture against transformers: ragged prefill in chunks, then single tokens, over a paged cache with
scattered blocks.
"""

from __future__ import annotations

import pytest
import torch

from quire.worker.cpu import build, native
from quire.worker.cpu.device import CpuPlatform
from quire.worker.models.registry import build_model, num_parameters, read_model_spec
from quire.worker.parallel import Group, use_groups
from quire.worker.spec.model import LayerSpec
from quire.worker.transformer.decoder import stage_layers
from quire.worker.weights.loader import load_weights
from tests.helpers.models.checkpoints import CHECKPOINTS, MOE_CHECKPOINTS, VOCAB_SIZE, load_reference
from tests.helpers.worker.dense_attention import PagedRunner

CPU = torch.device("cpu")
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
YARN_EXPLICIT = YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
ALL = CHECKPOINTS | MOE_CHECKPOINTS
CASES = [(name, {}) for name in ALL] + [
    ("qwen2", {"rope_parameters": rope}) for rope in (LINEAR, YARN, YARN_EXPLICIT, YARN_MSCALE)
]


@pytest.fixture(params=["plain", "native"])
def kernels(request, monkeypatch):
    """The operations in plain torch, then in the native CPU kernels (compiled on first use, cached afterwards)."""
    monkeypatch.setattr(native.KERNELS, "lib", None)
    if request.param == "native":
        if build.cpu_level() is None or build.compiler() is None:
            pytest.skip("no native kernels here")
        loaded = native.Kernels()
        assert loaded.load(background=False), loaded.status
        monkeypatch.setattr(native.KERNELS, "lib", loaded.lib)
    return request.param


def load(folder: str, dtype: torch.dtype = torch.float32):
    spec = read_model_spec(folder)
    model = build_model(spec, dtype, CPU, ops=CpuPlatform().ops)
    load_weights(model, spec, folder)
    return model


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 500, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def reference_logits(folder: str, texts: list[list[int]], dtype: str = "float32") -> list[torch.Tensor]:
    reference = load_reference(folder, dtype)
    return [reference(torch.tensor([ids])).logits[0].float() for ids in texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else str(value.get("rope_parameters", {}).get("rope_type", "")),
)
def test_logits_equal_transformers(checkpoint, name, overrides, kernels):
    folder = checkpoint(name, **overrides)
    model, texts = load(folder), prompts([1, 300, 37, 64])
    expected = reference_logits(folder, texts)
    runner = PagedRunner(model, len(texts), 512)
    got: list[list[torch.Tensor]] = [[] for _ in texts]
    # chunks of uneven sizes, then the last five tokens of every text one at a time, the requests coming and going
    todo = {
        row: [ids[:-5][at : at + 70] for at in range(0, max(0, len(ids) - 5), 70)] + [[token] for token in ids[-5:]]
        for row, ids in enumerate(texts)
    }
    while any(todo.values()):
        for row, hidden in runner.step({row: chunks.pop(0) for row, chunks in todo.items() if chunks}).items():
            got[row].append(model.logits(hidden))
    for row, wanted in enumerate(expected):
        logits = torch.cat(got[row])
        assert logits.dtype == torch.float32 and logits.shape == (len(texts[row]), VOCAB_SIZE)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bfloat16_agrees_where_the_margin_is_clear(checkpoint, name, kernels):
    folder = checkpoint(name, dtype="bfloat16")
    model, texts = load(folder, torch.bfloat16), prompts([200])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert (model.lm_head.weight is None) == (kernels == "native")  # repacked
    (exact,), (rounded,) = reference_logits(folder, texts), reference_logits(folder, texts, "bfloat16")
    runner = PagedRunner(model, 1, 256)
    logits = model.logits(runner.step({0: texts[0]})[0])
    error, reference_error = (logits - exact).abs().mean(), (rounded - exact).abs().mean()
    assert error < 1.2 * reference_error  # as close to the float32 computation as transformers' own bfloat16
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.5
    assert clear.sum() > 50
    assert torch.equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])


def test_native_kernels_may_come_later(checkpoint, kernels):
    if kernels == "plain":
        pytest.skip("nothing comes")
    folder, (text,) = checkpoint("llama-tied", dtype="bfloat16"), prompts([50])
    lib, native.KERNELS.lib = native.KERNELS.lib, None
    model = load(folder, torch.bfloat16)
    memory = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    before = model.logits(PagedRunner(model, 1, 64).step({0: text})[0])
    native.KERNELS.lib = lib
    model.use(CpuPlatform().ops)
    model.finalize()
    assert model.lm_head.weight is None and model.model.embed_tokens.weight is None
    # the originals are gone
    assert 0.7 * memory < sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) < 1.1 * memory
    after = model.logits(PagedRunner(model, 1, 64).step({0: text})[0])
    torch.testing.assert_close(after, before, atol=0.3, rtol=0)
    assert not torch.equal(after, before)  # it is other code
    model.finalize()  # once more changes nothing
    assert torch.equal(model.logits(PagedRunner(model, 1, 64).step({0: text})[0]), after)


@pytest.mark.parametrize("name", ALL)
def test_num_parameters(checkpoint, name):
    folder = checkpoint(name)
    model = load(folder)
    assert num_parameters(read_model_spec(folder)) == sum(p.numel() for p in model.parameters())


def test_unknown_architecture(checkpoint):
    from dataclasses import replace

    spec = replace(read_model_spec(checkpoint("qwen3")), architecture="Elephant")
    with pytest.raises(ValueError, match=r"Elephant.*Supported: Afmoe.*LlamaForCausalLM"):
        build_model(spec, torch.float32, CPU)


def test_build_restores_the_default_dtype(checkpoint):
    build_model(read_model_spec(checkpoint("qwen3")), torch.bfloat16, CPU)
    assert torch.get_default_dtype() == torch.float32


def test_rotary_table_is_float32_and_as_long_as_asked(checkpoint):
    model = build_model(
        read_model_spec(checkpoint("qwen3")), torch.bfloat16, CPU, max_model_len=100, ops=CpuPlatform().ops
    )
    table = model.model.rotary_emb.tables["default"].cos_sin_cache
    assert table.shape == (100, 32) and table.dtype == torch.float32


class Stage(Group):
    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("name", ["qwen3", "llama-tied"])
def test_pipeline_stages_pass_on_hidden_states(checkpoint, name):
    folder = checkpoint(name)
    spec, whole, (text,) = read_model_spec(folder), load(folder), prompts([40])
    stages = []
    for rank in range(2):
        with use_groups(pp=Stage(rank, 2)):
            stages.append(load(folder))

    class Pipeline(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stages, self.model = torch.nn.ModuleList(stages), stages[1].model
            self.dtype = torch.float32

        def forward(self, input_ids, positions, attn):
            hidden = self.stages[0](input_ids, positions, attn)
            return self.stages[1](input_ids, positions, attn, hidden)

    assert sorted(int(i) for stage in stages for i in stage.model.layers) == list(range(spec.num_hidden_layers))
    expected = whole.logits(PagedRunner(whole, 1, 64).step({0: text})[0])
    got = stages[1].logits(PagedRunner(Pipeline(), 1, 64).step({0: text})[0])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_stage_layers():
    def stages(num_stages: int, kv_from: list[int | None]) -> list[list[int]]:
        layers = [LayerSpec(1, 1, 8, 8, 8, kv_from=source) for source in kv_from]
        return [list(stage_layers(layers, rank, num_stages)) for rank in range(num_stages)]

    assert stages(3, [None] * 7) == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match=r"pipeline_parallel_size 3.*num_hidden_layers 2$"):
        stages(3, [None] * 2)
    sharing = [None] * 4 + [2, 3, 2, 3]  # layers 4 to 7 read the caches of 2 and 3
    assert stages(1, sharing) == [list(range(8))]
    assert stages(2, sharing) == [[0, 1], [2, 3, 4, 5, 6, 7]]
    assert stages(3, sharing) == [[0], [1], [2, 3, 4, 5, 6, 7]]
    assert stages(2, [None] * 6 + [4, 5]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="num_hidden_layers 8, of which the last 6 share caches"):
        stages(4, sharing)
