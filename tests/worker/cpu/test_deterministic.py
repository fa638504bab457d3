"""`deterministic`: equal bits alone, in a batch, in chunks of any size and after preemption; when it is the default."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quire.configs.config import Config
from quire.worker.cpu import ops as cpu_ops
from quire.worker.cpu import states
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cpu.fixed_order_linear import FixedRows, fix_order
from quire.worker.cpu.native import KERNELS
from quire.worker.cpu.native_linear import PackedLinear, QuantizedLinear
from quire.worker.cuda.device import CudaPlatform
from quire.worker.limits import resolve_limits
from quire.worker.messages import SamplingParams
from quire.worker.models.registry import read_model_spec
from quire.worker.sampling import logprobs
from quire.worker.startup.preview import preview
from quire.worker.transformer.hyper_connections import StreamProduct
from quire.worker.transformer.moe import SharedGate, WideRouterLinear
from quire.worker.worker import Worker
from tests.end_to_end.test_families import LENGTHS, small_engine
from tests.helpers.in_process import InProcessEngine
from tests.helpers.models.families import SEEING, VOCAB, build_family
from tests.helpers.worker.steps import Script

NUM_OUTPUTS = 12
SAMPLING = [
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=3, prompt_logprobs=1),
]


def _worker(folder: str, **settings) -> Worker:
    worker = Worker(
        Config.from_flat(
            **{
                "model": folder,
                "device": "cpu",
                "max_num_seqs": 48,
                "max_model_len": "512",
                "num_gpu_blocks_override": 1200,
                "num_threads": 1,
            }
            | settings
        )
    )
    worker.initialize(lambda phase, fraction: None)
    return worker


def _prompt(length: int, seed: int, vocab_size: int = 500) -> list[int]:
    return random.Random(seed).choices(range(4, vocab_size), k=length)


def _play(worker: Worker, sampling: SamplingParams, crowd: int = 0, chunk: int = 1000, preempt_at: int | None = None):
    """(tokens, their log-probabilities, the prompt's log-probabilities) of a request with a prompt of 300 tokens that
    runs with `crowd` others; prompts are computed in chunks of `chunk` tokens.
    """
    script, kept, prompt_kept = Script(16), [], []
    me = crowd // 2
    for row in range(crowd + 1):
        script.add(row, _prompt(300, 0) if row == me else _prompt(3 + 7 * row % 60, row + 1), sampling)
    while len(script.rows[me].outputs) < NUM_OUTPUTS:
        missing = {row: len(state.prompt) + len(state.outputs) - state.computed for row, state in script.rows.items()}
        step = script.step({row: min(count, chunk) for row, count in missing.items()})
        output = worker.execute(step).result()
        assert not output.errors
        script.receive(step, output)
        prompt_kept += (output.prompt_logprobs or {}).get(step.rows.index(me), [])
        kept += [
            entry for i, entries in zip(step.samples, output.logprobs or []) if step.rows[i] == me for entry in entries
        ]
        if preempt_at is not None and len(script.rows[me].outputs) == preempt_at:
            script.preempt(me)
            preempt_at, prompt_kept = None, []
    assert len(kept) == NUM_OUTPUTS and len(prompt_kept) == 299
    return script.rows[me].outputs, kept, prompt_kept


CASES = [
    {"crowd": 1},
    {"crowd": 6, "chunk": 64},
    {"crowd": 40},
    {"chunk": 7},
    {"preempt_at": 5},
    {"crowd": 3, "chunk": 33, "preempt_at": 9},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("mistral", {}),
        ("llama-bias", {}),
        ("llama-tied", {"quantization": "int8"}),
        ("qwen3", {"quantization": "int4"}),
        ("qwen3", {"kv_cache_dtype": "int8"}),
        ("mistral", {"kv_cache_dtype": "fp8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "bf16",
)
def test_same_bits_whatever_runs_beside(checkpoint, native_kernels, name, settings):
    _check_bits(_worker(checkpoint(name, dtype="bfloat16"), deterministic=True, **settings))


@pytest.mark.slow
def test_same_bits_with_sinks_and_experts(checkpoint, native_kernels):
    layers = ["full_attention", "full_attention"]
    _check_bits(_worker(checkpoint("gpt-oss", dtype="bfloat16", layer_types=layers), deterministic=True))


_ROPE = {"qk_rope_head_dim": 16}
# windows, sinks, latents, states, hyper-connections, gates, experts of all formulas: family -> sizes that kernels take
FAMILIES_WITH_IT: dict[str, dict[str, int]] = {
    "afmoe": {},
    "cohere2_moe": {},
    "dots3_note": _ROPE | {"head_dim": 32, "swa_kv_lora_rank": 16, "swa_v_head_dim": 16},
    "glm5_next": {},
    "hy_v4": _ROPE,
    "kimi_linear": _ROPE,
    "kolibri1": {},
    "laguna": {},
    "lfm3": {},
    "mellum": {},
    "mimo_v2": {"v_head_dim": 16},
    "minimax_m3": {"index_topk_blocks": 100},  # all blocks
    "mistral_large4": _ROPE,
    "muse_glimmer": {},
    "olmo_hybrid": {"hidden_size": 64},
    "qwen4_exp": {"indexer_budget": 400},
    "step3p5": {},
    "youtu": _ROPE,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_WITH_IT)
def test_same_bits_of_a_family(native_kernels, name, tmp_path):
    """Alone with drafts, and with others in chunks, preempted and begun again, without drafts."""
    sizes = FAMILIES_WITH_IT[name]
    if name in SEEING:
        sizes = {"text_config": SEEING[name][1]["text_config"] | sizes}
    folder = build_family(name, tmp_path, dtype="bfloat16", **sizes)
    prompts = [_prompt(length, length, VOCAB) for length in LENGTHS]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=2)
    alone = InProcessEngine(folder, deterministic=True, max_model_len="368", max_num_seqs=24)
    expected = [alone.generate([prompt], sampling)[0] for prompt in prompts]
    alone.close()
    engine = small_engine(folder, deterministic=True, speculative_config='{"method": "none"}')
    results = engine.generate(prompts, sampling)
    engine.close()
    assert sum(result.num_preemptions for result in results) > 0
    for result, wanted in zip(results, expected, strict=True):
        assert (result.error, result.token_ids, result.logprobs) == (None, wanted.token_ids, wanted.logprobs)


def test_a_row_of_streams_is_multiplied_alone(native_kernels):
    """The weights of hyper-connections: float32 products of torch have other bits for one row than for many."""
    spec = SimpleNamespace(raw={"hc_mult": 4}, hidden_size=96, norm_eps=1e-6)
    product = StreamProduct(spec, "hc", 24)
    generator = torch.Generator().manual_seed(0)
    product.weight.copy_(torch.randn(24, 4 * 96, generator=generator))
    fix_order(product)
    streams = torch.randn(40, 4, 96, generator=generator).bfloat16()
    whole = product(streams)
    assert all(torch.equal(product(streams[i : i + 1])[0], row) for i, row in enumerate(whole))
    x = streams.double().flatten(1)
    expected = F.linear(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), product.weight.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)


def test_an_index_leaves_it_off_unless_asked(native_kernels, tmp_path):
    folder = build_family("hy_v4", tmp_path, dtype="bfloat16", qk_rope_head_dim=16)
    spec, platform = read_model_spec(folder), CpuPlatform()
    found = {
        asked: platform.batch_invariance(
            Config.from_flat(model=folder, device="cpu", deterministic=asked), spec, torch.bfloat16
        )
        for asked in (None, True)
    }
    assert (found[None][0], found[True][0]) == (False, True)
    assert all(reason.endswith("one by one") for _, reason in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek_v4", "compressed keys"),
        ("zaya", "convolution of whole heads"),
        ("inkling", "bias of scores"),
        ("inkling2", "bias of scores"),
        ("minimax_m3", "chosen blocks: set --max-model-len to at most 20"),
        ("qwen4_exp", "chosen blocks: set --max-model-len to at most 20"),
    ],
)
def test_families_without_it_are_refused(native_kernels, name, words, tmp_path):
    with pytest.raises(ValueError, match=f"--deterministic has no .*{words}"):
        _worker(build_family(name, tmp_path, dtype="bfloat16"), deterministic=True)


def _check_bits(worker: Worker) -> None:
    assert worker.runner.backend.name == "cpu_fixed"
    for sampling in SAMPLING:
        alone = _play(worker, sampling)
        for case in CASES:
            assert _play(worker, sampling, **case) == alone, case
    worker.shutdown()


def test_without_it_bits_differ(checkpoint, native_kernels):
    if not cpu_ops.has_amx() and native_kernels.level != "avx2":
        pytest.skip("with AVX-512 alone there is only one way to compute")
    worker = _worker(checkpoint("qwen3", dtype="bfloat16", head_dim=64), deterministic=False)
    alone = _play(worker, SAMPLING[0])
    # with AVX2 only attention differs, and only for few rows
    assert any(_play(worker, SAMPLING[0], **case)[1:] != alone[1:] for case in [*CASES, {"chunk": 2}])
    worker.shutdown()


@pytest.mark.parametrize(
    ("level", "amx", "quantization", "settings", "on", "words"),
    [
        ("avx512", False, None, {}, False, "but products of many rows take twice as long"),
        ("avx512bf16", False, "int4", {}, False, "but products of many rows take twice as long"),
        ("amx", True, None, {}, True, "no measurable cost"),
        (
            "amx",
            True,
            "int8",
            {},
            False,
            (
                "tokens may depend on other requests. --deterministic makes sure that they do not, but "
                "prompts take 2 to 2.7 times as long"
            ),
        ),
        ("avx2", False, None, {}, False, "but prompts take 1."),
        ("avx2", False, "int4", {}, False, "but prompts take 1.4 times as long"),
        (
            "amx",
            True,
            "int8",
            {"deterministic": True},
            True,
            "as asked: a request's tokens do not depend on other requests; prompts take 2 to 2.7 times as long",
        ),
        ("avx512", False, None, {"deterministic": False}, False, "as asked: seeded and greedy tokens may depend"),
        ("avx512", False, None, {"dtype": "float32"}, False, "--deterministic computes in bfloat16 only"),
        ("avx512", False, None, {"tensor_parallel_size": 2}, False, "--deterministic works with one rank"),
        (
            "avx512",
            False,
            None,
            {"attention_backend": "cpu_native"},
            False,
            "--deterministic has an attention backend of its own",
        ),
    ],
)
def test_default(checkpoint, native_kernels, monkeypatch, level, amx, quantization, settings, on, words):
    monkeypatch.setattr(native_kernels, "level", level)
    monkeypatch.setattr(cpu_ops, "has_amx", lambda: amx)
    folder = checkpoint("qwen3", dtype="bfloat16")
    limits = resolve_limits(
        Config.from_flat(model=folder, quantization=quantization, **settings), read_model_spec(folder), CpuPlatform()
    )
    assert limits.deterministic == on and (limits.attention.backend.name == "cpu_fixed") == on
    ((value, reason),) = [choice[1:] for choice in limits.choices if choice[0] == "deterministic"]
    assert value == ("on" if on else "off") and words in reason


def test_default_with_recurrent_states(native_kernels, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_ops, "has_amx", lambda: True)
    folder = build_family("lfm2", tmp_path, dtype="bfloat16", hidden_size=64)
    config, spec = Config.from_flat(model=folder), read_model_spec(folder)
    assert resolve_limits(config, spec, CpuPlatform()).deterministic
    assert states.reason(((3, 64), (4, 16, 16))) is None
    assert "1025" in states.reason(((3, 64), (4, 1025, 16)))
    monkeypatch.setattr(states, "_WIDEST", 2)
    with pytest.raises(ValueError, match="needs the native kernels for recurrent states: a convolution"):
        resolve_limits(Config.from_flat(model=folder, deterministic=True), spec, CpuPlatform())


def test_default_on_a_gpu(checkpoint):
    assert (
        CudaPlatform(0).batch_invariance(
            Config.from_flat(model=checkpoint("qwen3")), read_model_spec(checkpoint("qwen3")), torch.bfloat16
        )[0]
        is False
    )


def test_default_begins_when_the_kernels_are_ready(checkpoint, native_kernels, monkeypatch, caplog):
    monkeypatch.setattr(native_kernels, "load", lambda background, level="auto", preview=False: False)
    lib, status = native_kernels.lib, native_kernels._status
    native_kernels.lib = None
    try:
        native_kernels._status = "building native kernels in the background"
        worker = _worker(checkpoint("qwen3", dtype="bfloat16"))
        choices = {name: (value, reason) for name, value, reason in preview(worker.config).choices}
        assert (
            choices["deterministic"][0] == "off"
            and "needs the native CPU kernels: building native kernels in the background" in choices["deterministic"][1]
        )
        _play(worker, SAMPLING[0])
    finally:
        native_kernels.lib, native_kernels._status = lib, status
    monkeypatch.setattr(cpu_ops, "has_amx", lambda: True)  # with AMX it is the default
    with caplog.at_level("INFO"):
        worker._change_over()
    assert worker.runner.backend.name == "cpu_fixed" and "deterministic on (" in caplog.text
    assert _play(worker, SAMPLING[1], crowd=6, chunk=64) == _play(worker, SAMPLING[1])
    worker.shutdown()


@pytest.mark.parametrize("kind", ["vectors", "any", "int8", "int4"])
@pytest.mark.parametrize("gated", [None, "silu"])
def test_rows_of_a_product(native_kernels, kind, gated):
    torch.manual_seed(0)
    weight, x = (torch.randn(70, 712) * 0.05).bfloat16(), torch.randn(290, 712).bfloat16()
    if kind in ("int8", "int4"):
        fixed = FixedRows(QuantizedLinear.quantize(weight, int(kind[3:]), gated=gated))
    else:
        packed = PackedLinear(weight, gated=gated, compact=kind == "any")
        fixed = FixedRows(packed if kind == "any" else lambda x, dtype, path, workspace: packed(x, dtype, path=1))
    together = fixed(x)
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 65, 200):
        assert torch.equal(fixed(x[13 : 13 + rows]), together[13 : 13 + rows])


def test_rows_of_small_products(native_kernels):
    """Routers in float32 and gates of shared experts, whose sizes are not those of vectors."""
    torch.manual_seed(0)
    layers = nn.ModuleList([WideRouterLinear(2048, 20, "router"), SharedGate(2048, "gate").bfloat16()])
    for layer in layers:
        torch.nn.init.normal_(layer.weight, std=0.05)
    x = torch.randn(290, 2048).bfloat16()
    expected = [layer(x) for layer in layers]
    fix_order(layers)
    for layer, plain in zip(layers, expected):
        together = layer(x)
        torch.testing.assert_close(together, plain, atol=1e-2, rtol=1e-2)
        for rows in (1, 2, 3, 7, 8, 17, 65, 200):
            assert torch.equal(layer(x[13 : 13 + rows]), together[13 : 13 + rows])


def test_log_probabilities_with_several_threads():
    torch.manual_seed(0)
    logits, chosen = torch.randn(12, 151936), torch.zeros(12, dtype=torch.int64)
    torch.set_num_threads(2)  # both threads sum a single row; with several rows, one thread sums each
    try:
        together = logprobs.entries(logits, chosen, 0, True, CpuPlatform()).values
        alone = torch.cat([logprobs.entries(row, chosen[:1], 0, True, CpuPlatform()).values for row in logits.split(1)])
        pairs = torch.cat([logprobs.entries(two, chosen[:2], 0, True, CpuPlatform()).values for two in logits.split(2)])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(together, alone) and torch.equal(together, pairs)


@pytest.mark.parametrize(
    ("platform", "settings", "words"),
    [
        (CudaPlatform(0), {}, "--deterministic needs Triton on this device"),
        (
            CpuPlatform(),
            {},
            "--deterministic computes in bfloat16 only, and this would be float32: set --dtype bfloat16",
        ),
        (CpuPlatform(), {"tensor_parallel_size": 2}, "leave --tensor-parallel-size and --pipeline-parallel-size at 1"),
        (
            CpuPlatform(),
            {"dtype": "bfloat16", "attention_backend": "cpu_paged"},
            "leave --attention-backend cpu_paged off",
        ),
        (CpuPlatform(), {"dtype": "bfloat16"}, "--deterministic needs the native CPU kernels: there are none"),
    ],
)
def test_what_does_not_go_together_is_refused(checkpoint, monkeypatch, platform, settings, words):
    monkeypatch.setattr(KERNELS, "lib", None)
    monkeypatch.setattr(KERNELS, "_status", "there are none")
    folder = checkpoint("qwen3")
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve_limits(
            Config.from_flat(model=folder, deterministic=True, **settings), read_model_spec(folder), platform
        )
