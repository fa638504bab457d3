"""Lists the flags of SGLang's `launch_server`, current and former."""

from quire.configs.peers import values
from quire.configs.peers.groups import no_effect, refused, renamed, same

_CHOSEN = "kernels are chosen by model and device"
_GRAPHS = "CUDA graphs are recorded as sizes come; --enforce-eager turns them off"
_MACHINES = "several machines: --distributed-executor-backend ray"
_APART = "prompts and answers are computed by the same engines"
_TIERS = "--kv-offload-gib (RAM) and --kv-disk keep blocks that were used again"
_EXPERTS = "--enable-expert-parallel divides the experts over the tensor-parallel ranks"
_FILES = "the model is what its files say; a copy can say otherwise"
_LOG = "one line per request is logged, without its text; --log-level sets how much"
_METRICS = "/metrics and traces have their own names and buckets"
_ANSWERS = "answers have tokens and log-probabilities only"
_WEIGHTS = "weights are read from the model's files, once"
_ORDER = "requests wait in the order of their arrival, or of their priority (--scheduling-policy)"
_DEBUG = "for SGLang's own developers"
_ONE_PROCESS = "--api-server-count adds HTTP processes; each tokenizes in threads"

GROUPS = (
    same(
        "--help -h --config= --device= --language-model-only --attention-backend= --enable-lora --max-lora-rank= "
        "--allowed-media-domains=+ --model= --load-format= --trust-remote-code --revision= --model-impl= --dtype= "
        "--quantization= --kv-cache-dtype= --download-dir= --log-level= --kv-events-config= --otlp-traces-endpoint= "
        "--tensor-parallel-size= --pipeline-parallel-size= --data-parallel-size= --host= --port= --ssl-keyfile= "
        "--ssl-certfile= --ssl-ca-certs= --enable-ssl-refresh --api-key=+ --admin-api-key=+ --served-model-name=+ "
        "--chat-template= --trust-request-chat-template --reasoning-parser= --tool-call-parser="
    ),
    # the model
    renamed("model", "--model-path="),
    renamed("tokenizer", "--tokenizer-path="),
    renamed("max_model_len", "--context-length="),
    no_effect(
        "what a model can do is read from its files; --pooling lets a text model make embeddings",
        "--is-embedding --enable-multimodal",
    ),
    refused("tokenizers are read as their files say", "--tokenizer-mode= --tokenizer-backend=",
        "auto hf fast slow huggingface"),
    refused("the server needs a tokenizer", "--skip-tokenizer-init"),
    refused(_FILES, "--json-model-override-args= --model-config-parser= --hf-chat-template-name= "
        "--completion-template= --decrypted-config-file= --decrypted-draft-config-file= --model-checksum=?", "{} auto"),
    refused(
        "the quantization of a checkpoint is read from its files; --quantization int8 or int4 rounds weights",
        "--torchao-config= --modelopt-quant= --quantize-and-serve --rl-quant-profile=",
    ),
    no_effect("the quantization of a checkpoint is read from its files", "--quantization-param-path= "
        "--modelopt-checkpoint-restore-path= --modelopt-checkpoint-save-path= --modelopt-export-path= "
        "--prefill-kv-cache-dequant-dtype= --qsa-indexer-dtype="),
    no_effect(
        _WEIGHTS,
        "--model-loader-extra-config= --startup-weight-load-mode= --weight-loader-disable-mmap "
        "--weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads= "
        "--weight-loader-drop-cache-after-load --weight-cache-mode= --weight-cache-socket= --weight-cache-timeout= "
        "--weight-version= --enable-draft-weights-cpu-backup --engine-info-bootstrap-port=",
    ),
    refused(
        _WEIGHTS,
        "--custom-weight-loader=+ --remote-instance-weight-loader-seed-instance-ip= "
        "--remote-instance-weight-loader-seed-instance-service-port= "
        "--remote-instance-weight-loader-send-weights-group-ports= --remote-instance-weight-loader-backend= "
        "--remote-instance-weight-loader-start-seed-via-transfer-engine --modelexpress-config= "
        "--delete-ckpt-after-loading --checkpoint-engine-wait-weights-before-ready --enable-memory-saver "
        "--enable-weights-cpu-backup --rl-on-policy-target=",
    ),
    # sizes
    renamed("tensor_parallel_size", "--tp= --tp-size="),
    renamed("pipeline_parallel_size", "--pp= --pp-size="),
    renamed("data_parallel_size", "--dp= --dp-size="),
    renamed("enable_expert_parallel", "--ep= --ep-size= --expert-parallel-size=", values.above_one,
        note="over the tensor-parallel ranks"),
    renamed("max_num_seqs", "--max-running-requests="),
    renamed("max_num_queued_reqs", "--max-queued-requests="),
    renamed("max_num_batched_tokens", "--chunked-prefill-size=", values.chunk, key="chunk"),
    renamed("max_num_batched_tokens", "--max-prefill-tokens=", key="prefill"),
    renamed("block_size", "--page-size="),
    renamed("gpu_memory_utilization", "--mem-fraction-static="),
    renamed("api_server_count", "--tokenizer-worker-num="),
    renamed("seed", "--random-seed="),
    renamed("enable_prefix_caching", "--disable-radix-cache", value=False),
    renamed("deterministic", "--enable-deterministic-inference", value=True),
    renamed("steps_in_flight", "--disable-overlap-schedule", value="1"),
    renamed("scheduling_policy", "--schedule-policy=", values.policy),
    renamed("scheduling_policy", "--enable-priority-scheduling", key="priority", value="priority"),
    renamed("kv_offload_gib", "--hicache-size="),
    renamed("distributed_executor_backend", "--use-ray", value="ray"),
    renamed("step_timeout", "--watchdog-timeout="),
    no_effect("/health answers 503 after --health-stall-timeout without a step", "--soft-watchdog-timeout="),
    refused(
        "of TGI: set --max-model-len (prompt and output together); of SGLang: set --kv-cache-memory-bytes",
        "--max-total-tokens=",
    ),
    same("--nnodes= --node-rank="),
    refused(_MACHINES, "--dist-init-addr= --nccl-init-addr=", "0"),
    no_effect(_MACHINES, "--nccl-port= --dist-timeout= --gated-launch-port="),
    refused("set CUDA_VISIBLE_DEVICES", "--base-gpu-id= --gpu-id-step=", "0"),
    refused(
        "a prompt that is too long is an error: it is never cut", "--allow-auto-truncate"
    ),
    no_effect(
        "ranks split layers by --tensor-parallel-size, and the model by --pipeline-parallel-size",
        "--dcp-size= --decode-context-parallel-size= --dcp-comm-backend= --[no-]dcp-replicate-q-proj "
        "--pp-max-micro-batch-size= --pp-async-batch-depth= --attn-dp-size= --attention-data-parallel-size= "
        "--attn-cp-size= --attention-context-parallel-size= --enable-dp-attention "
        "--enable-dp-attention-local-control-broadcast --enable-dp-lm-head --[no-]enable-tp-lm-head-all-to-all "
        "--enable-attn-tp-input-scattered --enable-shared-experts-attn-tp --shared-experts-tp-size= "
        "--enable-dense-mlp-attn-tp --enable-layernorm-sp --enable-megamoe-for-layernorm-sp --disable-attn-tp-gather "
        "--enable-prefill-cp --cp-strategy= --enable-dsa-cache-layer-split --enable-cp-decode-attn-tp "
        "--enable-kv-cache-sharding --dwdp-size= --enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode= "
        "--enable-prefill-context-parallel --prefill-cp-mode= --enable-p2p-check --disable-custom-all-reduce "
        "--enable-nccl-nvls --enable-symm-mem --enable-mscclpp --enable-torch-symm-mem --enable-scattered-sconv "
        "--pre-warm-nccl --boundary-reduction= --enable-quant-communications "
        "--enforce-disable-flashinfer-allreduce-fusion --enable-flashinfer-allreduce-fusion "
        "--flashinfer-allreduce-fusion-backend= --enable-aiter-allreduce-fusion "
        "--disable-aiter-allreduce-fusion-in-prefill --disable-aiter-allreduce-fusion-in-decode",
    ),
    no_effect("a request goes to the engine that has cached its prefix", "--load-balance-method= "
        "--prefill-round-robin-balance --load-snapshot-publish-interval= --load-publish-endpoint="),
    no_effect(
        _EXPERTS,
        "--moe-dp-size= --moe-data-parallel-size= --moe-dense-tp-size= --moe-a2a-backend= "
        "--enable-w4a4-mxfp4-megamoe --deepep-v2-mode= --deepep-mode= --fuseep-mode= --deepep-config= "
        "--deepep-dispatcher-output-dtype= --flashinfer-a2a-dispatch-type= --ep-num-redundant-experts= "
        "--ep-dispatch-algorithm= --init-expert-location= --enable-eplb --eplb-algorithm= "
        "--eplb-rebalance-num-iterations= --eplb-rebalance-layers-per-chunk= "
        "--eplb-min-rebalancing-utilization-threshold= --expert-distribution-recorder-mode= "
        "--expert-distribution-recorder-buffer-size= --enable-expert-distribution-metrics "
        "--expert-balancedness-report-mode= --elastic-ep-backend= --enable-elastic-expert-backup "
        "--mooncake-ib-device= --enable-waterfill --elastic-ep-join-mode= --elastic-ep-scale-timeout= "
        "--elastic-ep-join-rank-offset= --elastic-ep-initial-size= --max-ep-size= "
        "--disable-flashinfer-cutlass-moe-fp4-allgather --disable-shared-experts-fusion "
        "--enforce-shared-experts-fusion --enable-paged-experts --paged-experts-num-resident= "
        "--enable-two-batch-overlap --enable-single-batch-overlap --tbo-token-distribution-threshold=",
    ),
    no_effect(
        "weights stay on the device: use a smaller model, or share it among GPUs with --tensor-parallel-size",
        "--cpu-offload-gb= --offload-group-size= --offload-num-in-group= --offload-prefetch-step= --offload-mode= "
        "--[no-]ple-offload-embedding --ple-offload-backend= --ple-offload-dir= --kt-weight-path= --kt-method= "
        "--kt-cpuinfer= --kt-threadpool-count= --kt-num-gpu-experts= --kt-max-deferred-experts-per-token=",
    ),
    # memory
    no_effect(
        _TIERS,
        "--enable-hierarchical-cache --enable-hicache --hicache-host-memory-mode= --hicache-ratio= "
        "--hicache-host-memory-fraction= --hicache-write-policy= --hicache-io-backend= --hicache-mem-layout= "
        "--hicache-storage-prefetch-policy= --hicache-storage-prefetch-retry-poll-interval= "
        "--hicache-storage-prefetch-retry-max-attempts= --enable-hisparse --hisparse-config=",
    ),
    refused(
        _TIERS,
        "--hicache-storage-backend= --hicache-storage-backend-extra-config= --enable-unified-cache-external-linker "
        "--unified-cache-external-linker-backend= --unified-cache-external-linker-config= --enable-linker-mla-dedup "
        "--enable-lmcache --lmcache-config-file= --enable-flexkv --flexkv-config-file= --radix-cache-backend=",
    ),
    no_effect(
        "KV blocks are found by their content, kept by use, and sized for the model",
        "--radix-eviction-policy= --radix-eviction-policy-config= --enable-page-major-kv-layout "
        "--enable-unified-memory --enable-session-radix-cache --c128-page-size= --swa-full-tokens-ratio= "
        "--swa-prefix-tails= --disable-hybrid-swa-memory --hybrid-kvcache-ratio --prefill-only-disable-kv-cache "
        "--disable-chunked-prefix-cache --enable-encoder-swa-bounded-replay "
        "--[no-]enable-decoder-swa-bounded-replay --retraction-policy= --enable-streaming-session",
    ),
    no_effect(
        "recurrent states are kept as the model's families need it",
        "--mamba-backend= --mamba-ssm-dtype= --mamba-max-states-per-path= --mamba-scheduler-strategy= "
        "--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds= --mamba-radix-cache-strategy= "
        "--mamba-track-interval= --enable-int8-mamba-checkpoint --int8-mamba-ckpt-size= --linear-attn-backend= "
        "--linear-attn-decode-backend= --linear-attn-prefill-backend= --linear-attn-verify-backend= "
        "--enable-linear-replayssm --linear-replayssm-cache-len= --enable-linear-replayssm-spec "
        "--max-mamba-cache-size= --mamba-full-memory-ratio=",
    ),
    # the schedule
    no_effect(
        "each step holds prompts and answers up to --max-num-batched-tokens",
        "--prefill-decode-interval= --prefill-decode-interval-min-bs= --enable-dynamic-chunking "
        "--prefill-max-requests= --schedule-conservativeness= --num-continuous-decode-steps= "
        "--scheduler-recv-interval= --enable-mixed-chunk --enable-prefill-delayer --prefill-delayer-max-delay-passes= "
        "--prefill-delayer-token-usage-low-watermark= --prefill-delayer-forward-passes-buckets=+ "
        "--prefill-delayer-wait-seconds-buckets=+ --prefill-delayer-queue-min-ratio= --prefill-delayer-max-delay-ms= "
        "--min-free-slots-delay=",
    ),
    no_effect(_ORDER, "--disable-priority-preemption --priority-scheduling-preemption-threshold="),
    refused(_ORDER, "--default-priority-value= --abort-on-priority-when-disabled --schedule-low-priority-values-first"),
    # kernels
    renamed("enforce_eager", "--disable-cuda-graph", value=True),
    no_effect(
        _GRAPHS,
        "--cuda-graph-config= --cuda-graph-backend-decode= --cuda-graph-backend-prefill= --cuda-graph-max-bs= "
        "--cuda-graph-max-bs-decode= --cuda-graph-max-bs-prefill= --cuda-graph-max-seq-len-prefill= --cuda-graph-bs=+ "
        "--cuda-graph-bs-decode=+ --cuda-graph-bs-prefill=+ --cuda-graph-prefill-max-context= --context-bucket= "
        "--disable-prefill-cuda-graph --disable-decode-cuda-graph --disable-cuda-graph-padding "
        "--enable-profile-cuda-graph --enable-cudagraph-gc --debug-cuda-graph --enable-torch-compile "
        "--enable-torch-compile-debug-mode --torch-compile-max-bs= --disable-piecewise-cuda-graph "
        "--enable-piecewise-cuda-graph --enforce-piecewise-cuda-graph --piecewise-cuda-graph-tokens=+ "
        "--piecewise-cuda-graph-compiler= --piecewise-cuda-graph-max-tokens=",
    ),
    no_effect(
        _CHOSEN,
        "--decode-attention-backend= --prefill-attention-backend= --mm-attention-backend= --enable-lean-attention "
        "--enable-nvidia-megakernel --enable-amd-monokernel --monokernel-backend= --sampling-backend= "
        "--fp8-gemm-backend= --fp4-gemm-backend= --bf16-gemm-backend= --dsa-prefill-backend= --dsv4-prefill-backend= "
        "--dsa-triton-union= --dsa-decode-backend= --dsv4-attn-backend= --dsa-paged-mqa-logits-backend= "
        "--dsa-topk-backend= --nsa-prefill-backend= --nsa-decode-backend= --disable-flashinfer-autotune "
        "--flashinfer-autotune-skip-ops=+ --triton-attention-reduce-in-fp32 --triton-attention-num-kv-splits= "
        "--triton-attention-split-tile-size= --flashinfer-mla-disable-ragged --[no-]enable-fused-qk-norm-rope "
        "--enable-deepseek-v4-fp4-indexer --[no-]enable-dsa-fused-indexer --enable-fused-moe-sum-all-reduce "
        "--moe-runner-backend= --flashinfer-mxfp4-moe-precision= --[no-]enable-tf32-matmul --enable-fp32-lm-head "
        "--mlx-enable-sampling",
    ),
    refused("attention sees every token that the model's files say", "--enable-double-sparsity "
        "--ds-channel-config-path= --ds-heavy-channel-num= --ds-heavy-token-num= --ds-heavy-channel-type= "
        "--ds-sparse-decode-threshold= --hierarchical-sparse-attention-extra-config="),
    refused("models write from left to right", "--dllm-algorithm= --dllm-algorithm-config= --[no-]dllm-fdfo"),
    no_effect("threads run on the cores that the process may use: start it with numactl", "--numa-node=+"),
    # drafts
    renamed("speculative_config", "--speculative-algorithm=", key="method"),
    renamed("speculative_config", "--speculative-draft-model-path= --speculative-draft-model=", key="model"),
    renamed("speculative_config", "--speculative-num-draft-tokens=", key="num_speculative_tokens"),
    no_effect(
        "drafts adapt to what they gain; --speculative-config has the settings",
        "--speculative-num-steps= --speculative-eagle-topk= --speculative-draft-load-format= "
        "--speculative-dflash-block-size= --speculative-domino-candidate-pool-size= --speculative-dspark-block-size= "
        "--speculative-dspark-sps-table-path= --speculative-dspark-confidence-sts-path= "
        "--speculative-dspark-align-verify-tokens-to-graph-tier --speculative-use-rejection-sampling "
        "--speculative-use-block-verification --speculative-token-map= --speculative-attention-mode= "
        "--speculative-draft-attention-backend= --speculative-dsa-topk-backend= --speculative-draft-kv-cache-dtype= "
        "--speculative-draft-window-size= --speculative-draft-sink-size= --speculative-moe-runner-backend= "
        "--speculative-moe-a2a-backend= --[no-]speculative-enable-w4a4-mxfp4-megamoe "
        "--speculative-draft-model-quantization= --enable-multi-layer-eagle --speculative-adaptive "
        "--speculative-adaptive-config= --spec-trace-dir= --speculative-ngram-min-bfs-breadth= "
        "--speculative-ngram-max-bfs-breadth= --speculative-ngram-match-type= --speculative-ngram-max-trie-depth= "
        "--speculative-ngram-capacity= --speculative-ngram-external-corpus-path= "
        "--speculative-ngram-external-sam-budget= --speculative-ngram-external-corpus-max-tokens=",
    ),
    refused("drafts never change a text: each token is verified exactly", "--speculative-accept-threshold-single= "
        "--speculative-accept-threshold-acc=", "1 1.0"),
    refused("the draft model is read as its files say", "--speculative-draft-model-revision= --uno-lora-path="),
    refused(_APART, "--decoupled-spec-bind-endpoint= --decoupled-spec-connect-endpoints= --decoupled-spec-rank= "
        "--decoupled-spec-role="),
    # disaggregation
    refused(
        _APART,
        "--disaggregation-mode= --encoder-only --language-only --encoder-urls=+ --encoder-register-urls=+ "
        "--enable-pd-role-switch --enable-adaptive-dispatch-to-encoder",
        "null",
    ),
    no_effect(
        _APART,
        "--disaggregation-decode-allocation-policy= --disaggregation-transfer-backend= "
        "--disaggregation-enable-kv-checksum --disaggregation-bootstrap-port= --disaggregation-ib-device= "
        "--disaggregation-decode-enable-radix-cache --disaggregation-decode-enable-offload-kvcache "
        "--disaggregation-decode-retraction-backup= --num-reserved-decode-tokens= "
        "--disaggregation-decode-extra-slots= --disaggregation-decode-polling-interval= "
        "--disaggregation-decode-host-receive-threshold= --optimistic-prefill-attempts= --encoder-transfer-backend= "
        "--encoder-bootstrap-port= --enable-pdmux --pdmux-config-path= --sm-group-num=",
    ),
    # adapters
    renamed("lora_modules", "--lora-paths=+", values.adapter),
    renamed("max_loras", "--max-loras-per-batch="),
    renamed("max_cpu_loras", "--max-loaded-loras="),
    no_effect(
        "adapters are served in the type of the model, by every rank",
        "--enable-lora-overlap-loading --lora-eviction-policy= --lora-backend= --max-lora-chunk-size= "
        "--[no-]experts-shared-outer-loras --lora-use-virtual-experts --[no-]lora-strict-loading "
        "--lora-drain-wait-threshold=",
    ),
    refused("adapters change the modules that their files name", "--lora-target-modules=+"),
    # images
    renamed("limit_mm_per_prompt", "--limit-mm-data-per-request="),
    renamed("max_image_bytes", "--media-url-max-file-size-mb=", values.scaled(values.MIB, whole=True)),
    renamed("mm_processor_cache_gb", "--mm-preprocess-cache-size-mb=", values.scaled(1 / values.KIB)),
    refused("set --mm-processor-kwargs", "--mm-process-config=", "{}"),
    no_effect(
        "images are decoded and preprocessed alike for all models; --mm-processor-kwargs sizes them",
        "--enable-broadcast-mm-inputs-process --enable-prefix-mm-cache --[no-]mm-enable-dp-encoder "
        "--mm-processor-worker-num= --mm-io-worker-num= --enable-mm-global-cache --mm-global-cache-backend= "
        "--image-processor-backend= --disable-fast-image-processor --mm-feature-transport= "
        "--keep-mm-feature-on-device --enable-precise-embedding-interpolation",
    ),
    refused("images are known by their content", "--trust-mm-content-hashes"),
    # answers
    renamed("generation_config", "--sampling-defaults=", values.sampling_defaults),
    renamed("override_generation_config", "--preferred-sampling-params=", values.json_object),
    no_effect("one library enforces every structure that a request asks for", "--grammar-backend= "
        "--disable-outlines-disk-cache"),
    refused("a grammar allows the white space that its request allows", "--constrained-json-whitespace-pattern= "
        "--constrained-json-disable-any-whitespace --constrained-json-max-whitespace-cnt="),
    refused("code of others is not loaded", "--enable-custom-logit-processor --custom-sigquit-handler= --sidecar= "
        "--sidecar-args= --forward-hooks="),
    refused(
        _ANSWERS,
        "--enable-return-hidden-states --return-hidden-states-mode= --enable-return-aux-hidden-states "
        "--return-aux-hidden-state-layer-ids=+ --enable-return-routed-experts --enable-return-indexer-topk "
        "--return-input-ids --return-output-ids --enable-watermark --watermark-config= --enable-mis "
        "--multi-item-scoring-delimiter= --sampling-mask-max-tokens=",
    ),
    refused("a field of requests: chat_template_kwargs", "--default-chat-template-kwargs=", "{}"),
    refused("thoughts are limited by requests: thinking_token_budget", "--enable-strict-thinking"),
    refused("a field of requests: stream_options.include_usage", "--stream-response-default-include-usage"),
    refused("streams send the tokens that are new", "--incremental-streaming-output --stream-output"),
    no_effect("tokens are sent as they come", "--stream-interval= --batch-notify-size="),
    no_effect("always there", "--enable-cache-report --enable-metrics --enable-metrics-for-all-schedulers "
        "--enable-response-store --strip-thinking-cache"),
    refused("the server has its own routes alone", "--tool-server= --smg-grpc-mode --grpc-mode --grpc-port= "
        "--enable-http2 --smg-http-sidecar-port= --grpc-http-sidecar-port="),
    no_effect("the server has its own routes alone", "--grpc-response-timeout-secs= --http2-max-concurrent-streams= "
        "--http2-initial-connection-window-size= --asr-max-buffer-seconds= --asr-max-concurrent-sessions="),
    # HTTP and the log
    renamed("root_path", "--fastapi-root-path="),
    renamed("batch_dir", "--file-storage-path="),
    no_effect("--log-level sets how much is logged", "--log-level-http="),
    no_effect("the log has a line every --log-stats-interval seconds", "--decode-log-interval="),
    refused("the key of --ssl-keyfile must have no password", "--ssl-keyfile-password="),
    no_effect(
        _ONE_PROCESS,
        "--detokenizer-worker-num= --enable-http-worker-reuseport --enable-dynamic-batch-tokenizer "
        "--dynamic-batch-tokenizer-batch-size= --dynamic-batch-tokenizer-batch-timeout= "
        "--enable-tokenizer-batch-encode --disable-tokenizer-batch-decode",
    ),
    no_effect("the server warms up by itself", "--skip-server-warmup --warmups="),
    no_effect("a server without requests sleeps", "--sleep-on-idle"),
    no_effect(
        _LOG,
        "--log-requests --log-requests-level= --log-requests-format= --log-requests-target=+ "
        "--uvicorn-access-log-exclude-prefixes=+ --show-time-cost --enable-request-time-stats-logging "
        "--gc-warning-threshold-secs=",
    ),
    no_effect("an error is logged with its stack", "--crash-dump-folder="),
    no_effect(
        _METRICS,
        "--enable-mfu-metrics --tokenizer-metrics-custom-labels-header= --tokenizer-metrics-allowed-custom-labels=+ "
        "--extra-metric-labels= --bucket-time-to-first-token=+ --bucket-inter-token-latency=+ "
        "--bucket-e2e-request-latency=+ --prompt-tokens-buckets=+ --generation-tokens-buckets=+ "
        "--collect-tokens-histogram --enable-forward-pass-metrics --forward-pass-metrics-worker-id= "
        "--forward-pass-metrics-ipc-name= --otlp-service-name= --export-metrics-to-file "
        "--export-metrics-to-file-dir=",
    ),
    refused("set --otlp-traces-endpoint", "--enable-trace --trace-modules="),
    no_effect(
        _DEBUG,
        "--gc-threshold=+ --kv-canary= --kv-canary-sweep-interval= --kv-canary-real-data= --enable-nan-detection "
        "--debug-tensor-dump-output-folder= --debug-tensor-dump-layers=+ --debug-tensor-dump-input-file= "
        "--debug-tensor-dump-inject= --msprobe-dump-config= --enable-layerwise-nvtx-marker",
    ),
)  # fmt: skip
