"""Lists the environment variables of `ollama serve`, which has no flags for them."""

from quire.configs.peers import values
from quire.configs.peers.groups import no_effect, renamed

GROUPS = (
    renamed("max_model_len", "OLLAMA_CONTEXT_LENGTH", values.unless("0")),
    renamed("max_num_seqs", "OLLAMA_NUM_PARALLEL", values.unless("0")),
    renamed("max_num_queued_reqs", "OLLAMA_MAX_QUEUE"),
    renamed("kv_cache_dtype", "OLLAMA_KV_CACHE_TYPE", values.cache_type, note="q8_0 is int8"),
    renamed("allowed_origins", "OLLAMA_ORIGINS", values.origins_of_ollama),
    renamed("log_level", "OLLAMA_DEBUG", values.debug_level),
    no_effect("it also tells clients where a server is: set --host and --port", "OLLAMA_HOST"),
    no_effect("models are folders, GGUF files or Hub ids, kept by the Hugging Face cache (HF_HOME)", "OLLAMA_MODELS "
        "OLLAMA_NOPRUNE OLLAMA_MAX_TRANSFER_STREAMS OLLAMA_LIBRARY_PATH"),
    renamed("keep_alive", "OLLAMA_KEEP_ALIVE"),
    renamed("models_max", "OLLAMA_MAX_LOADED_MODELS"),
    no_effect("loading has no limit of time", "OLLAMA_LOAD_TIMEOUT"),
    no_effect("the attention backend is chosen automatically", "OLLAMA_FLASH_ATTENTION"),
    no_effect("the device is chosen by --device, and the GPU by CUDA_VISIBLE_DEVICES", "OLLAMA_LLM_LIBRARY "
        "OLLAMA_VULKAN OLLAMA_IGPU_ENABLE OLLAMA_SCHED_SPREAD OLLAMA_INTEL_GPU"),
    no_effect("--gpu-memory-utilization leaves room on the device", "OLLAMA_GPU_OVERHEAD OLLAMA_MAX_VRAM"),
    no_effect("requests are logged without their text", "OLLAMA_DEBUG_LOG_REQUESTS"),
    no_effect("chat templates are Jinja", "OLLAMA_GO_TEMPLATE"),
    no_effect("nothing is sent to other servers", "OLLAMA_NO_CLOUD OLLAMA_REMOTES OLLAMA_AUTH OLLAMA_API_KEY"),
    no_effect("`quire run` keeps its history below $XDG_STATE_HOME", "OLLAMA_NOHISTORY OLLAMA_EDITOR"),
)  # fmt: skip
