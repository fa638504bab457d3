"""Lists the flags of llama-server, current and former, and its LLAMA_ARG_ variables."""

from quire.configs.peers import values
from quire.configs.peers.groups import no_effect, refused, renamed, same

_REQUEST = "a field of requests; the server has no default for it"
_ONE_DEVICE = "the whole model runs on one kind of device: set --device cpu or --device cuda"
_ROPE = "the context is extended as the model's files say; a copy of the model can say otherwise"
_AGENT = "the server runs no tools: clients do"
_VIDEO = "videos are not supported"
_MMPROJ = "GGUF files of image encoders are not supported: serve the model's safetensors"
_DRAFT_TUNING = "drafts adapt to what they gain; --speculative-config has the settings"

GROUPS = (
    same(
        "--help -h --model= --host= --port= --seed= --device= --pooling= --ui --no-ui --api-key= --api-key-file= "
        "--cache-reuse= --slot-save-path= --chat-template= --alias= --models-dir= --models-max="
    ),
    # the model
    renamed("model", "-m= LLAMA_ARG_MODEL"),
    renamed("model", "-hf= -hfr= --hf-repo= LLAMA_ARG_HF_REPO", key="repository"),
    renamed("model", "-hff= --hf-file= LLAMA_ARG_HF_FILE", key="file", note="a file of the repository of -hf"),
    renamed("served_model_name", "-a= LLAMA_ARG_ALIAS", values.words),
    renamed("models_dir", "LLAMA_ARG_MODELS_DIR"),
    renamed("models_file", "--models-preset= LLAMA_ARG_MODELS_PRESET"),
    renamed("models_max", "LLAMA_ARG_MODELS_MAX"),
    no_effect("models load when a request names them", "--models-autoload LLAMA_ARG_MODELS_AUTOLOAD"),
    refused(
        "download the file and give its path, or the Hub id", "-mu= --model-url= LLAMA_ARG_MODEL_URL -dr= "
        "--docker-repo= LLAMA_ARG_DOCKER_REPO"
    ),
    refused("set the environment variable HF_TOKEN, which other users do not see", "-hft= --hf-token=?"),
    refused("set the environment variable HF_HUB_OFFLINE=1", "--offline LLAMA_ARG_OFFLINE"),
    refused(
        "name the model, as in `quire serve ORG/NAME-GGUF:Q8_0`",
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
        "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default "
        "--vision-gemma-4b-default --vision-gemma-12b-default",
    ),
    no_effect("models have no tags", "--tags= LLAMA_ARG_TAGS"),
    refused("models load when a request names them", "--no-models-autoload"),
    # memory and batches
    renamed(
        "max_model_len", "-c= --ctx-size= LLAMA_ARG_CTX_SIZE", values.unless("0"),
        note="of each request, not divided among slots",
    ),
    renamed("max_num_seqs", "-np= --parallel= LLAMA_ARG_N_PARALLEL", values.unless("-1", "0")),
    renamed(
        "max_num_batched_tokens", "-b= --batch-size= LLAMA_ARG_BATCH", key="batch", note="the smaller of -b and -ub"
    ),
    renamed(
        "max_num_batched_tokens", "-ub= --ubatch-size= LLAMA_ARG_UBATCH", values.ubatch, key="ubatch",
        note="the smaller of -b and -ub",
    ),
    renamed(
        "kv_cache_dtype", "-ctk= --cache-type-k= LLAMA_ARG_CACHE_TYPE_K", values.cache_type, key="k",
        note="q8_0 is int8, for keys and values alike",
    ),
    renamed(
        "kv_cache_dtype", "-ctv= --cache-type-v= LLAMA_ARG_CACHE_TYPE_V", values.cache_type, key="v",
        note="q8_0 is int8, for keys and values alike",
    ),
    renamed("kv_offload_gib", "-cram= --cache-ram= LLAMA_ARG_CACHE_RAM", values.ram_cache, note="MiB there, GiB here"),
    renamed("enable_prefix_caching", "LLAMA_ARG_CACHE_PROMPT", values.switch),
    renamed("enable_prefix_caching", "--no-cache-prompt", value=False),
    renamed("cache_reuse", "LLAMA_ARG_CACHE_REUSE"),
    renamed("slot_save_path", "LLAMA_ARG_SLOT_SAVE_PATH"),
    no_effect("prompts are always kept and found by their content", "--cache-prompt --cache-idle-slots "
        "--no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS -sps= --slot-prompt-similarity="),
    no_effect(
        "KV blocks are shared by all requests, and allocated as they grow",
        "-kvu --kv-unified -no-kvu --no-kv-unified LLAMA_ARG_KV_UNIFIED --kv-unified-per-slot= "
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT -dt= --defrag-thold= LLAMA_ARG_DEFRAG_THOLD --swa-full LLAMA_ARG_SWA_FULL "
        "-ctxcp= --ctx-checkpoints= --swa-checkpoints= LLAMA_ARG_CTX_CHECKPOINTS -cms= --checkpoint-min-step= "
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    ),
    no_effect("requests are always batched as they come", "-cb --cont-batching LLAMA_ARG_CONT_BATCHING"),
    no_effect("requests are always batched as they come: --max-num-seqs 1 runs one at a time",
        "-nocb --no-cont-batching"),
    refused(
        "a request that reaches the end of the context ends: text is never cut out of it",
        "--context-shift LLAMA_ARG_CONTEXT_SHIFT",
        "0 false off disabled",
    ),
    no_effect("text is never cut out of the context", "--no-context-shift --keep="),
    no_effect(
        "the context and the batch are fitted into the memory (--gpu-memory-utilization)",
        "-fit=? --fit=? LLAMA_ARG_FIT -fitt= --fit-target= LLAMA_ARG_FIT_TARGET -fitc= --fit-ctx= LLAMA_ARG_FIT_CTX",
    ),
    # devices
    renamed("device", "-ngl= --gpu-layers= --n-gpu-layers= LLAMA_ARG_N_GPU_LAYERS", values.layers,
        note="0 is --device cpu; all layers run on one kind of device"),
    renamed("device", "-dev= LLAMA_ARG_DEVICE"),
    renamed("num_threads", "-t= --threads= LLAMA_ARG_THREADS", values.unless("-1", "0")),
    no_effect("prompts and answers use the threads of --num-threads", "-tb= --threads-batch="),
    no_effect(
        "the attention backend is chosen automatically; --attention-backend forces one",
        "-fa=? --flash-attn=? LLAMA_ARG_FLASH_ATTN",
    ),
    no_effect(
        _ONE_DEVICE,
        "-kvo --kv-offload -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD --no-host LLAMA_ARG_NO_HOST -cmoe --cpu-moe "
        "LLAMA_ARG_CPU_MOE -ncmoe= --n-cpu-moe= LLAMA_ARG_N_CPU_MOE -ncffn= --n-cpu-ffn= LLAMA_ARG_N_CPU_FFN "
        "--moe-cache-mib= LLAMA_ARG_MOE_CACHE_MIB -ot= --override-tensor= LLAMA_ARG_OVERRIDE_TENSOR --op-offload "
        "--no-op-offload",
    ),
    no_effect(
        "--tensor-parallel-size splits every layer evenly, --pipeline-parallel-size the model by layers",
        "-sm= --split-mode= LLAMA_ARG_SPLIT_MODE -ts= --tensor-split= LLAMA_ARG_TENSOR_SPLIT",
    ),
    refused("set CUDA_VISIBLE_DEVICES", "-mg= --main-gpu= LLAMA_ARG_MAIN_GPU", "0"),
    refused("--distributed-executor-backend ray uses several machines", "--rpc= LLAMA_ARG_RPC"),
    no_effect(
        "threads run on the cores that the process may use: start it with taskset, nice or numactl",
        "-C= --cpu-mask= -Cr= --cpu-range= --cpu-strict= --prio= --poll= -Cb= --cpu-mask-batch= -Crb= "
        "--cpu-range-batch= --cpu-strict-batch= --prio-batch= --poll-batch= --numa= LLAMA_ARG_NUMA",
    ),
    no_effect(
        "files are mapped into memory, and their weights arranged for the device",
        "-lm= --load-mode= LLAMA_ARG_LOAD_MODE -lzm= --lazy-mode= LLAMA_ARG_LAZY_MODE --mlock LLAMA_ARG_MLOCK --mmap "
        "--no-mmap LLAMA_ARG_MMAP -dio --direct-io -ndio --no-direct-io LLAMA_ARG_DIO --repack -nr --no-repack "
        "LLAMA_ARG_REPACK --check-tensors",
    ),
    # defaults of requests
    renamed(
        "override_generation_config", "--temp= --temperature= LLAMA_ARG_TEMPERATURE", values.number, key="temperature"
    ),
    renamed("override_generation_config", "--top-k= LLAMA_ARG_TOP_K", values.number, key="top_k"),
    renamed("override_generation_config", "--top-p= LLAMA_ARG_TOP_P", values.number, key="top_p"),
    renamed("override_generation_config", "--min-p= LLAMA_ARG_MIN_P", values.number, key="min_p"),
    renamed(
        "override_generation_config", "--repeat-penalty= LLAMA_ARG_REPEAT_PENALTY", values.number,
        key="repetition_penalty",
    ),
    renamed(
        "override_generation_config", "--predict= --n-predict= LLAMA_ARG_N_PREDICT", values.limit, key="max_new_tokens"
    ),
    refused(
        "of llama.cpp: write --n-predict; of vLLM: --distributed-executor-backend ray uses several machines",
        "-n=", "-1",
    ),
    refused(
        _REQUEST,
        "--presence-penalty= LLAMA_ARG_PRESENCE_PENALTY --frequency-penalty= LLAMA_ARG_FREQUENCY_PENALTY "
        "--xtc-probability= --dynatemp-range= --mirostat= --dry-multiplier=", "0 0.0 0.00",
    ),
    refused(_REQUEST, "--top-nsigma= --top-n-sigma= --adaptive-target= -s= --reasoning-budget= LLAMA_ARG_THINK_BUDGET "
        "--repeat-last-n=", "-1 -1.0 -1.00"),
    refused(_REQUEST, "--typical= --typical-p= --xtc-threshold=", "1 1.0 1.00"),
    refused(
        _REQUEST,
        "--samplers= --sampler-seq= --sampling-seq= --ignore-eos -l= --logit-bias= --grammar= --grammar-file= -j= "
        "--json-schema= -jf= --json-schema-file= --dry-base= --dry-allowed-length= --dry-penalty-last-n= "
        "--dry-sequence-breaker= --adaptive-decay= --dynatemp-exp= --mirostat-lr= --mirostat-ent= -r= "
        "--reverse-prompt= -sp --special --spm-infill",
    ),
    no_effect("requests are sampled in batches", "-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING"),
    refused(
        "a field of requests: chat_template_kwargs",
        "--chat-template-kwargs= LLAMA_ARG_CHAT_TEMPLATE_KWARGS", "{}",
    ),
    refused(
        "a field of requests: reasoning_effort, or chat_template_kwargs",
        "-rea=? --reasoning=? LLAMA_ARG_REASONING --reasoning-effort= LLAMA_ARG_REASONING_EFFORT", "auto default",
    ),
    refused(
        "the template decides which earlier thoughts it shows",
        "--reasoning-budget-message= LLAMA_ARG_THINK_BUDGET_MESSAGE --no-reasoning-preserve",
    ),
    no_effect(
        "the template decides which earlier thoughts it shows",
        "--reasoning-preserve LLAMA_ARG_REASONING_PRESERVE",
    ),
    renamed("reasoning_parser", "--reasoning-format= LLAMA_ARG_THINK", values.reasoning_format,
        note="none leaves thoughts in the content"),
    renamed("chat_template", "--chat-template-file= LLAMA_ARG_CHAT_TEMPLATE_FILE LLAMA_ARG_CHAT_TEMPLATE"),
    no_effect("chat templates are always Jinja", "--jinja LLAMA_ARG_JINJA"),
    refused("chat templates are always Jinja", "--no-jinja"),
    refused(
        "set --tool-call-parser none and --reasoning-parser none",
        "--skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING", "0 false off disabled",
    ),
    no_effect("tool calls and thoughts are always parsed", "--no-skip-chat-parsing"),
    refused(
        "a field of requests: continue_final_message", "--prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT",
        "0 false off disabled",
    ),
    no_effect("only requests with continue_final_message continue an answer", "--no-prefill-assistant"),
    # kinds of models
    no_effect(
        "what a model can do is read from its files; --pooling lets a text model make embeddings",
        "--embedding --embeddings LLAMA_ARG_EMBEDDINGS --rerank --reranking LLAMA_ARG_RERANKING",
    ),
    renamed("pooling", "LLAMA_ARG_POOLING"),
    refused("embeddings are normalized as the model's files say, or as the request asks", "--embd-normalize=", "2"),
    refused(_MMPROJ, "-mm= --mmproj= LLAMA_ARG_MMPROJ -mmu= --mmproj-url= LLAMA_ARG_MMPROJ_URL"),
    no_effect(_MMPROJ, "--no-mmproj --mmproj-auto --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO --mmproj-offload "
        "--no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD -mmdev= --mmproj-device= --mtmd-batch-max-tokens= "
        "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    refused("set --mm-processor-kwargs", "--image-min-tokens= LLAMA_ARG_IMAGE_MIN_TOKENS --image-max-tokens= "
        "LLAMA_ARG_IMAGE_MAX_TOKENS"),
    no_effect(_VIDEO, "--video-fps= LLAMA_ARG_VIDEO_FPS --video-timestamp-interval= "
        "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL --video-ffmpeg-dir= LLAMA_ARG_VIDEO_FFMPEG_DIR"),
    renamed("allowed_local_media_path", "--media-path="),
    refused(
        "adapters change the requests that name them: set --lora-modules NAME=FILE",
        "--lora= --lora-scaled= --lora-init-without-apply",
    ),
    refused("control vectors are not supported", "--control-vector= --control-vector-scaled= "
        "--control-vector-layer-range="),
    refused(
        _ROPE,
        "--rope-scaling= LLAMA_ARG_ROPE_SCALING_TYPE --rope-scale= LLAMA_ARG_ROPE_SCALE --rope-freq-base= "
        "LLAMA_ARG_ROPE_FREQ_BASE --rope-freq-scale= LLAMA_ARG_ROPE_FREQ_SCALE --yarn-orig-ctx= "
        "LLAMA_ARG_YARN_ORIG_CTX --yarn-ext-factor= LLAMA_ARG_YARN_EXT_FACTOR --yarn-attn-factor= "
        "LLAMA_ARG_YARN_ATTN_FACTOR --yarn-beta-slow= LLAMA_ARG_YARN_BETA_SLOW --yarn-beta-fast= "
        "LLAMA_ARG_YARN_BETA_FAST -gan= --grp-attn-n= LLAMA_ARG_GRP_ATTN_N -gaw= --grp-attn-w= LLAMA_ARG_GRP_ATTN_W",
    ),
    refused("the model is what its files say; a copy can say otherwise", "--override-kv="),
    # HTTP
    renamed("host", "LLAMA_ARG_HOST"),
    renamed("port", "LLAMA_ARG_PORT"),
    renamed("api_key", "LLAMA_API_KEY", values.words),
    renamed("api_key_file", "LLAMA_ARG_API_KEY_FILE"),
    renamed("ssl_keyfile", "--ssl-key-file= LLAMA_ARG_SSL_KEY_FILE"),
    renamed("ssl_certfile", "--ssl-cert-file= LLAMA_ARG_SSL_CERT_FILE"),
    renamed("root_path", "--api-prefix= LLAMA_ARG_API_PREFIX"),
    renamed("allowed_origins", "--cors-origins= LLAMA_ARG_CORS_ORIGINS", values.origins),
    renamed("sse_keep_alive_interval", "--sse-ping-interval= LLAMA_ARG_SSE_PING_INTERVAL", values.interval),
    renamed("ui", "--webui", value=True),
    renamed("ui", "--no-webui", value=False),
    renamed("ui", "LLAMA_ARG_UI LLAMA_ARG_WEBUI", values.switch),
    no_effect("the page keeps its settings in the browser", "--ui-config= --webui-config= LLAMA_ARG_UI_CONFIG "
        "--ui-config-file= --webui-config-file= LLAMA_ARG_UI_CONFIG_FILE"),
    refused("the server serves its own page alone", "--path= LLAMA_ARG_STATIC_PATH"),
    refused("pages of the allowed origins may send every header and method", "--cors-methods= LLAMA_ARG_CORS_METHODS "
        "--cors-headers= LLAMA_ARG_CORS_HEADERS", "*"),
    no_effect("API keys are sent in headers, not as cookies", "--cors-credentials --no-cors-credentials "
        "LLAMA_ARG_CORS_CREDENTIALS"),
    refused(_AGENT, "--tools= LLAMA_ARG_TOOLS --tools-runtime= LLAMA_ARG_TOOLS_RUNTIME --mcp-servers-config= "
        "LLAMA_ARG_MCP_SERVERS_CONFIG --mcp-servers-json= LLAMA_ARG_MCP_SERVERS_JSON -ag --agent --ui-mcp-proxy "
        "--webui-mcp-proxy LLAMA_ARG_AGENT LLAMA_ARG_UI_MCP_PROXY", "0 false off disabled none"),
    no_effect(_AGENT, "-no-ag --no-agent --no-ui-mcp-proxy --no-webui-mcp-proxy"),
    no_effect("connections have no limit of time while an answer runs; --request-timeout sets one",
        "-to= --timeout= LLAMA_ARG_TIMEOUT"),
    no_effect("--api-server-count adds HTTP processes, which share the port", "--threads-http= LLAMA_ARG_THREADS_HTTP "
        "--reuse-port LLAMA_ARG_REUSE_PORT"),
    no_effect("/metrics, /slots and /props are always served, with a key if there are keys", "--metrics "
        "LLAMA_ARG_ENDPOINT_METRICS --slots LLAMA_ARG_ENDPOINT_SLOTS"),
    refused("/slots is always served, and needs a key if there are keys", "--no-slots"),
    refused("settings do not change while the server runs", "--props LLAMA_ARG_ENDPOINT_PROPS",
        "0 false off disabled"),
    no_effect("the model stays loaded", "--sleep-idle-seconds= --warmup --no-warmup"),
    # the log
    renamed("log_level", "-v --verbose --log-verbose", value="debug"),
    renamed("log_level", "-lv= --verbosity= --log-verbosity= LLAMA_ARG_LOG_VERBOSITY", values.level),
    renamed("log_level", "--log-disable", value="error"),
    renamed("log_format", "--log-jsonl", value="json"),
    renamed("log_format", "--no-log-jsonl", value="text"),
    no_effect("set --log-format json", "LLAMA_ARG_LOG_JSONL"),
    no_effect("the log goes to stderr, always with times; the shell's 2> sends it to a file",
        "--log-file= LLAMA_ARG_LOG_FILE --log-colors=? LLAMA_ARG_LOG_COLORS --log-prefix --no-log-prefix "
        "LLAMA_ARG_LOG_PREFIX --log-timestamps --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS --log-enable"),
    no_effect("prompts are not logged", "--log-prompts-dir="),
    no_effect("metrics have the times", "--perf --no-perf LLAMA_ARG_PERF -e --escape --no-escape"),
    refused("`quire --version`, `quire collect-env` and `quire completion bash` print these", "--version -cl "
        "--cache-list --completion-bash --list-devices --usage"),
    # drafts
    renamed("speculative_config", "--spec-type= LLAMA_ARG_SPEC_TYPE", key="method"),
    renamed("speculative_config", "--spec-default", key="method", value="auto"),
    renamed(
        "speculative_config",
        "--spec-draft-model= -md= --model-draft= LLAMA_ARG_SPEC_DRAFT_MODEL --spec-draft-hf= -hfd= -hfrd= "
        "--hf-repo-draft= LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        key="model",
    ),
    renamed(
        "speculative_config",
        "--spec-draft-n-max= LLAMA_ARG_SPEC_DRAFT_N_MAX --draft= --draft-n= --draft-max= LLAMA_ARG_DRAFT_MAX "
        "--spec-ngram-mod-n-max= --spec-ngram-simple-size-m= --spec-ngram-map-k-size-m= --spec-ngram-map-k4v-size-m= "
        "--spec-ngram-size-m=",
        key="num_speculative_tokens",
    ),
    renamed(
        "speculative_config",
        "--spec-draft-n-min= LLAMA_ARG_SPEC_DRAFT_N_MIN --draft-min= --draft-n-min= LLAMA_ARG_DRAFT_MIN",
        key="draft_min",
        note="drafts of any length are verified: 0 or 1",
    ),
    no_effect(
        _DRAFT_TUNING,
        "--spec-draft-p-split= --draft-p-split= LLAMA_ARG_SPEC_DRAFT_P_SPLIT --spec-draft-p-min= --draft-p-min= "
        "LLAMA_ARG_SPEC_DRAFT_P_MIN --spec-draft-backend-sampling --no-spec-draft-backend-sampling "
        "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING --spec-draft-sampling= LLAMA_ARG_SPEC_DRAFT_SAMPLING "
        "--spec-ngram-mod-n-min= --spec-ngram-mod-n-match= --spec-ngram-simple-size-n= --spec-ngram-simple-min-hits= "
        "--spec-ngram-map-k-size-n= --spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= "
        "--spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= --spec-ngram-min-hits= -lcs= --lookup-cache-static= -lcd= "
        "--lookup-cache-dynamic=",
    ),
    no_effect(
        "the draft model runs where the model does, with the same threads and type of keys and values",
        "--spec-draft-type-k= -ctkd= --cache-type-k-draft= LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K --spec-draft-type-v= "
        "-ctvd= --cache-type-v-draft= LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V --spec-draft-threads= -td= --threads-draft= "
        "--spec-draft-threads-batch= -tbd= --threads-batch-draft= --spec-draft-cpu-mask= -Cd= --cpu-mask-draft= "
        "--spec-draft-cpu-range= -Crd= --cpu-range-draft= --spec-draft-cpu-strict= --cpu-strict-draft= "
        "--spec-draft-prio= --prio-draft= --spec-draft-poll= --poll-draft= --spec-draft-cpu-mask-batch= -Cbd= "
        "--cpu-mask-batch-draft= --spec-draft-cpu-strict-batch= --cpu-strict-batch-draft= --spec-draft-prio-batch= "
        "--prio-batch-draft= --spec-draft-poll-batch= --poll-batch-draft= --spec-draft-override-tensor= -otd= "
        "--override-tensor-draft= --spec-draft-cpu-moe -cmoed --cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_CPU_MOE "
        "--spec-draft-n-cpu-moe= --spec-draft-ncmoe= -ncmoed= --n-cpu-moe-draft= LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE "
        "--spec-draft-device= -devd= --device-draft= --spec-draft-ngl= -ngld= --gpu-layers-draft= "
        "--n-gpu-layers-draft= LLAMA_ARG_N_GPU_LAYERS_DRAFT -cd= --ctx-size-draft= LLAMA_ARG_CTX_SIZE_DRAFT",
    ),
    refused("for measuring with made-up drafts", "--spec-synth-len= LLAMA_ARG_SPEC_SYNTH_LEN --spec-synth-rates= "
        "LLAMA_ARG_SPEC_SYNTH_RATES"),
)  # fmt: skip
