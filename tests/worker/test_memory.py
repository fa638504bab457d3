"""The memory plan in numbers, its error messages, and the memory and cores that are measured."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from quire.configs import platforms
from quire.configs.config import Config
from quire.worker import estimates, memory
from quire.worker.attention.base import AttentionSpec
from quire.worker.cache.tiers.ram import RamTier
from quire.worker.cpu.device import CpuPlatform
from quire.worker.cuda.device import CudaPlatform
from quire.worker.cuda.flash_attn import FlashAttention3, num_key_splits
from quire.worker.host import resources as host
from quire.worker.limits import resolve_limits
from quire.worker.memory import DeviceMemory, Sizes
from quire.worker.models.registry import num_parameters, read_model_spec
from quire.worker.platform import get_platform
from quire.worker.spec.model import kv_bytes_per_token
from quire.worker.startup.plan import Planned
from quire.worker.startup.preview import preview
from quire.worker.startup.ready import ready
from quire.worker.startup.resolve import Resolved
from quire.worker.worker import Worker

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("qwen3")


def _plan(folder, *, total=8 * GIB, available=4 * GIB, weights=GIB, activations=GIB // 2, device="cpu", **settings):
    config = Config.from_flat(model=folder, device="cpu", **settings)
    spec = read_model_spec(folder)
    limits = resolve_limits(config, spec, CpuPlatform())
    room, cache = DeviceMemory(device, total, available, device == "cpu"), memory.cache_plan(config, spec, limits)
    plan, num_blocks, _, choices = memory.plan_memory(config, spec, limits, room, Sizes(weights, activations))
    max_model_len, fitted = memory.fit_model_len(limits, num_blocks, plan, cache.groups)
    planned = Planned(plan, num_blocks, 0, 0, max_model_len, fitted + choices, [])
    memories = total, available
    resolved = Resolved(config, CpuPlatform(), spec, limits, cache, None, None, [], 1, 1, memories, [])
    return ready(resolved, planned)


def _choices(ready):
    return {name: (value, reason) for name, value, reason in ready.choices}


def test_on_cpu_the_default_is_bounded_by_need(folder, monkeypatch):
    """Room for all requests of some tokens, or for four of the full length, not for all of them at once."""
    monkeypatch.setattr(memory, "_CPU_TOKENS", 256)
    for seqs, length, tokens in ((64, 1024, 64 * 256), (8, 1024, 4 * 1024), (2, 2048, 2 * 2048)):
        settings = {"max_num_seqs": seqs, "max_model_len": str(length), "total": 999 * GIB, "available": 900 * GIB}
        ready = _plan(folder, **settings)
        assert (ready.num_blocks - 1) * ready.block_size == tokens
        assert "at most, as it fills" in _choices(ready)["KV cache"][1]
        on_gpu = _plan(folder, **settings, device="cuda:0")
        assert (on_gpu.num_blocks - 1) * on_gpu.block_size == seqs * length


def test_the_fraction_is_of_what_is_free_and_holds_everything(folder):
    ready = _plan(folder, gpu_memory_utilization=0.5, max_num_seqs=10**6)
    plan = ready.plan
    assert plan.bytes_per_block == kv_bytes_per_token(read_model_spec(folder), 4) * ready.block_size
    assert plan.kv_cache == ready.num_blocks * plan.bytes_per_block
    # half of 4 GiB minus weights and activations
    assert 0 <= 2 * GIB - GIB - GIB // 2 - plan.kv_cache < plan.bytes_per_block
    assert plan.weights + plan.activations + plan.kv_cache + plan.reserve == plan.available
    assert "gpu_memory_utilization 0.5" in _choices(ready)["KV cache"][1]


def test_on_a_gpu_the_fraction_is_of_all_of_it_but_never_more_than_is_free(folder):
    big = {"max_num_seqs": 10**6, "gpu_memory_utilization": 0.5}
    assert _plan(folder, device="cuda:0", **big).plan.kv_cache == pytest.approx(4 * GIB - 1.5 * GIB, abs=1 << 20)
    assert _plan(folder, device="cuda:0", available=3 * GIB, **big).plan.kv_cache == pytest.approx(
        1.5 * GIB, abs=1 << 20
    )


def test_no_more_than_full_length_requests_can_fill(folder):
    ready = _plan(folder, max_num_seqs=2, max_model_len="1000", block_size=16)
    assert ready.num_blocks == 2 * 63 + 1
    assert "2 requests of 1000 tokens" in _choices(ready)["KV cache"][1]


def test_bytes_and_blocks_as_asked(folder):
    per_block = kv_bytes_per_token(read_model_spec(folder), 4) * 16
    assert _plan(folder, kv_cache_memory_bytes=per_block * 50 + 3, block_size=16).num_blocks == 50
    assert _plan(folder, num_gpu_blocks_override=77).num_blocks == 77


def test_the_context_is_the_models_or_what_fits(folder):
    assert _plan(folder).max_model_len == 2048 and _choices(_plan(folder))["max_model_len"] == (
        "2048",
        "the model's maximum",
    )
    small = _plan(folder, num_gpu_blocks_override=11, block_size=16)
    assert small.max_model_len == 160 and "the model's maximum is 2048" in _choices(small)["max_model_len"][1]
    asked = _plan(folder, max_model_len="300")
    assert asked.max_model_len == 300 and "max_model_len" not in _choices(asked)


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"max_model_len": "2049"},
            "--max-model-len 2049 is more than this model's 2048 tokens: set it to at most 2048",
        ),
        ({"max_model_len": "many"}, "--max-model-len 'many'"),
        ({"max_model_len": "0"}, "--max-model-len '0'"),
        (
            {"max_model_len": "400", "num_gpu_blocks_override": 11, "block_size": 16},
            "set --max-model-len to at most 160",
        ),
        ({"kv_cache_memory_bytes": 3 * GIB}, f"set it to at most {4 * GIB - GIB - GIB // 2}"),
        ({"gpu_memory_utilization": 0.3}, "no room for a KV cache: 4.00 GiB are available"),
        ({"attention_backend": "flash_attn_3"}, "flash_attn_3: needs a GPU"),
        (
            {"tensor_parallel_size": 3},
            "num_attention_heads 4 cannot be split over tensor_parallel_size 3; sizes that divide it: 1, 2, 4",
        ),
        ({"tensor_parallel_size": 8}, "num_attention_heads 4 cannot be split over tensor_parallel_size 8"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size 9 is more than the model's num_hidden_layers"),
    ],
)
def test_errors_say_what_to_change(folder, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        _plan(folder, **settings)


def test_a_kv_cache_that_is_too_small_names_its_own_flag(folder):
    block = kv_bytes_per_token(read_model_spec(folder), 4) * 16
    with pytest.raises(ValueError) as caught:
        _plan(folder, kv_cache_memory_bytes=1000, block_size=16)
    assert (
        f"--kv-cache-memory-bytes 1000 is too small for two KV blocks of {block} bytes: set it to at least {2 * block}"
        in str(caught.value)
    )
    whole = int(re.search(r"or to (\d+) for a full context of 2048 tokens", str(caught.value))[1])
    assert _plan(folder, kv_cache_memory_bytes=whole, block_size=16).max_model_len == 2048
    assert _plan(folder, kv_cache_memory_bytes=2 * block, block_size=16).max_model_len == 16


def test_the_advice_of_an_error_works(folder):
    with pytest.raises(ValueError) as caught:
        _plan(folder, max_model_len="400", num_gpu_blocks_override=11, block_size=16)
    at_least = int(re.search(r"--kv-cache-memory-bytes (\d+)", str(caught.value))[1])
    assert _plan(folder, max_model_len="400", kv_cache_memory_bytes=at_least, block_size=16).max_model_len == 400
    assert _plan(folder, max_model_len="160", num_gpu_blocks_override=11, block_size=16).max_model_len == 160


def test_tensor_parallel_ranks_hold_their_share(folder):
    spec = read_model_spec(folder)
    config = Config.from_flat(model=folder, device="cpu", tensor_parallel_size=2, block_size=16)
    limits = resolve_limits(config, spec, CpuPlatform())
    assert memory.bytes_per_block(config, spec, limits) == kv_bytes_per_token(spec, 4) * 16 // 2
    assert limits.max_num_seqs == 256 and limits.max_num_batched_tokens == 4096


def test_graphs_are_part_of_the_plan(folder):
    spec, config = (
        read_model_spec(folder),
        Config.from_flat(model=folder, device="cpu", gpu_memory_utilization=0.5, max_num_seqs=10**6),
    )
    limits = resolve_limits(config, spec, CpuPlatform())
    graphs = estimates.estimate_graphs(config, spec, replace(limits, max_num_seqs=64), 1)
    more = estimates.estimate_graphs(config, spec, replace(limits, max_num_seqs=512), 1)
    assert 64 * spec.hidden_size * 4 < graphs < more < GIB
    with_lora = Config.from_flat(model=folder, device="cpu", enable_lora=True)
    assert graphs < estimates.estimate_graphs(with_lora, spec, replace(limits, max_num_seqs=64), 1) < 2 * graphs
    room = DeviceMemory("cuda", 8 * GIB, 8 * GIB)
    without, *_ = memory.plan_memory(config, spec, limits, room, Sizes(GIB, GIB))
    plan, *_ = memory.plan_memory(config, spec, limits, room, Sizes(GIB, GIB, graphs=GIB))
    assert plan.graphs == GIB and plan.kv_cache == pytest.approx(without.kv_cache - GIB, abs=plan.bytes_per_block)
    assert plan.weights + plan.activations + plan.graphs + plan.kv_cache + plan.reserve == plan.available


def test_the_split_results_of_flash_attention_3_are_part_of_the_plan(folder):
    """254 MB in a step of 1,024 requests with contexts of up to 40,000 tokens, 32 heads of 128 and 8 KV heads."""
    spec = AttentionSpec(32, 8, 128, torch.bfloat16, torch.device("cuda"))
    assert num_key_splits(4, 8, 40_000) == 15 and num_key_splits(4, 8, 512) == 1 and num_key_splits(1, 128, 40_000) == 1
    assert 15 * 1024 * 32 * 128 * 4 <= FlashAttention3.workspace(spec, 1024, 40_000) < 260e6
    config, model = Config.from_flat(model=folder, device="cpu"), read_model_spec(folder)
    limits = replace(resolve_limits(config, model, CpuPlatform()), max_num_seqs=1024, max_model_len=40_000)
    assert estimates.estimate_workspace(config, model, limits, CpuPlatform()) == 0
    limits = replace(limits, attention=replace(limits.attention, backend=FlashAttention3))
    assert estimates.estimate_workspace(config, model, limits, CpuPlatform()) > 1024 * 4


def test_who_records(folder):
    class Recording(CpuPlatform):
        has_graphs = True

    spec = read_model_spec(folder)
    for settings, safe, want in (
        ({}, True, True),
        ({"enforce_eager": True}, True, False),
        ({}, False, False),
        ({"pipeline_parallel_size": 2}, True, False),
    ):
        config = Config.from_flat(model=folder, device="cpu", **settings)
        limits = resolve_limits(config, spec, CpuPlatform())
        limits.attention.backend.graph_safe = safe
        assert estimates.uses_graphs(config, spec, limits, Recording()) == want and not estimates.uses_graphs(
            config, spec, limits, CpuPlatform()
        )


def test_estimates_grow_with_what_they_depend_on(folder):
    spec = read_model_spec(folder)
    config = Config.from_flat(model=folder, device="cpu")
    limits = resolve_limits(config, spec, CpuPlatform())
    base = estimates.estimate_activations(spec, limits, 1)
    for change in ({"max_num_batched_tokens": 10**5}, {"max_num_seqs": 10**5}, {"max_model_len": 10**6}):
        assert estimates.estimate_activations(spec, replace(limits, **change), 1) > base
    assert estimates.estimate_weights(spec, torch.bfloat16, 1) == 2 * num_parameters(spec)


def _sizes(message: str) -> list[str]:
    return re.findall(r"[\d.,]+ (?:[KMGT]i)?B\b", message)


def test_sizes_that_a_message_compares_look_different(folder, monkeypatch):
    """Each message about too little room, with one block, state or byte too little."""
    settings = {"model": folder, "device": "cpu", "max_num_seqs": 1, "max_num_batched_tokens": 64}
    whole = preview(Config.from_flat(**settings, kv_cache_memory_bytes=64 << 20)).plan.bytes_per_block
    blocks = 2048 // preview(Config.from_flat(**settings)).block_size  # one too few: the first is for padding
    short = settings | {"max_model_len": "2048", "kv_cache_memory_bytes": blocks * whole}
    with pytest.raises(ValueError, match=r"--max-model-len 2048 needs .* of KV cache") as error:
        preview(Config.from_flat(**short))
    needed, found = _sizes(str(error.value))
    assert needed != found
    fitting = re.search(r"--kv-cache-memory-bytes (\d+)", str(error.value))[1]
    assert preview(Config.from_flat(**short | {"kv_cache_memory_bytes": int(fitting)})).max_model_len == 2048

    monkeypatch.setattr(CpuPlatform, "free_ram", lambda _: 5 * GIB)
    with pytest.raises(ValueError, match="--kv-offload-gib 5") as error:
        preview(Config.from_flat(**settings, kv_offload_gib=5.00001))
    assert len(set(_sizes(str(error.value)))) == 2
    most = re.search(r"at most ([\d.]+)", str(error.value))[1]
    assert RamTier.plan(Config.from_flat(kv_offload_gib=float(most)), CpuPlatform())


def test_the_ram_tier_is_part_of_the_plan_on_cpu(folder, monkeypatch):
    settings = {"kv_offload_gib": 2.0, "max_num_seqs": 5000, "model": folder, "device": "cpu"}
    spec = read_model_spec(folder)
    config = Config.from_flat(**settings)
    limits, room = resolve_limits(config, spec, CpuPlatform()), DeviceMemory("cpu", 8 * GIB, 8 * GIB, True)
    without, *_ = memory.plan_memory(config, spec, limits, room, Sizes(GIB, GIB))
    sizes = Sizes(GIB, GIB, offload=2 * GIB)
    plan, *_ = memory.plan_memory(config, spec, limits, room, sizes)
    assert plan.kv_cache == pytest.approx(without.kv_cache - 2 * GIB, abs=plan.bytes_per_block)
    assert plan.weights + plan.activations + plan.offload + plan.kv_cache + plan.reserve == plan.available
    with pytest.raises(ValueError, match=r"no room for a KV cache.*2\.00 GiB \(--kv-offload-gib\)"):
        memory.plan_memory(config, spec, limits, replace(room, available=4 * GIB), sizes)
    monkeypatch.setattr(CpuPlatform, "free_ram", lambda _: 5 * GIB)
    ready = preview(Config.from_flat(**settings, kv_disk="/kv", kv_disk_gib=0.5))
    assert {tier.name: tier.limit for tier in ready.tiers} == {"ram": 2 * GIB, "disk": GIB // 2}
    assert ready.plan.offload == 2 * GIB
    with pytest.raises(ValueError, match=r"--kv-offload-gib 6: 6\.00 GiB are more than the 5\.00 GiB of RAM"):
        preview(Config.from_flat(**settings | {"kv_offload_gib": 6}))


@pytest.mark.parametrize("below", ["", "/new/folder"])
def test_a_folder_for_slots_that_cannot_be_made_is_refused_without_weights(tmp_path, folder, below):
    (tmp_path / "file").write_text("in the way")
    settings = {"model": folder, "device": "cpu"}
    with pytest.raises(ValueError, match=r"--slot-save-path .*file.*: Not a directory"):
        preview(Config.from_flat(**settings, slot_save_path=f"{tmp_path}/file{below}"))
    ready = preview(Config.from_flat(**settings, slot_save_path=f"{tmp_path}/new/folder"))
    assert ready.has_slot_files and not (tmp_path / "new").exists(), "a preview makes no folder"


def test_preview_needs_no_weights(tmp_path, folder):
    shutil.copy(f"{folder}/config.json", tmp_path)  # nothing else
    ready = preview(Config.from_flat(model=str(tmp_path), device="cpu", max_num_seqs=3))
    assert (ready.num_blocks - 1) * ready.block_size == 3 * 2048 and ready.plan.device == "cpu"
    assert ready.plan.weights == 4 * num_parameters(read_model_spec(folder))
    assert {"dtype", "attention_backend", "max_num_batched_tokens", "max_model_len", "num_threads"} <= _choices(
        ready
    ).keys()


@pytest.mark.slow
def test_importing_the_plan_does_not_import_transformers():
    code = "import sys, quire.worker.startup.preview, quire.worker.worker; print('transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


# ---- the platform


@pytest.mark.parametrize(
    "asked, model, dtype",
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("auto", "float16", "bfloat16"),
        ("float16", "float32", "bfloat16"),
    ],
)
def test_dtypes_on_cpu(asked, model, dtype):
    got, reason = CpuPlatform().resolve_dtype(asked, model)
    assert got == getattr(torch, dtype)
    assert ("float16 is slow" in reason) == ("float16" in (asked, model) and dtype == "bfloat16")


def test_unknown_devices_and_dtypes():
    with pytest.raises(ValueError, match="--dtype to one of auto, float32, bfloat16, float16"):
        CpuPlatform().resolve_dtype("int4", "float32")
    with pytest.raises(ValueError, match="--device 'tpu' is not supported"):
        get_platform("tpu")
    if not torch.cuda.is_available():
        assert get_platform("auto").name == "cpu"
        with pytest.raises(ValueError, match="torch finds no CUDA device"):
            get_platform("cuda")


# ---- the machine


def _machine(root, *, self_cgroup, files, available_kib=8_000_000, total_kib=16_000_000):
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(self_cgroup)
    (proc / "meminfo").write_text(
        f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\nHugePages_Total: 0\n"
    )
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_memory_of_a_machine_without_limits(tmp_path):
    assert host.memory(*_machine(tmp_path, self_cgroup="0::/\n", files={})) == (16_000_000 * 1024, 8_000_000 * 1024)


def test_memory_limited_by_cgroup_v2_of_a_parent(tmp_path):
    files = {
        "a/b/memory.max": "max",
        "a/b/memory.current": "5",
        "a/memory.max": str(2 * GIB),
        "a/memory.current": str(GIB),
        "a/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
    }
    assert host.memory(*_machine(tmp_path, self_cgroup="0::/a/b\n", files=files)) == (2 * GIB, 2 * GIB - GIB // 2)


def test_memory_limited_by_cgroup_v1(tmp_path):
    files = {
        "memory/x/memory.limit_in_bytes": str(GIB),
        "memory/x/memory.usage_in_bytes": "1000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "5000",
    }
    proc, cgroup = _machine(tmp_path, self_cgroup="4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n", files=files)
    assert host.memory(proc, cgroup) == (GIB, GIB - 1000)


def test_memory_in_a_container_whose_group_is_not_mounted(tmp_path):
    files = {"memory.max": str(GIB), "memory.current": "1000"}
    assert host.memory(*_machine(tmp_path, self_cgroup="0::/docker/abc\n", files=files)) == (GIB, GIB - 1000)


def test_cores_are_physical_and_within_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "usable_cpus", lambda: {0, 1, 2, 3, 4, 5})
    cpus = tmp_path / "cpus"
    for cpu in range(6):
        (cpus / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 3},{cpu % 3 + 3}\n")
    proc, cgroup = _machine(tmp_path, self_cgroup="0::/a\n", files={"a/cpu.max": "max 100000"})
    assert host.num_cores(proc, cgroup, cpus) == 3
    (cgroup / "a" / "cpu.max").write_text("250000 100000")
    assert host.num_cores(proc, cgroup, cpus) == 2
    (cgroup / "a" / "cpu.max").write_text("50000 100000")
    assert host.num_cores(proc, cgroup, cpus) == 1
    assert host.num_cores(tmp_path / "none", tmp_path / "none", tmp_path / "none") == 6


def test_this_machine():
    total, available = host.memory()
    assert 0 < available <= total and host.num_cores() >= 1


def test_what_other_processes_hold_on_a_gpu_is_not_ours(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)  # so others, and libraries, hold 20
    assert CudaPlatform(0).memory() == (100, 80)


def test_too_little_memory_to_start_is_the_users_to_correct(folder, monkeypatch):
    def fill(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr("quire.worker.startup.load.load_weights", fill)
    with pytest.raises(ValueError, match=r"lower --gpu-memory-utilization.*tried to allocate 2\.00 GiB"):
        Worker(Config.from_flat(model=folder, device="cpu")).initialize(lambda phase, fraction: None)


def test_the_plan_names_the_model_and_its_caches(checkpoint):
    window, full = _plan(checkpoint("mistral")), _plan(checkpoint("qwen3"))
    assert _choices(window)["model"] == (
        "MistralForCausalLM",
        "implementation quire; cache per layer: 3 x window of 24 tokens",
    )
    assert _choices(full)["model"][1].endswith("cache per layer: 3 x full")
