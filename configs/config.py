"""Configuration as frozen sections, one per owner; `Config` is only their record.

Every field is at once a command-line flag (`--max-model-len`), a YAML key (`max_model_len`) and an environment variable
(`QUIRE_MAX_MODEL_LEN`); `configs/options.py` derives all three from the metadata here. Names and meanings are vLLM's
where vLLM has the setting. Values that depend on the machine stay `None` or "auto" here: the process that resolves them
reports the result in `Ready` instead of editing the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.configs.kv_events import read_kv_events
from quire.configs.proxies import read_proxies
from quire.configs.speculation import read_speculation


def opt(
    default: Any,
    help: str,
    *,
    everyday: bool = False,
    choices: tuple[str, ...] | None = None,
    hidden_choices: tuple[str, ...] = (),
    aliases: dict[str, str] | None = None,
    repeat: bool = False,
    metavar: str | None = None,
    unit: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    other_name: str | None = None,
    check: Callable[[Any], object] | None = None,
):
    """A dataclass field that is also a flag. `everyday` fields appear in `--help`, the others in `--help-all`; `repeat`
    fields take several values.

    `unit` is "bytes" (suffixes allowed), "length" (a number of tokens, or auto) or "mapping" (`image=4`, or a JSON
    object; the value is JSON). `minimum`, `above` (exclusive) and `maximum` bound a number. `hidden_choices` are
    accepted but not advertised; `aliases` are other spellings of choices, `other_name` one of the setting itself; a
    `secret` value is never printed; `check` raises ValueError for a wrong value. `configs/options.py` checks all of
    this.
    """
    metadata = {
        "help": help,
        "everyday": everyday,
        "choices": choices,
        "hidden_choices": hidden_choices,
        "aliases": aliases or {},
        "repeat": repeat,
        "metavar": metavar,
        "unit": unit,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "secret": secret,
        "other_name": other_name,
        "check": check,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and its tokenizer, and how to read them."""

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
    )
    matryoshka: bool = opt(
        False, "shorten embeddings to the dimensions asked for, though the model's files do not say that they can be"
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
    )
    language_model_only: bool = opt(False, "leave out the encoder of a model that reads images, and refuse images")
    trust_remote_code: bool = opt(False, "let transformers run Python code from the model's folder (tokenizer only)")
    seed: int = opt(0, "seed of dummy weights; requests have their own seeds")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = opt(None, "tokens per KV block (default: chosen by the attention backend)", minimum=1)
    gpu_memory_utilization: float = opt(
        0.9,
        "fraction of the device's memory to use; on CPU, of the RAM that is free at start",
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
        aliases={"fp8_e4m3": "fp8", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
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
        "least number of equal tokens at another position whose KV entries are reused with shifted rotary embeddings; "
        "answers differ from computed ones (0: off)",
        metavar="N",
        minimum=0,
    )
    slot_save_path: str | None = opt(
        None,
        "folder for the files of llama.cpp's POST /slots/{id}?action=save and restore (default: none)",
        metavar="DIR",
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


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run in a step."""

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
    """The number of processes, and where they run."""

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
            "Ray cluster (default: uniproc for one rank, else mp)"
        ),
        choices=("uniproc", "mp", "ray"),
        hidden_choices=("fake",),
    )
    debug_check_ranks: bool = opt(
        False, "compare the sampled tokens of all tensor-parallel ranks after every step, and fail if they differ"
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """The device and how it is used."""

    device: str = opt("auto", "auto: CUDA if there is a GPU, else CPU", everyday=True, choices=("auto", "cpu", "cuda"))
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
            "make a request's tokens and log-probabilities independent of other requests, bit for bit (CPU, bfloat16, "
            "one rank; default: auto, which is on where it costs less than 5 %)"
        ),
    )
    cpu_level: str = opt(
        "auto",
        "instruction set of the native CPU kernels, one that this CPU has; auto: the widest, or avx2 if that measures "
        "faster",
        choices=("auto", "amx", "avx512bf16", "avx512", "avx2"),
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
class ServerConfig:
    """The HTTP side."""

    host: str = opt("127.0.0.1", "address to listen on", everyday=True)
    port: int = opt(8000, "port to listen on (0: any free one)", everyday=True, minimum=0, maximum=65535)
    api_server_count: int = opt(
        1,
        "number of HTTP processes that share the port, for loads that keep one busy with tokenizing",
        everyday=True,
        minimum=1,
    )
    uds: str | None = opt(None, "listen on this Unix domain socket instead of host and port")
    address_file: str | None = opt(
        None, "write the address of the server to this file, for `quire health`", metavar="FILE"
    )
    root_path: str = opt(
        "",
        "path below which a proxy serves this server (/llm), whether it strips it from requests or not",
        metavar="PATH",
    )
    forwarded_allow_ips: str | None = opt(
        None,
        "addresses and networks of proxies, separated by commas, whose X-Forwarded-For and X-Forwarded-Proto are "
        "believed; * is any (default: $FORWARDED_ALLOW_IPS, or 127.0.0.1)",
        metavar="ADDRESSES",
        check=read_proxies,
    )
    ssl_certfile: str | None = opt(None, "serve HTTPS with this certificate chain, in PEM", metavar="FILE")
    ssl_keyfile: str | None = opt(None, "key of --ssl-certfile (default: in the same file)", metavar="FILE")
    ssl_ca_certs: str | None = opt(None, "certificate authorities of clients' certificates, in PEM", metavar="FILE")
    ssl_cert_reqs: str = opt(
        "none",
        "whether clients need a certificate of --ssl-ca-certs",
        choices=("none", "optional", "required"),
        aliases={"0": "none", "1": "optional", "2": "required"},
    )
    enable_ssl_refresh: bool = opt(True, "read the files of --ssl-* again when they change")
    served_model_name: list[str] = opt(
        [],
        "model names that the API accepts; responses have the first (default: the name of the file or folder)",
        everyday=True,
        repeat=True,
    )
    api_key: list[str] = opt([], "accepted API keys", everyday=True, repeat=True, secret=True)
    api_key_file: str | None = opt(
        None,
        "YAML file of API keys with names, limits and weights, read again when it changes (docs/operations.md)",
        everyday=True,
        metavar="FILE",
    )
    admin_api_key: list[str] = opt(
        [], "API keys that may also use the routes of administrators", repeat=True, secret=True
    )
    key_usage_file: str | None = opt(
        None,
        "SQLite file in which the use of limited keys is counted, which survives a restart (default: below "
        "$XDG_STATE_HOME or ~/.local/state, one for each --api-key-file)",
        metavar="FILE",
    )
    audit_log: str | None = opt(
        None, "append a JSON line to this file for every accepted request: counts and the key's name", metavar="FILE"
    )
    chat_template: str | None = opt(None, "Jinja template, as a file or text, instead of the model's", everyday=True)
    trust_request_chat_template: bool = opt(False, "accept a chat_template in requests; its memory is not limited")
    tool_call_parser: str = opt(
        "auto",
        "format of the model's tool calls; auto: what its chat template shows; none: calls are text",
        everyday=True,
        metavar="NAME|auto|none",
    )
    reasoning_parser: str = opt(
        "auto",
        "format of the model's thoughts; auto: what its chat template shows; none: thoughts are content",
        everyday=True,
        metavar="NAME|auto|none",
    )
    enable_auto_tool_choice: bool = opt(
        False, "accepted for compatibility: a request with tools and no tool_choice has auto anyway"
    )
    generic_tool_prompt: bool | None = opt(
        None,
        "describe tools in a system message, and parse calls as JSON (default: if the model's chat template prints "
        "no tools)",
    )
    exclude_tools_when_tool_choice_none: bool = opt(
        False, "leave the tools out of the prompt of a request with tool_choice none"
    )
    reasoning_field: str = opt(
        "both",
        "name of the field that has the model's thoughts in answers",
        choices=("both", "reasoning_content", "reasoning"),
    )
    generation_config: str = opt(
        "auto",
        "source of default sampling parameters: auto (the model's generation_config.json), vllm (none), or a folder",
    )
    max_logprobs: int = opt(
        20, "maximum number of logprobs per token that a request may ask for (-1: no limit)", minimum=-1
    )
    max_body_size: int | None = opt(
        None,
        (
            "maximum size of a request body in bytes (default: 2M, 32M for models that read images, or 32 per token of "
            "the context if that is more; suffixes K, M, G)"
        ),
        metavar="BYTES",
        unit="bytes",
        minimum=1024,
    )
    max_num_queued_reqs: int | None = opt(
        4096, "refuse requests with 503 if more than this many choices would wait (0: no limit)", minimum=0
    )
    max_num_queued_tokens: int | None = opt(
        2**22,
        (
            "refuse requests with 503 if the prompts of waiting requests would have more than this many tokens, per "
            "frontend (0: no limit)"
        ),
        minimum=0,
    )
    share_prefix_cache: bool = opt(
        False,
        "share cached prefixes between API keys, which reveals to callers what others have sent",
    )
    batch_dir: str | None = opt(
        None,
        "folder for the files and batches of /v1/files and /v1/batches, which survive a restart (default: neither)",
        metavar="DIR",
    )
    batch_disk: int = opt(
        16 << 30,
        "maximum size of all files and results in --batch-dir in bytes (suffixes K, M, G)",
        metavar="BYTES",
        unit="bytes",
        minimum=1 << 20,
    )
    responses_store: str | None = opt(
        None,
        "SQLite file for stored responses and conversations, which survive a restart (default: in memory)",
        metavar="PATH",
    )
    responses_store_size: int = opt(
        256 << 20,
        (
            "maximum size of stored responses and conversations in bytes; the least recently used make room (suffixes "
            "K, M, G)"
        ),
        metavar="BYTES",
        unit="bytes",
        minimum=1 << 20,
    )
    timeout_keep_alive: float = opt(
        620.0,
        (
            "seconds that an idle connection stays open for its client's next request: longer than a balancer in front "
            "keeps it (the longest of the common ones 600)"
        ),
        above=0,
        maximum=86400,
    )
    request_timeout: float = opt(
        0.0,
        "seconds from a request's arrival to the end of its answer, which then ends with finish_reason timeout; "
        "requests may ask for less (0: no limit)",
        minimum=0,
    )
    queue_timeout: float = opt(
        0.0, "seconds that a request may wait in the queue before it gets 503 (0: no limit)", minimum=0
    )
    first_token_timeout: float = opt(
        0.0, "seconds from a request's arrival to its first token before it gets 504 (0: no limit)", minimum=0
    )
    shutdown_timeout: float = opt(
        30.0, "seconds that running requests have to finish after SIGTERM or Ctrl-C", minimum=0
    )
    step_timeout: float = opt(
        300.0,
        ("seconds without a finished step after which the engine is restarted, with its stacks in the log (0: never)"),
        minimum=0,
    )
    health_stall_timeout: float = opt(
        20.0,
        "seconds without a finished step, while requests wait, after which /health and /ready return 503 (0: never)",
        minimum=0,
    )
    sse_keep_alive_interval: float = opt(
        15.0, "seconds without data after which an event stream gets a comment (0: never)", minimum=0
    )
    allowed_hosts: list[str] = opt(
        [],
        (
            "accepted names in the Host header, in addition to addresses and names without a dot; * is any (default: "
            "any, or none when listening on a loopback address)"
        ),
        repeat=True,
    )
    allowed_origins: list[str] = opt(
        [], "origins of web pages that may call the API from a browser; * is any", everyday=True, repeat=True
    )
    ui: bool = opt(True, "answer browsers at / with a page to chat with the model and to watch the server")
    vllm_metrics: bool = opt(True, "serve every metric also under its vllm: name")
    strict_params: bool = opt(
        False, "refuse unknown request fields with 400 instead of answering with a Warning header"
    )
    additional_properties: bool = opt(
        False,
        "objects of structured output may have properties that their schema does not name, unless it says otherwise",
    )
    log_level: str = opt("info", "how much to log", everyday=True, choices=("debug", "info", "warning", "error"))
    otlp_traces_endpoint: str | None = opt(
        None, "send traces to this OTLP address, as http://HOST:4318/v1/traces (extra otel)", metavar="URL"
    )
    log_format: str = opt("text", "how a line of the log is written", choices=("text", "json"))
    slow_step_threshold: float = opt(
        10.0,
        "seconds that a step of the engine may take before a warning in the log says what it contained (0: never)",
        minimum=0,
    )
    log_stats_interval: float = opt(10.0, "seconds between throughput lines in the log (0: no such lines)", minimum=0)


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """Images of requests, for models that read them."""

    allowed_media_domains: list[str] = opt(
        [],
        "hosts from which images may be loaded by http(s) URL: names, *.example.org for those below one, or * for any; "
        "never private addresses (default: none)",
        repeat=True,
        other_name="allow_media_domains",
    )
    allowed_local_media_path: str | None = opt(
        None, "folder below which images may be loaded by file:// URL (default: none may)", metavar="DIR"
    )
    limit_mm_per_prompt: str | None = opt(
        None, 'maximum number of images of a prompt, as image=4 or {"image": 4} (default: 32)', unit="mapping"
    )
    mm_processor_kwargs: str | None = opt(
        None,
        'options of the model\'s image processor, as JSON, such as {"max_pixels": 1003520}; requests may override them',
        unit="mapping",
    )
    mm_processor_cache_gb: float = opt(
        1.0,
        "GiB of preprocessed images to keep, in shared memory, per frontend; images of running requests count; 0: "
        "these alone, at most 1 GiB",
        minimum=0,
    )
    max_image_bytes: int = opt(
        20 << 20,
        "maximum size of an image as it is encoded (suffixes K, M, G)",
        metavar="BYTES",
        unit="bytes",
        minimum=1024,
    )
    max_image_pixels: int = opt(1 << 26, "maximum width times height of an image", minimum=1024, maximum=1 << 27)
    media_timeout: float = opt(5.0, "seconds for loading an image by URL, redirects included", above=0, maximum=600)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters: fine-tunes that share the model's weights."""

    enable_lora: bool = opt(False, "serve LoRA adapters (implied by --lora-modules and --lora-dir)")
    lora_modules: list[str] = opt(
        [],
        'adapters to serve, as name=path or {"name": ..., "path": ..., "base_model_name": ...}: folders in PEFT\'s '
        "format",
        repeat=True,
        metavar="NAME=PATH",
    )
    lora_dir: str | None = opt(
        None,
        "serve every adapter in this folder by the name of its folder; adapters may be loaded from below it later",
        metavar="DIR",
    )
    max_loras: int | None = opt(None, "maximum number of different adapters in a step (default: 8)", minimum=1)
    max_lora_rank: int | None = opt(
        None,
        "maximum rank of an adapter (default: the largest of those at start, at least 64)",
        minimum=1,
        maximum=512,
    )
    max_cpu_loras: int | None = opt(
        None,
        "maximum number of adapters in RAM; others are read again when a request needs them (default: those at start, "
        "at least --max-loras)",
        minimum=1,
    )

    @property
    def enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None


@dataclass(frozen=True, slots=True)
class Config:
    """All sections. Give a component its own section, not this."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

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
        """The same with the folder of the draft model that `--speculative-config` names."""
        settings = json.loads(self.scheduler.speculative_config) | {"model": folder}
        return replace(self, scheduler=replace(self.scheduler, speculative_config=json.dumps(settings)))
