"""Lists the flags of `vllm serve`, current and former."""

from quire.configs.peers import values
from quire.configs.peers.groups import no_effect, refused, renamed, same

_STRUCTURED = "one library enforces every structure that a request asks for"
_KIND = "what a model can do is read from its files; --pooling lets a text model make embeddings"
_POOLER = "set --pooling; normalize and dimensions are fields of a request"
_MACHINES = "several machines: --distributed-executor-backend ray"
_TIERS = "set --kv-offload-gib (RAM) and --kv-disk"
_ADAPTERS = "adapters are served in the type of the model, by every rank"
_CHOSEN = "kernels are chosen by model and device"
_LOG = "the log has its own form: --log-level, --log-format"
_REQUEST_LOG = "one line per request is logged, without its text; --log-level warning leaves them out"
_MEDIA = "images are decoded and preprocessed alike for all models; --mm-processor-kwargs sizes them"
_MODEL_FILES = "the model is what its files say; a copy can say otherwise"
_CODE = "code of others is not loaded"

GROUPS = (
    same(
        "--help -h --config= --model= --tokenizer= --[no-]trust-remote-code --dtype= --seed= "
        "--allowed-local-media-path= --allowed-media-domains=+ --revision= --max-model-len= --quantization= "
        "--[no-]enforce-eager --max-logprobs= --served-model-name=+ --generation-config= "
        "--override-generation-config= --model-impl= --load-format= --download-dir= --attention-backend= "
        "--reasoning-parser= --distributed-executor-backend= --pipeline-parallel-size= --tensor-parallel-size= "
        "--data-parallel-size= --[no-]enable-expert-parallel --block-size= --gpu-memory-utilization= "
        "--kv-cache-memory-bytes= --kv-cache-dtype= --num-gpu-blocks-override= --[no-]enable-prefix-caching "
        "--[no-]language-model-only --limit-mm-per-prompt= --mm-processor-kwargs= --mm-processor-cache-gb= "
        "--[no-]enable-lora --max-loras= --max-lora-rank= --max-cpu-loras= --log-level= --otlp-traces-endpoint= "
        "--max-num-batched-tokens= --max-num-seqs= --max-num-queued-reqs= --max-num-queued-tokens= "
        "--long-prefill-token-threshold= --scheduling-policy= --speculative-config= --kv-events-config= "
        "--kv-transfer-config= --[no-]enable-log-requests --max-log-len= --log-config-file= --middleware= "
        "--media-io-kwargs= --nnodes= --node-rank= --master-addr= --master-port= --headless "
        "--data-parallel-size-local= --data-parallel-start-rank= --data-parallel-rank= --data-parallel-hybrid-lb "
        "--data-parallel-address= --data-parallel-rpc-port= --no-data-parallel-hybrid-lb "
        "--shutdown-timeout= --[no-]enable-sleep-mode "
        "--lora-modules=+ --chat-template= --[no-]trust-request-chat-template "
        "--[no-]enable-auto-tool-choice --[no-]exclude-tools-when-tool-choice-none --tool-call-parser= "
        "--sse-keep-alive-interval= --host= --port= --uds= --allowed-origins=+ --api-key=+ --ssl-keyfile= "
        "--ssl-certfile= --ssl-ca-certs= --[no-]enable-ssl-refresh --ssl-cert-reqs= --root-path= --api-server-count= "
        "--device="
    ),
    # sizes
    renamed("tensor_parallel_size", "-tp="),
    renamed("pipeline_parallel_size", "-pp="),
    renamed("data_parallel_size", "-dp="),
    renamed("enable_expert_parallel", "-ep", value=True),
    renamed("api_server_count", "-asc="),
    renamed("gpu_memory_utilization", "--device-memory-utilization="),
    renamed("max_num_batched_tokens", "--max-num-scheduled-tokens=", key="scheduled"),
    renamed("max_num_seqs", "--max-num-active-seqs= --max-num-seq="),
    renamed("steps_in_flight", "--no-async-scheduling --disable-async-output-proc", value="1"),
    renamed("kv_offload_gib", "--kv-offloading-size="),
    refused(
        "of vLLM: --distributed-executor-backend ray uses several machines; of llama.cpp: write --n-predict", "-n=",
        "-1",
    ),
    refused(
        f"of vLLM: {_MACHINES}; of llama.cpp: stop is a field of requests",
        "-r=",
    ),
    renamed("data_parallel_rank", "-dpn="),
    renamed("data_parallel_start_rank", "-dpr="),
    renamed("data_parallel_size_local", "-dpl="),
    renamed("data_parallel_address", "-dpa="),
    renamed("data_parallel_rpc_port", "-dpp="),
    renamed("data_parallel_hybrid_lb", "-dph", value="true"),
    no_effect("a server with --data-parallel-rank serves that engine alone", "--data-parallel-external-lb -dpe"),
    refused("start a server with --data-parallel-rank for each port", "--data-parallel-multi-port-external-lb -dpm"),
    no_effect(
        _MACHINES,
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= "
        "--data-parallel-backend= -dpb= --no-data-parallel-external-lb --no-data-parallel-multi-port-external-lb "
        "--data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= "
        "--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= --dp-sync-interval= "
        "--[no-]disable-nccl-for-dp-synchronization --[no-]enable-elastic-ep --elastic-ep-max-dp-size= "
        "--[no-]enable-fault-tolerance --fault-tolerance-config= --[no-]ray-workers-use-nsight "
        "--[no-]enable-nccl-comm-suspend",
    ),
    no_effect(
        "ranks split layers by --tensor-parallel-size, and the model by --pipeline-parallel-size",
        "--decode-context-parallel-size= -dcp= --prefill-context-parallel-size= -pcp= --dcp-comm-backend= "
        "--[no-]dcp-q-replicate --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size= --[no-]enable-hc-sp "
        "--[no-]enable-batch-sharded-sampling --[no-]enable-ep-weight-filter --all2all-backend= --[no-]enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --[no-]enable-eplb --eplb-config= "
        "--expert-placement-strategy= --[no-]disable-custom-all-reduce --[no-]enable-shm-tensor-arena "
        "--max-parallel-loading-workers=",
    ),
    renamed(
        "max_num_batched_tokens", "--ubatch-size=", values.ubatch, key="ubatch",
        note="llama.cpp's; vLLM's micro-batches have no counterpart",
    ),
    refused("set CUDA_VISIBLE_DEVICES", "--device-ids=+"),
    no_effect(
        "threads run on the cores that the process may use: start it with numactl",
        "--[no-]numa-bind --numa-bind-nodes=+ --numa-bind-cpus=+",
    ),
    # memory
    no_effect(
        "prompts are always prefilled in chunks; --max-num-batched-tokens sets their size",
        "--[no-]enable-chunked-prefill --max-num-partial-prefills= --max-long-partial-prefills= "
        "--[no-]long-prefill-token-threshold-adaptive --[no-]disable-chunked-mm-input --prefill-schedule-interval= "
        "--[no-]scheduler-reserve-full-isl",
    ),
    no_effect("a preempted request is computed again instead of swapped", "--swap-space= --preemption-mode="),
    no_effect(
        "weights stay on the device: use a smaller model, or share it among GPUs with --tensor-parallel-size",
        "--cpu-offload-gb= --cpu-offload-params=+ --offload-backend= --offload-group-size= --offload-num-in-group= "
        "--offload-prefetch-step= --offload-params=+",
    ),
    refused(
        _TIERS, "--ec-transfer-config= --ec-manager-config= --kv-offloading-backend=", "native"
    ),
    no_effect(
        "KV blocks are found by their content, kept by use, and sized for the model",
        "--prefix-caching-hash-algo= --prefix-cache-retention-interval= --prefix-match-unit= "
        "--[no-]kv-sharing-fast-prefill --[no-]swa-bounded-replay --[no-]disable-hybrid-kv-cache-manager --watermark= "
        "--[no-]disable-sliding-window --[no-]use-v2-block-manager --[no-]enable-cumem-allocator "
        "--[no-]kv-cache-metrics --kv-cache-metrics-sample= --num-lookahead-slots=",
    ),
    no_effect(
        "recurrent states are kept as the model's families need it",
        "--mamba-backend= --mamba-ssu-algorithm= --[no-]enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds= --mamba-cache-dtype= --mamba-ssm-cache-dtype= --mamba-block-size= "
        "--mamba-cache-mode= --[no-]enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= "
        "--[no-]use-replayssm --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend=",
    ),
    no_effect(
        "without scales in the checkpoint, each head of a token gets its own",
        "--[no-]calculate-kv-scales --kv-cache-dtype-skip-layers=+ --quantization-param-path=",
    ),
    no_effect(
        "a sleeping model is unloaded",
        "--sleep-mode-backend= --[no-]sleep-mode-offload-cudagraph "
        "--sleep-preserve-parameter-names=+",
    ),
    # steps and kernels
    no_effect("the next step is scheduled while one runs: --steps-in-flight", "--async-scheduling "
        "--num-scheduler-steps= --[no-]multi-step-stream-outputs --scheduler-delay-factor="),
    no_effect(
        "torch.compile is not used, and CUDA graphs are recorded as sizes come; --enforce-eager turns them off",
        "--compilation-config= -cc= -O= --optimization-level= --performance-mode= --cudagraph-capture-sizes=+ "
        "--cuda-graph-sizes=+ --max-cudagraph-capture-size= --max-seq-len-to-capture= "
        "--max-context-len-to-capture= --[no-]cudagraph-metrics --[no-]full-cuda-graph",
    ),
    no_effect(
        _CHOSEN,
        "--attention-config= -ac= --kernel-config= --moe-backend= --linear-backend= --sparse-indexer-topk-backend= "
        "--ir-op-priority= --[no-]enable-flashinfer-autotune --[no-]monokernel --[no-]disable-cascade-attn "
        "--[no-]use-fp64-gumbel --jit-monitor-mode= --[no-]jit-monitor-verbose --[no-]enable-trace-replay",
    ),
    no_effect("tokens are sent as they come", "--stream-interval="),
    no_effect("tokenizing runs in threads; --api-server-count adds processes", "--tokenizer-pool-size= "
        "--tokenizer-pool-type= --tokenizer-pool-extra-config= --renderer-num-workers= "
        "--[no-]disable-frontend-multiprocessing"),
    refused(_CODE, "--scheduler-cls= --worker-cls= --worker-extension-cls= --io-processor-plugin= "
        "--reasoning-parser-plugin= --tool-parser-plugin= --additional-config=", "auto {}"),
    # the model
    no_effect(_KIND, "--runner= --task= --convert="),
    refused(_POOLER, "--pooler-config= --override-pooler-config="),
    refused("tokenizers are read as their files say", "--tokenizer-mode=",
        "auto hf fast slow huggingface"),
    refused("tokenizers are read as their files say", "--tokenizer-revision="),
    refused(_MODEL_FILES, "--rope-scaling= --rope-theta="),
    refused(
        _MODEL_FILES, "--hf-overrides= --hf-config-path= --config-format= --model-class-overrides= "
        "--code-revision= --engram-config= --diffusion-config= -dc=", "auto hf {}"
    ),
    refused("the server needs a tokenizer", "--skip-tokenizer-init"),
    no_effect("the server needs a tokenizer", "--no-skip-tokenizer-init"),
    renamed("quantization", "-q=", note="int8 or int4; the quantization of a checkpoint is read from its files"),
    refused("the quantization of a checkpoint is read from its files; --quantization int8 or int4 rounds weights",
        "--quantization-config=", "{}"),
    no_effect("the quantization of a checkpoint is read from its files", "--[no-]allow-deprecated-quantization"),
    refused("set the environment variable HF_TOKEN, which other users do not see", "--hf-token=?"),
    no_effect("safetensors are mapped into memory", "--safetensors-load-strategy= "
        "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= --model-loader-extra-config= "
        "--ignore-patterns=+ --[no-]use-tqdm-on-load --pt-load-map-location="),
    refused("weights do not change while the server runs", "--weight-transfer-config="),
    # drafts
    renamed("speculative_config", "-sc=", key=""),
    renamed("speculative_config", "--spec-method=", key="method"),
    renamed("speculative_config", "--spec-model= --speculative-model=", key="model"),
    renamed("speculative_config", "--spec-tokens= --num-speculative-tokens=", key="num_speculative_tokens"),
    renamed("speculative_config", "--ngram-prompt-lookup-max=", key="prompt_lookup_max"),
    renamed("speculative_config", "--ngram-prompt-lookup-min=", key="prompt_lookup_min"),
    no_effect(
        "drafts adapt to what they gain; --speculative-config has the settings",
        "--speculative-draft-tensor-parallel-size= --speculative-disable-by-batch-size= --speculative-max-model-len= "
        "--[no-]speculative-disable-mqa-scorer --speculative-model-quantization= --per-request-spec-decode-metrics=",
    ),
    # images
    no_effect(
        _MEDIA,
        "--[no-]interleave-mm-strings --[no-]skip-mm-profiling --mm-processor-cache-type= "
        "--mm-shm-cache-max-object-size-mb= --mm-hasher-algorithm= --[no-]mm-encoder-only --mm-encoder-tp-mode= "
        "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= --mm-tensor-ipc= "
        "--mm-processor-device= --mm-ipc-gpu-memory-gb= --[no-]mm-device-do-normalize "
        "--[no-]disable-mm-preprocessor-cache --video-pruning-rate= --video-pruning-method=",
    ),
    refused("prompts are text, token ids and images", "--enable-prompt-embeds --enable-mm-embeds"),
    no_effect("prompts are text, token ids and images", "--no-enable-prompt-embeds --no-enable-mm-embeds"),
    no_effect("requests may always give mm_processor_kwargs", "--trust-request-mm-kwargs"),
    refused("requests may give mm_processor_kwargs within --max-image-pixels", "--no-trust-request-mm-kwargs"),
    # adapters
    no_effect(
        _ADAPTERS,
        "--lora-dtype= --[no-]fully-sharded-loras --[no-]specialize-active-lora --[no-]enable-mixed-moe-lora-format "
        "--[no-]enable-moe-shared-loras --[no-]enable-tower-connector-lora --lora-extra-vocab-size= "
        "--[no-]enable-lora-bias --max-lora-cls-labels= --long-lora-scaling-factors=",
    ),
    refused(_ADAPTERS, "--lora-target-modules=+ --default-mm-loras= --[no-]enable-prompt-adapter "
        "--max-prompt-adapters= --max-prompt-adapter-token= --qlora-adapter-name-or-path="),
    # answers
    no_effect(_STRUCTURED, "--guided-decoding-backend= --[no-]guided-decoding-disable-fallback "
        "--[no-]guided-decoding-disable-any-whitespace --structured-outputs-config= --tool-strict-level="),
    refused(
        "not needed for DeepSeek-OCR: requests choose its n-gram processor with vllm_xargs "
        '{"ngram_size": 30, "window_size": 90}; others are not supported',
        "--logits-processors=+ --logits-processor-pattern=",
    ),
    refused("log-probabilities are those of the model, before temperature and penalties", "--logprobs-mode=",
        "raw_logprobs"),
    refused("answers have tokens and log-probabilities only", "--enable-return-routed-experts --return-sampling-mask "
        "--aux-output-config= --watermark-config="),
    no_effect("answers have tokens and log-probabilities only", "--no-enable-return-routed-experts "
        "--no-return-sampling-mask"),
    refused("a field of requests: chat_template_kwargs", "--default-chat-template-kwargs=", "{}"),
    refused("a field of requests: reasoning_effort", "--reasoning-effort-map= --reasoning-config= "
        "--anthropic-disabled-thinking-effort=", "{} auto"),
    refused("answers have the role assistant", "--response-role=", "assistant"),
    refused("a field of requests: return_tokens_as_token_ids", "--return-tokens-as-token-ids"),
    no_effect("a field of requests: return_tokens_as_token_ids", "--no-return-tokens-as-token-ids"),
    refused("a field of requests: stream_options.include_usage", "--enable-force-include-usage"),
    no_effect("a field of requests: stream_options.include_usage", "--no-enable-force-include-usage"),
    no_effect("the form of a template's contents is read from the template", "--chat-template-content-format="),
    no_effect("always there", "--[no-]enable-prompt-tokens-details --[no-]enable-server-load-tracking "
        "--[no-]enable-request-id-headers --[no-]enable-tokenizer-info-endpoint"),
    refused("times of a request are in /metrics and traces", "--enable-per-request-metrics"),
    no_effect("times of a request are in /metrics and traces", "--no-enable-per-request-metrics"),
    no_effect("answers say version and settings in system_fingerprint", "--fingerprint-mode= --fingerprint-value="),
    refused("the server has its own routes alone", "--tool-server= --[no-]cohere-is-reasoning-model --cohere-format= "
        "--tokens-only --enable-scale-out --grpc --grpc-port="),
    no_effect("the server has its own routes alone", "--no-tokens-only --no-enable-scale-out "
        "--[no-]enable-flash-late-interaction"),
    # HTTP and the log
    refused("pages of the allowed origins may send every header and method", "--allowed-methods= --allowed-headers=",
        '["*"] *'),
    no_effect("API keys are sent in headers, not as cookies", "--[no-]allow-credentials"),
    refused("the ciphers are those of Python's ssl module", "--ssl-ciphers="),
    no_effect("/docs needs no network", "--[no-]enable-offline-docs --no-disable-fastapi-docs"),
    refused("/docs and /openapi.json are always served, and need a key if there are keys", "--disable-fastapi-docs"),
    no_effect("sizes of headers have fixed limits", "--h11-max-incomplete-event-size= --h11-max-header-count="),
    no_effect("--log-level sets how much is logged", "--uvicorn-log-level="),
    renamed("log_stats_interval", "--disable-log-stats", value="0"),
    no_effect("a line of throughput is logged every --log-stats-interval", "--no-disable-log-stats "
        "--[no-]aggregate-engine-logging"),
    no_effect(
        _REQUEST_LOG,
        "--[no-]disable-log-requests --[no-]disable-uvicorn-access-log "
        "--disable-access-log-for-endpoints= --[no-]enable-log-outputs --[no-]enable-log-deltas "
        "--[no-]enable-logging-iteration-details",
    ),
    no_effect(_LOG, "--logging-config= --[no-]log-error-stack"),
    no_effect(
        "/metrics and traces have their own names and buckets",
        "--show-hidden-metrics-for-version= --collect-detailed-traces=+ --custom-histogram-buckets= "
        "--[no-]enable-layerwise-nvtx-tracing --[no-]enable-mfu-metrics",
    ),
    refused("set --torch-profiler-dir", "--profiler-config=", "{}"),
    no_effect("a stalled engine is restarted after --step-timeout", "--watchdog-config="),
    # variables
    renamed("api_key", "VLLM_API_KEY", values.words),
    renamed("log_level", "VLLM_LOGGING_LEVEL", str.lower),
    renamed("log_config_file", "VLLM_LOGGING_CONFIG_PATH"),
    renamed("kv_transfer_host", "VLLM_NIXL_SIDE_CHANNEL_HOST"),
    renamed("kv_transfer_port", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
    renamed("kv_cache_memory_bytes", "VLLM_CPU_KVCACHE_SPACE", values.gibibytes),
    renamed("timeout_keep_alive", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    no_effect("administrators may load adapters while the server runs",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    no_effect("an unknown QUIRE_ variable always ends the start", "--[no-]fail-on-environ-validation"),
)  # fmt: skip
