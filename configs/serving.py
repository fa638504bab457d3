"""Defines the sections of the HTTP server, and of the images and adapters that its requests name."""

from __future__ import annotations

from dataclasses import dataclass

from quire.configs.fields import opt
from quire.configs.generation import read_generation
from quire.configs.media_limits import read_media_io, read_media_limits
from quire.configs.origins import read_origins
from quire.configs.proxies import read_proxies


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP server."""

    host: str = opt("127.0.0.1", "address to listen on", everyday=True)
    port: int = opt(8000, "port to listen on (0: any free one)", everyday=True, minimum=0, maximum=65535)
    api_server_count: int = opt(
        1,
        "number of HTTP processes that share the port, for loads that keep one busy with tokenizing",
        everyday=True,
        minimum=1,
    )
    headless: bool = opt(
        False,
        "serve nothing: run ranks for the node at --master-addr, or engines for the server at --data-parallel-address",
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
    override_generation_config: str | None = opt(
        None,
        "default sampling parameters that replace those of --generation-config, as JSON: temperature, top_p, top_k, "
        "min_p, repetition_penalty, max_new_tokens",
        metavar="JSON",
        unit="mapping",
        check=read_generation,
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
        (
            "seconds without a finished step after which the engine is restarted, with its stacks in the log; while it "
            "starts ten times as many (0: never)"
        ),
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
    allow_downloads: bool = opt(
        False, "let POST /api/pull and /api/create download models; with API keys, for administrators"
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
    ui_mcp_origins: list[str] = opt(
        [],
        "origins of MCP servers that people may use from the page at /, such as http://127.0.0.1:9000",
        repeat=True,
        check=read_origins,
    )
    ui: bool = opt(True, "answer browsers at / with a page to chat with the model and to watch the server")
    vllm_metrics: bool = opt(True, "serve every metric also under its vllm: name")
    middleware: list[str] = opt(
        [],
        "import path, as PACKAGE.MODULE.NAME, of an ASGI middleware class or of a function (request, call_next) that "
        "every request passes before all else",
        repeat=True,
        metavar="PATH",
    )
    strict_params: bool = opt(
        False, "refuse unknown request fields with 400 instead of answering with a Warning header"
    )
    strict_flags: bool = opt(
        False,
        "refuse flags and variables of other servers that have no effect here, instead of starting with a warning",
    )
    additional_properties: bool = opt(
        False,
        "objects of structured output may have properties that their schema does not name, unless it says otherwise",
    )
    log_level: str = opt(
        "info",
        "how much to log",
        everyday=True,
        choices=("debug", "info", "warning", "error"),
        aliases={"trace": "debug", "warn": "warning", "critical": "error"},
    )
    otlp_traces_endpoint: str | None = opt(
        None, "send traces to this OTLP address, as http://HOST:4318/v1/traces (extra otel)", metavar="URL"
    )
    enable_log_requests: bool = opt(
        False,
        "log every accepted request with its parameters and counts; its prompt, too, with --log-level debug",
    )
    max_log_len: int | None = opt(
        None, "characters of a prompt, and token ids, that --enable-log-requests logs (default: all)", minimum=0
    )
    log_config_file: str | None = opt(
        None,
        "JSON file for Python's logging.config.dictConfig, applied to the log of every process",
        metavar="FILE",
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
    """Settings for images and videos of requests."""

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
        None,
        'maximum number of images and videos of a prompt, as image=4 or {"image": 4, "video": 1} (default: 32 and 4)',
        unit="mapping",
        check=read_media_limits,
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
    media_io_kwargs: str | None = opt(
        None,
        'how the frames of videos are chosen, as JSON: {"video": {"num_frames": 40, "fps": 2}} (default: as the model '
        "says); the fewer frames count",
        unit="mapping",
        check=read_media_io,
    )
    max_video_bytes: int = opt(
        100 << 20,
        "maximum size of a video file (suffixes K, M, G)",
        metavar="BYTES",
        unit="bytes",
        minimum=1024,
    )
    max_video_seconds: float = opt(3600.0, "maximum length of a video", above=0)
    video_timeout: float = opt(60.0, "seconds for decoding a video", above=0, maximum=3600)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of LoRA adapters: fine-tunes that share the model's weights."""

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
