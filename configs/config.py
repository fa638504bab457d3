"""Configuration as frozen sections, one per owner; `Config` is only their record.

Every field is at once a command-line flag (`--max-model-len`), a YAML key (`max_model_len`) and an environment variable
(`QUIRE_MAX_MODEL_LEN`); `configs/options.py` derives all three from the metadata here. Names and meanings are vLLM's
where vLLM has the setting. Values that depend on the machine stay `None` or "auto" here: the process that resolves them
reports the result in `Ready` instead of editing the configuration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.configs import platforms
from quire.configs.fields import opt
from quire.configs.kv_events import read_kv_events
from quire.configs.kv_transfer import KVTransferSettings, read_kv_transfer
from quire.configs.serving import LoraConfig, MediaConfig, ServerConfig
from quire.configs.several import ModelsConfig
from quire.configs.speculation import read_speculation


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Settings of the model and its tokenizer."""

    model: str = opt("", "folder, GGUF file or Hub id", everyday=True)
    tokenizer: str | None = opt(None, "folder or Hub id of the tokenizer (default: the model's)")
    revision: str | None = opt(None, "branch, tag or commit on the Hub", everyday=True)
    download_dir: str | None = opt(None, "folder for files downloaded from the Hub (default: the Hugging Face cache)")
    dtype: str = opt(
        "auto",
        "data type of weights and activations (auto: the checkpoint's)",
        everyday=True,
        choices=("auto", "float32", "bfloat16", "float16"),
        aliases={"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    )
    quantization: str | None = opt(
        None,
        (
            "round the weights to integers at load, in groups of 128 or 64 with one scale each (the output head is "
            "int8 in both cases)"
        ),
        everyday=True,
        choices=("int8", "int4"),
    )
    max_model_len: str = opt(
        "auto",
        "context length in tokens (prompt and output), or auto: the longest that model and memory allow",
        everyday=True,
        metavar="N|auto",
        unit="length",
    )
    pooling: str = opt(
        "auto",
        (
            "how an embedding model makes one vector of a prompt (auto: as the model's modules.json says, or the last "
            "token for models without an output head; none: serve no embeddings; yes-no: rerank by the logit of the "
            "token yes over that of no)"
        ),
        choices=("auto", "none", "yes-no", "lasttoken", "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean"),
        aliases={"last": "lasttoken", "rank": "auto"},
    )
    matryoshka: bool = opt(
        False, "shorten embeddings to the requested dimensions, even if the model's files do not declare support for it"
    )
    load_format: str = opt(
        "auto", "safetensors reads the files; dummy makes random weights", choices=("auto", "safetensors", "dummy")
    )
    model_impl: str = opt(
        "auto",
        (
            "who computes the model: quire, transformers over quire's attention and linear layers, or auto (quire if "
            "it has the architecture)"
        ),
        choices=("auto", "quire", "transformers"),
        aliases={"vllm": "quire", "sglang": "quire", "hf": "transformers"},
    )
    language_model_only: bool = opt(False, "leave out the encoder of a model that reads images, and refuse images")
    trust_remote_code: bool = opt(False, "let transformers run Python code from the model's folder (tokenizer only)")
    seed: int = opt(0, "seed of dummy weights; requests have their own seeds")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the paged KV cache."""

    block_size: int | None = opt(None, "tokens per KV block (default: chosen by the attention backend)", minimum=1)
    gpu_memory_utilization: float = opt(
        0.9,
        "fraction of the device's memory to use; on CPU: of the RAM that is free at start",
        everyday=True,
        above=0,
        maximum=1,
    )
    kv_cache_memory_bytes: int | None = opt(
        None,
        "size of the KV cache in bytes, instead of --gpu-memory-utilization (suffixes K, M, G)",
        metavar="BYTES",
        unit="bytes",
        minimum=1,
    )
    kv_cache_dtype: str = opt(
        "auto",
        (
            "how keys and values are stored: in the type of the activations, or in 8 bits with scales, in half the "
            "memory (auto: as the checkpoint says, else like the activations)"
        ),
        everyday=True,
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "int8"),
        hidden_choices=("fp8_per_token_head", "int8_per_token_head"),
        aliases={
            "fp8_e4m3": "fp8",
            "q8_0": "int8",
            "half": "float16",
            "fp16": "float16",
            "bf16": "bfloat16",
            "fp32": "float32",
        },
    )
    enable_prefix_caching: bool = opt(True, "reuse KV blocks of equal prompt prefixes")
    kv_offload_gib: float | None = opt(
        None,
        (
            "GiB of RAM for blocks that were used again and leave the KV cache, per engine (default: a quarter of the "
            "free RAM on CUDA, 0 on CPU, where the cache is RAM)"
        ),
        minimum=0,
    )
    kv_disk: str | None = opt(
        None,
        (
            "folder for KV blocks that were used again, so that conversations continue after a pause or a restart "
            "without being computed again (default: none)"
        ),
        everyday=True,
        metavar="DIR",
    )
    kv_disk_gib: float = opt(16.0, "maximum GiB of all files in --kv-disk, of all engines that use it", above=0)
    cache_reuse: int = opt(
        0,
        "no effect: KV entries are not reused at other positions any more, because answers differed from computed ones",
        metavar="N",
        minimum=0,
        removed=True,
    )
    slot_save_path: str | None = opt(
        None,
        "folder for the files of llama.cpp's POST /slots/{id}?action=save and restore (default: none)",
        metavar="DIR",
    )
    kv_transfer_config: str | None = opt(
        None,
        (
            "send the blocks of prompts to other servers, or read theirs, as vLLM's JSON: "
            '{"kv_connector": "NixlConnector", "kv_role": "kv_producer" | "kv_consumer" | "kv_both"} (default: off)'
        ),
        metavar="JSON",
        unit="mapping",
        check=read_kv_transfer,
    )
    kv_transfer_host: str | None = opt(
        None, "address at which other servers read blocks (default: kv_ip, 127.0.0.1)", metavar="HOST"
    )
    kv_transfer_port: int | None = opt(
        None,
        "first port of it: each rank of each engine has one (default: kv_port, 5600)",
        minimum=1,
        maximum=65535,
    )
    kv_events_config: str | None = opt(
        None,
        (
            "which blocks are cached, for routers, as vLLM's JSON: "
            '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": ADDRESS, "topic": NAME} '
            "(default: off)"
        ),
        metavar="JSON",
        unit="mapping",
        check=read_kv_events,
    )
    num_gpu_blocks_override: int | None = opt(None, "exact number of KV blocks, for tests", minimum=2)

    @property
    def transfer(self) -> KVTransferSettings:
        """Return the settings for sending KV blocks to other servers and reading theirs."""
        found = read_kv_transfer(self.kv_transfer_config) if self.kv_transfer_config else KVTransferSettings()
        return replace(found, host=self.kv_transfer_host or found.host, port=self.kv_transfer_port or found.port)

    def with_places_of(self, own: CacheConfig) -> CacheConfig:
        """Return the settings with the addresses and folders of `own`, those of another machine. Its port holds if it
        has one.
        """
        port = own.transfer.port
        return replace(
            self,
            kv_transfer_host=own.transfer.host,
            kv_transfer_port=self.transfer.port if port == KVTransferSettings().port else port,
            kv_disk=own.kv_disk,
            slot_save_path=own.slot_save_path,
        )

    def for_engine(self, index: int, num_ranks: int) -> CacheConfig:
        """Return the settings of one of several engines, each of whose ranks has a port."""
        port = self.transfer.port
        return replace(self, kv_transfer_port=port + index * num_ranks) if index else self


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler."""

    max_num_seqs: int | None = opt(None, "maximum number of requests running at once", everyday=True, minimum=1)
    max_num_batched_tokens: int | None = opt(
        None, "maximum number of tokens per step, prefill and decode together", everyday=True, minimum=1
    )
    scheduling_policy: str = opt(
        "fcfs", "order of waiting requests: by arrival, or by the requests' priority", choices=("fcfs", "priority")
    )
    long_prefill_token_threshold: int = opt(
        0, "maximum prompt tokens of one request per step while others run (0: no limit)", minimum=0
    )
    steps_in_flight: int | None = opt(
        None,
        (
            "scheduled steps in flight: 1 is synchronous, 2 overlaps scheduling with the device (default: 1 on CPU, "
            "2 on CUDA)"
        ),
        minimum=1,
        maximum=8,
    )
    speculative_config: str | None = opt(
        None,
        (
            "several tokens of a request per step, as vLLM's JSON: "
            '{"method": "auto"|"ngram"|"suffix"|"grammar"|"mtp"|"eagle3"|"draft_model"|"none", '
            '"model": MODEL of eagle3 and draft_model, "num_speculative_tokens": 1 to 64} '
            "(default: auto where it cannot change a text)"
        ),
        metavar="JSON",
        unit="mapping",
        check=read_speculation,
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Settings of ranks, engines and machines."""

    tensor_parallel_size: int = opt(1, "number of ranks that split every layer", everyday=True, minimum=1)
    pipeline_parallel_size: int = opt(1, "number of ranks that split the model by layers", minimum=1)
    enable_expert_parallel: bool = opt(
        False,
        "divide the experts of a mixture-of-experts model over the tensor-parallel ranks, instead of splitting each",
    )
    data_parallel_size: int = opt(
        1,
        "number of engines, each with the whole model; a request goes to the one that has cached its prefix",
        minimum=1,
    )
    distributed_executor_backend: str | None = opt(
        None,
        (
            "uniproc: the worker runs in the engine process; mp: one process per rank; ray: one actor per rank on a "
            "Ray cluster; MODULE:CLASS: another executor (default: uniproc for one rank, else mp)"
        ),
        choices=("uniproc", "mp", "ray"),
        other_choices=r"[\w.]+:\w+",
    )
    nnodes: int = opt(1, "number of machines over which the ranks of the engine are divided", minimum=1)
    node_rank: int = opt(0, "number of this machine; the first, 0, serves, the others are --headless", minimum=0)
    master_addr: str = opt("127.0.0.1", "address of the first machine, at which the others reach it")
    master_port: int = opt(29501, "port of the first machine for the others", minimum=1, maximum=65535)
    data_parallel_size_local: int | None = opt(
        None, "number of engines on this machine (default: all, or an equal part of --nnodes)", minimum=0
    )
    data_parallel_start_rank: int = opt(0, "number of the first engine of this machine", minimum=0)
    data_parallel_rank: int | None = opt(
        None, "number of this server's only engine; a balancer chooses among the servers", minimum=0
    )
    data_parallel_hybrid_lb: bool = opt(
        False, "serve the engines of this machine alone; a balancer chooses among the servers"
    )
    data_parallel_address: str = opt(
        "127.0.0.1", "address of the machine that serves, at which other machines' engines reach it"
    )
    data_parallel_rpc_port: int = opt(29550, "port of that machine for the engines", minimum=1, maximum=65535)
    debug_check_ranks: bool = opt(
        False, "compare the sampled tokens of all tensor-parallel ranks after every step, and fail if they differ"
    )

    @property
    def world_size(self) -> int:
        """Return the number of ranks of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each machine."""
        return self.world_size // self.nnodes

    @property
    def local_engines(self) -> range:
        """Return the numbers of the engines on this machine; a single engine may have ranks on others."""
        if self.data_parallel_size == 1:
            return range(1)
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        count, start = self.data_parallel_size_local, self.data_parallel_start_rank
        if count is None:
            count = self.data_parallel_size // self.nnodes if self.nnodes > 1 else self.data_parallel_size - start
        start = start or self.node_rank * count
        return range(start, start + count)

    @property
    def has_own_balancer(self) -> bool:
        """Return whether a balancer in front chooses among servers, each with the engines of its machine."""
        return self.data_parallel_hybrid_lb or self.data_parallel_rank is not None

    @property
    def names_machines(self) -> bool:
        """Return whether the settings put ranks or engines on other machines."""
        if self.data_parallel_size > 1 and self.has_own_balancer:
            return False
        return self.nnodes > 1 or len(self.local_engines) < self.data_parallel_size

    @property
    def spans_machines(self) -> bool:
        """Return whether ranks or engines may run on other machines, without shared memory: Ray may use any machine."""
        return self.distributed_executor_backend == "ray" or self.names_machines

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Return the address at which the engines of other machines join."""
        default = type(self)().data_parallel_address
        use_master = self.nnodes > 1 and self.data_parallel_address == default
        return self.master_addr if use_master else self.data_parallel_address, self.data_parallel_rpc_port

    def on_this_machine(self) -> ParallelConfig:
        """Return the settings for the engines of this machine, each of which is whole."""
        if self.data_parallel_size == 1:
            return self
        alone = ParallelConfig()
        names = "nnodes node_rank data_parallel_size_local data_parallel_start_rank data_parallel_rank "
        reset = {name: getattr(alone, name) for name in (names + "data_parallel_hybrid_lb").split()}
        return replace(self, data_parallel_size=len(self.local_engines), **reset)

    def check_nodes(self, headless: bool) -> None:
        """Raise ValueError for machines that do not fit the ranks or each other, and for a system that lacks what
        several machines need.
        """
        if (headless or self.names_machines) and not platforms.can_join_machines():
            raise ValueError(
                "ranks and engines on several machines need Linux: leave out --nnodes, --headless, "
                "--data-parallel-size-local and --data-parallel-start-rank"
            )
        if self.data_parallel_size > 1:
            return self._check_engines(headless)
        for name in ("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank"):
            if (value := getattr(self, name)) not in (None, 1 if name.endswith("local") else 0):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {value} needs --data-parallel-size, the number of all engines")
        if headless and not self.node_rank:
            raise ValueError("--headless needs --node-rank 1 or more: the first node serves")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must be less than --nnodes {self.nnodes}")
        if self.node_rank and not headless:
            raise ValueError(f"--node-rank {self.node_rank} needs --headless: only the first node serves")
        if self.nnodes == 1:
            return
        if self.world_size % self.nnodes:
            raise ValueError(
                f"--nnodes {self.nnodes} does not divide the number of ranks, {self.world_size} "
                "(--tensor-parallel-size times --pipeline-parallel-size)"
            )
        if self.executor != "mp":
            raise ValueError(f"--nnodes {self.nnodes} needs --distributed-executor-backend mp, not {self.executor}")

    def _check_engines(self, headless: bool) -> None:
        """Raise ValueError for engines that no machine has, and for a machine without any."""
        size, mine = self.data_parallel_size, self.local_engines
        if self.nnodes > 1 and self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank {self.node_rank} must be less than --nnodes {self.nnodes}")
        if self.nnodes > 1 and self.data_parallel_size_local is None and size % self.nnodes:
            raise ValueError(
                f"--nnodes {self.nnodes} does not divide --data-parallel-size {size}: an engine of several machines is "
                "the only one"
            )
        if mine.stop > size:
            raise ValueError(
                f"engine {mine.stop - 1} of this machine must be less than --data-parallel-size {size} "
                f"(--data-parallel-start-rank {mine.start}, --data-parallel-size-local {len(mine)})"
            )
        # a machine without engines may serve the engines of one other machine, whose flags say that it has all of them
        has_all = self.data_parallel_size_local == size
        if headless and (self.has_own_balancer or not mine or not (mine.start or has_all)):
            raise ValueError(
                "--headless needs --data-parallel-start-rank 1 or more, or --node-rank: the machine that serves has "
                "the first engines"
            )
        if not headless and mine.start and not self.has_own_balancer:
            raise ValueError(
                f"engine {mine.start} needs --headless: only the machine with the first engines serves "
                "(--data-parallel-hybrid-lb: each serves its own)"
            )
        if self.has_own_balancer and not mine:
            raise ValueError("--data-parallel-size-local 0 has nothing to serve with --data-parallel-hybrid-lb")

    @property
    def executor(self) -> str:
        """Return `distributed_executor_backend`, or its default: uniproc for one rank, else mp."""
        return self.distributed_executor_backend or ("uniproc" if self.world_size == 1 else "mp")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Settings of the device."""

    device: str = opt(
        "auto",
        "auto: CUDA if there is a GPU, else CPU",
        everyday=True,
        choices=("auto", "cpu", "cuda"),
        aliases=dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "cuda0", "cuda:0"), "cuda") | {"none": "cpu"},
    )
    enforce_eager: bool = opt(False, "do not use CUDA graphs")
    record_graphs: str = opt(
        "idle",
        "when CUDA graphs are recorded. start: all before the server is ready; idle: while no request runs, and sizes "
        "that are frequent between steps",
        choices=("start", "idle"),
    )
    attention_backend: str | None = opt(None, "use this attention backend instead of the first that applies")
    deterministic: bool | None = opt(
        None,
        (
            "make a request's tokens and log-probabilities independent of other requests, bit for bit (CPU: bfloat16, "
            "one rank; GPU: weights that are not quantized; default: auto, which is on where it costs less than 5 %)"
        ),
    )
    cpu_level: str = opt(
        "auto",
        "instruction set of the native CPU kernels, one that this CPU has; auto: the widest, or avx2 if that measures "
        "faster",
        choices=("auto", "amx", "avx512bf16", "avx512", "avx2", "bf16", "i8mm", "dotprod", "neon"),
    )
    cpu_activation_bits: str = opt(
        "auto",
        "bits to which vector units round activations for products with quantized weights; auto: 8 for GGUF files (as "
        "llama.cpp does) and weights of 4 bits, else 16, which is finer than bfloat16",
        choices=("auto", "8", "16"),
    )
    torch_profiler_dir: str | None = opt(
        None,
        "folder for the traces of /start_profile and /stop_profile (default: these routes answer 404)",
        metavar="DIR",
    )
    num_threads: int | None = opt(
        None, "number of compute threads on CPU (default: the cores that this process may use)", minimum=1
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Holds all sections. Give a component its own section instead."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)

    @classmethod
    def from_flat(cls, **values: Any) -> Config:
        """Build from field names without their section: `Config.from_flat(model="m", max_num_seqs=4)`.

        Raises ValueError for a name that is in no section.
        """
        sections = {}
        for section in fields(cls):
            section_cls = section.default_factory
            names = [f.name for f in fields(section_cls) if f.name in values]
            sections[section.name] = section_cls(**{name: values.pop(name) for name in names})
        if values:
            raise ValueError(f"unknown setting: {', '.join(sorted(values))}")
        return cls(**sections)

    def with_draft_model(self, folder: str) -> Config:
        """Return the same with the folder of the draft model that `--speculative-config` names."""
        settings = json.loads(self.scheduler.speculative_config) | {"model": folder}
        return replace(self, scheduler=replace(self.scheduler, speculative_config=json.dumps(settings)))
